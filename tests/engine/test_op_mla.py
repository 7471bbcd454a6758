"""MLA in absorbed form against the direct form in float64; the same bits for any tree and any split of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from engine_operands import draw
from engine_ops import F32, Array, Ops, Rows, chain, same_bits, within

from engine.library import library

DIMS = [
    (1, 4, 1, 2, 1),
    (3, 17, 5, 6, 7),
    (20, 40, 70, 8, 66),
    (16, 64, 16, 16, 16),
    (2, 300, 5, 4, 3),
    (13, 33, 9, 4, 8),
]
"""heads, rank, nope, rope, v: more heads than a block of 16, nope and v beyond a block of 64; a rank that the CPU
absorbs in several slices; heads that fill no tile of 4 or 8."""
EPS, SCALE = 1e-6, 0.37


class Attention:
    """Weights and inputs of one layer for `total` tokens, and what float64 makes of them in the direct form."""

    def __init__(self, dims: Sequence[int], total: int) -> None:
        rng = np.random.default_rng(total + dims[1])
        self.dims, self.total = list(dims), total
        self.heads, self.rank, self.nope, self.rope, self.v = dims
        self.q = draw(rng, total, self.heads, self.nope + self.rope)
        self.kv = draw(rng, total, self.rank + self.rope)
        self.norm = draw(rng, self.rank)
        self.kv_b = draw(rng, self.heads, self.nope + self.v, self.rank)
        angle = rng.random((total, self.rope // 2)) * 6.28
        self.cos_sin = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)

    def turned(self, x: Array, position: int) -> Array:
        pair = x.astype(np.float64)[..., 0::2] + 1j * x[..., 1::2]
        cs = self.cos_sin[position].astype(np.float64)
        pair = pair * (cs[:, 0] + 1j * cs[:, 1])
        return np.stack([pair.real, pair.imag], -1).reshape(x.shape)

    def latent(self, token: int) -> Array:
        x = self.kv[token, : self.rank].astype(np.float64)
        return np.asarray(x / np.sqrt((x**2).mean() + EPS) * self.norm)

    def want(self, path: Sequence[int]) -> Array:
        """o [heads, v] of the last of `path`, token numbers in order of position; keys and values made explicitly."""
        latent = np.stack([self.latent(t) for t in path])
        k_rope = np.stack([self.turned(self.kv[t, self.rank :], p) for p, t in enumerate(path)])
        k = np.einsum("tr,hnr->htn", latent, self.kv_b[:, : self.nope].astype(np.float64))
        v = np.einsum("tr,hvr->htv", latent, self.kv_b[:, self.nope :].astype(np.float64))
        q = self.q[path[-1]].astype(np.float64)
        q_rope = self.turned(q[:, self.nope :], len(path) - 1)
        score = SCALE * (np.einsum("hn,htn->ht", q[:, : self.nope], k) + q_rope @ k_rope.T)
        p = np.exp(score - score.max(-1, keepdims=True))
        return np.asarray(np.einsum("ht,htv->hv", p / p.sum(-1, keepdims=True), v))


class Layer:
    """The device's side: a cache, and steps through prepare, attention and value."""

    def __init__(self, ops: Ops, a: Attention, slots: int) -> None:
        self.ops, self.a = ops, a
        self.latent, self.k_rope = ops.empty(slots, a.rank), ops.empty(slots, a.rope)

    def step(self, tokens: Sequence[int], rows: Rows, kv_len: int, n_rows: int | None = None) -> dict[str, F32]:
        ops, a, m = self.ops, self.a, len(rows.tokens)
        index = np.resize(np.asarray(tokens), m)
        q_lat, q_rope = ops.empty(m, a.heads, a.rank), ops.empty(m, a.heads, a.rope)
        o_lat, o = ops.empty(m, a.heads, a.rank), ops.empty(m, a.heads, a.v)
        kv_b = ops.tensor(a.kv_b)
        on_device, state = ops.rows(rows), ops.state(rows.active if n_rows is None else n_rows, kv_len=kv_len)
        ops.call(
            "mla_prepare", a.dims, ops.tensor(a.q[index]), ops.tensor(a.kv[index]), ops.tensor(a.norm), EPS, kv_b,
            ops.tensor(a.cos_sin), q_lat, q_rope, self.latent, self.k_rope, on_device, state,
        )  # fmt: skip
        keys = a.total
        ops.call("mla_attention", a.dims, SCALE, q_lat, q_rope, self.latent, self.k_rope, o_lat, keys, on_device, state)
        ops.call("mla_value", a.dims, o_lat, kv_b, o, state)
        names = {"q_lat": q_lat, "q_rope": q_rope, "o_lat": o_lat, "o": o}
        return {name: tensor.cpu().numpy() for name, tensor in names.items()}

    def cached(self) -> tuple[F32, F32]:
        return self.latent.cpu().numpy(), self.k_rope.cpu().numpy()


