"""How far numbers are from the golden ones, as checks; every bound that is not a bundle's own stands here.

A bundle states one tolerance t per tensor: a multiple of the noise that float32 shows in the same computation. Shape,
type and the places of NaN and infinities are compared exactly before any tolerance is looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.cells import Check, Verdict

Array = npt.NDArray[Any]

RMS_SHARE = 0.5  # rounding noise is spread: its root mean square is below a third of its maximum, a shift of all is not
KL_FLOOR = 1e-14  # what float64 loses in the sum over a vocabulary
SCALE_SHARE = 0.01  # t must be at most this share of the golden's largest value, or zeros could pass


def exactly(name: str, wrong: int, verdict: Verdict, detail: str = "") -> Check:
    """A count that has to be zero."""
    return Check(name, float(wrong), 0.0, verdict, detail if wrong else "")


def _place(array: Array, flat: int) -> str:
    return "[" + ", ".join(str(int(i)) for i in np.unravel_index(flat, array.shape)) + "]"


def _kind(values: Array) -> npt.NDArray[np.int8]:
    """0 finite, 1 +inf, 2 -inf, 3 NaN."""
    kinds = np.zeros(values.shape, np.int8)
    kinds[np.isposinf(values)] = 1
    kinds[np.isneginf(values)] = 2
    kinds[np.isnan(values)] = 3
    return kinds


def shape(name: str, got: Array | None, want: tuple[int, ...], dtype: type = np.float32) -> Check:
    """``got`` is an array of ``dtype`` and of shape ``want``."""
    if not isinstance(got, np.ndarray):
        return exactly(f"{name}.shape", 1, Verdict.FAIL_SHAPE, f"is {type(got).__name__}, not an array")
    fine = got.shape == want and got.dtype == np.dtype(dtype)
    detail = f"{got.dtype} {list(got.shape)} instead of {np.dtype(dtype)} {list(want)}"
    return exactly(f"{name}.shape", int(not fine), Verdict.FAIL_SHAPE, detail)


def finite(name: str, got: Array, want: Array) -> Check:
    """NaN and infinities stand exactly where the golden has them, and the golden has no NaN."""
    mine, golden = _kind(got), _kind(want)
    wrong = np.flatnonzero((mine != golden) | (golden == 3))
    detail = ""
    if wrong.size:
        at = int(wrong[0])
        detail = (
            f"{wrong.size} of {got.size} elements, first at {_place(got, at)}: "
            f"got {got.reshape(-1)[at]}, golden {want.reshape(-1)[at]}"
        )
    return exactly(f"{name}.finite", int(wrong.size), Verdict.FAIL_NONFINITE, detail)


def difference(got: Array, want: Array) -> npt.NDArray[np.float64]:
    """|got - want| in float64; equal infinities differ by 0, and what cannot be compared is infinitely far."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(got.astype(np.float64) - want.astype(np.float64))
    apart[_kind(got) != _kind(want)] = np.inf
    apart[np.isnan(apart)] = 0.0
    apart[np.isnan(want)] = np.inf
    return apart


def worst(got: Array, want: Array, allowed: float) -> tuple[tuple[int, ...], int, str]:
    """Index of the element furthest off, how many are beyond ``allowed``, and both as a sentence."""
    apart = difference(got, want)
    at = int(np.argmax(apart))
    beyond = int((apart > allowed).sum())
    index = tuple(int(i) for i in np.unravel_index(at, apart.shape))
    sentence = (
        f"{beyond} of {apart.size} elements beyond {allowed:.3g}, worst at {_place(apart, at)}: "
        f"got {got.reshape(-1)[at]:.9g}, golden {want.reshape(-1)[at]:.9g}, off by {apart.reshape(-1)[at]:.3g}"
    )
    return index, beyond, sentence


def max_abs(name: str, got: Array, want: Array, tolerance: float) -> Check:
    """The greatest difference is within ``tolerance``."""
    check = Check(f"{name}.max_abs", float(difference(got, want).max()), tolerance, Verdict.FAIL_LOGITS)
    return check if check.ok else replace(check, detail=worst(got, want, tolerance)[2])


def tensor(name: str, got: Array, want: Array, tolerance: float) -> list[Check]:
    """Shape, finite and max_abs; the later ones only where the earlier hold."""
    checks = [shape(name, got, want.shape)]
    if checks[-1].ok:
        checks.append(finite(name, got, want))
    if checks[-1].ok:
        checks.append(max_abs(name, got, want, tolerance))
    return checks


def log_softmax(rows: Array) -> npt.NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def logits(got: Array, want: Array, tolerance: float) -> list[Check]:
    """Every metric of [rows, V] logits; ``shape`` and ``finite`` alone when they do not hold.

    With |got - want| <= t everywhere: KL <= t^2 / 2 (Hoeffding's lemma on a range of 2t). The mean square is asked to
    be within (t * RMS_SHARE)^2, relative to that of the golden.
    """
    checks = tensor("logits", got, want, tolerance)
    if len(checks) < 3:
        return checks
    apart = difference(got, want)
    power = float((want**2).mean())
    nmse = float((apart**2).mean()) / power if power else np.inf
    p, q = log_softmax(want), log_softmax(got)
    divergence = float(np.abs((np.exp(p) * (p - q)).sum(axis=-1)).max())
    flipped = np.flatnonzero(got.argmax(axis=-1) != want.argmax(axis=-1))
    allowed = (tolerance * RMS_SHARE) ** 2 / power if power else 0.0
    least = float(np.abs(want).max(axis=-1).min())
    checks += [
        Check("logits.nmse", nmse, allowed, Verdict.FAIL_LOGITS),
        Check("logits.kl", divergence, max(tolerance**2 / 2, KL_FLOOR), Verdict.FAIL_LOGITS),
        exactly(
            "logits.top1", flipped.size, Verdict.FAIL_LOGITS, f"another token leads in rows {flipped[:8].tolist()}"
        ),
        Check(
            "logits.scale",
            tolerance / least if least else np.inf,
            SCALE_SHARE,
            Verdict.FAIL_LOGITS,
            f"the tolerance {tolerance:.3g} is too near the golden's largest value {least:.3g}: zeros could pass",
        ),
    ]
    return checks


def bits(name: str, got: Array, want: Array, what: str = "") -> Check:
    """Equal in every bit: signs of zeros and payloads of NaN count."""
    if got.shape != want.shape or got.dtype != want.dtype:
        detail = f"{got.dtype} {list(got.shape)} against {want.dtype} {list(want.shape)}"
        return exactly(name, 1, Verdict.FAIL_BITWISE, detail)
    unsigned = f"u{got.dtype.itemsize}"
    mine, other = np.ascontiguousarray(got).view(unsigned), np.ascontiguousarray(want).view(unsigned)
    wrong = np.flatnonzero(mine != other)
    detail = ""
    if wrong.size:
        at = int(wrong[0])
        a, b = got.reshape(-1)[at], want.reshape(-1)[at]
        detail = (
            f"{what + ': ' if what else ''}{wrong.size} of {got.size} elements differ in bits, first at "
            f"{_place(got, at)}: {a:.9g} (0x{int(mine.reshape(-1)[at]):08x}) against {b:.9g} "
            f"(0x{int(other.reshape(-1)[at]):08x})"
        )
    return exactly(name, int(wrong.size), Verdict.FAIL_BITWISE, detail)
