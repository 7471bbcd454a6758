"""Every operation of an engine that rounds to bf16, held against what it should have made of its own inputs.

Between two honest engines of bf16 numbers wander: one value on the other side of a rounding boundary moves all that
follow. So the reference takes each operation's inputs from the engine's own taps and computes its result in float64
with the roundings of docs/model.md. What is left is one operation's error: f32 against f64, and now and then one
bf16 step. Its mean square is far below that of a rounding left out, truncated or done twice, however deep in the
model the operation stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from harness.cells import Check, Divergence, Verdict
from harness.compare import Array, exactly
from harness.golden import Golden
from harness.trace.taps import order, place, shaped, title
from refs.attention import CHUNK
from refs.exact import bf16_nearest, sigmoid
from refs.golden_bf16 import clearance
from refs.model import Model

BOUND = 2e-7
"""Of a row's mean square error over its mean square, met by SHARE of a tap's rows. A row without a value on the
other side of a boundary is off by 1e-15; one of thousands of inputs, of which a few are, by 1e-9, and by 1e-7 once it
is rounded. Planted faults - roundings left out, done twice, cut off - are at 3e-6 to 3e-5."""
KEPT = 1e-10
"""The same of operations that read nothing but what was stored, so that both sides have the same inputs."""
FROM_STORED = ("embed", "mla.out", "moe.weights", "out")
SHARE = 0.9
"""One step of a row's largest value may exceed the bound, and does in one row of hundreds."""
FREE = 2.5e-6
"""The bound of attention's output in rows with more than one chunk of keys, where roundings of the weights are free:
honest ones are at 1.3e-6, weights left unrounded at 3.4e-6."""
HALF_STEP = 2.0**-11
"""Of 11 bits, which sums of weighted latents may be kept in until they are added up: at most this of a sum is lost."""
CLEAR = 1e-5
"""A choice of experts whose margin is above this does not hang on the last bits of a sigmoid."""


class _Reference(Model):
    """The reference, which also keeps what attention gives before it is rounded, by its tap: [row, head * rank]."""

    def reset(self) -> None:
        super().reset()
        self.unrounded: dict[str, Array] = {}

    def _attend(self, *given: Any) -> Array:
        found, layer = super()._attend(*given), given[4]
        self.unrounded[f"layers.{layer}.mla.o_lat"] = found.reshape(len(found), -1)
        return found


@lru_cache(maxsize=2)
def _model(file: str, precision: str) -> _Reference:
    return _Reference.open(file, precision, rounding=True)


def expected(golden: Golden, tokens: Sequence[int], taps: Mapping[str, Array]) -> Mapping[str, Array]:
    """What every operation of a prefill of ``tokens`` should give, each from the inputs that ``taps`` hold.

    Of attention's output, where docs/model.md leaves a choice, what is nearest to ``taps``.
    """
    model = _model(golden.file.file, golden.precision)
    want = model.taps(tokens, operations=True, given=taps)
    chosen = {tap: _nearest(taps[tap], exact) for tap, exact in model.unrounded.items() if tap in taps}
    return {tap: chosen.get(tap, right) for tap, right in want.items()}


def _nearest(got: Array, exact: Array) -> Array:
    """Of the roundings of all that 11 bits may make of exact sums, the nearest to ``got``."""
    if got.shape != exact.shape:
        return bf16_nearest(exact)
    ends = bf16_nearest(exact * (1 - HALF_STEP)), bf16_nearest(exact * (1 + HALF_STEP))
    return np.clip(got, np.minimum(*ends), np.maximum(*ends))


def operations(
    golden: Golden, tokens: Sequence[int], taps: Mapping[str, Array]
) -> tuple[list[Check], Divergence | None]:
    """One check a kind of operation, over all layers, and the first operation in the order of computation that is
    off."""
    want = expected(golden, tokens, taps)
    worst: dict[str, Check] = {}
    first: Divergence | None = None
    for tap in order(golden):
        if tap not in want:
            continue
        kind = tap.split(".", 2)[2] if tap.startswith("layers.") else tap
        for check in _checks(golden, tap, kind, taps, want[tap]):
            if check.name not in worst or _size(check) > _size(worst[check.name]):
                worst[check.name] = check
            if first is None and not check.ok and tap in taps and taps[tap].shape == want[tap].shape:
                first = _divergence(golden, tap, taps[tap], want[tap], check)
    return list(worst.values()), first


def _size(check: Check) -> float:
    return check.value if np.isfinite(check.value) else np.inf


def _checks(golden: Golden, tap: str, kind: str, taps: Mapping[str, Array], right: Array) -> list[Check]:
    name, got = f"operations.{kind}", taps.get(tap)
    if got is None or got.shape != right.shape:
        told = "no such tap" if got is None else f"shape {list(got.shape)} instead of {list(right.shape)}"
        return [exactly(f"{name}.shape", 1, Verdict.FAIL_SHAPE, f"{title(tap)}: {told}")]
    if kind == "moe.ids":
        return [_choices(golden, tap, got, right, taps[tap.replace("ids", "router_logits")])]
    if kind == "mla.o_lat":
        return [
            _mean_square(name, tap, got[:CHUNK], right[:CHUNK], BOUND),
            *([_mean_square(f"{name}.far", tap, got[CHUNK:], right[CHUNK:], FREE)] if len(got) > CHUNK else []),
        ]
    return [_mean_square(name, tap, got, right, KEPT if kind in FROM_STORED else BOUND)]


def _mean_square(name: str, tap: str, got: Array, want: Array, allowed: float) -> Check:
    if not np.isfinite(got).all():
        return Check(name, np.nan, allowed, Verdict.FAIL_NONFINITE, f"{title(tap)}: NaN or infinite")
    wide = want.astype(np.float64)
    power, apart = (wide**2).mean(axis=1), ((got - wide) ** 2).mean(axis=1)
    errors = np.sort(np.where(apart > 0, apart / np.maximum(power, np.finfo(np.float64).tiny), 0.0))
    error = float(errors[int(np.ceil(SHARE * len(errors))) - 1])
    told = f"{title(tap)}: mean square error {error:.2g} of the mean square, allowed {allowed:.2g}"
    return Check(name, error, allowed, Verdict.FAIL_LOGITS, told if error > allowed else "")


def _choices(golden: Golden, tap: str, got: Array, want: Array, logits: Array) -> Check:
    """The experts are those that follow from the engine's own router logits."""
    model = _model(golden.file.file, golden.precision)
    biased = sigmoid(logits.astype(np.float64)) + model.router_bias(int(tap.split(".")[1]))
    clear = clearance(model.config, biased) > CLEAR
    rows = np.flatnonzero((np.sort(got, axis=1) != np.sort(want, axis=1)).any(axis=1) & clear).tolist()
    told = f"{title(tap)}: rows {rows[:8]} chose experts that their scores do not give"
    return exactly("operations.moe.ids", len(rows), Verdict.FAIL_LOGITS, told)


def _divergence(golden: Golden, tap: str, got: Array, want: Array, check: Check) -> Divergence:
    mine, right = shaped(golden, tap, got), shaped(golden, tap, want)
    apart = np.abs(mine.astype(np.float64) - right)
    apart[~np.isfinite(apart)] = np.inf
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    a, b = float(mine[index]), float(right[index])
    detail = f"{check.sentence}; worst at {place(golden, tap, index)}: got {a:.9g}, from its own inputs {b:.9g}"
    return Divergence(tap, index, a, b, check.allowed, int((apart > 0).sum()), detail)
