"""Sessions over the extension: arguments into tensors, results into numpy arrays, nothing else."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import costs
from engine.library import library, library_path, named_errors
from engine.ranks.member import ALONE, Member
from harness.protocol import (
    F32,
    Decoded,
    DecodeRequest,
    Draft,
    DrafterError,
    OwnDrafter,
    RequestError,
    Round,
    TokenError,
)
from refs.config import BF16_PRECISIONS

I32 = npt.NDArray[np.int32]
PERIOD = 0.25  # seconds: of a decode, after which Python has its turn, and what watches it is told that it goes on


def _bytes(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _ints(values: Sequence[int], what: str, error: type[Exception] = RequestError) -> Any:
    import torch

    given = _listed(values, what, error)
    for i, value in enumerate(given):
        if not isinstance(value, (int, np.integer)) or not -(2**31) <= value < 2**31:
            raise error(f"{what} {value!r} at index {i} is no 32-bit integer")
    return torch.from_numpy(np.array(given, np.int32))


def _listed(values: Sequence[Any], what: str, error: type[Exception]) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise error(f"{what}: {values!r} is no list") from None


def _float(name: str, value: float) -> float:
    with contextlib.suppress(OverflowError):  # of an integer that no float reaches
        if isinstance(value, (float, int, np.floating, np.integer)):
            return float(value)
    raise RequestError(f"{name} {value!r} is no number")


def _fits(name: str, value: int) -> int:
    """Torch hands on 64 bits; what fewer mean is for the engine to say."""
    if not isinstance(value, (int, np.integer)):
        raise RequestError(f"{name} {value!r} is no integer")
    if not -(2**63) <= value < 2**63:
        raise RequestError(f"{name} {value} exceeds 64 bits")
    return int(value)


def _out(array: npt.NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(array)


class CsrcSession:
    """A `harness.protocol.Session` on ``csrc/``. Calls from several threads take turns, a whole `decode` being one."""

    def __init__(
        self,
        ops: Any,
        handle: int,
        progress: Callable[[], None] | None = None,
        identity: Callable[[], Mapping[str, str]] = dict,
        member: Member = ALONE,
    ) -> None:
        """``progress`` is called every `PERIOD` seconds of a decode.

        ``identity`` says what a forward's costs depend on (`engine.costs`). ``member``: whose functions the engine
        calls, so that they live as long as the session does.
        """
        self._member = member
        self._ops, self._handle, self._progress, self._identity = ops, handle, progress, identity
        self._turn = threading.RLock()
        self._close = weakref.finalize(self, ops.session_close, handle)  # a session that is dropped is closed too
        sizes = ops.session_sizes(handle)
        self.vocab, self.hidden, self.layers, self.rank, self.rope, self.eos_id, self.context, self.max_rows = sizes[:8]
        self.draft_block = sizes[8]
        """Of the file's own drafter; 0 without one."""

    @property
    def length(self) -> int:
        """Committed rows."""
        with self._turn, named_errors():
            return int(self._ops.session_length(self._handle))

    def reset(self) -> None:
        """Forget all rows."""
        with self._turn, named_errors():
            self._ops.session_reset(self._handle)

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Commit ``tokens``; logits [n, V]."""
        rows = _ints(tokens, "token", TokenError)
        out = np.empty((len(rows), self.vocab), np.float32)
        with self._turn, named_errors():
            self._ops.session_prefill(self._handle, rows, _out(out))
        return out

    def step(self, token: int) -> F32:
        """Commit one token; logits [V]."""
        out = np.empty(self.vocab, np.float32)
        value = int(_ints([token], "token", TokenError)[0])
        with self._turn, named_errors():
            self._ops.session_step(self._handle, value, _out(out))
        return out

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F32:
        """Run a tree, commit none of it; logits [M, V]."""
        rows, above = _ints(tokens, "token", TokenError), _ints(parents, "parent")
        out = np.empty((len(rows), self.vocab), np.float32)
        with self._turn, named_errors():
            self._ops.session_verify(self._handle, rows, above, _out(out))
        return out

    def commit(self, path: Sequence[int]) -> None:
        """Commit rows of the last verify."""
        rows = _ints(path, "row")
        with self._turn, named_errors():
            self._ops.session_commit(self._handle, rows)

    def decode(self, request: DecodeRequest) -> Decoded:
        """Reset, prefill and decode to the end."""
        with self._turn, named_errors():
            ticket = self._begin(request)
            while self._ops.decode_run(self._handle, ticket, PERIOD):  # between two calls Ctrl-C is heard
                if self._progress:
                    self._progress()
            return self._decoded(request, ticket)

    def stream(self, request: DecodeRequest) -> Iterator[int]:
        """As `decode`, yielding tokens as rounds accept them; checked when the first token is asked for."""
        with self._turn, named_errors():
            ticket = self._begin(request)
        while True:
            with self._turn, named_errors():
                tokens = self._ops.decode_round(self._handle, ticket)
            if not tokens:
                return
            yield from tokens

    def cache(self, layer: int) -> tuple[F32, F32]:
        """Committed rows of one layer: latent [length, R], k_rope [length, P]."""
        with self._turn, named_errors():
            length = self.length
            latent, k_rope = np.empty((length, self.rank), np.float32), np.empty((length, self.rope), np.float32)
            self._ops.session_cache(self._handle, _fits("layer", layer), _out(latent), _out(k_rope))
        return latent, k_rope

    def taps(self, tokens: Sequence[int], *, operations: bool = False) -> Mapping[str, F32]:
        """Reset, prefill and return the intermediate rows by name."""
        rows = _ints(tokens, "token", TokenError)
        with self._turn, named_errors():
            return self._tapped(self._ops.session_taps(self._handle, rows, operations), len(rows))

    def verify_taps(self, tokens: Sequence[int], parents: Sequence[int]) -> Mapping[str, F32]:
        """Run a tree as `verify` does and return every operation's rows by name; nothing is left to commit."""
        rows, above = _ints(tokens, "token", TokenError), _ints(parents, "parent")
        with self._turn, named_errors():
            return self._tapped(self._ops.session_verify_taps(self._handle, rows, above), len(rows))

    def counters(self) -> Mapping[str, int]:
        """Kernel launches by name."""
        with self._turn, named_errors():
            lines = self._ops.session_counters(self._handle).splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}

    def reset_counters(self) -> None:
        """Count from zero again."""
        with self._turn, named_errors():
            self._ops.session_reset_counters(self._handle)

    def broken_guard(self) -> str:
        """Name of a buffer written outside its bounds, or ``""``."""
        with self._turn, named_errors():
            return str(self._ops.session_broken_guard(self._handle))

    def memory(self) -> tuple[int, int]:
        """Bytes of the device that this session holds and has held at most; weights mapped from the file excepted."""
        with self._turn, named_errors():
            held, peak = self._ops.session_memory(self._handle)
        return held, peak

    def weights(self) -> Mapping[str, tuple[int, int, int, int]]:
        """What this rank holds of each tensor: address in the device's memory, bytes a block, blocks, pitch."""
        with self._turn, named_errors():
            lines = [line.split() for line in self._ops.session_weights(self._handle).splitlines()]
        return {name: (int(at), int(size), int(count), int(pitch)) for name, at, size, count, pitch in lines}

    def close(self) -> None:
        """Free everything; further calls raise `RequestError`."""
        self._close()

    def __enter__(self) -> CsrcSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tapped(self, listing: str, rows: int) -> Mapping[str, F32]:
        found: dict[str, F32] = {}
        for index, line in enumerate(listing.splitlines()):
            name, width = line.split()
            found[name] = np.empty((rows, int(width)), np.float32)
            self._ops.session_tap(self._handle, index, _out(found[name]))
        return found

    def auto_budget(self, request: DecodeRequest, limit: int = costs.LIMIT) -> DecodeRequest:
        """``request`` with trees of at most ``limit`` nodes, each as large as pays on this machine (`engine.costs`).

        What a forward costs is measured when it is first asked for, which takes seconds and resets the session.
        """
        return costs.auto(self, request, self._identity(), limit)

    def _begin(self, request: DecodeRequest) -> int:
        import torch

        prompt = _ints(request.prompt, "token", TokenError)
        draft, first = torch.empty((0, self.vocab), dtype=torch.float32), 0
        drafter = "none" if request.draft is None else "dflash" if isinstance(request.draft, OwnDrafter) else "recorded"
        if drafter == "recorded":
            if not isinstance(request.draft, Draft):
                raise DrafterError(f"draft {request.draft!r} is no Draft, no OwnDrafter and not None")
            try:
                table = np.ascontiguousarray(request.draft.logits, dtype=np.float32)
            except (TypeError, ValueError) as error:
                raise DrafterError(f"draft logits are no matrix of numbers: {error}") from error
            if table.ndim != 2:
                raise DrafterError(f"draft logits have shape {table.shape}, not [rows, {self.vocab}]")
            if not table.flags.writeable:  # torch wants a writable array although nothing writes to it
                table = table.copy()
            draft, first = torch.from_numpy(table), request.draft.first
        if not isinstance(request.seed, (int, np.integer)) or not 0 <= request.seed < 2**64:
            raise RequestError(f"seed {request.seed!r} is not in 0..2^64-1")
        seed = int(request.seed)
        prices = [_float("cost", cost) for cost in _listed(request.costs, "costs", RequestError)]
        ticket = self._ops.decode_begin(
            self._handle,
            prompt,
            _fits("max_tokens", request.max_tokens),
            drafter,
            draft,
            _fits("first drafted position", first),
            _fits("block_size", request.block_size),
            _fits("budget", request.budget),
            bool(request.chain),
            torch.tensor(prices, dtype=torch.float64),
            _float("temperature", request.temperature),
            seed - 2**64 if seed >= 2**63 else seed,
            bool(request.record),
        )
        return int(ticket)

    def _decoded(self, request: DecodeRequest, ticket: int) -> Decoded:
        found = self._ops.decode_result(self._handle, ticket)
        tokens, accepted, nanoseconds, eos, prefill_seconds, decode_seconds = found
        logits: F32 | None = None
        rounds: tuple[Round, ...] = ()
        drafted: F32 | None = None
        if request.record:
            logits = np.empty((len(tokens) + 1, self.vocab), np.float32)
            self._ops.decode_logits(self._handle, ticket, _out(logits))
            if request.draft is not None:
                trees = np.empty((len(accepted), 2 + 3 * (request.budget + 1)), np.int32)
                self._ops.decode_trees(self._handle, ticket, _out(trees))
                rounds = tuple(_round(entry) for entry in trees)
            if isinstance(request.draft, OwnDrafter):
                drafted = np.empty((len(accepted), self.draft_block - 1, self.vocab), np.float32)
                self._ops.decode_draft(self._handle, ticket, _out(drafted))
        return Decoded(
            tokens=tuple(tokens),
            forwards=len(accepted),
            stopped="eos" if eos else "limit",
            accepted_per_round=tuple(accepted),
            logits=logits,
            rounds=rounds,
            draft_logits=drafted,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            round_seconds=tuple(1e-9 * n for n in nanoseconds),
        )


