"""An engine that is wrong on purpose, in one chosen way, so that every verdict of the harness can be provoked.

``wrong:FAULT`` is the reference with one fault in its decode. ``hang``, ``crash`` and those about trees strike only
DDTree decodes, so that a run goes on around them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from harness.protocol import F32, Decoded, DecodeRequest, DeviceError, EngineError, RequestError
from harness.reference_engine import ReferenceEngine, ReferenceSession
from refs.model import Model


def _last_row(decoded: Decoded, change: Callable[[F32], F32]) -> Decoded:
    if decoded.logits is None:
        return decoded
    logits = decoded.logits.copy()
    logits[-1] = change(logits[-1])
    return replace(decoded, logits=logits)


def _hang(decoded: Decoded) -> Decoded:
    while True:
        time.sleep(0.05)


def _crash(decoded: Decoded) -> Decoded:
    os.kill(os.getpid(), signal.SIGKILL)
    return decoded


def _error(decoded: Decoded) -> Decoded:
    raise EngineError("wrong on purpose")


def _device(decoded: Decoded) -> Decoded:
    raise DeviceError("the context is lost, on purpose")


def _tree(decoded: Decoded) -> Decoded:
    first = decoded.rounds[0]
    return replace(
        decoded, rounds=(replace(first, tokens=(*first.tokens[:-1], first.tokens[-1] ^ 1)), *decoded.rounds[1:])
    )


ALWAYS: dict[str, Callable[[Decoded], Decoded]] = {
    "tokens": lambda d: replace(d, tokens=(*d.tokens[:-1], d.tokens[-1] ^ 1)),
    "degenerate": lambda d: replace(d, tokens=d.tokens[:1] * len(d.tokens)),
    "logits": lambda d: _last_row(d, lambda row: row + np.float32(0.01)),
    "zeros": lambda d: replace(d, logits=None if d.logits is None else np.zeros_like(d.logits)),
    "nan": lambda d: _last_row(d, lambda row: row * np.float32(np.nan)),
    "shape": lambda d: replace(d, logits=None if d.logits is None else d.logits[:, :-1]),
    "kernel": lambda d: d,
    "error": _error,
}
DDTREE: dict[str, Callable[[Decoded], Decoded]] = {
    "tree": _tree,
    "acceptance": lambda d: replace(d, forwards=d.forwards + 1),
    "bitwise": lambda d: _last_row(d, lambda row: np.nextafter(row, np.float32(9))),
    "hang": _hang,
    "device": _device,
    "crash": _crash,
}


class WrongSession(ReferenceSession):
    """The reference's session with a fault in ``decode``."""

    def __init__(self, model: Model, max_rows: int, fault: str) -> None:
        super().__init__(model, max_rows)
        self._fault = fault

    def decode(self, request: DecodeRequest) -> Decoded:
        decoded = super().decode(request)
        faults = {**ALWAYS, **(DDTREE if request.draft is not None else {})}
        return faults[self._fault](decoded) if self._fault in faults else decoded

    def counters(self) -> Mapping[str, int]:
        return {} if self._fault == "kernel" else super().counters()


class WrongEngine(ReferenceEngine):
    """The reference with ``fault``."""

    name = "wrong"

    def __init__(self, device: str, fault: str) -> None:
        super().__init__(device)
        self._fault = fault

    def _session(self, model: Model, max_rows: int) -> WrongSession:
        return WrongSession(model, max_rows, self._fault)


def create(device: str, fault: str = "tokens") -> WrongEngine:
    """Raises RequestError for a fault that does not exist."""
    if fault not in (*ALWAYS, *DDTREE):
        raise RequestError(f"wrong:{fault}: no such fault; there are {', '.join((*ALWAYS, *DDTREE))}")
    return WrongEngine(device, fault)
