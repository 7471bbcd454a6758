"""Experts with bf16 activations, their rows whole boxes of 256 values: float64, and a row's bits in any company.

On Hopper such rows are the bulk copy engine's, with one kernel for up to 4, 8, 16 and more rows of an expert. Of long
ones a row alone has kernels of its own, and of INT4 the warps of a block go through K together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_operands import draw, int4, normed
from engine_ops import F32, Array, Ops, same_bits

from engine.library import library

ROWS, EPS = 40, 1e-5
WIDTHS = [
    *((1,), (3, 4), (0, 7, 7), (3, 4, 5, 6, 39), (8, 9, 2, 1, 30, 31, 32)),
    *(tuple(range(20)), tuple(range(39, -1, -1))),
]
HOPPER = 232448  # bytes of shared memory a block may have


@dataclass(frozen=True)
class Sizes:
    dim: int
    inner: int
    experts: int
    top_k: int
    shared: int


SHORT, LONG = Sizes(1024, 512, 5, 2, 512), Sizes(1024, 1024, 8, 7, 1024)
CASES = pytest.mark.parametrize(
    ("kind", "sizes"), [(kind, sizes) for kind in ("bf16", "int4") for sizes in (SHORT, LONG)], ids=str
)


def test_long_rows_are_those_of_every_kernel() -> None:
    """On an H200: blocks of down with tiles of two experts, more units than blocks."""
    z, plan = LONG, library("cpu")
    down = [int(n) for n in plan.row_plan(True, z.inner, z.shared, z.dim, z.dim, z.top_k, True, HOPPER)]
    assert plan.row_plan(False, z.dim, z.dim, z.inner, z.shared, z.top_k, True, HOPPER)
    blocks, each = down[4], z.dim // 16
    firsts = down[7 + blocks :]
    assert any(first // each != (end - 1) // each for first, end in pairwise(firsts) if end > first)
    assert plan.tile_plan(z.dim, z.inner, False, z.dim, ROWS, HOPPER)
    turns = -(-np.bincount(Case("int4", z).ids.ravel()) // 16)
    assert turns.sum() * z.inner // 64 > blocks


def rounded(v: Array) -> Array:
    return torch.from_numpy(np.asarray(v, np.float32)).bfloat16().double().numpy()


def bits(v: Array) -> Array:
    return torch.from_numpy(np.asarray(v, np.float32)).bfloat16().view(torch.uint16).numpy()


class Case:
    """Rows and weights. Every expert has the first one's weight rows, turned by as many as no two experts are."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        self.sizes, rng = sizes, np.random.default_rng(11)
        self.exact, self.stored, self.scales = [], [], []
        for shape in ((sizes.inner, sizes.dim), (sizes.inner, sizes.dim), (sizes.dim, sizes.inner)):
            if kind == "bf16":
                exact = rounded(draw(rng, *shape))
                stored, scales = bits(exact), None
            else:
                stored, scales, exact = int4(rng, *shape)
            self.exact.append(exact)
            self.stored.append(self._turned(stored))
            self.scales.append(np.empty(0, np.uint8) if scales is None else self._turned(scales).view(np.uint8))
        around = ((sizes.shared, sizes.dim), (sizes.shared, sizes.dim), (sizes.dim, sizes.shared))
        self.beside = [rounded(draw(rng, *s)) for s in around]
        self.x, self.norm = draw(rng, ROWS, sizes.dim), draw(rng, sizes.dim)
        self.ids = np.stack([rng.permutation(sizes.experts)[: sizes.top_k] for _ in range(ROWS)]).astype(np.int32)
        self.weights = rng.random((ROWS, sizes.top_k)).astype(np.float32)

    def _turned(self, rows: Array) -> Array:
        return np.stack([np.roll(rows, 37 * e, axis=0) for e in range(self.sizes.experts)])

    def want(self, row: int) -> Array:
        """What the block adds to a row, in float64."""
        b = rounded(normed(self.x[row : row + 1], self.norm, EPS)[0])
        found = mlp(*self.beside, b)
        for e, w in zip(self.ids[row], self.weights[row], strict=True):
            found = found + w * mlp(*(np.roll(part, 37 * e, axis=0) for part in self.exact), b)
        return found

    def kept(self, ops: Ops) -> list[list[torch.Tensor]]:
        """Weights, scales, the shared expert's, as operations take them."""
        return [[ops.tensor(w) for w in part] for part in (self.stored, self.scales, [bits(w) for w in self.beside])]

    def acts(self, ops: Ops, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.sizes
        return ops.empty(m, z.top_k, z.inner, dtype=np.uint16), ops.empty(m, z.shared, dtype=np.uint16)


def mlp(gate: Array, up: Array, down: Array, b: Array) -> Array:
    g = gate @ b
    return np.asarray(down @ rounded(g / (1 + np.exp(-g)) * (up @ b)))


@CASES
def test_experts_of_whole_boxes(ops: Ops, kind: str, sizes: Sizes) -> None:
    case = Case(kind, sizes)
    kept = case.kept(ops)

    def run(rows: tuple[int, ...]) -> F32:
        at, m = list(rows), len(rows)
        out = ops.tensor(case.x[at])
        given = [out, ops.tensor(case.norm), EPS, ops.tensor(case.ids[at]), ops.tensor(case.weights[at])]
        ops.call("moe", *given, *kept, *case.acts(ops, m), out, ops.state(m), True)
        return np.asarray(out.cpu().numpy())

    whole = run(tuple(range(ROWS)))
    for row in range(0, ROWS, 8):
        got, want = whole[row].astype(np.float64) - case.x[row], case.want(row)
        assert np.linalg.norm(got - want) <= 3e-3 * np.linalg.norm(want), row
    for rows in WIDTHS:
        same_bits(run(rows), whole[list(rows)], f"experts of {len(rows)} rows, [row, element]")


@CASES
def test_equal_scores_of_experts_of_whole_boxes(ops: Ops, kind: str, sizes: Sizes) -> None:
    """Router, choice and experts in one: of experts with the same scores the lowest is first, and a row's bits stay."""
    case, z = Case(kind, sizes), sizes
    kept = case.kept(ops)
    router = draw(np.random.default_rng(5), z.experts, z.dim)
    router[1::2] = router[: len(router) // 2 * 2 : 2]
    around = [ops.tensor(case.norm), EPS, ops.tensor(bits(router)), ops.tensor(np.zeros(z.experts, np.float32))]

    def run(rows: tuple[int, ...]) -> tuple[F32, Array]:
        m = len(rows)
        x, out = ops.tensor(case.x[list(rows)]), ops.tensor(case.x[list(rows)])
        logits, weights = ops.empty(m, z.experts), ops.empty(m, z.top_k)
        ids = ops.empty(m, z.top_k, dtype=np.int32)
        how = [1, 1, True, 2.5, 7]
        given = [x, *around, logits, ids, weights, *how, *kept, *case.acts(ops, m), out, ops.state(m), True]
        ops.call("routed_moe", *given)
        return np.asarray(out.cpu().numpy()), np.asarray(ids.cpu().numpy())

    whole, ids = run(tuple(range(ROWS)))
    for first in range(0, z.experts - 1, 2):
        for chosen in ids.tolist():
            assert first + 1 not in chosen or chosen.index(first + 1) == chosen.index(first) + 1, chosen
    for rows in WIDTHS:
        got, theirs = run(rows)
        assert (theirs == ids[list(rows)]).all()
        same_bits(got, whole[list(rows)], f"router and experts of {len(rows)} rows, [row, element]")