def _round(entry: I32) -> Round:
    """One entry of the tree log: n_rows, n_accepted, then tokens, parents and accepted rows (csrc/ops.h)."""
    n_rows, n_accepted = int(entry[0]), int(entry[1])
    tokens, parents, accepted = np.split(entry[2:], 3)
    return Round(
        tuple(tokens[:n_rows].tolist()), tuple(parents[:n_rows].tolist()), tuple(accepted[:n_accepted].tolist())
    )


class CsrcEngine:
    """A `harness.protocol.Engine`: ``csrc/`` on one device, which may be one rank of several that make the same calls.

    `harness.build.BuildError` if it cannot be built.
    """

    def __init__(self, device: str, member: Member = ALONE, progress: Callable[[], None] | None = None) -> None:
        self.name = "csrc"
        self.device = device
        self._member, self._progress = member, progress
        self._library = library_path(device)
        if device != "cpu":
            library(device)  # what it needs of driver and toolkit is missed now; a CPU's is loaded with the first file

    def load(
        self,
        path: Path,
        precision: str,
        *,
        context: int | None = None,
        max_rows: int = 65,
        poison: bool = False,
        graphs: bool = True,
    ) -> CsrcSession:
        """Open a KDTR file as the protocol says."""
        slots = 0 if context is None else _fits("context", context)
        if context is not None and slots < 1:
            raise RequestError(f"context {context} is below 1")
        name = _bytes(os.fsencode(path)), _bytes(os.fspath(path).encode("utf-8", "backslashreplace"))
        ops = library(self.device)
        with named_errors():
            handle = ops.session_open(
                *name,
                self.device,
                precision,
                slots,
                _fits("max_rows", max_rows),
                poison,
                graphs,
                self._member.rank,
                self._member.count,
                self._member.all_gather,
                self._member.broadcast,
                list(self._member.window.addresses),
                self._member.window.size,
                self._member.window.seconds,
                self._member.progress,
            )
        depends_on = functools.partial(costs.identity, self._library, self.device, path, precision, self._member.count)
        return CsrcSession(ops, handle, self._progress, depends_on, self._member)

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        """Kernels that a decode must have launched (csrc/ops.h names them); with KDTREE_ISA set, those it asks for."""
        mla = {"mla_prepare", "mla_attention", "mla_value"}
        plain, end = ("linear_bf16", "_bf16") if precision in BF16_PRECISIONS else ("linear_f32", "")
        always = {"embed", plain, "select", "accept", "kv_commit"} | {name + end for name in mla}
        kind = "experts_int4" + end if precision.startswith("int4") else "experts_bf16" if end else "experts_f32"
        experts = {"router", kind} if moe else set()
        isa = os.environ.get("KDTREE_ISA", "") if self.device == "cpu" else ""
        return frozenset(always | experts | ({f"isa_{isa}"} if isa else set()))

    def drafter_kernels(self) -> frozenset[str]:
        """Kernels that a decode with the file's own drafter must have launched, and no other."""
        return frozenset({"gather_rows", "draft_block", "draft_prepare", "draft_attention"})
