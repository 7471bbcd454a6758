"""linear() and rms_norm() against float64, and the same bits whatever the rows, the threads and the instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from engine_operands import draw, int4, normed, packed
from engine_ops import F32, RESIDUAL, SILU_MUL, STORE, Array, Ops, same_bits, within

from engine.library import library
from harness.protocol import DeviceError
from refs.quant import quantise

SHAPES = [(1, 1, 1), (3, 5, 17), (2, 33, 64), (5, 16, 31), (9, 130, 96), (65, 47, 129), (70, 20, 300)]
LONG = [(1, 35, 2205), (6, 35, 2205)]
"""INT4 rows beyond 1 KiB go another way on the CPU; these end within a group and within a unit."""


def close(got: F32, want: Array, terms: Array) -> None:
    """Within the rounding of a sum of these terms: 2^-23 of their magnitudes' sum, times a small constant."""
    within(got, want, 4e-7 * terms + 1e-12, "linear, [row, output]")


@pytest.mark.parametrize(("m", "n", "k"), SHAPES + LONG)
@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("norm", [False, True])
def test_store(ops: Ops, kind: str, m: int, n: int, k: int, norm: bool) -> None:
    rng = np.random.default_rng(m * 1000 + n)
    x, g = draw(rng, m, k), draw(rng, k)
    if kind == "f32":
        w = draw(rng, n, k)
        got = ops.linear(x, [w], norm=g if norm else None)[0]
        exact: Array = w.astype(np.float64)
    else:
        q, scale, exact = int4(rng, n, k)
        got = ops.linear(x, [q], scales=[scale], norm=g if norm else None)[0]
    wide = normed(x, g, 1e-5) if norm else x.astype(np.float64)
    close(got, wide @ exact.T, 8 * np.abs(wide) @ np.abs(exact).T + 1e-6)
    linear = {name: count for name, count in ops.counters().items() if name.startswith("linear")}
    assert linear == {"linear_int4" if kind == "int4" else "linear_f32": 1}


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_epilogues_and_two_outputs(ops: Ops, kind: str) -> None:
    rng = np.random.default_rng(5)
    m, n, k = 7, 37, 75
    x, before = draw(rng, m, k), draw(rng, m, n)
    made = [int4(rng, n, k) for _ in range(2)] if kind == "int4" else [(draw(rng, n, k), None, None) for _ in range(2)]
    weights = [w for w, _, _ in made]
    scales = [s for _, s, _ in made] if kind == "int4" else None
    exact = [e if e is not None else w.astype(np.float64) for w, _, e in made]
    y = [x.astype(np.float64) @ e.T for e in exact]
    size = [8 * np.abs(x) @ np.abs(e).T for e in exact]
    both = ops.linear(x, weights, scales=scales)
    for i in range(2):
        close(both[i], y[i], size[i])
    added = ops.linear(x, weights[:1], scales=scales[:1] if scales else None, epilogue=RESIDUAL, out=[before])[0]
    close(added, before + y[0], size[0] + np.abs(before))
    gated = ops.linear(x, weights, scales=scales, epilogue=SILU_MUL)[0]
    want = y[0] / (1 + np.exp(-y[0])) * y[1]
    close(gated, want, 8 * (np.abs(want) + size[0] * np.abs(y[1]) + size[1] * np.abs(y[0])))


def test_outputs_of_different_widths(ops: Ops) -> None:
    rng = np.random.default_rng(6)
    x, a, b = draw(rng, 4, 40), draw(rng, 18, 40), draw(rng, 3, 40)
    got = ops.linear(x, [a, b])
    for out, w in zip(got, (a, b), strict=True):
        close(out, x.astype(np.float64) @ w.astype(np.float64).T, 8 * np.abs(x) @ np.abs(w).T)


def test_known_int4_words(ops: Ops) -> None:
    """The public known answer: [-8,-7,-1,0,1,2,6,7] packs to the word 0xfea98710; read back through unit vectors."""
    row = np.full(16, 0x88, np.uint8)
    row[:4] = np.frombuffer((0xFEA98710).to_bytes(4, "little"), np.uint8)
    x = np.eye(32, dtype=np.float32)[:9]
    scale = np.array([[0x3F00]], np.uint16)  # 0.5
    got = ops.linear(x, [row[None]], scales=[scale])[0]
    assert got[:, 0].tolist() == [-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 3.0, 3.5, 0.0]


def test_int4_weight_is_the_exact_product(ops: Ops) -> None:
    """q * scale is not rounded to bf16: with one non-zero input the result is the exact product."""
    q = np.array([[7, -8, 5]], np.int8)
    scale = np.array([[0x3DCD]], np.uint16)  # 0.10009765625
    x = np.eye(3, dtype=np.float32)
    got = ops.linear(x, [packed(q, 3)], scales=[scale])[0]
    assert got[:, 0].tolist() == [7 * 0.10009765625, -8 * 0.10009765625, 5 * 0.10009765625]


