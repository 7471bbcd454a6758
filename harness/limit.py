"""A time limit around code that may never return.

In the main thread a timer interrupts Python code and the caller goes on. Native code cannot be interrupted: a watchdog
thread then runs ``last_words`` and ends the process, which the test runner replaces.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

GRACE = 5.0  # seconds between the interruption and the end of a process that did not heed it


class CellTimeout(BaseException):
    """The limit is over. Not an Exception, so that an engine's own handlers let it through."""


@contextmanager
def limit(seconds: float, last_words: Callable[[], None]) -> Iterator[None]:
    """Raise CellTimeout in the block after ``seconds``; if it does not end, ``last_words`` and exit status 1 follow."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise CellTimeout

    def end() -> None:
        try:
            last_words()
        finally:
            os._exit(1)

    timed = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    watchdog = threading.Timer(seconds + (GRACE if timed else 0.0), end)
    watchdog.daemon = True
    watchdog.start()
    if timed:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        watchdog.cancel()
