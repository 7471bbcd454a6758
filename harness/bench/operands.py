"""Calls of the engine's operations on random operands, in as many copies as keep every call's operands out of caches.

The contract of the calls is csrc/ops.h and csrc/bindings/. A call includes what its binding does: checks,
scratch, and waiting for the result. Weights are random nibbles and numbers; no result is looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.library import library, named_errors
from harness.bench import clock, work
from harness.bench.cases import Case
from harness.bench.clock import Call
from refs.quant import groups

COPIES = 400  # more are never called: harness.bench.clock.MOST
OPERATIONS = {"moe_block": "routed_moe"}
"""Of cases that have another name."""
BLOCK = 16  # block_size of trees, where a case names no depth
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Calls:
    """Equal calls on different memory."""

    calls: list[Call]
    arguments: list[list[Any]]
    """Of each call, as csrc/bindings/ takes them; results among them."""
    bytes_each: int
    """Of the operands that differ from call to call."""
    ids: list[Any]
    """Of each call that has experts: whom its rows go to, once it has run."""

    def distinct(self) -> float | None:
        """Experts that a call touches, on average; None where there are none."""
        return float(np.mean([len(np.unique(ids.cpu().numpy())) for ids in self.ids])) if self.ids else None


def binary_parents(m: int) -> I32:
    """A tree of m rows in which every row has two children: not a chain, and known to everybody."""
    return np.array([-1, *((i - 1) // 2 for i in range(1, m))], np.int32)


def paths(parents: I32, stride: int) -> tuple[I32, I32]:
    """Depths [M] and ancestors [M, stride] as csrc/ops.h wants them; places past a row itself hold 0."""
    depths, path = np.zeros(len(parents), np.int32), np.zeros((len(parents), stride), np.int32)
    for row, parent in enumerate(parents):
        if parent >= 0:
            depths[row] = depths[parent] + 1
            path[row, : depths[row]] = path[parent, : depths[row]]
        path[row, depths[row]] = row
    return depths, path


def routes(case: Case, seed: int) -> I32:
    """Expert ids [M, top_k], different ones within a row."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(case.experts, case.top_k, replace=False) for _ in range(case.M)]
    return np.array(drawn, np.int32)


