"""Options, fixtures and the ledger come from the harness's own pytest plugin; what is slow, from ``slow.py``.

The collector of garbage does not go through what will never be any, no test's files wait for the disk, and no property
fails because the machine is busy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from harness.sources import HOOKED

pytest_plugins = ["harness.workers", "harness.plugin", "tests.slow"]

for name in HOOKED:  # of a git hook that runs the tests, whose repositories are others
    os.environ.pop(name, None)

with contextlib.suppress(ImportError):  # a host that runs cells alone has none; elsewhere pytest's plugin imports it
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

gc.disable()  # importing torch and collecting thousands of tests makes millions of objects that stay


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """A thousand small files, 3 ms each, that no loss of power will ever be asked about."""
    with pytest.MonkeyPatch.context() as changed:
        for name in ("fsync", "fdatasync"):
            changed.setattr(os, name, lambda file: None, raising=False)
        yield


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """For tests in which this process gets a signal: a script's background job ignores SIGINT, and what nohup starts
    SIGHUP, and so do those that these start."""
    heeded = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
