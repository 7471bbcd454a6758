"""The narrow protocol between the harness and an engine.

Everything the harness knows of an engine is here. ``csrc/`` on the CPU and on CUDA, the numpy reference and a
deliberately wrong engine all stand behind it; an engine of your own is registered under the entry point group
``kdtree.engines`` with a factory ``(device: str) -> Engine``.

Letters: n prompt tokens, M rows of a step, V vocabulary, B tree budget, T tokens committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class EngineError(Exception):
    """Base of all errors an engine raises on purpose; after one, the session stays usable."""


class FormatError(EngineError):
    """A file breaks the KDTR format: ``FILE: FIELD: reason``."""


class ConfigError(EngineError):
    """A model field is unknown, missing or out of range."""


class MissingTensor(EngineError):
    """The file lacks a tensor that the asked-for precision needs, or it has another shape or type."""


class TokenError(EngineError):
    """A token id lies outside the vocabulary."""


class ContextOverflow(EngineError):
    """Prompt plus tokens to decode do not fit the session's context."""


class RequestError(EngineError):
    """A request is malformed: empty prompt, negative budget or block size, bad parents, bad path."""


class DrafterError(EngineError):
    """Draft logits have the wrong width or values that cannot be ranked."""


class NonFiniteError(EngineError):
    """A router score or a logit is NaN or infinite."""


class DeviceError(EngineError):
    """The device failed or is not there; a sticky CUDA error ends the process's use of it."""


class OutOfMemory(DeviceError):
    """The device has less memory than the session needs."""


class RankError(EngineError):
    """An exchange between ranks failed: one of them is gone or did not answer in time. Nothing more can be run."""


class RankDiverged(RankError):
    """A rank's weights, tokens or logits are not what they must be; the message names the rank."""


@dataclass(frozen=True)
class Draft:
    """Recorded draft logits by position: ``logits[r]`` drafts the token at position ``first + r``."""

    logits: F32
    """[rows, V]"""
    first: int


@dataclass(frozen=True)
class OwnDrafter:
    """The drafter that the model's file holds (docs/model.md, Drafter) drafts."""


@dataclass(frozen=True)
class DecodeRequest:
    """One decode. ``draft is None`` means AR; otherwise DDTree with ``block_size`` and ``budget``."""

    prompt: Sequence[int]
    max_tokens: int
    draft: Draft | OwnDrafter | None = None
    block_size: int = 1
    budget: int = 0
    chain: bool = False
    """Only the best token of each depth: a drafter without a tree."""
    costs: Sequence[float] = ()
    """[B+1]: what a forward with 0, 1, ... nodes costs, in any unit; each tree is cut where expected tokens over cost
    are greatest. Empty: trees are not cut."""
    temperature: float = 0.0
    seed: int = 0
    record: bool = False
    """Keep the logits of every committed row and every round's tree."""


@dataclass(frozen=True)
class Round:
    """One DDTree forward: rows in order, row 0 the root."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Decoded:
    """What a decode gave."""

    tokens: tuple[int, ...]
    """The committed tokens, T of them."""
    forwards: int
    """Forwards after the prefill."""
    stopped: str
    """``limit`` or ``eos``."""
    accepted_per_round: tuple[int, ...]
    """Rows committed by each forward, the root included."""
    logits: F32 | None = None
    """[T+1, V] when recorded: row 0 after the prompt, row i after the i-th committed token."""
    rounds: tuple[Round, ...] = ()
    """When recorded."""
    draft_logits: F32 | None = None
    """[rounds, L, V] when recorded with an own drafter: what it gave in each round."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    round_seconds: tuple[float, ...] = ()
    """Of each forward, where the engine says."""


@runtime_checkable
class Session(Protocol):
    """A loaded model with its cache. ``length`` rows are committed, at positions 0 .. length-1."""

    @property
    def length(self) -> int: ...

    def reset(self) -> None:
        """Forget all rows."""

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Commit ``tokens`` after what is there; logits [n, V] of each."""

    def step(self, token: int) -> F32:
        """Commit one token; logits [V] after it."""

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F32:
        """Run a tree (row 0 the root, ``parents[0] == -1``, parents before children); logits [M, V]. Commits none."""

    def commit(self, path: Sequence[int]) -> None:
        """Commit rows of the last verify: ascending, starting with 0, each the child of the one before."""

    def decode(self, request: DecodeRequest) -> Decoded:
        """Reset, prefill, and run the engine's own loop."""

    def stream(self, request: DecodeRequest) -> Iterator[int]:
        """As ``decode``, yielding tokens as they are accepted."""

    def cache(self, layer: int) -> tuple[F32, F32]:
        """Committed cache rows: latent [length, R], rotated k_rope [length, P]."""

    def taps(self, tokens: Sequence[int], *, operations: bool = False) -> Mapping[str, F32]:
        """Reset, prefill ``tokens`` and return named intermediate rows.

        Always ``embed`` [n, D], ``layers.I.out`` [n, D] and ``logits`` [n, V]; with ``operations`` also, for every
        layer, the names of ``OPERATION_TAPS`` that it has. Values that are not finite are better given than refused:
        they show where a NaN began.
        """

    # An engine may also have verify_taps(tokens, parents) -> Mapping[str, F32]: a tree run as by verify, every
    # operation's rows [M, width]. With it `kdtree trace` names the operation at which a tree's row goes wrong.

    def counters(self) -> Mapping[str, int]:
        """Kernel launches by name since the session was opened or ``reset_counters``."""

    def reset_counters(self) -> None: ...

    def broken_guard(self) -> str:
        """Name of a buffer written outside its bounds, or ``""``."""

    def close(self) -> None: ...


OPERATION_TAPS = (
    "mla.q_a",  # [n, Rq]
    "mla.kv",  # [n, R+P] raw
    "mla.q",  # [n, H*(N+P)] before rotation
    "mla.q_lat",  # [n, H*R]
    "mla.q_rope",  # [n, H*P] rotated
    "mla.latent",  # [n, R] as cached
    "mla.k_rope",  # [n, P] as cached
    "mla.o_lat",  # [n, H*R]
    "mla.o",  # [n, H*Vh]
    "mla.out",  # [n, D] residual stream after attention
    "mlp.act",  # [n, F] dense layers: silu(gate)*up
    "moe.router_logits",  # [n, E]
    "moe.ids",  # [n, k], as floats
    "moe.weights",  # [n, k]
    "moe.act",  # [n, k*I]
    "moe.shared_act",  # [n, S*I]
)
"""Names inside a layer, in the order of computation; the tap is ``layers.I.<name>``."""


class Engine(Protocol):
    """A factory of sessions on one device."""

    name: str
    device: str

    def load(
        self,
        path: Path,
        precision: str,
        *,
        context: int | None = None,
        max_rows: int = 65,
        poison: bool = False,
        graphs: bool = True,
    ) -> Session:
        """Open a KDTR file in a precision of the matrix; ``context`` defaults to the model's ``max_context``."""

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        """Counter names that must be above zero after a decode in this precision (empty: it counts none)."""

    # An engine that knows drafters of a file's own may also have drafter_kernels() -> frozenset[str]: the counter names
    # that must be above zero after a decode with one, and are zero without.
