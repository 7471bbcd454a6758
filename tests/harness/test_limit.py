"""A time limit: what it ends, whom it lets speak, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from harness import limit as limits
from harness.limit import CellTimeout, limit


class Watchdog:
    """A thread's timer that waits for the test to let it go off."""

    made: Watchdog

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        self.seconds, self.end, self.daemon, self.state = seconds, end, False, "made"
        Watchdog.made = self

    def start(self) -> None:
        self.state = "started"
        assert self.daemon, "it would keep the process from ending"

    def cancel(self) -> None:
        self.state = "cancelled"


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> type[Watchdog]:
    monkeypatch.setattr(threading, "Timer", Watchdog)
    return Watchdog


def silent() -> None:
    pytest.fail("nothing was late")


def test_code_in_time_leaves_no_alarm_and_no_watchdog(watchdog: type[Watchdog]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limit(30, silent):
        assert watchdog.made.state == "started"
        assert 25 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
        assert watchdog.made.seconds == 30 + limits.GRACE
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
    assert watchdog.made.state == "cancelled"
    with pytest.raises(KeyError), limit(30, silent):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert watchdog.made.state == "cancelled"


def test_late_code_is_interrupted_though_it_catches_errors(watchdog: type[Watchdog]) -> None:
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()

    def engine() -> None:
        try:
            time.sleep(20)
        except Exception:
            pytest.fail("an engine's own handler would take it for an error of its own")

    with pytest.raises(CellTimeout), limit(0.05, silent):
        engine()
    assert 0.04 < time.monotonic() - start < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert watchdog.made.state == "cancelled"


def test_outside_the_main_thread_the_watchdog_alone_keeps_the_time(watchdog: type[Watchdog]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    seen = []

    def run() -> None:
        with limit(7, silent):
            seen.append(
                (watchdog.made.seconds, signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM))
            )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(7, 0.0, before)]
    assert watchdog.made.state == "cancelled"


@pytest.mark.parametrize("broken", [False, True])
def test_code_that_never_returns_ends_the_process_after_the_last_words(
    watchdog: type[Watchdog], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    told: list[object] = []

    def last_words() -> None:
        told.append("last words")
        if broken:
            raise OSError("the disk is full")

    monkeypatch.setattr(os, "_exit", told.append)
    with limit(30, last_words):
        if broken:
            with pytest.raises(OSError, match="full"):
                watchdog.made.end()
        else:
            watchdog.made.end()
    assert told == ["last words", 1]
