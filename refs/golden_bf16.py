"""What the reference computes for a bf16 precision: goldens in float64 without rounding, and how far roundings move
them.

An engine that rounds as docs/model.md, bf16, says is off by those roundings, and where two experts' scores are
nearer to each other than that it may choose the other one, which moves a row by far more. Rows whose choices are
all clear are *decided*; statistics are over them. What an undecided row does to the rows after it, through
attention, is in the noise: it is measured with every such choice made the other way too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from refs.config import ModelConfig
from refs.elementary import F, exp, log
from refs.exact import SUMMATIONS, sigmoid, softmax, sum_last, top_k, tree_sum
from refs.golden import Golden, Rejected, draft_tables, replayed
from refs.model import Model
from refs.recipe import Recipe
from refs.router import group_scores, open_experts

Mask = npt.NDArray[np.bool_]
MULTIPLE = 4.0
"""Tolerance over noise, for mean squares, KL and the greatest difference of logits alike."""
REACH = 6.0
"""A choice of experts is clear when its margin exceeds so many times the root mean square error of the layer's
scores."""
LEAST_DECIDED = 1 / 3
"""Share of decided rows below which goldens are drawn anew."""


def nmse(got: F, want: F) -> float:
    """Mean square of the difference over that of ``want``; 0 for equal arrays."""
    wide = want.astype(np.float64).reshape(-1)
    apart = got.astype(np.float64).reshape(-1) - wide
    return float(tree_sum(apart * apart) / tree_sum(wide * wide)) if apart.any() else 0.0


def divergence(got: F, want: F) -> F:
    """KL(want || got) of each row of logits [rows, V]."""
    p = softmax(want.astype(np.float64))
    shifted = [x.astype(np.float64) - x.max(axis=-1, keepdims=True) for x in (want, got)]
    q_want, q_got = (x - log(sum_last(exp(x)))[:, None] for x in shifted)
    out: F = sum_last(p * (q_want - q_got))
    return out


def compute(
    recipe: Recipe,
    exact: Model,
    rounded: Mapping[str, Model],
    attempt: int,
    prompt: tuple[int, ...],
    unstopped: tuple[int, ...],
    emitted: Mapping[str, F],
    eos: int,
) -> Golden:
    """All of one bf16 precision's goldens. ``rounded``: models in float32 with roundings, one for each summation;
    ``unstopped`` and ``emitted`` as `refs.golden.emitted` gives them."""
    n, c = len(prompt), exact.config
    tokens = unstopped[: unstopped.index(eos) + 1] if eos in unstopped else unstopped
    rows = [*prompt, *tokens]
    taps = {name: value[: len(rows)] for name, value in emitted.items()}
    logits = taps["logits"][n - 1 :]
    seen = {order: rounded[order].taps(rows, operations=True) for order in SUMMATIONS}
    steady = np.ones(len(rows), np.bool_)
    for layer in range(c.first_k_dense, c.num_layers):
        ids = np.sort(taps[f"layers.{layer}.moe.ids"], axis=1, kind="stable")
        for other in seen.values():
            steady &= (np.sort(other[f"layers.{layer}.moe.ids"], axis=1, kind="stable") == ids).all(axis=1)
    gaps = {layer: clearance(c, _biased(exact, taps, layer)) for layer in range(c.first_k_dense, c.num_layers)}
    reach = {layer: REACH * _score_noise(layer, seen.values(), taps, steady) for layer in gaps}
    decided = steady.copy()
    for layer, gap in gaps.items():
        decided &= gap > reach[layer]
    if np.count_nonzero(decided) < LEAST_DECIDED * len(rows) or not decided[n - 1 :].any():
        raise Rejected(
            f"{exact.precision}: {np.count_nonzero(decided)} of {len(rows)} rows have clear choices of experts"
        )
    if not decided.all() and not recipe.exact_ties:
        other_way = {
            f"layers.{layer}.moe.router_logits": _other_way(exact, taps, layer, gap <= reach[layer])
            for layer, gap in gaps.items()
        }
        seen["other way"] = rounded["tree"].taps(rows, operations=True, given=other_way)
    noise: dict[str, float] = {}
    for other in seen.values():
        _measure(noise, other, taps, decided, n)
    drafts = draft_tables(recipe, unstopped, exact.precision, attempt)
    rounds = {name: replayed(recipe, table, prompt, tokens, unstopped, eos) for name, table in drafts.items()}
    margins = {"router": min((float(gap[decided].min()) for gap in gaps.values()), default=np.inf)}
    margins = {name: value for name, value in margins.items() if np.isfinite(value)}
    return Golden(prompt, unstopped, tokens, logits, taps, drafts, rounds, noise, margins, {}, decided)


def _score_noise(layer: int, seen: Iterable[Mapping[str, F]], taps: Mapping[str, F], rows: Mask) -> float:
    """Root mean square error of the layer's scores over ``rows``, in the worst of what was seen."""
    name = f"layers.{layer}.moe.router_logits"
    scores = sigmoid(taps[name][rows])
    squares = [(sigmoid(other[name][rows].astype(np.float64)) - scores).reshape(-1) ** 2 for other in seen]
    return max(float(np.sqrt(tree_sum(square) / max(scores.size, 1))) for square in squares) if rows.any() else np.inf


