"""Fixtures of the engine's tests: devices, operations, bundles, sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ops import Ops, devices

import engine
from engine.session import CsrcSession
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


@pytest.fixture(params=["fp32", "int4"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(device: str, tiny2: Path, precision: str) -> Iterator[CsrcSession]:
    """`tiny2` with poisoned memory, whose guards must be whole at the end."""
    with engine.create(device).load(tiny2, precision, poison=True) as opened:
        yield opened
        assert opened.broken_guard() == ""