class Bench:
    """One backend, and the making of calls on it."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.lib = library(device)
        with named_errors():
            self.handle: int = self.lib.backend_open(device, False)
        self._generator = torch.Generator(device).manual_seed(1)
        self._shared: dict[str, Any] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lib.backend_close(self.handle)

    def calls(self, case: Case, rotate: int) -> Calls:
        """Calls of ``case`` whose operands together exceed ``rotate`` bytes, or COPIES of them."""
        make: Callable[[Case, int], tuple[list[Any], int]] = getattr(self, f"_{case.op}")
        self._shared.clear()  # the experts of the case before
        arguments, size = make(case, 0)
        copies = min(max(2, -(-rotate // max(size, 1))), COPIES)
        every = [arguments, *(make(case, i)[0] for i in range(1, copies))]
        operation = getattr(self.lib, OPERATIONS.get(case.op, case.op))
        if self.device != "cpu":
            self.torch.cuda.synchronize()  # operands come from torch's stream, operations run on the backend's

        place = 6 if case.op == "moe_block" else 3
        ids = [given[place] for given in every if case.experts and "moe" in case.op]
        return Calls([self._call(operation, given) for given in every], every, size, ids)

    def _call(self, operation: Callable[..., Any], given: list[Any]) -> Call:
        def run() -> None:
            with named_errors():
                operation(self.handle, *given)

        return run

    def without_tree(self, case: Case, made: Calls) -> dict[str, list[Call]]:
        """What a tree's attention is to be compared with: ``made``'s calls on the same memory, no row of a step seen.

        ``no-tree``: every row sees as many keys as its path gives it, all of them committed ones in a row.
        ``dense``: every row sees the T committed keys alone.
        Nothing for other operations and for one row.
        """
        if case.op != "mla_attention" or case.M == 1:
            return {}
        depths, _ = paths(binary_parents(case.M), case.M)
        levels = 1 + int(depths.max())

        def altered(given: list[Any], committed: int, seen: I32) -> Call:
            """A row sees ``kv_len`` + its depth + 1 keys, so a depth below 0 leaves out the row itself too."""
            rows, state = list(given[-2]), self._state(case, kv_len=committed)
            rows[2] = self._ints(seen)
            return self._call(self.lib.mla_attention, [*given[:-2], rows, state])

        alone = np.full(case.M, -1, np.int32)
        return {
            "no-tree": [altered(given, case.T + levels, depths - levels) for given in made.arguments],
            "dense": [altered(given, case.T, alone) for given in made.arguments],
        }

    def timed(self, calls: Sequence[Call], seconds: float) -> clock.Timing:
        """Of calls made here: on a GPU noted as a sequence and replayed as the engine replays its steps."""
        if self.device == "cpu":
            return clock.wall(calls, seconds)
        for call in calls:
            call()
        each = clock.wall(calls[:1], 0).fastest  # with the host's share: rather too few calls than too many
        noted = clock.in_turn(calls, each)
        with named_errors():
            sequence = self.lib.sequence_begin(self.handle)
            try:
                for call in noted:
                    call()
                self.lib.sequence_end(self.handle)
                stream = self.torch.cuda.ExternalStream(self.lib.backend_stream(self.handle))
                run = clock.between_events(lambda: self.lib.sequence_run(self.handle, sequence), stream)
                return clock.replays(run, len(noted), seconds)
            finally:
                self.lib.sequence_drop(self.handle, sequence)

    def uniform(self, *shape: int) -> Any:
        """f32 in [-1, 1)."""
        return self.torch.empty(shape, device=self.device).uniform_(-1, 1, generator=self._generator)

    def numbers(self, kind: str, *shape: int) -> Any:
        """The same, for kinds with bf16 activations as the bits of bf16 numbers."""
        made = self.uniform(*shape)
        return made.to(self.torch.bfloat16).view(self.torch.uint16) if kind.endswith("bf16") else made

    def _empty(self, kind: str, *shape: int) -> Any:
        """Zeros of what products read."""
        dtype = self.torch.uint16 if kind.endswith("bf16") else self.torch.float32
        return self.torch.zeros(shape, dtype=dtype, device=self.device)

    def bytes_of(self, *shape: int) -> Any:
        """Random bytes."""
        return self.torch.randint(0, 256, shape, dtype=self.torch.uint8, device=self.device, generator=self._generator)

    def weight(self, kind: str, *shape: int) -> tuple[Any, Any]:
        """[..., n, k] and its scales; int4: random nibbles, each group's scale 1/64 as the bytes of a bf16."""
        torch, outer, count = self.torch, shape[:-1], groups(shape[-1])
        if not kind.startswith("int4"):
            return self.numbers(kind, *shape), torch.empty(0, dtype=torch.uint8, device=self.device)
        scale = torch.full((*outer, count), 1 / 64, dtype=torch.bfloat16, device=self.device)
        return self.bytes_of(*outer, 16 * count), scale.view(torch.uint8)

    def _ints(self, values: Any) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.device)

    def _zeros(self, *shape: int) -> Any:
        return self.torch.zeros(shape, device=self.device)

    def _state(self, case: Case, **fields: int) -> Any:
        """StepState; ``limit`` is far off so that repeated accepts go on."""
        given = {"kv_len": case.T, "n_rows": case.M, "limit": 1 << 30, **fields}
        order = (
            "kv_len", "n_rows", "bonus", "committed", "limit", "done", "n_accepted", "base", "error", "error_row",
            "error_detail", "rounds", "draft_first", "draft_rows", "seed_lo", "seed_hi",
        )  # fmt: skip
        return self._ints([given.get(name, 0) for name in order])

    def _rows(self, case: Case, stride: int = 0) -> list[Any]:
        parents = binary_parents(case.M)
        depths, path = paths(parents, max(stride, case.M))
        return [self._ints(np.arange(case.M)), self._ints(parents), self._ints(depths), self._ints(path)]

    def _dims(self, case: Case) -> list[int]:
        return [case.heads, case.rank, case.nope, case.rope, case.v]

    def _cache(self, case: Case) -> list[Any]:
        slots = case.T + case.M
        return [self.numbers(case.kind, slots, case.rank), self.numbers(case.kind, slots, case.rope)]

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        """One tensor for all copies of a case."""
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]

    def _linear(self, c: Case, copy: int) -> tuple[list[Any], int]:
        w, scale = self.weight(c.kind, c.N, c.K)
        x, none, out = self.numbers(c.kind, c.M, c.K), self._zeros(0), self._zeros(c.M, c.N)
        given = [x, none, 1e-5, [w], [scale], [out], 0, self._state(c), c.kind.endswith("bf16")]
        return given, work.weight_bytes(c.kind, c.N, c.K)

    def _moe(self, c: Case, copy: int) -> tuple[list[Any], int]:
        """Copies share the experts and differ in whom they route to."""
        shapes = ((c.N, c.K), (c.N, c.K), (c.K, c.N))
        stored = self._kept("experts", lambda: [self.weight(c.kind, c.experts, *s) for s in shapes])
        around = ((c.shared, c.K), (c.shared, c.K), (c.K, c.shared))
        shared = self._kept("shared", lambda: [self.numbers(c.kind, *s) for s in around] if c.shared else [])
        weights = self.torch.full((c.M, c.top_k), 1 / c.top_k, device=self.device)
        given = [
            self.uniform(c.M, c.K), self.uniform(c.K), 1e-5, self._ints(routes(c, copy)), weights,
            [w for w, _ in stored], [s for _, s in stored], shared,
            self._empty(c.kind, c.M, c.top_k, c.N), self._empty(c.kind, c.M, c.shared), self._zeros(c.M, c.K),
            self._state(c), c.kind.endswith("bf16"),
        ]  # fmt: skip
        return given, work.of(c).bytes

    def _moe_block(self, c: Case, copy: int) -> tuple[list[Any], int]:
        """The router's logits deviate by about 1 and have no bias: every row chooses evenly and for itself."""
        moe, size = self._moe(c, copy)
        kind = "bf16" if c.kind.endswith("bf16") else "f32"

        def weight() -> Any:
            even = self.uniform(c.experts, c.K) * (3 / c.K**0.5)
            return even if kind == "f32" else even.to(self.torch.bfloat16).view(self.torch.uint16)

        router = self._kept("router", weight)
        logits, ids = self._zeros(c.M, c.experts), self._ints(np.zeros((c.M, c.top_k)))
        weights = self._zeros(c.M, c.top_k)
        choice = [self._zeros(c.experts), logits, ids, weights, 1, 1, True, 2.827, 0]
        return [*moe[:3], router, *choice, *moe[5:]], size

    def _mla_attention(self, c: Case, copy: int) -> tuple[list[Any], int]:
        q = [self.numbers(c.kind, c.M, c.heads, c.rank), self.numbers(c.kind, c.M, c.heads, c.rope)]
        scale = float((c.nope + c.rope) ** -0.5)
        given = [self._dims(c), scale, *q, *self._cache(c), self._empty(c.kind, c.M, c.heads, c.rank), c.T + c.M]
        return [*given, self._rows(c), self._state(c)], work.of(c).bytes

    def _mla_prepare(self, c: Case, copy: int) -> tuple[list[Any], int]:
        up = self.numbers(c.kind, c.heads * (c.nope + c.v), c.rank)
        given = [
            self._dims(c), self.uniform(c.M, c.heads * (c.nope + c.rope)), self.uniform(c.M, c.rank + c.rope),
            self.uniform(c.rank), 1e-6, up, self._kept("angles", lambda: self.uniform(c.T + c.M, c.rope // 2, 2)),
            self._empty(c.kind, c.M, c.heads, c.rank), self._empty(c.kind, c.M, c.heads, c.rope),
            *self._kept("cache", lambda: self._cache(c)), self._rows(c), self._state(c),
        ]  # fmt: skip
        return given, work.of(c).bytes

    def _mla_value(self, c: Case, copy: int) -> tuple[list[Any], int]:
        up = self.numbers(c.kind, c.heads * (c.nope + c.v), c.rank)
        given = [self._dims(c), self.numbers(c.kind, c.M, c.heads, c.rank), up, self._empty(c.kind, c.M, c.heads * c.v)]
        return [*given, self._state(c)], work.of(c).bytes

    def _router(self, c: Case, copy: int) -> tuple[list[Any], int]:
        ids, weights = self._ints(np.zeros((c.M, c.top_k))), self._zeros(c.M, c.top_k)
        given = [self.uniform(c.M, c.experts), self.uniform(c.experts), ids, weights, 1, 1, True, 2.827, 0]
        return [*given, self._state(c)], work.of(c).bytes

    def _select(self, c: Case, copy: int) -> tuple[list[Any], int]:
        given = [self.uniform(c.M, c.N), 0.0, self._ints(np.zeros(c.M)), self._rows(c), self._state(c)]
        return given, work.of(c).bytes

    def _embed(self, c: Case, copy: int) -> tuple[list[Any], int]:
        """Copies are other lines of one table; 0.47 GB of it are enough to have no line in a cache."""
        lines = 16384
        table = self._kept("table", lambda: self.uniform(lines, c.K))
        rows = self._rows(c)
        rows[0] = self._ints(np.random.default_rng(copy).integers(0, lines, c.M))
        return [self._zeros(c.M, c.K), table, rows, self._state(c)], work.of(c).bytes

    def _rms_norm(self, c: Case, copy: int) -> tuple[list[Any], int]:
        given = [self._zeros(c.M, c.K), self.uniform(c.M, c.K), self.uniform(c.K), 1e-5, self._state(c)]
        return given, work.of(c).bytes

    def _tree_root(self, c: Case, copy: int) -> tuple[list[Any], int]:
        return [self._rows(c), self._state(c)], work.of(c).bytes

    def _tree_build(self, c: Case, copy: int) -> tuple[list[Any], int]:
        draft = self.uniform(c.depths, c.N)
        scores = self.torch.zeros(c.M, dtype=self.torch.float64, device=self.device)
        state = self._state(c, draft_first=1, draft_rows=c.depths)
        costs = self.torch.zeros(0, dtype=self.torch.float64)
        given = [draft, c.depths + 1, c.budget, -1, False, costs, self._rows(c, c.depths + 1), scores, state]
        return given, work.of(c).bytes

    def _accept(self, c: Case, copy: int) -> tuple[list[Any], int]:
        """The walk goes down the tree's first children: a row's choice is its first child's token."""
        choice = self._ints(2 * np.arange(c.M) + 1)
        out = self._ints(np.zeros(10 + c.M))
        given = [self._rows(c), choice, -1, self._ints(np.zeros(c.M)), out, self._state(c)]
        return given, work.of(c).bytes

    def _kv_commit(self, c: Case, copy: int) -> tuple[list[Any], int]:
        """Every other row is accepted, so that rows do move."""
        kept = np.arange(0, c.M, 2)
        accepted = np.zeros(c.M, np.int32)
        accepted[: len(kept)] = kept
        caches = [self._cache(c) for _ in range(c.layers)]
        state = self._state(c, base=c.T, n_accepted=len(kept))
        given = [[latent for latent, _ in caches], [rope for _, rope in caches], self._ints(accepted), state]
        return given, sum(part.numel() * 4 for cache in caches for part in cache)

    def _record(self, c: Case, copy: int) -> tuple[list[Any], int]:
        state = self._state(c, committed=c.M, n_accepted=c.M)
        given = [self._zeros(c.M, c.N), self.uniform(c.M, c.N), 0, self._ints(np.arange(c.M)), state]
        return given, work.of(c).bytes

    def _record_tree(self, c: Case, copy: int) -> tuple[list[Any], int]:
        state = self._state(c, rounds=1, n_accepted=c.M)
        log = self._ints(np.zeros((1, 2 + 3 * c.M)))
        return [log, self._rows(c), self._ints(np.arange(c.M)), state], work.of(c).bytes

    def _gather_rows(self, c: Case, copy: int) -> tuple[list[Any], int]:
        given = [self._zeros(c.M, c.K), 0, self.uniform(c.M, c.K), self._ints(np.arange(c.M)[::-1]), self._state(c)]
        return given, work.of(c).bytes

    def _draft_block(self, c: Case, copy: int) -> tuple[list[Any], int]:
        return [self._ints(np.zeros(c.M)), 7, self._state(c)], work.of(c).bytes

    def _draft_prepare(self, c: Case, copy: int) -> tuple[list[Any], int]:
        q, k, v = (self.uniform(c.M, heads * c.v) for heads in (c.heads, c.kv_heads, c.kv_heads))
        norms = [self.uniform(c.v), self.uniform(c.v)]
        table = self._kept("angles", lambda: self.uniform(c.T + c.M, c.v // 2, 2))
        given = [[c.heads, c.kv_heads, c.v], q, k, v, *norms, 1e-6, table, *self._kept("cache", lambda: self._keys(c))]
        return [*given, self._state(c)], work.of(c).bytes

    def _draft_attention(self, c: Case, copy: int) -> tuple[list[Any], int]:
        q = self.uniform(c.M, c.heads * c.v)
        given = [[c.heads, c.kv_heads, c.v], q, *self._keys(c), self._zeros(c.M, c.heads * c.v), self._state(c)]
        return given, work.of(c).bytes

    def _keys(self, c: Case) -> list[Any]:
        """A drafter's cache of one layer."""
        return [self.uniform(c.T + c.M, c.kv_heads * c.v) for _ in range(2)]
