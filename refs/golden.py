"""What the reference computes for one precision of a bundle: AR, the draft tables, every round, noise and margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.ddtree import Tree, accept, build
from refs.decode import Request, choices, drafted, plan, replay
from refs.dflash import Drafter
from refs.drafters import DFLASH, DRAFTERS
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
    drafts: Mapping[str, npt.NDArray[Any]]
    """Recorded drafters: the table, [rows, V] float32; ``dflash``: every round's logits, [rounds, L, V] float64."""
    rounds: Mapping[str, tuple[tuple[Tree, tuple[int, ...]], ...]]
    noise: Mapping[str, float]
    margins: Mapping[str, float]
    ties: Mapping[str, int]
    """How often two scores between which a choice had to be made were exactly equal."""
    decided: npt.NDArray[np.bool_] | None = None
    """bf16: [n+T], the rows whose choices of experts are clear (`refs.golden_bf16`)."""


def emitted(model: Model, recipe: Recipe, prompt: Sequence[int]) -> tuple[tuple[int, ...], dict[str, F]]:
    """AR without EOS, one step after the other: the tokens, and every tap's rows for the prompt and them."""
    run = recipe.run
    parts = [model.taps(prompt, operations=True)]
    out: list[int] = []
    while len(out) < run.max_tokens:
        out.append(choose(parts[-1]["logits"][-1], model.length - 1, run.temperature, run.seed))
        parts.append(model.taps(out[-1:], operations=True, reset=False))
    return tuple(out), {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def compute(
    recipe: Recipe,
    models: Mapping[str, Model],
    precision: str,
    attempt: int,
    prompt: tuple[int, ...],
    unstopped: tuple[int, ...],
    rows: Mapping[str, F],
    eos: int,
) -> Golden:
    """All of one precision's goldens. ``models``: ``exact`` in float64, and one in float32 for each summation;
    ``unstopped`` and ``rows`` as `emitted` gives them.

    `Rejected` if a decision hangs on less than the noise.
    """
    run = recipe.run
    tokens = unstopped[: unstopped.index(eos) + 1] if eos in unstopped else unstopped
    taps = {name: value[: len(prompt) + len(tokens)] for name, value in rows.items()}
    logits = taps["logits"][len(prompt) - 1 :]
    rough = {order: models[order].taps([*prompt, *tokens], operations=True) for order in SUMMATIONS}
    noise, router_noise = _noise(rough, taps)
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
    drafts: dict[str, npt.NDArray[Any]] = dict(draft_tables(recipe, unstopped, precision, attempt))
    rounds = {name: replayed(recipe, table, prompt, tokens, unstopped, eos) for name, table in drafts.items()}
    if DFLASH in run.drafters:
        rounds[DFLASH], drafts[DFLASH] = _dflash(recipe, models["exact"], taps, prompt, tokens, unstopped, eos)
        noise["draft"] = _draft_noise(models, rough, prompt, tokens, rounds[DFLASH], drafts[DFLASH])
        for i, logits_of_draft in enumerate(drafts[DFLASH]):
            _check_order(logits_of_draft, run.budget, MULTIPLE * noise["draft"], f"{precision}: dflash, round {i}")
    return Golden(prompt, unstopped, tokens, logits, taps, drafts, rounds, noise, margins, ties)


def is_stored(tap: str) -> bool:
    """Whether a bundle holds the rows of ``tap``: the residual stream, the cache rows and the logits."""
    cached = tap.endswith((".mla.latent", ".mla.k_rope"))
    return cached or tap in ("embed", "logits") or (tap.endswith(".out") and ".mla." not in tap)


def _noise(rough: Mapping[str, Mapping[str, F]], taps: Mapping[str, F]) -> tuple[dict[str, float], float]:
    """Per stored tap, and for the routers' biased scores, the greatest error of float32 in the worse order."""
    noise: dict[str, float] = {}
    router = 0.0
    for found in rough.values():
        for name, value in found.items():
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


def draft_tables(
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
        if name != DFLASH
    }


def replayed(
    recipe: Recipe,
    table: npt.NDArray[np.float32],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    unstopped: tuple[int, ...],
    eos: int,
) -> tuple[tuple[Tree, tuple[int, ...]], ...]:
    """The rounds of the recipe's DDTree decode, from AR's tokens.

    That the model says the same of the trees is tested (tests/refs/test_decode.py), not recomputed for every bundle.
    """
    run = recipe.run
    request = Request(prompt, run.max_tokens, table, len(prompt) + 1, block_size=run.block_size, budget=run.budget)
    return replay(request, tokens, unstopped, eos)


def _features(drafter: Drafter, taps: Mapping[str, F]) -> F:
    return np.concatenate([taps[f"layers.{layer}.out"] for layer in drafter.config.taps], axis=1)


def _drafter(model: Model) -> Drafter:
    if model.drafter is None:
        raise Rejected("the model has no drafter")
    model.drafter.reset()
    return model.drafter


def _dflash(
    recipe: Recipe,
    model: Model,
    taps: Mapping[str, F],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    unstopped: tuple[int, ...],
    eos: int,
) -> tuple[tuple[tuple[Tree, tuple[int, ...]], ...], F]:
    """As `replayed` with the model's own drafter, whose context comes from AR's taps; and each round's logits."""
    run, drafter = recipe.run, _drafter(model)
    features = _features(drafter, taps)
    request = Request(prompt, run.max_tokens, dflash=True, block_size=run.block_size, budget=run.budget)
    depths = min(run.block_size, drafter.config.block_size) - 1
    out: list[tuple[Tree, tuple[int, ...]]] = []
    every: list[F] = []
    committed = 0
    while committed < len(tokens):
        drafter.extend(features[drafter.length : len(prompt) + committed])
        every.append(drafter.draft(tokens[committed])[:depths])
        tree = plan(request, drafted(request, every[-1], committed), tokens[committed], eos)
        path = accept(tree, choices(tree, unstopped, committed), eos)
        out.append((tree, path))
        committed += len(path)
    return tuple(out), np.stack(every)


def _draft_noise(
    models: Mapping[str, Model],
    rough: Mapping[str, Mapping[str, F]],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    rounds: tuple[tuple[Tree, tuple[int, ...]], ...],
    exact: F,
) -> float:
    """The greatest error of a float32 drafter over float32 taps, in the worse order."""
    worst = 0.0
    for order, taps in rough.items():
        drafter = _drafter(models[order])
        features = _features(drafter, taps)
        committed = 0
        for (_, path), want in zip(rounds, exact, strict=True):
            drafter.extend(features[drafter.length : len(prompt) + committed])
            got = drafter.draft(tokens[committed])[: len(want)].astype(np.float64)
            worst = max(worst, float(np.abs(got - want).max(initial=0.0)))
            committed += len(path)
    return worst


def _check_order(logits: F, budget: int, tolerance: float, where: str) -> None:
    """`Rejected` unless the tree stays the same when every logit moves by ``tolerance``.

    Two nodes' scores differ by the logits of the rows that are not common to their paths, and by the log-sum-exp of
    every depth that only one of them reaches; each may be off by the tolerance. Nodes that did not join are compared
    too, as far as they could have come.
    """
    tree = build(0, logits.astype(np.float32), 2 * budget + 8 if budget else 0)
    paths: list[frozenset[int]] = [frozenset()]
    for row in range(1, tree.size):
        paths.append(paths[tree.parents[row]] | {row})
    for a in range(1, min(budget + 1, tree.size)):
        for b in range(a + 1, tree.size):
            apart = len(paths[a] ^ paths[b]) + abs(tree.depths[a] - tree.depths[b])
            if not tree.scores[a] - tree.scores[b] > apart * tolerance:
                raise Rejected(f"{where}: tree order margin {tree.scores[a] - tree.scores[b]:.2e} between two nodes")
