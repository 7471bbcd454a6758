"""The numpy reference behind the engine protocol: float64 inside, float32 at the protocol.

It is slow and exact; the harness is tested on it without a compiler, and an engine's author can compare against it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from harness import protocol
from harness.protocol import (
    F32,
    Decoded,
    DecodeRequest,
    DeviceError,
    EngineError,
    FormatError,
    OwnDrafter,
    RequestError,
    Round,
)
from refs import decode as refs_decode
from refs.config import BF16_PRECISIONS
from refs.elementary import F
from refs.errors import RefError
from refs.kdtr import KdtrError
from refs.model import Model


@contextmanager
def named_errors() -> Iterator[None]:
    """The reference's errors as the protocol's of the same name."""
    try:
        yield
    except KdtrError as error:
        raise FormatError(str(error)) from error
    except RefError as error:
        kind = getattr(protocol, type(error).__name__, EngineError)
        raise kind(str(error)) from error


def _f32(rows: F) -> F32:
    return np.ascontiguousarray(rows, np.float32)


class ReferenceSession:
    """`protocol.Session` over `refs.model.Model`; one forward counts as one launch of ``reference.PRECISION``."""

    def __init__(self, model: Model, max_rows: int) -> None:
        self._model, self._max_rows = model, max_rows
        self.reset_counters()

    @property
    def length(self) -> int:
        return self._model.length

    def reset(self) -> None:
        self._model.reset()

    def prefill(self, tokens: Sequence[int]) -> F32:
        return self._run(lambda: self._model.prefill(tokens))

    def step(self, token: int) -> F32:
        return self._run(lambda: self._model.step(token))

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F32:
        if len(tokens) > self._max_rows:
            raise RequestError(f"{len(tokens)} rows, the session was opened for {self._max_rows}")
        return self._run(lambda: self._model.verify(tokens, parents))

    def commit(self, path: Sequence[int]) -> None:
        with named_errors():
            self._model.commit(path)

    def decode(self, request: DecodeRequest) -> Decoded:
        start = time.perf_counter()
        prefilled = start
        rounds: list[refs_decode.Round] = []
        for r in self._rounds(request):
            prefilled = prefilled if rounds else time.perf_counter()
            rounds.append(r)
        first, *rest = rounds
        tokens = tuple(token for r in rest for token in r.tokens)
        drafted = [r.draft for r in rest if r.draft is not None]
        return Decoded(
            tokens=tokens,
            forwards=len(rest),
            stopped="eos" if tokens and tokens[-1] == self._model.config.eos_id else "limit",
            accepted_per_round=tuple(len(r.accepted) for r in rest),
            logits=_f32(np.concatenate([first.logits, *(r.logits for r in rest)])) if request.record else None,
            rounds=tuple(Round(r.tree.tokens, r.tree.parents, r.accepted) for r in rest) if request.record else (),
            draft_logits=_f32(np.stack(drafted)) if request.record and drafted else None,
            prefill_seconds=prefilled - start,
            decode_seconds=time.perf_counter() - prefilled,
        )

    def stream(self, request: DecodeRequest) -> Iterator[int]:
        for r in self._rounds(request):
            yield from r.tokens

    def cache(self, layer: int) -> tuple[F32, F32]:
        with named_errors():
            latent, k_rope = self._model.cache(layer)
        return _f32(latent), _f32(k_rope)

    def taps(self, tokens: Sequence[int], *, operations: bool = False) -> dict[str, F32]:
        with named_errors():
            return {name: _f32(rows) for name, rows in self._model.taps(tokens, operations=operations).items()}

    def counters(self) -> Mapping[str, int]:
        return {f"reference.{self._model.precision}": self._forwards}

    def reset_counters(self) -> None:
        self._forwards = 0

    def broken_guard(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def _rounds(self, request: DecodeRequest) -> Iterator[refs_decode.Round]:
        own = isinstance(request.draft, OwnDrafter)
        draft = None if isinstance(request.draft, OwnDrafter) else request.draft
        asked = refs_decode.Request(
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            draft=None if draft is None else draft.logits,
            first=0 if draft is None else draft.first,
            dflash=own,
            block_size=request.block_size,
            budget=request.budget,
            chain=request.chain,
            costs=request.costs,
            temperature=request.temperature,
            seed=request.seed,
        )
        with named_errors():
            for r in refs_decode.rounds(self._model, asked):
                self._forwards += 1
                yield r

    def _run(self, forward: Callable[[], F]) -> F32:
        self._forwards += 1
        with named_errors():
            return _f32(forward())


class ReferenceEngine:
    """`protocol.Engine`."""

    name = "reference"

    def __init__(self, device: str) -> None:
        if device != "cpu":
            raise DeviceError(f"the reference runs on cpu, not on {device}")
        self.device = device

    def load(
        self,
        path: Path,
        precision: str,
        *,
        context: int | None = None,
        max_rows: int = 65,
        poison: bool = False,
        graphs: bool = True,
    ) -> ReferenceSession:
        with named_errors():
            rounding = precision in BF16_PRECISIONS
            return self._session(Model.open(path, precision, context=context, rounding=rounding), max_rows)

    def _session(self, model: Model, max_rows: int) -> ReferenceSession:
        return ReferenceSession(model, max_rows)

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        return frozenset({f"reference.{precision}"})


def create(device: str) -> ReferenceEngine:
    """Raises DeviceError for another device than ``cpu``."""
    return ReferenceEngine(device)
