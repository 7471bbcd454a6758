"""Fixtures of the engine's tests: devices, operations, bundles, sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ops import Ops, devices

from harness.bundles import ensure


@pytest.fixture(params=devices())
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine, one after the other."""
    return str(request.param)


@pytest.fixture
def ops(device: str) -> Iterator[Ops]:
    """Operations on the device."""
    with Ops(device) as opened:
        yield opened


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundle `tiny`."""
    return ensure(["tiny"])["tiny"]


@pytest.fixture(scope="session")
def tiny2() -> Path:
    """The bundle `tiny2`, whose sizes are no powers of two."""
    return ensure(["tiny2"])["tiny2"]
