"""What `tests.cuda.pairs` asks: products, experts and MLA on rows of a pool, and the bits of every row of it alone.

A shape's `alone` runs each row of its pool by itself, as AR does: M = 1, everything before it committed. `calls` runs a
mix: some of the rows in some order, or a tree of them, with room for more rows than count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.library import library, named_errors
from tests.cuda.operations import Tree, state

EPS = 1e-5
MOST = 64
UNWRITTEN = -1  # every bit set: a NaN of either width
CROWD = 0.05  # how far rows stand from each other that choose much the same experts

Tensor = torch.Tensor
Call = tuple[str, list[Any]]
Outputs = dict[str, Tensor]
"""By name [M, ...], as integers of their width."""


class Ops:
    """Operations of one backend on torch tensors that stay on its device, one by one or as one sequence."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.lib = library(device)
        with named_errors():
            self.handle = self.lib.backend_open(device, True)
        self.generator = torch.Generator(device).manual_seed(7)

    def __call__(self, name: str, arguments: list[Any]) -> None:
        self.wait()
        with named_errors():
            getattr(self.lib, name)(self.handle, *arguments)

    def together(self, calls: Sequence[Call]) -> None:
        """All of them as one step: on a GPU a graph, whose launches overlap as a step's do."""
        with named_errors():
            number = self.lib.sequence_begin(self.handle)
            try:
                for name, arguments in calls:
                    getattr(self.lib, name)(self.handle, *arguments)
                self.lib.sequence_end(self.handle)
                self.wait()
                self.lib.sequence_run(self.handle, number)
                self.wait()
            finally:
                self.lib.sequence_drop(self.handle, number)

    def wait(self) -> None:
        """Torch's stream and the backend's know nothing of each other."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def counters(self) -> dict[str, int]:
        lines = (line.split() for line in self.lib.backend_counters(self.handle).splitlines())
        return {name: int(count) for name, count in lines}

    def close(self) -> None:
        self.lib.backend_close(self.handle)

    def put(self, values: Any, dtype: type = np.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(self.device)

    def state(self, rows: int, kv_len: int = 0) -> Tensor:
        return self.put(state(n_rows=rows, kv_len=kv_len))

    def normal(self, *shape: int, bf16: bool = False, spread: float = 1.0) -> Tensor:
        """f32, or bf16 as the integers that hold them."""
        made = torch.empty(shape, device=self.device, dtype=torch.bfloat16 if bf16 else torch.float32)
        made.normal_(0, spread, generator=self.generator)
        return made.view(torch.int16) if bf16 else made

    def blank(self, *shape: int, bf16: bool = False) -> Tensor:
        made = torch.full(shape, UNWRITTEN, device=self.device, dtype=torch.int16 if bf16 else torch.int32)
        return made if bf16 else made.view(torch.float32)

    def weight(self, kind: str, *shape: int) -> tuple[Tensor, Tensor]:
        """[..., n, k] as operations take it, and its scales; products of normal rows are about normal."""
        *outer, k = shape
        if not kind.startswith("int4"):
            made = self.normal(*shape, bf16=kind == "bf16", spread=k**-0.5)
            return taken(made), torch.empty(0, dtype=torch.uint8, device=self.device)
        groups = -(-k // 32)
        nibbles = torch.randint(
            0, 256, (*outer, 16 * groups), dtype=torch.uint8, device=self.device, generator=self.generator
        )
        if k % 32:  # what pads the last group is 0
            places = torch.arange(32 * groups, device=self.device).view(-1, 2) < k
            mask = torch.where(places[:, 0], 0x0F, 0) + torch.where(places[:, 1], 0xF0, 0)
            zero = 0x88 - (mask & 0x88)
            nibbles = (nibbles & mask.to(torch.uint8)) | zero.to(torch.uint8)
        scale = torch.empty((*outer, groups), device=self.device)
        scale.uniform_(0.5, 1.5, generator=self.generator).mul_(k**-0.5 / 4.6)
        return nibbles, scale.bfloat16().view(torch.uint8)


def taken(x: Tensor) -> Tensor:
    """Integers that hold bf16 numbers, as operations take them."""
    return x.contiguous().view(torch.uint16) if x.dtype == torch.int16 else x.contiguous()


def whole(x: Tensor) -> Tensor:
    """The integers of what an operation wrote, [M, all of a row]."""
    return (x if x.dtype == torch.int16 else x.view(torch.int32)).reshape(len(x), -1)


@dataclass(frozen=True)
class Mix:
    """Rows of a pool; ``tree`` has one row for each and, last, ``spare`` rows that do not count."""

    rows: list[int]
    tree: Tree
    spare: int

    @property
    def count(self) -> int:
        return len(self.rows)


class Shape(Protocol):
    """One shape of the operations."""

    name: str

    def alone(self) -> Outputs: ...

    def draw(self, rng: np.random.Generator, number: int) -> Mix: ...

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]: ...


def spare_rows(rng: np.random.Generator, count: int) -> int:
    """For one mix in four: graphs serve steps with fewer rows than they were made for."""
    return int(rng.integers(0, MOST - count + 1)) if rng.random() < 0.25 else 0


class Rows:
    """What rows have in common that form no tree: any of the pool in any order, some of them twice."""

    pool = 2 * MOST

    def __init__(self, ops: Ops, name: str) -> None:
        self.ops, self.name = ops, name

    def draw(self, rng: np.random.Generator, number: int) -> Mix:
        """Every third one is of the second half of the pool alone."""
        count = int(rng.integers(1, MOST + 1))
        rows = rng.integers(MOST if number % 3 == 0 else 0, self.pool, count).tolist()
        return Mix(rows, Tree([-1]), spare_rows(rng, count))

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]:
        raise NotImplementedError

    def at(self, mix: Mix) -> Tensor:
        """Where in the pool the rows of a call are; those that do not count are its first."""
        return self.ops.put([*mix.rows, *range(mix.spare)], np.int64)

    def alone(self) -> Outputs:
        found: list[Outputs] = []
        for row in range(self.pool):
            calls, out = self.calls(Mix([row], Tree([-1]), 0))
            for name, arguments in calls:
                self.ops(name, arguments)
            found.append(out)
        return {name: torch.cat([out[name] for out in found]) for name in found[0]}


class Linear(Rows):
    """y = W x for one weight or two, with or without a norm; epilogue as in csrc/ops.h."""

    def __init__(
        self, ops: Ops, name: str, kind: str, k: int, n: Sequence[int], *, normed: bool = False, epilogue: int = 0
    ) -> None:
        super().__init__(ops, name)
        self.n, self.epilogue, self.bf16 = n, epilogue, kind.endswith("bf16")
        made = [ops.weight(kind, rows, k) for rows in n]
        self.weights, self.scales = [w for w, _ in made], [s for _, s in made]
        self.x = ops.normal(self.pool, k, bf16=self.bf16 and not normed)
        self.norm = ops.normal(k).abs() + 0.5 if normed else torch.empty(0, device=ops.device)
        self.before = ops.normal(self.pool, n[0])

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]:
        at = self.at(mix)
        if self.epilogue == 1:
            out = [self.before[at]]
        elif self.epilogue == 2:
            out = [self.ops.blank(len(at), self.n[0], bf16=self.bf16)]
        else:
            out = [self.ops.blank(len(at), n) for n in self.n]
        given = [taken(self.x[at]), self.norm, EPS, self.weights, self.scales, [taken(o) for o in out], self.epilogue]
        given += [self.ops.state(mix.count), self.bf16]
        return [("linear", given)], {f"out{i}": whole(o)[: mix.count] for i, o in enumerate(out)}


class Experts(Rows):
    """Router, choice and experts as one operation; half of the pool's rows choose much the same experts."""

    def __init__(
        self, ops: Ops, name: str, kind: str, dim: int, inner: int, shared: int, experts: int, top_k: int
    ) -> None:
        super().__init__(ops, name)
        self.bf16 = kind.endswith("bf16")
        self.sizes = (inner, shared, experts, top_k)
        own = "bf16" if self.bf16 else "f32"
        made = [ops.weight(kind, experts, *s) for s in ((inner, dim), (inner, dim), (dim, inner))]
        self.weights, self.scales = [w for w, _ in made], [s for _, s in made]
        around = ((shared, dim), (shared, dim), (dim, shared)) if shared else ()
        self.shared = [ops.weight(own, *s)[0] for s in around]
        self.router, self.bias = ops.weight(own, experts, dim)[0], ops.normal(experts).mul_(0.01)
        self.norm, self.x = ops.normal(dim).abs() + 0.5, ops.normal(self.pool, dim)
        self.x[MOST:] = self.x[MOST] + CROWD * self.x[MOST:]

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]:
        ops, at = self.ops, self.at(mix)
        inner, shared, experts, top_k = self.sizes
        m = len(at)
        logits, weights, ids = ops.blank(m, experts), ops.blank(m, top_k), ops.blank(m, top_k).view(torch.int32)
        act, shared_act = ops.blank(m, top_k, inner, bf16=self.bf16), ops.blank(m, shared, bf16=self.bf16)
        x = self.x[at]
        out = x.clone()
        given = [x, self.norm, EPS, self.router, self.bias, logits, ids, weights, 1, 1, True, 2.827, 0]
        given += [self.weights, self.scales, self.shared, taken(act), taken(shared_act), out]
        written = {"logits": logits, "ids": ids, "weights": weights, "out": out}
        return [("routed_moe", [*given, ops.state(mix.count), self.bf16])], {
            name: whole(part)[: mix.count] for name, part in written.items()
        }


class Router(Rows):
    """The choice alone, of logits."""

    def __init__(self, ops: Ops, name: str, experts: int, top_k: int) -> None:
        super().__init__(ops, name)
        self.logits, self.bias, self.top_k = ops.normal(self.pool, experts), ops.normal(experts).mul_(0.01), top_k

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]:
        ops, logits = self.ops, self.logits[self.at(mix)]
        weights, ids = (ops.blank(len(logits), self.top_k) for _ in range(2))
        ids = ids.view(torch.int32)
        given = [logits, self.bias, ids, weights, 1, 1, True, 2.827, 0, ops.state(mix.count)]
        return [("router", given)], {"ids": whole(ids)[: mix.count], "weights": whole(weights)[: mix.count]}
