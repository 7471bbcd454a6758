"""Experts with bf16 activations, their rows whole boxes of 256 values: float64, and a row's bits in any company.

On Hopper such rows are the bulk copy engine's, with one kernel for up to 4, 8, 16 and more rows of an expert.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_ops import F32, Array, Ops, same_bits
from test_op_linear import draw, int4, normed

ROWS, DIM, INNER, EXPERTS, TOP_K, SHARED = 40, 1024, 512, 5, 2, 512
WIDTHS = [
    *((1,), (3, 4), (0, 7, 7), (3, 4, 5, 6, 39), (8, 9, 2, 1, 30, 31, 32)),
    *(tuple(range(20)), tuple(range(39, -1, -1))),
]


def rounded(v: Array) -> Array:
    return torch.from_numpy(np.asarray(v, np.float32)).bfloat16().double().numpy()


def bits(v: Array) -> Array:
    return torch.from_numpy(np.asarray(v, np.float32)).bfloat16().view(torch.uint16).numpy()


def mlp(gate: Array, up: Array, down: Array, b: Array) -> Array:
    g = gate @ b
    return np.asarray(down @ rounded(g / (1 + np.exp(-g)) * (up @ b)))


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_experts_of_whole_boxes(ops: Ops, kind: str) -> None:
    rng = np.random.default_rng(11)
    shapes = [(INNER, DIM), (INNER, DIM), (DIM, INNER)]
    if kind == "bf16":
        exact = [rounded(draw(rng, EXPERTS, *s)) for s in shapes]
        stored, scales = [bits(w) for w in exact], [np.empty(0, np.uint8)] * 3
    else:
        parts = [[int4(rng, *s) for _ in range(EXPERTS)] for s in shapes]
        stored = [np.stack([p[0] for p in part]) for part in parts]
        scales = [np.stack([p[1] for p in part]).view(np.uint8) for part in parts]
        exact = [np.stack([p[2] for p in part]) for part in parts]
    beside = [rounded(draw(rng, *s)) for s in ((SHARED, DIM), (SHARED, DIM), (DIM, SHARED))]
    x, norm = draw(rng, ROWS, DIM), draw(rng, DIM)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS)]).astype(np.int32)
    weights = rng.random((ROWS, TOP_K)).astype(np.float32)

    def run(rows: tuple[int, ...]) -> F32:
        at, m = list(rows), len(rows)
        act, shared_act = ops.empty(m, TOP_K, INNER, dtype=np.uint16), ops.empty(m, SHARED, dtype=np.uint16)
        out = ops.tensor(x[at])
        given = [out, ops.tensor(norm), 1e-5, ops.tensor(ids[at]), ops.tensor(weights[at])]
        kept = [[ops.tensor(w) for w in part] for part in (stored, scales, [bits(w) for w in beside])]
        ops.call("moe", *given, *kept, act, shared_act, out, ops.state(m), True)
        return np.asarray(out.cpu().numpy())

    whole = run(tuple(range(ROWS)))
    for row in range(0, ROWS, 5):
        b = rounded(normed(x[row : row + 1], norm, 1e-5)[0])
        want = mlp(*beside, b)
        for e, w in zip(ids[row], weights[row], strict=True):
            want = want + w * mlp(*(part[e] for part in exact), b)
        got = whole[row].astype(np.float64) - x[row]
        assert np.linalg.norm(got - want) <= 3e-3 * np.linalg.norm(want), row
    for rows in WIDTHS:
        same_bits(run(rows), whole[list(rows)], f"experts of {len(rows)} rows, [row, element]")
