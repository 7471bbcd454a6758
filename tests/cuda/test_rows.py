"""Operations on rows against float64, and their row invariance in every bit: linear, norms, MLA, experts.

Bounds: a float32 sum of K products in any order is off by at most about K * 2^-24 of the sum of their magnitudes;
the lanes and the butterfly make the real chains a thirty-second of that.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.operations import NO_SCALE, NONE, Array, Operations, Tree, quantise, random_tree, same_bits, state

ULP = 2.0**-24
EPS = 1e-5
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 65)
GUARD = np.float32(1e30)  # what rows that do not count must keep


def _rms(x: Array, w: Array) -> Array:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * w


def _silu(z: Array) -> Array:
    return z / (1 + np.exp(-z))


def _linear(
    ops: Operations, x: Array, norm: Array, weights: list[Array], scales: list[Array], epilogue: int, out: list[Array]
) -> None:
    ops("linear", x, norm, EPS, weights, scales, out, epilogue, state(n_rows=len(x)))


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("k", [1, 7, 31, 32, 33, 64, 100, 129, 1000, 1536, 2048, 7168, 8191, 8200, 18432])
def test_linear(cuda: Operations, kind: str, k: int) -> None:
    """Every width has the bits of one row alone, and these are near float64; K on every side of tile and group."""
    rng = np.random.default_rng(k)
    n = (37, 20)
    x = rng.standard_normal((65, k)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, k).astype(np.float32)
    if kind == "int4":
        made = [quantise(rng, rows, k) for rows in n]
        weights, scales, exact = ([m[i] for m in made] for i in range(3))
    else:
        weights = [rng.standard_normal((rows, k)).astype(np.float32) for rows in n]
        scales, exact = [NO_SCALE, NO_SCALE], [w.astype(np.float64) for w in weights]
    normed = _rms(x, norm)
    alone = [np.empty((65, rows), np.float32) for rows in n]
    for row in range(65):
        one = [np.empty((1, rows), np.float32) for rows in n]
        _linear(cuda, x[row : row + 1], norm, weights, scales, 0, one)
        for whole, part in zip(alone, one, strict=True):
            whole[row] = part[0]
    for whole, w in zip(alone, exact, strict=True):
        bound = (k / 32 + 24) * ULP * (np.abs(normed) @ np.abs(w).T) + 1e-30
        assert np.all(np.abs(whole - normed @ w.T) <= bound)
    for m in WIDTHS:
        wide = [np.full((m, rows), GUARD) for rows in n]
        _linear(cuda, x[:m], norm, weights, scales, 0, wide)
        for whole, part in zip(alone, wide, strict=True):
            assert same_bits(whole[:m], part), f"width {m}"


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("epilogue", [1, 2])
def test_epilogues(cuda: Operations, kind: str, epilogue: int) -> None:
    """The residual is added and silu(gate)*up formed; rows past n_rows keep what was there."""
    rng = np.random.default_rng(epilogue)
    k, n, m = 96, 45, 6
    x = rng.standard_normal((m, k)).astype(np.float32)
    made = [quantise(rng, n, k) for _ in range(2)]
    if kind == "f32":
        made = [(v.astype(np.float32), NO_SCALE, v.astype(np.float32).astype(np.float64)) for _, _, v in made]
    parts = 2 if epilogue == 2 else 1
    out = [rng.standard_normal((m, n)).astype(np.float32)]
    before = out[0].copy()
    ops_state = state(n_rows=4)
    cuda("linear", x, NONE, EPS, [v[0] for v in made[:parts]], [v[1] for v in made[:parts]], out, epilogue, ops_state)
    y = [x.astype(np.float64) @ v[2].T for v in made]
    want = before + y[0] if epilogue == 1 else _silu(y[0]) * y[1]
    np.testing.assert_allclose(out[0][:4], want[:4], rtol=2e-5, atol=2e-6)
    assert same_bits(out[0][4:], before[4:])


@pytest.mark.parametrize("dim", [1, 64, 100, 7168])
def test_embed_and_rms_norm(cuda: Operations, dim: int) -> None:
    """Rows of the table exactly; the norm near float64, the same bits at every width."""
    rng = np.random.default_rng(dim)
    table = rng.standard_normal((50, dim)).astype(np.float32)
    tree = Tree([-1, *range(8)], rng.integers(0, 50, 9).tolist())
    out = np.full((9, dim), GUARD)
    cuda("embed", out, table, tree.rows, state(n_rows=7))
    assert same_bits(out[:7], table[tree.tokens[:7]])
    assert np.all(out[7:] == GUARD)
    x, w = out[:7].copy(), rng.uniform(0.5, 1.5, dim).astype(np.float32)
    normed = np.empty_like(x)
    cuda("rms_norm", normed, x, w, EPS, state(n_rows=7))
    np.testing.assert_allclose(normed, _rms(x, w), rtol=1e-6, atol=1e-7)
    one = np.empty((1, dim), np.float32)
    cuda("rms_norm", one, x[4:5], w, EPS, state(n_rows=1))
    assert same_bits(one[0], normed[4])


SHAPES = [
    (4, 32, 16, 8, 16),
    (1, 16, 4, 2, 3),
    (3, 100, 10, 6, 17),
    (8, 30, 8, 2, 8),
    (5, 300, 24, 16, 20),
    (64, 512, 128, 64, 128),
]


@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_prepare_and_value(cuda: Operations, dims: tuple[int, ...]) -> None:
    """Absorbed query, rotations, cache rows and values against float64; bits at every width those of width 65."""
    heads, rank, nope, rope, v = dims
    rng = np.random.default_rng(sum(dims))
    kv_len, m_all = 5, 65
    q = rng.standard_normal((m_all, heads * (nope + rope))).astype(np.float32)
    kv = rng.standard_normal((m_all, rank + rope)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, rank).astype(np.float32)
    kv_b = rng.standard_normal((heads * (nope + v), rank)).astype(np.float32)
    angles = rng.uniform(0, 6, (kv_len + m_all, rope // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    tree = random_tree(rng, m_all)
    results = {}
    for m in (65, 1, 2, 3, 6, 8, 17):
        rows = [a[:m] for a in tree.rows]
        q_lat, q_rope = np.full((m, heads, rank), GUARD), np.full((m, heads, rope), GUARD)
        latent, k_rope = np.full((kv_len + m_all, rank), GUARD), np.full((kv_len + m_all, rope), GUARD)
        step = state(kv_len=kv_len, n_rows=m)
        cuda(
            "mla_prepare", list(dims), q[:m], kv[:m], norm, EPS, kv_b, table, q_lat, q_rope, latent, k_rope, rows, step
        )
        assert np.all(latent[kv_len + m :] == GUARD)
        assert np.all(latent[:kv_len] == GUARD)
        o = np.full((m, heads, v), GUARD)
        cuda("mla_value", list(dims), q_lat, kv_b, o, step)
        results[m] = (q_lat, q_rope, latent[kv_len : kv_len + m], k_rope[kv_len : kv_len + m], o)
        for whole, part in zip(results[65], results[m], strict=True):
            assert same_bits(np.ascontiguousarray(whole[:m]), np.ascontiguousarray(part)), f"width {m}"

    by_head = q.reshape(m_all, heads, nope + rope).astype(np.float64)
    up = kv_b.reshape(heads, nope + v, rank).astype(np.float64)
    position = kv_len + tree.depths
    cos, sin = table[position][..., 0].astype(np.float64), table[position][..., 1].astype(np.float64)

    def rotate(x: Array, cos: Array, sin: Array) -> Array:
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    want_lat = np.einsum("mhn,hnr->mhr", by_head[..., :nope], up[:, :nope])
    close = {"rtol": 1e-5, "atol": 2e-5 * np.sqrt(max(nope, rank))}
    np.testing.assert_allclose(results[65][0], want_lat, **close)
    np.testing.assert_allclose(
        results[65][1], rotate(by_head[..., nope:], cos[:, None], sin[:, None]), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(results[65][2], _rms(kv[:, :rank], norm), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[65][3], rotate(kv[:, rank:].astype(np.float64), cos, sin), rtol=1e-5, atol=1e-6)
    want_o = np.einsum("hvr,mhr->mhv", up[:, nope:], results[65][0].astype(np.float64))
    np.testing.assert_allclose(results[65][4], want_o, rtol=1e-5, atol=1e-4 * rank)


def _attention(
    ops: Operations,
    dims: tuple[int, ...],
    scale: float,
    q: list[Array],
    cache: list[Array],
    tree: list[Array],
    kv_len: int,
    max_keys: int,
) -> Array:
    m = len(q[0])
    out = np.full((m, dims[0], dims[1]), GUARD)
    ops("mla_attention", list(dims), scale, *q, *cache, out, max_keys, tree, state(kv_len=kv_len, n_rows=m))
    return out


@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("kv_len", [0, 1, 62, 63, 64, 65, 447, 511, 512, 513, 1100])
def test_attention(cuda: Operations, dims: tuple[int, ...], kv_len: int) -> None:
    """Against float64 over each row's own path; other rows, widths, launch shapes and slots change no bit."""
    heads, rank, _, rope, _ = dims
    m_all = 65 if heads < 64 else 17
    rng = np.random.default_rng(kv_len + rank)
    tree = random_tree(rng, m_all)
    slots = kv_len + m_all
    q = [
        rng.standard_normal((m_all, heads, rank)).astype(np.float32),
        rng.standard_normal((m_all, heads, rope)).astype(np.float32),
    ]
    cache = [
        rng.standard_normal((slots, rank)).astype(np.float32),
        rng.standard_normal((slots, rope)).astype(np.float32),
    ]
    scale = float((rank + rope) ** -0.5)
    wide = _attention(cuda, dims, scale, q, cache, tree.rows, kv_len, slots)
    latent, k_rope = (c.astype(np.float64) for c in cache)
    for row in range(m_all):
        visible = [*range(kv_len), *(kv_len + tree.path[row, : tree.depths[row] + 1])]
        score = q[0][row].astype(np.float64) @ latent[visible].T + q[1][row].astype(np.float64) @ k_rope[visible].T
        weight = np.exp(scale * (score - score.max(-1, keepdims=True)))
        want = weight / weight.sum(-1, keepdims=True) @ latent[visible]
        np.testing.assert_allclose(wide[row], want, rtol=2e-4, atol=2e-5)
    # A row alone: its path laid out as a chain, in a cache of just its keys, for a session of another length.
    for row in (0, m_all // 2, m_all - 1):
        path = tree.path[row, : tree.depths[row] + 1]
        chain = Tree([*range(-1, len(path) - 1)])
        keys = [*range(kv_len), *(kv_len + path)]
        own = [np.ascontiguousarray(c[keys]) for c in cache]
        for max_keys in (len(keys), 2048):
            narrow = _attention(
                cuda, dims, scale, [np.ascontiguousarray(a[path]) for a in q], own, chain.rows, kv_len, max_keys
            )
            assert same_bits(narrow[-1], wide[row]), f"row {row}, max_keys {max_keys}"
        # As AR sees it: everything before it committed.
        last = [np.ascontiguousarray(a[row : row + 1]) for a in q]
        step = _attention(cuda, dims, scale, last, own, Tree([-1]).rows, len(keys) - 1, len(keys))
        assert same_bits(step[0], wide[row]), f"row {row} as a step"


EXPERTS = [  # experts, top k, D, I, the shared expert's inner size
    (16, 4, 64, 32, 32),
    (5, 2, 33, 17, 0),
    (7, 7, 40, 48, 96),
    (1, 1, 8, 8, 8),
    (384, 8, 256, 96, 64),
    (40, 6, 1500, 96, 100),
    (12, 3, 1026, 70, 35),
]


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
def test_experts(cuda: Operations, kind: str, sizes: tuple[int, ...]) -> None:
    """Against float64; each width has the bits of one row alone, though rows share experts differently."""
    experts, k, dim, inner, shared = sizes
    rng = np.random.default_rng(experts * dim)
    m_all = 65
    x = rng.standard_normal((m_all, dim)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, dim).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(m_all)]).astype(np.int32)
    weights = rng.uniform(0.1, 1, (m_all, k)).astype(np.float32)
    made = [quantise(rng, experts, *s) for s in ((inner, dim), (inner, dim), (dim, inner))]
    if kind == "f32":
        made = [(v.astype(np.float32), NO_SCALE, v.astype(np.float32).astype(np.float64)) for _, _, v in made]
    own = (
        [rng.standard_normal(s).astype(np.float32) / 8 for s in ((shared, dim), (shared, dim), (dim, shared))]
        if shared
        else []
    )

    def run(first: int, last: int) -> tuple[Array, Array]:
        rows = slice(first, last)
        m = last - first
        out, act = x[rows].copy(), np.full((m, k, inner), GUARD)
        data, scales = [v[0] for v in made], [v[1] for v in made]
        acts = [act, np.full((m, shared), GUARD)]
        chosen = [ids[rows], weights[rows]]
        cuda("moe", x[rows].copy(), norm, EPS, *chosen, data, scales, own, *acts, out, state(n_rows=m))
        return out, act

    gate, up, down = (v[2] for v in made)
    b = _rms(x, norm)
    alone = np.empty_like(x)
    for row in range(m_all):
        alone[row] = run(row, row + 1)[0][0]
        want = x[row].astype(np.float64)
        for j, e in enumerate(ids[row]):
            want = want + weights[row, j] * (down[e] @ (_silu(gate[e] @ b[row]) * (up[e] @ b[row])))
        if shared:
            g, u, d = (w.astype(np.float64) for w in own)
            want = want + d @ (_silu(g @ b[row]) * (u @ b[row]))
        np.testing.assert_allclose(alone[row], want, rtol=3e-5, atol=3e-5)
    for m in WIDTHS:
        assert same_bits(run(0, m)[0], alone[:m]), f"width {m}"
    before = cuda.counters()
    run(3, 9)
    counted = {name: n - before.get(name, 0) for name, n in cuda.counters().items()}
    assert counted["experts_int4" if kind == "int4" else "experts_f32"] == 1
