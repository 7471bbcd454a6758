"""exp, log, sin, cos, power against arithmetic in 60 decimal digits, and the fixed f32 functions against their page."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest

from refs import elementary as el

decimal.getcontext().prec = 60
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def decimal_sin(x: Decimal) -> Decimal:
    x -= (x / (2 * PI)).to_integral_value() * 2 * PI
    term, total, n = x, x, 1
    while abs(term) > Decimal("1e-55"):
        term *= -x * x / ((n + 1) * (n + 2))
        total += term
        n += 2
    return total


def decimal_cos(x: Decimal) -> Decimal:
    return decimal_sin(x + PI / 2)


def worst_ulp(function: Callable[[el.F], el.F], truth: Callable[[Decimal], Decimal], x: el.F) -> float:
    """The greatest distance from the true value, in units of the result's last place."""
    got = function(x)
    assert got.dtype == x.dtype
    worst = 0.0
    for a, y in zip(x.tolist(), got, strict=True):
        want = truth(Decimal(a))
        spacing = float(np.spacing(np.abs(x.dtype.type(float(want)))))
        worst = max(worst, float(abs(Decimal(float(y)) - want)) / spacing)
    return worst


def points(low: float, high: float, dtype: type, n: int = 400) -> el.F:
    rng = np.random.default_rng(5)
    return (low + (high - low) * rng.random(n)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_exp(dtype: type) -> None:
    for low, high in ((-1.0, 1.0), (-87.0, 88.0), (-1e-6, 1e-6), (-0.36, -0.34)):
        assert worst_ulp(el.exp, Decimal.exp, points(low, high, dtype)) < 1.0
    special = el.exp(np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e4, -1e4], dtype))
    np.testing.assert_array_equal(special, np.array([1, 1, np.inf, 0, np.nan, np.inf, 0], dtype))
    assert el.exp(np.array([-740.0]))[0] == pytest.approx(math.exp(-740.0), rel=0.01)  # a subnormal


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_log(dtype: type) -> None:
    for low, high in ((0.5, 2.0), (1e-30, 1e30), (1e-3, 1e-2), (0.999, 1.001)):
        assert worst_ulp(el.log, Decimal.ln, points(low, high, dtype)) < 1.0
    assert worst_ulp(el.log, Decimal.ln, np.array([0.7071067, 0.70710677, 1.4142135, 5e-45, 3e38], dtype)) < 1.0
    special = el.log(np.array([1, 0, np.inf, -1, np.nan], dtype))
    np.testing.assert_array_equal(special, np.array([0, -np.inf, np.inf, np.nan, np.nan], dtype))


@pytest.mark.parametrize(("function", "truth"), [(el.sin, decimal_sin), (el.cos, decimal_cos)])
def test_sin_and_cos(function: Callable[[el.F], el.F], truth: Callable[[Decimal], Decimal]) -> None:
    for low, high in ((-0.8, 0.8), (-10.0, 10.0), (0.0, 3e5), (-1e6, 1e6)):
        assert worst_ulp(function, truth, points(low, high, np.float64, 200)) < 1.0
        assert worst_ulp(function, truth, points(low, high, np.float32, 50)) <= 0.51
    near = np.array([k * math.pi / 2 for k in (1, 2, 3, 4, 5, 1000, 333333)])  # where cancellation is worst
    assert worst_ulp(function, truth, near) < 1.0
    with pytest.raises(ValueError, match="angle"):
        function(np.array([2.0**21]))
    with pytest.raises(ValueError, match="angle"):
        function(np.array([np.nan]))


def test_power() -> None:
    base, exponent = points(1.5, 1e5, np.float64), points(-2.0, 2.0, np.float64)
    for b, e, got in zip(base.tolist(), exponent.tolist(), el.power(base, exponent).tolist(), strict=True):
        want = Decimal(b) ** Decimal(e)
        assert float(abs(Decimal(got) - want) / want) < (1 + abs(e * math.log(b))) * 2.0**-52


def test_scalar_log() -> None:
    assert el.scalar_log(64.0) == math.log(64.0)


def naive_exp32(x: float) -> np.float32:
    """The page's steps, one number and one operation at a time."""
    f = np.float32
    if f(x) < f(-87):
        return f(0)
    n = f(np.rint(f(f(x) * f(1.44269504))))
    r = f(f(x) - f(n * f(0.693359375)))
    r = f(r - f(n * f(-2.12194440e-4)))
    p = f(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = f(f(p * r) + f(c))
    y = f(f(f(p * f(r * r)) + r) + f(1))
    return f(math.ldexp(float(y), int(n)))


def naive_lse32(row: list[float]) -> float:
    """The page's order, one addition at a time."""
    f = np.float32
    segments = [row[i : i + 4096] for i in range(0, len(row), 4096)]
    tops, sums = [], []
    for part in segments:
        m = max(part)
        lane = [f(0)] * 256
        for i, x in enumerate(part):
            if m > -math.inf:
                lane[i % 256] = f(lane[i % 256] + naive_exp32(f(f(x) - f(m))))
        h = 128
        while h:
            lane = [f(lane[t] + lane[t + h]) for t in range(h)]
            h //= 2
        tops.append(m)
        sums.append(lane[0])
    top, total = max(tops), f(0)
    for m, s in zip(tops, sums, strict=True):
        if m > -math.inf:
            total = f(total + f(s * naive_exp32(f(f(m) - f(top)))))
    return float(f(f(top) + el.log32(np.array([total], np.float32))[0]))


def test_exp32_and_log32_are_close_and_follow_the_page() -> None:
    x = np.concatenate([points(-87, 0, np.float32), np.array([0, -87, -88, -np.inf], np.float32)])
    np.testing.assert_array_equal(el.exp32(x), np.array([naive_exp32(v) for v in x.tolist()], np.float32))
    assert worst_ulp(el.exp32, Decimal.exp, points(-87, 0, np.float32)) < 1.5
    assert worst_ulp(el.log32, Decimal.ln, points(1, 2e5, np.float32)) < 1.5


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000, 4096, 4097, 9000])
def test_lse32_follows_the_page_and_is_right(size: int) -> None:
    row = points(-20, 20, np.float32, size)
    row[size // 3] = 21
    got = el.lse32(row)
    assert got.dtype == np.float32
    assert float(got[0]) == naive_lse32(row.tolist())
    want = 21 + math.log(math.fsum(math.exp(v - 21) for v in row.tolist()))
    assert float(got[0]) == pytest.approx(want, rel=1e-6)


def test_lse32_adds_in_the_stated_order() -> None:
    """The greatest logit is 0 and the rest adds up to little, so that the last bit of the sum shows in the result."""
    for seed in range(12):
        row = (np.random.default_rng(seed).random(300 + seed) * 2 - 9).astype(np.float32)
        row[seed] = 0
        assert float(el.lse32(row)[0]) == naive_lse32(row.tolist())


def test_lse32_with_missing_logits() -> None:
    row = np.full(9000, -np.inf, np.float32)
    assert el.lse32(row)[0] == -np.inf
    row[8999] = 3.5
    assert el.lse32(row)[0] == 3.5
    row[0] = -2
    assert float(el.lse32(row)[0]) == naive_lse32(row.tolist())
