"""A process that is told to end, ends as by Ctrl-C: what it holds is given back, what it made in part is removed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt meanwhile, where they would end the process on the spot.

    One that is ignored (``nohup``) stays so. Only the main thread may set handlers; in others this does nothing.
    """
    mine = threading.current_thread() is threading.main_thread()
    numbers = [number for number in NUMBERS if mine and signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
