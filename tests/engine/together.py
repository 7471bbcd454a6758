"""Ranks as threads of one process: the same sessions and exchanges as those of a job, without starting one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.ranks.member import Member, member
from engine.session import CsrcEngine, CsrcSession

SECONDS = 60.0  # for the others to arrive: a thread that failed leaves them waiting
Spoil = Callable[[int, int, int], None]
"""Called with rank, address and bytes of what an all-gather left."""


class Exchange:
    """Memory that all ranks see, and a barrier before and after every use of it."""

    def __init__(self, count: int, spoil: Spoil | None = None) -> None:
        self.count, self.spoil = count, spoil
        self.gathers = self.broadcasts = 0
        self._barrier = threading.Barrier(count)
        self._parts: list[bytes] = [b""] * count

    def member(self, rank: int) -> Member:
        """The member whose exchanges these are."""

        def all_gather(recv: int, send: int, size: int, stream: int) -> None:
            self._parts[rank] = ctypes.string_at(send, size)
            self._barrier.wait(SECONDS)
            ctypes.memmove(recv, b"".join(self._parts), size * self.count)
            self.gathers += rank == 0
            self._barrier.wait(SECONDS)
            if self.spoil:
                self.spoil(rank, recv, size)

        def broadcast(data: int, size: int, stream: int) -> None:
            if rank == 0:
                self._parts[0] = ctypes.string_at(data, size)
                self.broadcasts += 1
            self._barrier.wait(SECONDS)
            ctypes.memmove(data, self._parts[0], size)
            self._barrier.wait(SECONDS)

        return member(rank, self.count, all_gather, broadcast)

    def abort(self) -> None:
        """Let nobody wait any more."""
        self._barrier.abort()

    def reset(self) -> None:
        """Be usable again, when nobody waits."""
        self._barrier.reset()


class Together:
    """One session a rank; `call` makes all of them do the same and gives their results by rank."""

    def __init__(self, path: Path, precision: str, count: int, *, spoil: Spoil | None = None, **options: Any) -> None:
        self.exchange = Exchange(count, spoil)
        self.engines = [CsrcEngine("cpu", self.exchange.member(rank)) for rank in range(count)]
        self._pool = ThreadPoolExecutor(count)
        self.sessions: list[CsrcSession] = self._all(
            [lambda engine=engine: engine.load(path, precision, poison=True, **options) for engine in self.engines]
        )

    def _all(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        def guarded(task: Callable[[], Any]) -> Any:
            try:
                return task()
            except BaseException:
                self.exchange.abort()
                raise

        futures = [self._pool.submit(guarded, task) for task in tasks]
        errors = [error for error in (future.exception() for future in futures) if error]
        self.exchange.reset()
        for error in errors:  # of several, the one that is not about the others
            if "failed: another rank" not in str(error):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def call(self, name: str, *args: Any, **options: Any) -> list[Any]:
        return self._all([lambda s=s: getattr(s, name)(*args, **options) for s in self.sessions])

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions:
            session.close()
        self._pool.shutdown()
