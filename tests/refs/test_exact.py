"""Sums and products against correctly rounded ones, their stated order, and what refs/ may use at all."""

from __future__ import annotations

import ast
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refs import exact

REFS = Path(exact.__file__).parent
DTYPES = [np.float64, np.float32]
WORDS = ["0x946f01fb23290ba", "0xeeef0d12b481d59c", "0x36580f399dfdd832"]


def halves(values: list[Any]) -> Any:
    """tree_sum's stated order, recursively written."""
    n = len(values)
    if n == 1:
        return values[0]
    half = (n + 1) // 2
    return halves([values[i] + values[i + half] if i + half < n else values[i] for i in range(half)])


def lanes(values: list[Any]) -> Any:
    """strided_sum's stated order."""
    totals = []
    for t in range(min(4, len(values))):
        total = values[t]
        for v in values[t + 4 :: 4]:
            total = total + v
        totals.append(total)
    return halves(totals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 64, 100, 129])
def test_summation_orders_are_the_stated_ones(n: int, dtype: Any) -> None:
    values = exact.Draws("sum", n).normal((n, 6)).astype(dtype)
    for function, order in ((exact.tree_sum, halves), (exact.strided_sum, lanes)):
        want = [order(list(values[:, j])) for j in range(6)]
        assert function(values.copy()).tolist() == [float(v) for v in want]
    if n > 8:
        assert (exact.tree_sum(values.copy()) != exact.strided_sum(values.copy())).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_kept_up_to_a_block_and_by_each_thread(dtype: Any) -> None:
    def made(seed: int, n: int) -> tuple[Any, Any]:
        values = np.arange(seed, seed + 4 * n, dtype=dtype).reshape(2, 2, n)
        return exact.product(values[0], values[1, :1]), values[0] * values[1, :1]

    half = exact.BLOCK // 2
    for n in (1, half, half + 1):
        got, want = made(n, n)
        assert got.dtype == dtype
        assert np.array_equal(got, want)
    got, want = made(1, 8)
    with ThreadPoolExecutor(1) as other:
        assert np.array_equal(*other.submit(made, 2, 8).result())
    assert np.array_equal(got, want), "of another thread, which does not wait for this one"
    made(3, 8)
    assert not np.array_equal(got, want), "of this thread, whose next product takes the place"


@pytest.mark.parametrize("summation", list(exact.SUMMATIONS.values()))
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 64, 5), (7, 37, 11), (2, 300, 1000), (40, 129, 70)])
def test_matmul_against_correctly_rounded_sums(m: int, k: int, n: int, summation: Any) -> None:
    x, w = exact.Draws("x", m).normal((m, k)), exact.Draws("w", n).normal((k, n))
    got = exact.matmul(x, w, summation)
    for i, j in {(0, 0), (m - 1, n - 1), (m // 2, n // 3)}:
        terms = [float(a) * float(b) for a, b in zip(x[i], w[:, j], strict=True)]
        bound = 2.0**-53 * math.log2(k + 1) * (8 + k / 4) * max(map(abs, terms))
        assert abs(got[i, j] - math.fsum(terms)) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: Any) -> None:
    x, w = exact.Draws("x").normal((50, 96)).astype(dtype), exact.Draws("w").normal((96, 3000)).astype(dtype)
    whole = exact.matmul(x, w)
    assert whole.dtype == dtype
    for i in (0, 13, 49):
        assert exact.matmul(x[i : i + 1], w).tobytes() == whole[i].tobytes()
        assert exact.matmul(x[i:], w[:, 7:9])[0].tobytes() == whole[i, 7:9].tobytes()


def test_chosen_matrices_give_the_bits_of_the_plain_product() -> None:
    x, w = exact.Draws("x").normal((9, 20)), exact.Draws("w").normal((20, 5, 13))
    chosen = np.array([4, 0, 0, 3, 2, 1, 4, 4, 0])
    got = exact.matmul_chosen(x, w, chosen)
    for j, e in enumerate(chosen):
        assert got[j].tobytes() == exact.matmul(x[j : j + 1], np.ascontiguousarray(w[:, e])).tobytes()


def test_contract_in_blocks_is_contract_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = exact.Draws("a").normal((6, 10, 3, 1)), exact.Draws("b").normal((6, 10, 1, 4))
    whole = exact.contract(a, b)
    np.testing.assert_allclose(whole, np.einsum("kmij,kmjn->min", a, b), rtol=1e-14)
    monkeypatch.setattr(exact, "BLOCK", 1)
    assert exact.contract(a, b).tobytes() == whole.tobytes()
    assert exact.contract(a, b[:, :1]).tobytes() == exact.contract(a, np.repeat(b[:, :1], 10, axis=1)).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_sigmoid_silu(dtype: Any) -> None:
    x = np.array([[-1000, 0, 3, 3, -np.inf], [700, 710, 709.5, -2, 5]], dtype)
    tolerance = 4 * float(np.finfo(dtype).eps)
    for row, got in zip(x.tolist(), exact.softmax(x), strict=True):
        weights = [math.exp(v - max(row)) for v in row]
        np.testing.assert_allclose(got, [w / math.fsum(weights) for w in weights], rtol=tolerance, atol=1e-300)
    z = np.array([-800, -90, -2.5, 0, 1e-3, 4, 100], dtype)
    with np.errstate(all="ignore"):
        want = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in z.tolist()]
    np.testing.assert_allclose(exact.sigmoid(z), want, rtol=tolerance, atol=1e-38)
    np.testing.assert_allclose(
        exact.silu(z), [v * s for v, s in zip(z.tolist(), want, strict=True)], rtol=tolerance, atol=1e-36
    )


