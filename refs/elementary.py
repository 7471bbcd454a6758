"""exp, log, sin, cos and power from IEEE operations alone, so that every machine gives the same bits.

Used are elementwise + - * /, rint, frexp, ldexp, comparisons and selection: each is exact or correctly rounded and
none depends on the CPU's vector width. numpy's own exp, log and power do (their results change with AVX dispatch).
`exp` and `log` work in the type they are given; `sin`, `cos` and `power` compute in float64 and round.
Methods: range reduction with a two- or three-part constant (Cody and Waite), then Taylor series.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

F = npt.NDArray[np.floating[Any]]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

# ln 2 in two parts: the high one has so few bits that its product with any exponent of the type is exact.
_LN2 = {
    "f8": (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")),
    "f4": (0.693359375, -2.12194440e-4),
}
_EXP_TERMS = {"f8": 13, "f4": 7}  # the first term left out is below a quarter of an ulp for |r| <= ln(2)/2
_LOG_TERMS = {"f8": 11, "f4": 5}  # likewise for |s| <= 0.1716
# pi/2 in four parts of 33, 33, 33 and 53 bits: a product with k <= 2^20 is exact for the first three.
_PIO2 = (
    float.fromhex("0x1.921fb544p+0"),
    float.fromhex("0x1.0b4611a6p-34"),
    float.fromhex("0x1.3198a2ep-69"),
    float.fromhex("0x1.b839a252049c1p-104"),
)
TRIG_LIMIT = 2.0**20


def _horner(x: F, coefficients: list[float]) -> F:
    """Polynomial with the highest coefficient first, in the type of ``x``."""
    one = x.dtype.type
    p = one(coefficients[0]) * x + one(coefficients[1])
    for c in coefficients[2:]:
        p *= x
        p += one(c)
    return p


@cache
def _factorial(n: int) -> float:
    out = 1.0
    for i in range(2, n + 1):
        out *= i
    return out


def exp(x: F) -> F:
    """e^x within 1 ulp; overflow gives inf, underflow 0 through the subnormals."""
    t, key = x.dtype.type, x.dtype.str[1:]
    hi, lo = _LN2[key]
    top = 1100.0 if key == "f8" else 200.0  # beyond the range of both types' exponents
    nan = np.isnan(x)
    finite = np.minimum(np.maximum(x, t(-top)), t(top))
    if nan.any():
        finite = np.where(nan, t(0), finite)
    k = np.rint(finite * t(1.4426950408889634))
    r = (finite - k * t(hi)) - k * t(lo)
    p = _horner(r, [1.0 / _factorial(n) for n in range(_EXP_TERMS[key], 1, -1)])
    y = (r * r * p + r) + t(1)
    with np.errstate(over="ignore", under="ignore"):
        out: F = np.ldexp(y, k.astype(np.int32)).astype(x.dtype, copy=False)
    return np.where(nan, x, out) if nan.any() else out


def log(x: F) -> F:
    """ln x within 1 ulp; 0 gives -inf, a negative number NaN."""
    t, key = x.dtype.type, x.dtype.str[1:]
    hi, lo = _LN2[key]
    good = (x > 0) & (x < np.inf)
    m, e = np.frexp(np.where(good, x, t(1)))
    low = m < t(0.7071067811865476)
    m, e = np.where(low, m + m, m), e - low
    k, f = e.astype(x.dtype), m - t(1)
    s = f / (f + t(2))
    s2 = s * s
    series = s2 * _horner(s2, [2.0 / (2 * n + 1) for n in range(_LOG_TERMS[key], 0, -1)])
    half = t(0.5) * f * f
    out = k * t(hi) - ((half - (s * (half + series) + k * t(lo))) - f)
    special = np.where(x == 0, t(-np.inf), np.where(x == np.inf, t(np.inf), t(np.nan)))
    return np.where(good, out, special)


def _reduce(x: F64) -> tuple[npt.NDArray[np.int64], F64, F64]:
    """x = k*pi/2 + r + c with |r| <= pi/4 and c the rounding error of r."""
    if x.size and not np.all(np.abs(x) <= TRIG_LIMIT):
        raise ValueError(f"angle beyond {TRIG_LIMIT} or not a number")
    k = np.rint(x * 0.6366197723675814)
    a = x - k * _PIO2[0]
    w = k * _PIO2[1]
    b = a - w
    bb = b - a
    error = (a - (b - bb)) - (w + bb)  # two-sum: what the subtraction lost
    c = (k * _PIO2[2] - error) + k * _PIO2[3]
    r = b - c
    return k.astype(np.int64), r, (b - r) - c


def _sin_cos(x: F64) -> tuple[F64, F64]:
    k, r, c = _reduce(x)
    z = r * r
    s = _horner(z, [(-1.0) ** n / _factorial(2 * n + 1) for n in range(9, 0, -1)])
    sin_r = r + (r * z * s + c * (1.0 - 0.5 * z))
    q = _horner(z, [(-1.0) ** n / _factorial(2 * n) for n in range(9, 1, -1)])
    half = 0.5 * z
    w = 1.0 - half
    cos_r = w + (((1.0 - w) - half) + (z * z * q - r * c))
    quadrant = k & 3
    swap = (quadrant & 1) == 1
    sine, cosine = np.where(swap, cos_r, sin_r), np.where(swap, sin_r, cos_r)
    sine = np.where(quadrant >= 2, -sine, sine)
    return sine, np.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)


def sin(x: F) -> F:
    """Sine within 1 ulp for |x| <= `TRIG_LIMIT`, a ValueError beyond; float32 is computed in float64 and rounded."""
    return _sin_cos(x.astype(np.float64))[0].astype(x.dtype)


def cos(x: F) -> F:
    """Cosine; as `sin`."""
    return _sin_cos(x.astype(np.float64))[1].astype(x.dtype)


def power(base: F, exponent: F) -> F:
    """base^exponent for base > 0, to a relative error of about (1 + |exponent * ln base|) * 2^-52."""
    return exp(exponent.astype(np.float64) * log(base.astype(np.float64))).astype(base.dtype)


def scalar_log(x: float) -> float:
    """`log` of one number."""
    return float(log(np.array([x]))[0])


def exp32(x: F32) -> F32:
    """docs/model.md, "lse in f32": e^x for x <= 0, never fused; below -87 it is 0."""
    f = np.float32
    small = x < f(-87)
    x = np.where(small, f(0), x)
    n = np.rint(x * f(1.44269504))
    r = x - n * f(0.693359375)
    r = r - n * f(-2.12194440e-4)
    p = np.full_like(r, f(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(c)
    y = p * (r * r)
    y = y + r
    y = y + f(1)
    out: F32 = np.where(small, f(0), np.ldexp(y, n.astype(np.int32)))
    return out


def log32(s: F32) -> F32:
    """docs/model.md, "lse in f32": ln s for s >= 1, never fused."""
    f = np.float32
    m, e = np.frexp(s)
    low = m < f(0.707106781186547524)
    m, e = np.where(low, m + m, m), (e - low).astype(np.float32)
    z = m - f(1)
    p = np.full_like(z, f(7.0376836292e-2))
    for c in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = p * z + f(c)
    q = z * z
    y = z * q
    y = y * p
    y = y + e * f(-2.12194440e-4)
    y = y - f(0.5) * q
    r = z + y
    out: F32 = r + e * f(0.693359375)
    return out


def lse32(row: F32) -> F32:
    """docs/model.md: log-sum-exp of one row [V] as an array of one f32; all -inf gives -inf."""
    f, lanes, segment = np.float32, 256, 4096
    maxima, sums = [], []
    for start in range(0, row.size, segment):
        part = row[start : start + segment]
        top = part.max(keepdims=True)
        acc = np.zeros(lanes, np.float32)
        if top[0] > -np.inf:
            terms = exp32(part - top)
            for i in range(0, terms.size, lanes):
                acc[: terms.size - i] += terms[i : i + lanes]
        h = lanes // 2
        while h:
            acc[:h] += acc[h : 2 * h]
            h //= 2
        maxima.append(top)
        sums.append(acc[:1])
    top = np.max(np.concatenate(maxima), keepdims=True)
    total = np.zeros(1, np.float32)
    if top[0] == -np.inf:
        return np.full(1, f(-np.inf))
    for m, s in zip(maxima, sums, strict=True):
        if m[0] > -np.inf:
            total = total + s * exp32(m - top)
    out: F32 = top + log32(total)
    return out
