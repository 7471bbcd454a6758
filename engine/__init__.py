"""The engine's Python face: ``create(device)`` gives what ``harness.protocol.Engine`` asks for."""

from __future__ import annotations

from engine.ranks.engine import RankedEngine
from engine.session import CsrcEngine


def create(device: str, *, ranks: int = 1) -> CsrcEngine | RankedEngine:
    """The engine of ``csrc/`` on ``cpu``, ``cuda`` or ``cuda:N``, built now if the cache lacks it.

    With several ``ranks`` its sessions are shared between as many processes that ``torchrun`` starts (docs/ranks.md).
    """
    return CsrcEngine(device) if ranks == 1 else RankedEngine(device, ranks)


__all__ = ["CsrcEngine", "RankedEngine", "create"]