def test_top_k_breaks_ties_by_the_lowest_index() -> None:
    scores = np.array([[1.0, 3.0, 2.0, 3.0, 2.0, -np.inf], [0.0] * 6])
    assert exact.top_k(scores, 4).tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]
    many = np.zeros((1, 500))
    many[0, 7::13] = 1.0
    assert exact.top_k(many, 30)[0].tolist() == [*range(7, 396, 13)][:30]


def test_bf16_rounds_to_nearest_ties_to_even() -> None:
    bits = np.concatenate(
        [exact.Draws("bits").raw(3000).astype(np.uint32), np.arange(0x3F800000, 0x3F840000, 0x4000, np.uint32)]
    )
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) < 3e38)]
    got = exact.rounded_to_bf16(x)
    for value, code in zip(x.tolist(), got.tolist(), strict=True):
        near = [c for c in (code - 1, code, code + 1) if 0 <= c < 65536 and (c ^ code) < 32768]
        values = exact.bf16_value(np.array(near, np.uint16)).tolist()
        gaps = [abs(Fraction(v) - Fraction(value)) if math.isfinite(v) else Fraction(10**60) for v in values]
        here = gaps[near.index(code)]
        assert here == min(gaps)
        if gaps.count(here) > 1:
            assert code % 2 == 0


def test_draws_are_numpys_promised_integer_stream() -> None:
    """Philox-4x64-10 with a key from SHA-256: pinned words, and the value of a stream does not depend on others."""
    words = exact.Draws("tiny", 0, "embed.w").raw(3)
    assert [hex(w) for w in words.tolist()] == WORDS
    first = exact.Draws("a", 1)
    first.raw(7)
    exact.Draws("b").raw(100)
    np.testing.assert_array_equal(first.raw(5), exact.Draws("a", 1).raw(12)[7:])
    assert (exact.Draws("a", 1).raw(8) != exact.Draws("a", 2).raw(8)).all()
    assert (exact.Draws("a1").raw(8) != exact.Draws("a", 1).raw(8)).all()


def test_draws_have_the_stated_distributions() -> None:
    normal = exact.Draws("n").normal((40000,), 2.0)
    assert abs(float(normal.mean())) < 0.04
    assert float(normal.std()) == pytest.approx(2.0, rel=0.02)
    assert float(np.abs(normal).max()) <= 2.0 * 3.47
    uniform = exact.Draws("u").uniform((40000,))
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert np.bincount(exact.Draws("i").below(7, 70000), minlength=7).tolist() == pytest.approx([10000] * 7, rel=0.05)
    assert sorted(exact.Draws("p").permutation(50).tolist()) == list(range(50))
    assert exact.Draws("p").permutation(50).tolist() != list(range(50))


ALLOWED_MODULES = {"numpy", "yaml", "refs", *sys.stdlib_module_names}
NUMPY_REDUCTIONS = {
    "sum",
    "mean",
    "dot",
    "matmul",
    "einsum",
    "inner",
    "outer",
    "tensordot",
    "vdot",
    "std",
    "var",
    "cumsum",
}
NUMPY_FUNCTIONS = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "tanh",
    "power",
    "float_power",
}
RANDOM = {"default_rng", "normal", "standard_normal", "random", "integers", "RandomState", "seed", "shuffle", "choice"}
ENGINE_MODULES = {"harness", "engine", "torch"}


@pytest.mark.parametrize("path", sorted(REFS.glob("*.py")), ids=lambda p: p.name)
def test_refs_uses_nothing_whose_bits_may_change(path: Path) -> None:
    """Imports numpy, yaml and the standard library alone; calls no numpy function that depends on the machine."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert {a.name.split(".")[0] for a in node.names} <= ALLOWED_MODULES
        if isinstance(node, ast.ImportFrom):
            assert str(node.module).split(".")[0] in ALLOWED_MODULES
        assert not isinstance(getattr(node, "op", None), ast.MatMult), f"{path.name}:{node.lineno}: @"  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute):
            where = f"{path.name}:{node.lineno}: .{node.attr}"
            assert node.attr not in NUMPY_REDUCTIONS, where
            if isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
                assert node.attr not in NUMPY_FUNCTIONS, where
            if isinstance(node.value, ast.Attribute) and node.value.attr == "random":
                assert node.attr not in RANDOM, where
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("sort", "argsort")
        ):
            kinds = [k.value.value for k in node.keywords if k.arg == "kind" and isinstance(k.value, ast.Constant)]
            assert kinds == ["stable"], f"{path.name}:{node.lineno}: a sort without kind='stable'"


def test_no_module_of_the_engine_is_loaded_by_refs() -> None:
    import subprocess

    code = "import sys, refs.generate; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=REFS.parent, capture_output=True, text=True, check=True)
    assert not ENGINE_MODULES & set(loaded.stdout.split())