def test_quantised_by_the_reference(ops: Ops) -> None:
    rng = np.random.default_rng(8)
    n, k = 24, 96
    w = draw(rng, n, k)
    w[3] = 0
    q, scale = quantise(w)
    exact = q * np.repeat((scale.astype(np.uint32) << 16).view(np.float32).astype(np.float64), 32, axis=1)
    x = draw(rng, 3, k)
    got = ops.linear(x, [packed(q, k)], scales=[scale])[0]
    close(got, x.astype(np.float64) @ exact.T, 8 * np.abs(x) @ np.abs(exact).T + 1e-9)
    assert (got[:, 3] == 0).all()


def operands(kind: str, n: int, k: int) -> tuple[F32, list[Array], list[Array] | None, F32]:
    rng = np.random.default_rng(11)
    x, g = draw(rng, 65, k), draw(rng, k)
    if kind == "f32":
        return x, [draw(rng, n, k)], None, g
    q, scale, _ = int4(rng, n, k)
    return x, [q], [scale], g


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize(("n", "k"), [(37, 75), (64, 256), (130, 1031)])
def test_rows_do_not_depend_on_each_other(ops: Ops, kind: str, n: int, k: int) -> None:
    """Every width 1..65, other rows full of NaN, another place in the batch: the same bits."""
    x, w, s, g = operands(kind, n, k)
    whole = ops.linear(x, w, scales=s, norm=g)[0]
    for m in range(1, 66):
        part = ops.linear(x[:m], w, scales=s, norm=g)[0]
        same_bits(part, whole[:m], f"linear at width {m}, [row, output]")
    turned = ops.linear(np.ascontiguousarray(x[::-1]), w, scales=s, norm=g)[0]
    same_bits(turned[::-1], whole, "rows in reverse, [row, output]")
    broken = np.full_like(x, np.nan)
    broken[17] = x[17]
    same_bits(ops.linear(broken, w, scales=s, norm=g)[0][17], whole[17], "a row beside a broken one, [output]")


def test_only_active_rows_are_written(ops: Ops) -> None:
    x, w, _, _ = operands("f32", 37, 75)
    before = np.full((65, 37), 7.0, np.float32)
    for epilogue in (STORE, RESIDUAL):
        got = ops.linear(x, w, out=[before], epilogue=epilogue, n_rows=3)[0]
        assert (got[3:] == 7.0).all()
        assert (got[:3] != 7.0).all()


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_threads_do_not_show(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Large enough that the work is shared out."""
    x, w, s, g = operands(kind, 300, 1031)
    results = set()
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("KDTREE_THREADS", str(threads))
        with Ops("cpu") as ops:
            results.add(ops.linear(x, w, scales=s, norm=g)[0].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("k", [1, 15, 16, 33, 75, 1031])
def test_instruction_sets_do_not_show(monkeypatch: pytest.MonkeyPatch, kind: str, k: int) -> None:
    names = library("cpu").isa_names().split()
    assert "base" in names or names == ["neon"]
    x, w, s, g = operands(kind, 37, k)
    results = set()
    for isa in names:
        monkeypatch.setenv("KDTREE_ISA", isa)
        with Ops("cpu") as ops:
            store = ops.linear(x, w, scales=s, norm=g)[0]
            gated = ops.linear(x, w * 2, scales=s * 2 if s else None, norm=g, epilogue=SILU_MUL)[0]
            assert f"isa_{isa}" in ops.counters()
        results.add(store.tobytes() + gated.tobytes())
    assert len(results) == 1


def test_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_ISA", "mmx")
    with pytest.raises(DeviceError, match="KDTREE_ISA=mmx: this processor has "):
        Ops("cpu")


@pytest.mark.parametrize("dim", [1, 15, 64, 129, 1031])
def test_rms_norm(ops: Ops, dim: int) -> None:
    rng = np.random.default_rng(dim)
    x, w = draw(rng, 9, dim), draw(rng, dim)
    x[4] = 0
    out = ops.empty(9, dim)
    ops.call("rms_norm", out, ops.tensor(x), ops.tensor(w), 1e-5, ops.state(9))
    got = out.cpu().numpy()
    want = normed(x, w, 1e-5)
    close(got, want, np.abs(want) + 1e-9)
    for m in range(1, 9):
        part = ops.empty(m, dim)
        ops.call("rms_norm", part, ops.tensor(x[:m]), ops.tensor(w), 1e-5, ops.state(m))
        same_bits(part.cpu().numpy(), got[:m], f"a part at width {m}, [row, output]")
