"""Comparison: what is off is found and named, and neither NaN nor zeros nor another shape can pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness import compare
from harness.cells import Check, Verdict

T = 1e-4
GOLDEN = np.random.default_rng(5).normal(0, 2, (4, 50))
CLOSE = GOLDEN.astype(np.float32)


def failed(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if not check.ok}


def test_what_is_close_passes_every_metric() -> None:
    checks = compare.logits(CLOSE, GOLDEN, T)
    assert not failed(checks)
    assert [c.name.removeprefix("logits.") for c in checks] == [
        "shape", "finite", "max_abs", "nmse", "kl", "top1", "scale",
    ]  # fmt: skip


def test_one_element_is_named_with_both_values_and_the_bound() -> None:
    got = CLOSE.copy()
    got[2, 17] += 3 * T
    got[3, 1] -= 2 * T
    check = failed(compare.logits(got, GOLDEN, T))["logits.max_abs"]
    assert check.verdict is Verdict.FAIL_LOGITS
    assert check.detail.startswith("2 of 200 elements beyond 0.0001, worst at [2, 17]: got ")
    assert f"golden {GOLDEN[2, 17]:.9g}" in check.detail
    index, count, _ = compare.worst(got, GOLDEN, T)
    assert (index, count) == ((2, 17), 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_before_any_tolerance(bad: float) -> None:
    got = CLOSE.copy()
    got[1, 2] = bad
    checks = compare.logits(got, GOLDEN, 1e9)
    assert [check.name for check in checks] == ["logits.shape", "logits.finite"]
    assert checks[-1].verdict is Verdict.FAIL_NONFINITE
    assert "1 of 200 elements, first at [1, 2]" in checks[-1].detail


def test_nan_on_both_sides_fails() -> None:
    want, got = GOLDEN.copy(), CLOSE.copy()
    want[0, 0] = got[0, 0] = np.nan
    assert not compare.finite("x", got, want).ok
    assert compare.difference(got, want)[0, 0] == np.inf


def test_equal_infinities_agree_and_others_do_not() -> None:
    want = np.array([-np.inf, np.inf, -np.inf])
    assert compare.finite("x", want.astype(np.float32), want).ok
    assert compare.difference(want, want).tolist() == [0, 0, 0]
    assert compare.difference(want, -want).tolist() == [np.inf] * 3
    assert not compare.finite("x", -want.astype(np.float32), want).ok


def test_what_is_not_finite_on_one_side_alone_is_infinitely_far() -> None:
    """And NaN is far from NaN too: a golden has none."""
    got, want = np.array([np.nan, np.inf, 1.0, np.nan, 2.0]), np.array([1.0, 1.0, np.nan, np.nan, 5.0])
    assert compare.difference(got, want).tolist() == [np.inf] * 4 + [3.0]


def test_a_tolerance_is_held_against_the_largest_value_of_the_worst_row() -> None:
    for least, fine in ((1.0, True), (0.99, False)):
        want = np.array([[50.0, 0.0, 1e-9], [-least, 0.0, 0.0]])
        checks = {check.name: check for check in compare.logits(want.astype(np.float32), want, 0.01)}
        assert checks["logits.scale"].ok is fine


@pytest.mark.parametrize(
    "got", [None, CLOSE[:, :-1], CLOSE[:3], CLOSE.reshape(-1), CLOSE.astype(np.float64), CLOSE.astype(np.float16)]
)
def test_another_shape_or_type_fails(got: np.ndarray | None) -> None:
    check = compare.shape("x", got, GOLDEN.shape)
    assert (check.ok, check.verdict) == (False, Verdict.FAIL_SHAPE)


def test_zeros_fail_even_where_the_tolerance_exceeds_the_values() -> None:
    tiny = GOLDEN * 1e-6
    names = failed(compare.logits(np.zeros_like(CLOSE), tiny, T))
    assert "logits.scale" in names
    assert "logits.max_abs" not in names
    assert "logits.scale" in failed(compare.logits(np.zeros_like(CLOSE), np.zeros_like(GOLDEN), T))


def test_a_shift_of_everything_fails_though_every_element_is_within_the_tolerance() -> None:
    assert set(failed(compare.logits((GOLDEN + 0.9 * T).astype(np.float32), GOLDEN, T))) == {"logits.nmse"}


def test_another_leader_fails() -> None:
    want = np.zeros((2, 5))
    want[:, 0], want[:, 4] = 1.0, 1.0 - T / 2
    got = want.astype(np.float32)
    got[1, 4] += T
    assert "rows [1]" in failed(compare.logits(got, want, T))["logits.top1"].detail


@given(hnp.arrays(np.float64, (3, 20), elements=st.floats(-30, 30)), st.floats(1e-4, 1e-1), st.integers(0, 2**32))
def test_the_bound_on_kl_holds_for_every_difference_within_the_tolerance(want: np.ndarray, t: float, seed: int) -> None:
    signs = np.random.default_rng(seed).choice([-1.0, 1.0, 0.3], want.shape)
    got = (want + t * signs * 0.9).astype(np.float32)
    checks = {check.name: check for check in compare.logits(got, want, t)}
    assert checks["logits.max_abs"].ok
    assert checks["logits.kl"].ok


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """By the textbook, over the vocabulary."""
    a, b = np.exp(p) / np.exp(p).sum(), np.exp(q) / np.exp(q).sum()
    return float((a * np.log(a / b)).sum())


def test_kl_and_nmse_are_the_textbook_s() -> None:
    got = (GOLDEN + np.random.default_rng(6).normal(0, 0.1, GOLDEN.shape)).astype(np.float32)
    checks = {check.name: check.value for check in compare.logits(got, GOLDEN, 1.0)}
    assert checks["logits.kl"] == pytest.approx(max(kl(p, q) for p, q in zip(GOLDEN, got.astype(float), strict=True)))
    assert checks["logits.nmse"] == pytest.approx(((got - GOLDEN) ** 2).sum() / (GOLDEN**2).sum())


@given(
    hnp.arrays(np.uint32, (2, 3), elements=st.integers(0, 2**32 - 1)),
    st.integers(0, 5),
    st.integers(0, 31),
)
def test_one_flipped_bit_is_found(raw: np.ndarray, at: int, bit: int) -> None:
    other = raw.copy()
    other.reshape(-1)[at] ^= np.uint32(1 << bit)
    a, b = raw.view(np.float32), other.view(np.float32)
    assert compare.bits("x", a, a.copy()).ok  # NaN payloads included
    check = compare.bits("x", a, b, "here")
    assert (check.ok, check.value) == (False, 1.0)
    assert f"here: 1 of 6 elements differ in bits, first at [{at // 3}, {at % 3}]" in check.detail


def test_bits_of_another_shape_or_of_another_zero_differ() -> None:
    a = np.zeros((2, 2), np.float32)
    assert not compare.bits("x", a, -a).ok
    assert not compare.bits("x", a, a[:1]).ok
    assert not compare.bits("x", a, a.astype(np.float64)).ok


def test_the_bounds_are_what_docs_harness_states() -> None:
    bound = {check.name.removeprefix("logits."): check.allowed for check in compare.logits(CLOSE, GOLDEN, T)}
    assert bound["max_abs"] == T
    assert bound["nmse"] == pytest.approx((T / 2) ** 2 / (GOLDEN**2).mean())
    assert bound["kl"] == pytest.approx(T**2 / 2)
    assert bound["scale"] == 0.01
    assert bound["top1"] == 0


def test_zeros_could_pass_where_one_row_alone_is_small() -> None:
    """Every column has a large value, one row has none."""
    want = GOLDEN.copy()
    want[2] = 1e-3
    checks = compare.logits(want.astype(np.float32), want, T)
    assert set(failed(checks)) == {"logits.scale"}
    assert failed(checks)["logits.scale"].value == pytest.approx(T / 1e-3)


def test_large_logits_do_not_overflow() -> None:
    rows = GOLDEN + 1e3
    assert np.allclose(compare.log_softmax(rows), compare.log_softmax(GOLDEN))