def close(got: F32, want: Array, what: str) -> None:
    __tracebackhide__ = True
    within(got, want, 2e-5 * (np.abs(want).max() + 1), what)


@pytest.mark.parametrize("dims", DIMS)
def test_chain_against_the_direct_form(ops: Ops, dims: tuple[int, ...]) -> None:
    """70 rows in one step, so that a chunk of 64 keys ends inside it."""
    a = Attention(dims, 70)
    layer = Layer(ops, a, 72)
    got = layer.step(range(70), chain(70), 0)
    latent, k_rope = layer.cached()
    close(latent[:70], np.stack([a.latent(t) for t in range(70)]), "latent, [slot, element]")
    close(k_rope[:70], np.stack([a.turned(a.kv[t, a.rank :], t) for t in range(70)]), "k_rope, [slot, element]")
    for row in (0, 1, 2, 31, 62, 63, 64, 65, 69):
        close(got["o"][row], a.want(range(row + 1)), f"o of row {row}, [head, element]")
    assert np.isnan(latent[70:]).all(), "a slot past the step's rows was written"


@pytest.mark.parametrize("kv_len", [254, 65534])
def test_positions_need_more_than_8_and_16_bits(ops: Ops, kv_len: int) -> None:
    """Rows on both sides take the angles of their own positions, and lie in their own slots of the cache."""
    a, m = Attention(DIMS[1], 4), 4
    slots = kv_len + m
    angle = np.random.default_rng(kv_len).random((slots, a.rope // 2)) * 6.28
    a.cos_sin = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    q_lat, q_rope = ops.empty(m, a.heads, a.rank), ops.empty(m, a.heads, a.rope)
    latent, k_rope = ops.empty(slots, a.rank), ops.empty(slots, a.rope)
    ops.call(
        "mla_prepare", a.dims, ops.tensor(a.q), ops.tensor(a.kv), ops.tensor(a.norm), EPS, ops.tensor(a.kv_b),
        ops.tensor(a.cos_sin), q_lat, q_rope, latent, k_rope, ops.rows(chain(m)), ops.state(m, kv_len=kv_len),
    )  # fmt: skip
    turned = np.stack([a.turned(a.q[i, :, a.nope :], kv_len + i) for i in range(m)])
    close(q_rope.cpu().numpy(), turned, "q_rope, [row, head, element]")
    turned = np.stack([a.turned(a.kv[i, a.rank :], kv_len + i) for i in range(m)])
    close(k_rope[kv_len:].cpu().numpy(), turned, "k_rope, [row, element]")
    close(latent[kv_len:].cpu().numpy(), np.stack([a.latent(i) for i in range(m)]), "latent, [row, element]")
    assert np.isnan(latent[:kv_len].cpu().numpy()).all(), "a slot before the step's rows was written"


TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 0]
"""A bushy tree: row 7 is four deep, row 8 is a late child of the root."""


@pytest.mark.parametrize("dims", DIMS[1:3])
@pytest.mark.parametrize("committed", [0, 1, 60, 63, 64, 130])
def test_tree_sees_ancestors_alone(ops: Ops, dims: tuple[int, ...], committed: int) -> None:
    a = Attention(dims, committed + len(TREE))
    layer = Layer(ops, a, committed + len(TREE) + 3)
    for at in range(0, committed, 65):
        n = min(65, committed - at)
        layer.step(range(at, at + n), chain(n), at)
    rows = Rows(TREE)
    got = layer.step(range(committed, committed + len(TREE)), rows, committed)
    for row in range(len(TREE)):
        path = [*range(committed), *(committed + r for r in rows.ancestors(row))]
        close(got["o"][row], a.want(path), f"o of row {row}, [head, element]")


@pytest.mark.parametrize("dims", [DIMS[1], DIMS[3]])
def test_bits_do_not_depend_on_width_or_on_where_keys_lie(ops: Ops, dims: tuple[int, ...]) -> None:
    """Token 129 computed as: one row over a cache of 129; the last of 65 rows; the deepest of a tree with strangers."""
    a = Attention(dims, 140)
    bits = set()
    reference: list[bytes] = []
    for widths in ([65, 64, 1], [1] * 130, [65, 65], [64, 64, 2], [7] * 18 + [4]):
        layer = Layer(ops, a, 210)
        at = 0
        for width in widths:
            got = layer.step(range(at, at + width), chain(width), at)
            at += width
        bits.add(got["o"][-1].tobytes() + got["o_lat"][-1].tobytes() + got["q_lat"][-1].tobytes())
        latent, k_rope = layer.cached()
        reference.append(latent[:130].tobytes() + k_rope[:130].tobytes())
    assert len(bits) == 1
    assert len(set(reference)) == 1
    layer = Layer(ops, a, 210)
    for at in (0, 60):
        layer.step(range(at, at + 60), chain(60), at)
    # tokens 120..129 as a path through a tree whose other rows are tokens 130..139
    parents = [-1, 0, 0, 2, 2, 4, 1, 5, 7, 3, 8, 10, 11, 12, 6, 13]
    path = [0, 2, 4, 5, 7, 8, 10, 11, 12, 13]
    tokens = iter(range(130, 140))
    index = [120 + path.index(r) if r in path else next(tokens) for r in range(len(parents))]
    got = layer.step(index, Rows(parents), 120)
    bits.add(got["o"][13].tobytes() + got["o_lat"][13].tobytes() + got["q_lat"][13].tobytes())
    assert len(bits) == 1


def test_every_width_gives_the_same_bits(ops: Ops) -> None:
    a = Attention(DIMS[1], 100)
    whole = None
    for width in range(65, 0, -1):
        layer = Layer(ops, a, 100)
        layer.step(range(35), chain(35), 0)
        got = layer.step(range(35, 35 + width), chain(width), 35)["o"]
        whole = got if whole is None else whole
        same_bits(got, whole[:width], f"o at width {width}, [row, head, element]")


def test_only_active_rows_are_written(ops: Ops) -> None:
    a = Attention(DIMS[1], 20)
    layer = Layer(ops, a, 20)
    got = layer.step(range(4), Rows([-1, 0, 1, 2], max_rows=9), 0)
    for name, array in got.items():
        assert np.isfinite(array[:4]).all(), name
        assert np.isnan(array[4:]).all(), name
    assert np.isnan(layer.cached()[0][4:]).all()


def test_large_scores_neither_overflow_nor_vanish(ops: Ops) -> None:
    """Scores some hundreds apart: one key takes all, and the running maximum changes between chunks."""
    a = Attention(DIMS[1], 200)
    a.q *= 60
    layer = Layer(ops, a, 200)
    for at in range(0, 200, 50):
        got = layer.step(range(at, at + 50), chain(50), at)
        want = a.want(range(at + 50))
        within(got["o"][-1], want, 1e-3 * (np.abs(want).max() + 1), f"o of row {at + 49}, [head, element]")


def test_a_key_that_is_no_number_shows_in_every_row_that_sees_it(ops: Ops) -> None:
    """A score of NaN must not pass for a weight of nothing."""
    a = Attention(DIMS[1], 70)
    for broken in (3, 66):  # of the first chunk of keys, and of the second
        a.kv[broken, a.rank] = np.nan
        got = Layer(ops, a, 70).step(range(70), chain(70), 0)["o"]
        assert np.isfinite(got[:broken]).all()
        assert np.isnan(got[broken:]).all()
        a.kv[broken, a.rank] = 0.0


def test_threads_and_instruction_sets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Attention(DIMS[2], 150)
    results = set()
    for threads, isa in [(n, "") for n in (1, 2, 3)] + [(1, name) for name in library("cpu").isa_names().split()]:
        monkeypatch.setenv("KDTREE_THREADS", str(threads))
        monkeypatch.setenv("KDTREE_ISA", isa)
        with Ops("cpu") as ops:
            layer = Layer(ops, a, 150)
            layer.step(range(65), chain(65), 0)
            got = layer.step(range(65, 150), chain(85), 65)
            results.add(b"".join(array.tobytes() for array in got.values()))
    assert len(results) == 1