def _measure(noise: dict[str, float], got: Mapping[str, F], want: Mapping[str, F], decided: Mask, n: int) -> None:
    """Raise ``noise`` to what ``got`` shows over the decided rows."""

    def raise_to(name: str, value: float) -> None:
        noise[name] = max(noise.get(name, 0.0), value)

    for name, value in want.items():
        if name == "embed" or (name.endswith(".out") and ".mla." not in name):
            raise_to(name, nmse(got[name][decided], value[decided]))
    late = decided.copy()
    late[: n - 1] = False
    a, b = got["logits"][late], want["logits"][late]
    raise_to("logits", float(np.abs(a.astype(np.float64) - b).max()))
    raise_to("logits.nmse", nmse(a, b))
    raise_to("logits.kl", float(np.abs(divergence(a, b)).max()))


def _biased(model: Model, taps: Mapping[str, F], layer: int) -> F:
    biased: F = sigmoid(taps[f"layers.{layer}.moe.router_logits"]) + model.router_bias(layer)
    return biased


def clearance(config: ModelConfig, biased: F) -> F:
    """How far each row [M, E] of biased scores is from another choice of experts, or of groups.

    Equal scores are no danger in themselves (the lowest id wins everywhere), but what stands next to them is.
    """
    ranked = -np.sort(-open_experts(config, biased), axis=1, kind="stable")
    out = _gap(ranked, config.num_experts_per_tok)
    if config.topk_group < config.n_group:
        groups = -np.sort(-group_scores(config, biased), axis=1, kind="stable")
        out = np.minimum(out, _gap(groups, config.topk_group) / 2)  # a group's score is a sum of two
    return out


def _gap(ranked: F, k: int) -> F:
    """Between the k-th of each descending row and the next that is less; and the one above it, where a tie is cut
    at k."""
    last = ranked[:, k - 1 : k]
    below = np.where(ranked < last, last - ranked, np.inf).min(axis=1)
    above = np.where(ranked > last, ranked - last, np.inf).min(axis=1)
    cut = (ranked[:, k] == last[:, 0]) if ranked.shape[1] > k else np.zeros(len(ranked), np.bool_)
    out: F = np.where(cut, np.minimum(below, above), below)
    return out


def _other_way(model: Model, taps: Mapping[str, F], layer: int, rows: Mask) -> F:
    """The layer's router logits, those of ``rows`` moved just so far that the last chosen and the first left out
    swap."""
    k = model.config.num_experts_per_tok
    logits = taps[f"layers.{layer}.moe.router_logits"].copy()
    biased = open_experts(model.config, _biased(model, taps, layer))
    order = top_k(biased, min(k + 1, biased.shape[1]))
    s = sigmoid(logits)
    for row in np.flatnonzero(rows):
        a, b = order[row, k - 1], order[row, -1]
        gap = biased[row, a] - biased[row, b]
        if not np.isfinite(gap) or a == b:
            continue
        step = 1.1 * gap / (s[row, a] * (1 - s[row, a]) + s[row, b] * (1 - s[row, b])) + 1e-9
        logits[row, a] -= step
        logits[row, b] += step
    return logits
