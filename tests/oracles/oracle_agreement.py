"""When two runs of one model agree, how far apart they may be, and what a near-tie is.

The noise of a case is what transformers' float32 differs from its float64, over the rows before the two first choose
different experts. A float32 engine may differ from float64 by `FLOAT32` times that; the float64 reference by the noise
scaled from float32's unit roundoff to float64's, times `FLOAT64`. A different expert or token is forgiven only as a
*near-tie*: when float64 puts the two candidates no further apart than the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle_models import Run

from refs.config import ModelConfig

FLOAT32 = 4.0  # over 200 models csrc/ on a CPU reached 1.97, transformers itself is 1 by definition
FLOAT64 = 8.0  # the reference reached 3.14
ROUNDOFF = 2.0**-24  # float32's; float64's is 2^-53
NARROW = 2.0**-29  # from float32's to float64's


class Disagreement(AssertionError):
    """Two runs differ by more than noise explains."""


@dataclass(frozen=True)
class Noise:
    """The greatest difference of transformers' float32 from its float64, never taken below a few roundoffs."""

    logits: float
    scores: float
    weights: float

    @staticmethod
    def of(narrow: Run, exact: Run) -> Noise:
        """From the two runs of transformers over the same tokens."""
        rows = _first_difference(narrow, exact)

        def worst(a: Sequence[Any], b: Sequence[Any]) -> float:
            floor = max((4 * ROUNDOFF * float(np.abs(y).max()) for y in b), default=0.0)
            return max([floor, *(float(np.abs(x[:rows] - y[:rows]).max(initial=0)) for x, y in zip(a, b, strict=True))])

        return Noise(
            worst([narrow.logits], [exact.logits]),
            worst(narrow.scores, exact.scores),
            worst(narrow.weights, exact.weights),
        )

    def times(self, factor: float) -> Noise:
        """As tolerances."""
        return Noise(self.logits * factor, self.scores * factor, self.weights * factor)


def _first_difference(one: Run, other: Run) -> int:
    """The first row in which a layer chooses other experts; all rows if none does."""
    rows = [np.flatnonzero((a != b).any(axis=1)) for a, b in zip(one.ids, other.ids, strict=True)]
    return min((int(r[0]) for r in rows if r.size), default=one.logits.shape[0])


def taps_run(taps: Mapping[str, Any], config: ModelConfig) -> Run:
    """A run from an engine's or the reference's taps (harness/protocol.py); experts sorted by id, as in `Run`."""
    layers = range(config.first_k_dense, config.num_layers)
    ids = [np.asarray(taps[f"layers.{i}.moe.ids"]).astype(np.int64) for i in layers]
    weights = [np.asarray(taps[f"layers.{i}.moe.weights"], np.float64) for i in layers]
    order = [np.argsort(i, axis=1) for i in ids]
    return Run(
        np.asarray(taps["logits"], np.float64),
        tuple(np.take_along_axis(i, o, axis=1) for i, o in zip(ids, order, strict=True)),
        tuple(np.take_along_axis(w, o, axis=1) for w, o in zip(weights, order, strict=True)),
    )


@dataclass(frozen=True)
class Agreement:
    """How well a run agrees: the worst difference over the tolerance; whether a near-tie cut the comparison short."""

    ratio: float
    near_tie: bool


def agree(got: Run, exact: Run, allowed: Noise, config: ModelConfig) -> Agreement:
    """Compare a run with transformers' float64; `Disagreement` says where it is off."""
    pairs = [("logits", got.logits, exact.logits, allowed.logits)]
    for i, (a, b) in enumerate(zip(got.weights, exact.weights, strict=True)):
        pairs.append((f"weights of MoE layer {i}", a, b, allowed.weights))
    for what, a, b, _ in pairs:
        if a.shape != b.shape or not np.isfinite(a).all():
            raise Disagreement(f"{what}: shape {a.shape} for {b.shape}, or not finite")
    rows = _first_difference(got, exact)
    if rows < exact.logits.shape[0]:
        _require_near_tie(got, exact, rows, allowed.scores, config)
    worst = 0.0
    for what, a, b, limit in pairs:
        off = np.abs(a[:rows] - b[:rows])
        if off.size and float(off.max()) > limit:
            at = np.unravel_index(int(off.argmax()), off.shape)
            raise Disagreement(f"{what}{[int(i) for i in at]}: {a[at]!r}, transformers {b[at]!r}, allowed {limit:.3g}")
        worst = max(worst, float(off.max(initial=0)) / limit)
    return Agreement(worst, rows < exact.logits.shape[0])


def _require_near_tie(got: Run, exact: Run, row: int, limit: float, config: ModelConfig) -> None:
    layer = next(i for i, (a, b) in enumerate(zip(got.ids, exact.ids, strict=True)) if (a[row] != b[row]).any())
    scores = exact.scores[layer][row]
    gap = router_margin(scores, config)
    if gap > 2 * limit:
        ours, theirs = got.ids[layer][row].tolist(), exact.ids[layer][row].tolist()
        text = f"experts of MoE layer {layer}, row {row}: {ours}, transformers {theirs}"
        raise Disagreement(f"{text}, margin {gap:.3g}, near-ties end at {2 * limit:.3g}")


def router_margin(scores: Any, config: ModelConfig) -> float:
    """How much the biased scores [E] of one row can move before another expert or group is chosen."""
    groups = scores.reshape(config.n_group, -1)
    gaps = []
    open_scores = scores
    if config.n_group > 1:
        best_two = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        order = np.argsort(-best_two)
        if config.topk_group < config.n_group:
            gaps.append(best_two[order[config.topk_group - 1]] - best_two[order[config.topk_group]])
        open_scores = groups[order[: config.topk_group]].reshape(-1)
    ranked = np.sort(open_scores)[::-1]
    if len(ranked) > config.num_experts_per_tok:
        gaps.append(ranked[config.num_experts_per_tok - 1] - ranked[config.num_experts_per_tok])
    return float(min(gaps, default=np.inf))


def same_tokens(got: Sequence[int], want: Sequence[int], exact: Run, prompt: int, limit: float) -> bool:
    """Whether two greedy continuations are equal; False for a certified near-tie, `Disagreement` otherwise.

    ``exact`` ran over the prompt and ``want``, so that its row prompt-1+i decides token i.
    """
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            row = exact.logits[prompt - 1 + i]
            gap = abs(float(row[a] - row[b]))
            if gap > 2 * limit or max(row[a], row[b]) < row.max() - 2 * limit:
                raise Disagreement(
                    f"token {i}: {a}, transformers {b}, {gap:.3g} apart, near-ties end at {2 * limit:.3g}"
                )
            return False
    return True
