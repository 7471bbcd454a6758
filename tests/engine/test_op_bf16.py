"""Operations under Numerics::kBf16: what products read is rounded once, to nearest; the same bits whatever the rows.

The oracle rounds with torch's bfloat16 and computes in float64. Where an engine's f32 value and the oracle's f64 value
lie on two sides of a rounding boundary they differ by a whole bf16 step, so results are held to a mean square; the same
bound must be broken by the same computation with a rounding left out or truncated, which the tests show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engine_operands import draw, int4, normed
from engine_ops import F32, RESIDUAL, SILU_MUL, STORE, Array, Ops, Rows, chain, same_bits

from engine.library import library

BOUND = 2e-7
"""Of the mean square error over the mean square: a rounding left out or truncated gives at least 5e-7."""
EPS = 1e-5
Rounding = Callable[[Array], Array]


def bits(x: Array) -> Array:
    """bf16 as u16, by torch."""
    return np.asarray(torch.from_numpy(np.array(x, np.float32)).to(torch.bfloat16).view(torch.uint16))


def value(x: Array) -> Array:
    """u16 -> float64."""
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest(x: Array) -> Array:
    return value(bits(x))


def truncated(x: Array) -> Array:
    return value((np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16))


def untouched(x: Array) -> Array:
    return np.asarray(x, np.float64)


def error(got: Array, want: Array) -> float:
    assert np.isfinite(got).all()
    return float(((got - want) ** 2).mean() / (want**2).mean())


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def weight(rng: np.random.Generator, kind: str, *shape: int) -> tuple[Array, Array, Array]:
    """Stored, scales, exact."""
    if kind == "bf16":
        stored = bits(draw(rng, *shape))
        return stored, np.empty(0, np.uint8), value(stored)
    *outer, n, k = shape
    parts = [int4(rng, n, k) for _ in range(int(np.prod(outer)))]
    joined = [np.stack([p[i] for p in parts]).reshape(*outer, *parts[0][i].shape) for i in range(3)]
    return joined[0], joined[1].view(np.uint8), joined[2]


def linear(
    ops: Ops, x: Array, weights: Sequence[Array], scales: Sequence[Array], norm: F32 | None, epilogue: int, out: Array
) -> Array:
    results = [ops.tensor(out) for _ in weights][: 1 if epilogue == SILU_MUL else 2]
    ops.call(
        "linear", ops.tensor(x), ops.tensor(np.empty(0, np.float32) if norm is None else norm), EPS,
        [ops.tensor(w) for w in weights], [ops.tensor(s) for s in scales], results, epilogue, ops.state(len(x)), True,
    )  # fmt: skip
    return np.asarray(results[0].cpu())


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 257), (5, 64, 256), (9, 47, 129), (33, 47, 304), (70, 20, 300)])
def test_linear(ops: Ops, kind: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m + n)
    x, g = draw(rng, m, k), draw(rng, k)
    w, s, exact = weight(rng, kind, n, k)
    name = "linear_bf16" if kind == "bf16" else "linear_int4_bf16"
    blank = np.zeros((m, n), np.float32)
    got = linear(ops, x, [w], [s], g, STORE, blank)
    whole = normed(x, g, EPS)
    assert error(got, nearest(whole) @ exact.T) < BOUND
    for wrong in (untouched, truncated):
        assert error(got, wrong(whole) @ exact.T) > BOUND
    held = linear(ops, bits(x), [w], [s], None, STORE, blank)
    assert error(held, nearest(x) @ exact.T) < 1e-12, "nothing is rounded here, products are exact"
    added = linear(ops, bits(x), [w], [s], None, RESIDUAL, x[:, :1] * np.ones((1, n), np.float32))
    assert error(added, x[:, :1] + nearest(x) @ exact.T) < 1e-12
    gated = linear(ops, x, [w, w], [s, s], g, SILU_MUL, bits(blank))
    y = nearest(whole) @ exact.T
    assert error(value(gated), nearest(silu(y) * y)) < 2e-6, "a step of the gate's input moves it and up alike"
    counted = {c: count for c, count in ops.counters().items() if c.startswith("linear") and not c.endswith("_stream")}
    assert counted == {name: 4}, "under the name that every kernel counts"


@pytest.mark.parametrize(("m", "n", "k"), [(40, 20, 2304), (29, 150, 768), (13, 150, 768)])
def test_linear_in_boxes(ops: Ops, m: int, n: int, k: int) -> None:
    """INT4 rows of whole boxes. For 17 rows and more Hopper has a kernel for those longer than 2048, one for others; up
    to 2048 it stages nine to sixteen without gaps."""
    test_linear(ops, "int4", m, n, k)


def test_halves_go_to_even_and_what_is_no_number_stays(ops: Ops) -> None:
    """Rotated by nothing, a key goes into the cache as it is, rounded once; bits written by hand."""
    cases = {
        0x3F808000: 0x3F80,  # 1 + 2^-8, halfway, to the even one below
        0x3F818000: 0x3F82,  # 1 + 3 * 2^-8, halfway, to the even one above
        0x3F808001: 0x3F81,  # just above a half
        0x3F817FFF: 0x3F81,  # just below one
        0xBF808000: 0xBF80,
        0x00008001: 0x0001,  # subnormal
        0x80000000: 0x8000,  # -0
        0x7F7FFFFF: 0x7F80,  # the greatest f32 is nearer to what bf16 has no number for
        0x7F800000: 0x7F80,
        0x7F800001: 0x7FC0,  # a NaN whose payload would be cut off
        0xFFFFFFFF: 0xFFFF,
        0x3F800000: 0x3F80,
    }
    layer = Layer(ops, (1, 4, 1, len(cases), 1), 1)
    layer.kv[0, 4:] = np.array(list(cases), np.uint32).view(np.float32)
    layer.cos_sin[:] = [1.0, 0.0]
    layer.q[:] = 0
    layer.step([0], chain(1), 0)
    got = [int(bits) for bits in layer.cached()[1][0]]
    # a pair (a, b) turns into (a*1 - b*0, a*0 + b*1): what is not finite spoils its partner too
    pairs = list(zip(cases, cases.values(), got, strict=True))
    for (a, want_a, got_a), (b, want_b, got_b) in zip(pairs[0::2], pairs[1::2], strict=True):
        if all((x & 0x7F800000) != 0x7F800000 for x in (a, b)):
            assert (got_a, got_b) == (want_a, want_b), (hex(a), hex(b))
        else:
            assert np.isnan(value(np.array([got_a, got_b], np.uint16))).any(), (hex(a), hex(b))


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize("k", [1031, 1032])
def test_rows_threads_and_instruction_sets_do_not_show(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: str, k: int
) -> None:
    """On Hopper rows of whole eights stream, where they are no whole boxes."""
    rng = np.random.default_rng(11)
    x, g = draw(rng, 65, k), draw(rng, k)
    w, s, _ = weight(rng, kind, 60, k)
    results = set()
    for isa in library("cpu").isa_names().split() if device == "cpu" else [""]:
        monkeypatch.setenv("KDTREE_ISA", isa)
        with Ops(device) as ops:
            for given, norm in ((x, g), (bits(x), None)):
                whole = linear(ops, given, [w], [s], norm, STORE, np.zeros((65, 60), np.float32))
                for m in (1, 2, 3, 4, 5, 8, 9, 17, 33, 64):
                    part = linear(ops, given[:m], [w], [s], norm, STORE, np.zeros((m, 60), np.float32))
                    same_bits(part, whole[:m], f"linear at width {m}, [row, output]")
                results.add((norm is None, whole.tobytes()))
    assert len(results) == 2


@dataclass
class Experts:
    """Rows, what they chose, and weights as they are stored; the shared expert is last."""

    x: F32
    norm: F32
    ids: Array
    weights: F32
    routed: list[Array]
    scales: list[Array]
    shared: list[Array]

    def run(self, ops: Ops, rows: slice, gathered: Array | None = None) -> tuple[F32, Array, Array]:
        """The residual stream after, and both acts as stored; given what ranks gathered of the acts, of down alone."""
        x, ids = ops.tensor(self.x[rows]), np.ascontiguousarray(self.ids[rows])
        m, k = ids.shape
        act = ops.empty(m, k, self.routed[0].shape[1], dtype=np.uint16)
        shared_act = ops.empty(m, self.shared[0].shape[0], dtype=np.uint16)
        ops.call(
            "moe" if gathered is None else "moe_down",
            x, ops.tensor(self.norm), EPS, ops.tensor(ids), ops.tensor(self.weights[rows]),
            [ops.tensor(w) for w in self.routed], [ops.tensor(s) for s in self.scales],
            [ops.tensor(w) for w in self.shared], act, shared_act, x, ops.state(m), True,
            *([] if gathered is None else [ops.tensor(gathered)]),
        )  # fmt: skip
        return x.cpu().numpy(), act.cpu().numpy(), shared_act.cpu().numpy()


def experts_of(
    kind: str, m: int, dim: int, inner: int, experts: int, k: int, shared: int
) -> tuple[Experts, list[Array]]:
    """A case, and its routed and shared weights in float64: gate, up, down of each."""
    rng = np.random.default_rng(dim)
    made = [weight(rng, kind, experts, *s) for s in ((inner, dim), (inner, dim), (dim, inner))]
    both = [weight(rng, "bf16", *s) for s in ((shared, dim), (shared, dim), (dim, shared))]
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(m)]).astype(np.int32)
    case = Experts(
        draw(rng, m, dim), draw(rng, dim), ids, rng.random((m, k)).astype(np.float32),
        [w[0] for w in made], [w[1] for w in made], [w[0] for w in both],
    )  # fmt: skip
    return case, [w[2] for w in (*made, *both)]


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize(
    ("m", "dim", "inner", "experts", "k", "shared"), [(5, 33, 17, 9, 3, 20), (40, 64, 48, 30, 6, 48)]
)
def test_moe(ops: Ops, kind: str, m: int, dim: int, inner: int, experts: int, k: int, shared: int) -> None:
    case, exact = experts_of(kind, m, dim, inner, experts, k, shared)
    out, act, shared_act = case.run(ops, slice(None))
    counted = "experts_bf16" if kind == "bf16" else "experts_int4_bf16"
    own = ("_norm", "_order", "_down", "_stream")  # of the kernels that one backend takes for it
    assert {c for c in ops.counters() if c.startswith("experts") and not c.endswith(own)} == {counted}
    gate, up, down, *both = exact
    want_act, want = np.zeros(act.shape), case.x.astype(np.float64)
    b = nearest(normed(case.x, case.norm, EPS))
    for i in range(m):
        for j, e in enumerate(case.ids[i]):
            want_act[i, j] = silu(gate[e] @ b[i]) * (up[e] @ b[i])
            want[i] += case.weights[i, j] * (down[e] @ value(act[i, j]))  # what it stored is what it goes on from
    want_shared = silu(b @ both[0].T) * (b @ both[1].T)
    want += value(shared_act) @ both[2].T
    assert error(value(act), nearest(want_act)) < 2e-6
    assert error(value(shared_act), nearest(want_shared)) < 2e-6
    assert error(value(act), truncated(want_act)) > 4e-6
    assert error(out, want) < 1e-12, "sums over experts are f32"
    for rows in (slice(0, 1), slice(0, 2), slice(1, 4), slice(3, m)):
        part = case.run(ops, rows)
        for mine, other in zip(part, (out, act, shared_act), strict=True):
            same_bits(mine, other[rows], "experts of some rows, [row, element]")


@pytest.mark.parametrize("kind", ["bf16", "int4"])
@pytest.mark.parametrize(
    ("m", "inner", "shared", "ranks"), [(1, 128, 64, 2), (5, 256, 128, 4), (40, 48, 48, 3), (9, 12, 6, 2)]
)
def test_down_of_gathered_acts(ops: Ops, kind: str, m: int, inner: int, shared: int, ranks: int) -> None:
    """What ranks computed of the acts, one after the other's, gives the bits of the acts themselves."""
    case, _ = experts_of(kind, m, 64, inner, 30, 6, shared)
    out, *acts = case.run(ops, slice(None))
    parts = [np.stack(np.split(act.reshape(-1, act.shape[-1]), ranks, axis=1)).reshape(ranks, -1) for act in acts]
    gathered = np.concatenate(parts, axis=1).view(np.uint8)
    assert np.array_equal(case.run(ops, slice(None), gathered)[0].view(np.uint32), out.view(np.uint32))


