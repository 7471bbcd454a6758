"""What the reference computes for one precision of a bundle: AR, the draft tables, every round, noise and margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.ddtree import Tree, accept
from refs.decode import Request, plan
from refs.drafters import DRAFTERS
from refs.elementary import F
from refs.exact import SUMMATIONS, Draws, sigmoid
from refs.model import Model
from refs.recipe import Recipe
from refs.router import group_scores, open_experts
from refs.sampling import choose, scores

Array = npt.NDArray[Any]
MULTIPLE = 8.0
"""Tolerance over noise. Honest float32 engines differ in the order of their sums and in the last place of exp: measured
over all configs and seven other orders, down to one serial chain per sum, they err by at most 3.5 times the noise, so 8
leaves room. The least of the planted faults, one expert's scale one bf16 step off, exceeds it (tests/refs/test_noise.py
holds both)."""


class Rejected(Exception):
    """This attempt's goldens cannot be used; the text says why. The next attempt draws everything anew."""


@dataclass(frozen=True)
class Golden:
    """One precision's results; T committed tokens."""

    prompt: tuple[int, ...]
    unstopped: tuple[int, ...]
    """max_tokens tokens, as if there were no EOS."""
    tokens: tuple[int, ...]
    logits: F
    """[T+1, V] float64."""
    taps: Mapping[str, F]
    """Every tap of `Model.taps` with operations, [n+T, width] float64."""
    drafts: Mapping[str, npt.NDArray[np.float32]]
    rounds: Mapping[str, tuple[tuple[Tree, tuple[int, ...]], ...]]
    noise: Mapping[str, float]
    margins: Mapping[str, float]
    ties: Mapping[str, int]
    """How often two scores between which a choice had to be made were exactly equal."""


def emitted(model: Model, recipe: Recipe, prompt: Sequence[int]) -> tuple[int, ...]:
    """AR without EOS, one step after the other."""
    run = recipe.run
    model.reset()
    row = model.prefill(prompt)[-1]
    out: list[int] = []
    while True:
        out.append(choose(row, model.length - 1, run.temperature, run.seed))
        if len(out) == run.max_tokens:
            return tuple(out)
        row = model.step(out[-1])


def compute(
    recipe: Recipe,
    models: Mapping[str, Model],
    precision: str,
    attempt: int,
    prompt: tuple[int, ...],
    unstopped: tuple[int, ...],
    eos: int,
) -> Golden:
    """All of one precision's goldens. ``models``: ``exact`` in float64, and one in float32 for each summation.

    `Rejected` if a decision hangs on less than the noise.
    """
    run = recipe.run
    tokens = unstopped[: unstopped.index(eos) + 1] if eos in unstopped else unstopped
    taps = models["exact"].taps([*prompt, *tokens], operations=True)
    logits = taps["logits"][len(prompt) - 1 :]
    noise, router_noise = _noise(models, taps, [*prompt, *tokens])
    margins, ties = _margins(recipe, models["exact"], taps, logits, len(prompt))
    reach = 2 * MULTIPLE  # both sides of a decision may be off by the tolerance
    temper = run.temperature or 1.0
    limits = {"top1": noise["logits"] / temper, "router": router_noise, "group": 2 * router_noise}
    for name, margin in margins.items():
        if not margin > reach * limits[name]:
            raise Rejected(
                f"{precision}: {name} margin {margin:.2e} is within {reach:g} times the noise {limits[name]:.2e}"
            )
    for name, count in ties.items():
        if count and not recipe.exact_ties:
            raise Rejected(f"{precision}: {count} exact ties of {name}")
    drafts = _draft_tables(recipe, unstopped, precision, attempt)
    rounds = {name: _replay(recipe, table, prompt, tokens, unstopped, eos) for name, table in drafts.items()}
    return Golden(prompt, unstopped, tokens, logits, taps, drafts, rounds, noise, margins, ties)


def is_stored(tap: str) -> bool:
    """Whether a bundle holds the rows of ``tap``: the residual stream, the cache rows and the logits."""
    cached = tap.endswith((".mla.latent", ".mla.k_rope"))
    return cached or tap in ("embed", "logits") or (tap.endswith(".out") and ".mla." not in tap)


