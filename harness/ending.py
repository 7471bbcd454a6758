"""A process that is told to end, ends as by Ctrl-C: what it holds is given back, what it made in part is removed.

What is written last, the record of a run, is written all the same.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


def _in_main_thread() -> bool:
    """Only there handlers can be set, and only there they run."""
    return threading.current_thread() is threading.main_thread()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt meanwhile, where they would end the process on the spot.

    One that is ignored (``nohup``) stays so. Only the main thread may set handlers; in others this does nothing.
    """
    numbers = [number for number in NUMBERS if _in_main_thread() and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait until the end of what is short and must not be done by half.

    Whoever is impatient presses Ctrl-C twice, and the second one comes while the first one's record is written.
    """
    numbers = (signal.SIGINT, *NUMBERS) if _in_main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    came: list[int] = []
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
