"""The engine's Python face: ``create(device)`` gives what ``harness.protocol.Engine`` asks for."""

from __future__ import annotations

from engine.session import CsrcEngine


def create(device: str) -> CsrcEngine:
    """The engine of ``csrc/`` on ``cpu``, ``cuda`` or ``cuda:N``; built now if the cache lacks it."""
    return CsrcEngine(device)


__all__ = ["CsrcEngine", "create"]