def _noise(models: Mapping[str, Model], taps: Mapping[str, F], rows: list[int]) -> tuple[dict[str, float], float]:
    """Per stored tap, and for the routers' biased scores, the greatest error of float32 in the worse order."""
    noise: dict[str, float] = {}
    router = 0.0
    for order in SUMMATIONS:
        model = models[order]
        for name, value in model.taps(rows, operations=True).items():
            if name.endswith("moe.ids") and not np.array_equal(value, taps[name]):
                raise Rejected(f"float32 chooses other experts at {name}")
            error = np.abs(value.astype(np.float64) - taps[name])
            if name.endswith("moe.router_logits"):
                router = max(router, float(np.abs(sigmoid(value).astype(np.float64) - sigmoid(taps[name])).max()))
            if is_stored(name):
                noise[name] = max(noise.get(name, 0.0), float(error.max()))
    return noise, router


def _margins(
    recipe: Recipe, model: Model, taps: Mapping[str, F], logits: F, n: int
) -> tuple[dict[str, float], dict[str, int]]:
    """The least distance between what was chosen and what was not; exact ties are counted apart."""
    c, run = model.config, recipe.run
    gaps: dict[str, list[float]] = {"top1": [], "router": [], "group": []}
    for i, row in enumerate(logits[:-1]):  # nothing is chosen after the last one
        top = np.sort(scores(row, n - 1 + i, run.temperature, run.seed), kind="stable")[::-1]
        equal = int(np.count_nonzero(top == top[0]))
        gaps["top1"] += (top[0] - top[1 : equal + 1]).tolist()  # its equals, and the first that is less
    for layer in range(c.first_k_dense, c.num_layers):
        biased = sigmoid(taps[f"layers.{layer}.moe.router_logits"]) + model.router_bias(layer)
        ranked = -np.sort(-open_experts(c, biased), axis=1, kind="stable")[:, : c.num_experts_per_tok + 1]
        steps = ranked[:, :-1] - ranked[:, 1:]
        gaps["router"] += steps[np.isfinite(steps)].tolist()
        if c.topk_group < c.n_group:
            groups = -np.sort(-group_scores(c, biased), axis=1, kind="stable")
            gaps["group"] += (groups[:, c.topk_group - 1] - groups[:, c.topk_group]).tolist()
    margins = {name: min(g for g in found if g > 0) for name, found in gaps.items() if any(g > 0 for g in found)}
    return margins, {name: sum(g == 0 for g in found) for name, found in gaps.items()}


def _draft_tables(
    recipe: Recipe, unstopped: tuple[int, ...], precision: str, attempt: int
) -> dict[str, npt.NDArray[np.float32]]:
    """[rows, V] per drafter, row r for position n+1+r, made around the tokens that follow the first, then any."""
    run = recipe.run
    drafted = (unstopped[1:] or unstopped)[: run.draft_rows or None]
    if run.draft_rows > len(drafted):
        beyond = Draws(recipe.name, attempt, "draft", precision, "beyond")
        drafted += tuple(beyond.below(recipe.model.vocab_size, run.draft_rows - len(drafted)).tolist())
    return {
        name: DRAFTERS[name](
            drafted, recipe.model.vocab_size, Draws(recipe.name, attempt, "draft", precision, name), run.draft_step
        )
        for name in run.drafters
    }


def _replay(
    recipe: Recipe,
    table: npt.NDArray[np.float32],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    unstopped: tuple[int, ...],
    eos: int,
) -> tuple[tuple[Tree, tuple[int, ...]], ...]:
    """The rounds of a DDTree decode, from AR's tokens alone: a row on the accepted path chooses what AR chose there.

    That the model says the same of the trees is tested (tests/refs/test_decode.py), not recomputed for every bundle.
    """
    run = recipe.run
    request = Request(prompt, run.max_tokens, table, len(prompt) + 1, run.block_size, run.budget)
    out: list[tuple[Tree, tuple[int, ...]]] = []
    committed = 0
    while committed < len(tokens):
        tree = plan(request, tokens[committed], committed, eos)
        following = [*unstopped[committed + 1 :], -1]
        # Off the path a row's choice is never asked for, so the one of its depth may stand in.
        path = accept(tree, [following[min(d, len(following) - 1)] for d in tree.depths], eos)
        out.append((tree, path))
        committed += len(path)
    return tuple(out)
