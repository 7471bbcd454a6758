"""Other libraries on a case's shape: who there is, whether it is installed, and its calls.

A peer that is not installed, or not for this device, is listed with the reason. Peers get operands of their own, in
their own layout, in as many copies as the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.bench.cases import Case
from harness.bench.clock import Call

Serve = Callable[[Case, int], "Sequence[Call] | None"]
"""(case, copies) -> calls, or None for a case that the peer has nothing for."""


@dataclass(frozen=True)
class Peer:
    """``absent`` is the reason why it cannot be asked, ``""`` if it can."""

    name: str
    what: str
    """What its calls compute, where that is not the whole of the case."""
    absent: str
    serve: Serve


def copies_of(make: Callable[[], Call], copies: int) -> list[Call]:
    """The same call so many times, each with operands of its own."""
    return [make() for _ in range(copies)]


def peers(device: str) -> list[Peer]:
    """Every peer that this project compares itself with on ``device``."""
    if device == "cuda":
        from harness.bench import peers_cuda

        return peers_cuda.peers()
    from harness.bench import peers_cpu

    return peers_cpu.peers()
