"""A rank's place among the others, and the exchanges that the engine calls back for (``csrc/collective.h``)."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ALL_GATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
BROADCAST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
PROGRESS = ctypes.CFUNCTYPE(None)


@dataclass(frozen=True)
class Window:
    """Memory of every rank that all of them read and write; zeros before the first session."""

    addresses: tuple[int, ...] = ()
    """Every rank's, where this process sees it; none: there is no such memory."""
    size: int = 0
    """Bytes of each."""
    seconds: float = 0.0
    """That a rank waits for another."""


@dataclass(frozen=True)
class Member:
    """One of ``count`` ranks. What it calls are addresses of C functions, 0 where it is alone."""

    rank: int = 0
    count: int = 1
    all_gather: int = 0
    broadcast: int = 0
    window: Window = Window()
    progress: int = 0
    kept: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """What must live as long as the functions may be called."""


ALONE = Member()


def member(
    rank: int,
    count: int,
    all_gather: Callable[[int, int, int, int], None],
    broadcast: Callable[[int, int, int], None],
    window: Window = Window(),
    progress: Callable[[], None] = lambda: None,
) -> Member:
    """A member whose exchanges are Python functions: ``all_gather(recv, send, bytes, stream)`` over addresses, recv
    holding ``count * bytes``, and ``broadcast(data, bytes, stream)`` from rank 0; ``stream`` is 0 on the CPU.
    What the engine exchanges by itself, through ``window``, it calls ``progress`` for in their place.

    What they raise is printed here, and the engine raises `harness.protocol.RankError`.
    """

    def gather_call(recv: int, send: int, size: int, stream: int | None) -> int:
        try:
            all_gather(recv, send, size, stream or 0)
        except BaseException:  # nothing may fly through the C++ frames below
            traceback.print_exc()
            return 1
        return 0

    def broadcast_call(data: int, size: int, stream: int | None) -> int:
        try:
            broadcast(data, size, stream or 0)
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    calls = ALL_GATHER(gather_call), BROADCAST(broadcast_call), PROGRESS(progress)
    first, second, third = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
    return Member(rank, count, first, second, window, third, calls)