class Layer:
    """MLA of one layer over bf16: weights, inputs, a cache."""

    def __init__(self, ops: Ops, dims: Sequence[int], total: int) -> None:
        rng = np.random.default_rng(total)
        self.ops, self.dims, self.total = ops, list(dims), total
        self.heads, self.rank, self.nope, self.rope, self.v = dims
        self.scale = 2.0 / float(np.sqrt(self.nope * self.rank))  # scores of a few units, so that many keys count
        self.q, self.kv = draw(rng, total, self.heads, self.nope + self.rope), draw(rng, total, self.rank + self.rope)
        self.norm, self.kv_b = draw(rng, self.rank), bits(draw(rng, self.heads, self.nope + self.v, self.rank))
        angle = rng.random((total, self.rope // 2)) * 6.28
        self.cos_sin = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
        self.latent = ops.empty(total + 3, self.rank, dtype=np.uint16)
        self.k_rope = ops.empty(total + 3, self.rope, dtype=np.uint16)

    def step(self, tokens: Sequence[int], rows: Rows, kv_len: int) -> dict[str, Array]:
        ops, m, at = self.ops, len(tokens), list(tokens)
        q_lat, q_rope, o_lat, o = (
            ops.empty(m, self.heads, width, dtype=np.uint16) for width in (self.rank, self.rope, self.rank, self.v)
        )
        kv_b, on_device, state = ops.tensor(self.kv_b), ops.rows(rows), ops.state(m, kv_len=kv_len)
        ops.call(
            "mla_prepare", self.dims, ops.tensor(self.q[at]), ops.tensor(self.kv[at]), ops.tensor(self.norm), EPS, kv_b,
            ops.tensor(self.cos_sin), q_lat, q_rope, self.latent, self.k_rope, on_device, state,
        )  # fmt: skip
        ops.call(
            "mla_attention",
            self.dims,
            self.scale,
            q_lat,
            q_rope,
            self.latent,
            self.k_rope,
            o_lat,
            self.total,
            on_device,
            state,
        )
        ops.call("mla_value", self.dims, o_lat, kv_b, o, state)
        return {
            "q_lat": q_lat.cpu().numpy(),
            "q_rope": q_rope.cpu().numpy(),
            "o_lat": o_lat.cpu().numpy(),
            "o": o.cpu().numpy(),
        }

    def turned(self, x: Array, position: int) -> Array:
        cs = self.cos_sin[position].astype(np.float64)
        pair = (x[..., 0::2] + 1j * x[..., 1::2].astype(np.float64)) * (cs[:, 0] + 1j * cs[:, 1])
        return np.stack([pair.real, pair.imag], -1).reshape(x.shape)

    def cached(self) -> tuple[Array, Array]:
        return self.latent.cpu().numpy(), self.k_rope.cpu().numpy()


@pytest.mark.parametrize("dims", [(3, 17, 5, 6, 7), (20, 40, 70, 8, 66), (16, 64, 16, 16, 16), (2, 512, 128, 64, 128)])
def test_mla(ops: Ops, dims: tuple[int, ...]) -> None:
    """A chain of 64 rows, so that every row's greatest score is one number for everybody (docs/model.md, bf16)."""
    layer = Layer(ops, dims, 64)
    got = layer.step(range(64), chain(64), 0)
    assert {"mla_prepare_bf16", "mla_attention_bf16", "mla_value_bf16"} <= ops.counters().keys()
    latent, k_rope = layer.cached()
    exact = normed(layer.kv[:, : layer.rank], layer.norm, EPS)
    assert error(value(latent[:64]), nearest(exact)) < BOUND < error(value(latent[:64]), truncated(exact))
    turned = np.stack([layer.turned(layer.kv[t, layer.rank :], t) for t in range(64)])
    assert error(value(k_rope[:64]), nearest(turned)) < BOUND
    assert (latent[64:] == 0xFFFF).all(), "a slot past the step's rows was written"
    w = value(layer.kv_b)
    q_nope = layer.q[..., : layer.nope]
    q_lat = np.einsum("thn,hnr->thr", nearest(q_nope), w[:, : layer.nope])
    assert error(value(got["q_lat"]), nearest(q_lat)) < BOUND
    assert error(value(got["q_lat"]), nearest(np.einsum("thn,hnr->thr", untouched(q_nope), w[:, : layer.nope]))) > BOUND
    q_rope = np.stack([layer.turned(layer.q[t, :, layer.nope :], t) for t in range(64)])
    assert error(value(got["q_rope"]), nearest(q_rope)) < BOUND

    def attended(rounding: Rounding) -> Array:
        k, kr = value(latent[:64]), value(k_rope[:64])
        score = layer.scale * (value(got["q_lat"]) @ k.T + value(got["q_rope"]) @ kr.T)  # [t, h, key]
        score = np.where(np.tri(64, dtype=bool)[:, None], score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        return np.asarray(rounding(p) @ k / p.sum(-1, keepdims=True))

    if "mla_attention_bf16_hopper" not in ops.counters():
        assert error(value(got["o_lat"]), nearest(attended(nearest))) < BOUND
        for wrong in (untouched, truncated):
            assert error(value(got["o_lat"]), nearest(attended(wrong))) > BOUND

    # Hopper's sums have eleven bits before the last rounding and may fall on its other side: so its error is held
    # against that of the rounding alone, to which they add a sixty-fourth.
    def share(rounding: Rounding) -> float:
        want = attended(rounding)
        return error(value(got["o_lat"]), want) / error(nearest(want), want)

    assert share(nearest) < 1.05
    for wrong in (untouched, truncated):
        assert share(wrong) > 1.1
    o = np.einsum("thr,hvr->thv", value(got["o_lat"]), w[:, layer.nope :])
    assert error(value(got["o"]), nearest(o)) < BOUND < error(value(got["o"]), truncated(o))


@pytest.mark.parametrize("dims", [(3, 17, 5, 6, 7), (2, 512, 128, 64, 128)])
@pytest.mark.parametrize("growth", [0.0, 0.25])
def test_attention_over_many_keys(ops: Ops, dims: tuple[int, ...], growth: float) -> None:
    """A tree behind 21 chunks of keys, whose scores grow with the position or do not, and before it a chain of more
    rows than the blocks of a GPU take at once, one of them with six keys more than whole chunks: against float64."""
    committed, rows = 1300, Rows([-1, 0, 0, 1, 1, 2, 3, 6, 0])
    total, m = committed + 9, 9
    layer = Layer(ops, dims, total)
    layer.kv[:, layer.rank :] *= 1 + growth * np.arange(total, dtype=np.float32)[:, None]
    for at in range(0, committed, 65):
        wide = layer.step(range(at, at + 65), chain(65), at)
    got = layer.step(range(committed, total), rows, committed)
    latent, k_rope = (value(x) for x in layer.cached())
    moved = 0.0
    seen = [(got, row, [*range(committed), *(committed + rows.path[row, : rows.depths[row] + 1])]) for row in range(m)]
    seen += [(wide, row, [*range(committed - 64 + row)]) for row in (0, 33, 50, 64)]
    for step, row, keys in seen:
        score = layer.scale * (
            value(step["q_lat"][row]) @ latent[keys].T + value(step["q_rope"][row]) @ k_rope[keys].T
        )  # [head, key]
        moved = max(moved, float((score.max(-1) - score[:, :64].max(-1)).max()))
        p = np.exp(score - score.max(-1, keepdims=True))
        assert error(value(step["o_lat"][row]), p @ latent[keys] / p.sum(-1, keepdims=True)) < 3e-5, f"row {row}"
    assert (moved > 20) == (growth > 0), "what this is about is that sums are rescaled"


@pytest.mark.parametrize("dims", [(3, 17, 5, 6, 7), (16, 64, 16, 16, 16), (2, 512, 128, 64, 128)])
@pytest.mark.parametrize("committed", [0, 1, 63, 64, 130, 600])
def test_a_tree_has_the_bits_of_its_chains(ops: Ops, dims: tuple[int, ...], committed: int) -> None:
    """Every row of a tree against a chain of one row at a time; the committed path's cache rows against the chain's."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 0]
    total = committed + len(parents)
    layer = Layer(ops, dims, total)
    for at in range(0, committed, 65):
        n = min(65, committed - at)
        layer.step(range(at, at + n), chain(n), at)
    rows = Rows(parents)
    got = layer.step(range(committed, total), rows, committed)
    path = [0, 1, 3, 6, 7]
    state = ops.state(len(parents), kv_len=committed, base=committed, n_accepted=len(path))
    accepted = np.zeros(len(parents), np.int32)
    accepted[: len(path)] = path
    ops.call("kv_commit", [layer.latent], [layer.k_rope], ops.tensor(accepted), state)
    compacted = layer.cached()
    for depth, row in enumerate(path):
        alone = layer.step([committed + row], chain(1), committed + depth)
        for name, values in alone.items():
            same_bits(values[0], got[name][row], f"{name} of row {row}")
    for mine, other in zip(layer.cached(), compacted, strict=True):
        same_bits(mine[: committed + len(path)], other[: committed + len(path)], "the cache, [slot, element]")


def test_embedding_is_widened(ops: Ops) -> None:
    table = bits(draw(np.random.default_rng(3), 7, 33))
    rows = Rows([-1, 0, 1], tokens=[6, 0, 3])
    out = ops.empty(3, 33)
    ops.call("embed", out, ops.tensor(table), ops.rows(rows), ops.state(3))
    assert (out.cpu().numpy() == value(table)[[6, 0, 3]]).all()
