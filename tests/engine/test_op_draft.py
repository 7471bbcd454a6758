"""The drafter's operations against float64 written out here; the same bits for any block and any split of the keys."""

from __future__ import annotations

import numpy as np
import pytest
from engine_operands import draw, normed
from engine_ops import F32, Array, Ops

DIMS = [(1, 1, 2), (6, 2, 10), (8, 8, 32), (40, 2, 130)]
"""heads, heads of keys, head_dim; more queries a key than a block of 16, a head beyond a warp and 128 threads."""
EPS = 1e-3


def turned(x: Array, angles: Array) -> Array:
    """x [rows, heads, W] as numbers x_i + j x_(i + W/2), times e^(j angle)."""
    half = x.shape[-1] // 2
    pair = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pair.real, pair.imag], -1)


def test_rows_are_gathered_into_columns(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    src = draw(rng, 9, 300)
    for index in (np.array([8, 0, 3, 3, 1, 7], np.int32), np.zeros(0, np.int32)):
        dst = ops.tensor(np.full((6, 700), 7, np.float32))
        ops.call("gather_rows", dst, 350, ops.tensor(src), ops.tensor(index), ops.state(5))
        want = np.full((6, 700), 7, np.float32)
        want[:5, 350:650] = src[index[:5] if index.size else np.arange(5)]
        assert np.array_equal(dst.cpu().numpy(), want)


def test_a_block_is_the_bonus_and_masks(ops: Ops) -> None:
    tokens, state = ops.empty(300, dtype=np.int32), ops.state(0, kv_len=20, bonus=5)
    ops.call("draft_block", tokens, 77, state)
    assert tokens.cpu().tolist() == [5] + [77] * 299
    assert ops.fields(state) == ops.fields(ops.state(0, kv_len=20, bonus=5, draft_first=21, draft_rows=299))


class Side:
    """Inputs of one layer for `total` positions and the device's cache."""

    def __init__(self, ops: Ops, dims: tuple[int, int, int], total: int) -> None:
        rng = np.random.default_rng(total + dims[2])
        self.ops, self.dims, self.total = ops, dims, total
        self.heads, self.kv, self.w = dims
        self.q, self.k, self.v = (draw(rng, total, h, self.w) for h in (self.heads, self.kv, self.kv))
        self.q_norm, self.k_norm = draw(rng, self.w), draw(rng, self.w)
        self.angles = rng.random((total, self.w // 2)) * 6.28
        self.table = np.stack([np.cos(self.angles), np.sin(self.angles)], -1).astype(np.float32)
        self.keys, self.values = (ops.empty(total + 1, self.kv * self.w) for _ in range(2))

    def prepare(self, first: int, n: int, *, queries: bool) -> F32:
        """Rows first .. first + n - 1 into the cache; the queries, normed and rotated."""
        o, part = self.ops, slice(first, first + n)
        q = o.tensor(self.q[part] if queries else np.zeros(0, np.float32))
        k, v, norms = o.tensor(self.k[part]), o.tensor(self.v[part]), [o.tensor(w) for w in (self.q_norm, self.k_norm)]
        state = o.state(n, kv_len=first)
        o.call(
            "draft_prepare", list(self.dims), q, k, v, *norms, EPS, o.tensor(self.table), self.keys, self.values, state
        )
        return q.cpu().numpy()

    def attend(self, q: F32, kv_len: int, rows: int) -> F32:
        out = self.ops.empty(*q.shape)
        state = self.ops.state(rows, kv_len=kv_len)
        self.ops.call("draft_attention", list(self.dims), self.ops.tensor(q), self.keys, self.values, out, state)
        return out.cpu().numpy()

    def want(self, first: int, rows: int) -> Array:
        """Attention of rows first .. over all keys 0 .. first + rows - 1, [rows, heads, W]."""
        k, q = (
            turned(normed(self.k, self.k_norm, EPS), self.angles),
            turned(normed(self.q, self.q_norm, EPS), self.angles),
        )
        group = np.repeat(np.arange(self.kv), self.heads // self.kv)
        seen = first + rows
        score = np.einsum("mhw,thw->hmt", q[first:seen], k[:seen, group]) / np.sqrt(self.w)
        p = np.exp(score - score.max(-1, keepdims=True))
        return np.asarray(
            np.einsum("hmt,thw->mhw", p / p.sum(-1, keepdims=True), self.v.astype(np.float64)[:seen, group])
        )


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_prepare(ops: Ops, dims: tuple[int, int, int]) -> None:
    side = Side(ops, dims, 7)
    got = side.prepare(0, 7, queries=True)
    np.testing.assert_allclose(got, turned(normed(side.q, side.q_norm, EPS), side.angles), atol=2e-5)
    keys = side.keys.cpu().numpy()
    want = turned(normed(side.k, side.k_norm, EPS), side.angles)
    np.testing.assert_allclose(keys[:7].reshape(want.shape), want, atol=2e-5)
    assert np.array_equal(side.values.cpu().numpy()[:7].reshape(side.v.shape), side.v)
    assert np.isnan(keys[7]).all(), "written past the rows"


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("context", [0, 1, 63, 64, 130, 300])
def test_attention(ops: Ops, dims: tuple[int, int, int], context: int) -> None:
    """Every row of the block sees the context and the whole block; the context may have come in any pieces."""
    rows = 5
    side = Side(ops, dims, context + rows)
    side.prepare(0, context, queries=False) if context else None
    q = side.prepare(context, rows, queries=True)
    got = side.attend(q, context, rows)
    np.testing.assert_allclose(got, side.want(context, rows), atol=3e-5)

    pieces = Side(ops, dims, context + rows)
    for at in range(0, context, 40):
        pieces.prepare(at, min(40, context - at), queries=False)
    pieces.prepare(context, rows, queries=False)
    alone = np.concatenate([pieces.attend(np.repeat(q[i : i + 1], rows, 0), context, rows)[:1] for i in range(rows)])
    assert np.array_equal(got, alone), "a row's bits depend on the other rows or on the pieces"
