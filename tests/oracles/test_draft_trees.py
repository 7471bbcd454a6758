"""Draft trees against a search that tries everything.

The best B nodes are the B first of *all* token sequences, ordered as docs/model.md orders candidates: score descending,
then ranks lexicographically with a prefix first. No heap, no frontier: every sequence is listed and the list sorted.
Log-probabilities come from a second reading of the page's lse, scalar by scalar. refs/ddtree.py must build the
same tree in every bit of its scores; csrc/ must verify the same trees, round by round, and accept the path that its AR
tokens walk. Shown to fail: `test_controls`, with six wrong rules for ties, depth and budget.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle_models as hf
import pytest
from oracle_cases import case

from engine.importer import main
from harness.protocol import DecodeRequest, Draft
from refs import ddtree

f32 = np.float32
Rows = Sequence[Sequence[float]]


def exp32(x: np.float32) -> np.float32:
    if x < f32(-87):
        return f32(0)
    n = np.rint(x * f32(1.44269504))
    r = x - n * f32(0.693359375)
    r = r - n * f32(-2.12194440e-4)
    p = f32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f32(c)
    y = p * (r * r)
    y = y + r
    y = y + f32(1)
    return f32(math.ldexp(float(y), int(n)))


def log32(s: np.float32) -> np.float32:
    mantissa, e = math.frexp(float(s))
    f = f32(mantissa)
    if f < f32(0.707106781186547524):
        e, f = e - 1, f + f
    z = f - f32(1)
    p = f32(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1):
        p = p * z + f32(c)
    for c in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = p * z + f32(c)
    q = z * z
    y = z * q
    y = y * p
    y = y + f32(e) * f32(-2.12194440e-4)
    y = y - f32(0.5) * q
    return (z + y) + f32(e) * f32(0.693359375)


def lse32(row: Sequence[float]) -> np.float32:
    """Of a row shorter than one segment; 256 lanes, folded in halves."""
    values = [f32(v) for v in row]
    m = max(values)
    lanes = [f32(0)] * 256
    for i, v in enumerate(values):
        lanes[i % 256] = lanes[i % 256] + (exp32(v - m) if v > -np.inf else f32(0))
    half = 128
    while half:
        for t in range(half):
            lanes[t] = lanes[t] + lanes[t + half]
        half //= 2
    return m + log32(lanes[0])


Node = tuple[tuple[int, ...], tuple[int, ...], float]  # ranks, tokens, score


def everything(rows: Rows, k: int) -> list[Node]:
    """All sequences that may be in a tree, unordered."""
    ranked: list[list[tuple[int, float]]] = []
    for row in rows:
        order = sorted((t for t in range(len(row)) if row[t] > -np.inf), key=lambda t: (-row[t], t))[:k]
        if not order:
            break
        lse = lse32(row)
        ranked.append([(t, float(f32(row[t]) - lse)) for t in order])
    out: list[Node] = []
    for depth in range(1, len(ranked) + 1):
        for ranks in itertools.product(*(range(len(r)) for r in ranked[:depth])):
            chosen = [ranked[d][rank] for d, rank in enumerate(ranks)]
            score = 0.0
            for _, lp in chosen:
                score = score + lp
            out.append((ranks, tuple(t for t, _ in chosen), score))
    return out


def brute_force(bonus: int, rows: Rows, budget: int) -> ddtree.Tree:
    """The best tree by listing and sorting."""
    nodes = sorted(everything(rows, min(budget, len(rows[0]) if rows else 0)), key=lambda n: (-n[2], n[0]))[:budget]
    row_of = {(): 0} | {ranks: i + 1 for i, (ranks, _, _) in enumerate(nodes)}
    return ddtree.Tree(
        (bonus, *(tokens[-1] for _, tokens, _ in nodes)),
        (-1, *(row_of[ranks[:-1]] for ranks, _, _ in nodes)),
        (0, *(len(ranks) for ranks, _, _ in nodes)),
        (0.0, *(score for _, _, score in nodes)),
    )


def draw(seed: int) -> tuple[list[list[float]], int]:
    """Draft rows and a budget: continuous, tied within a depth, tied across depths, with -inf, with all -inf."""
    r = random.Random(f"tree {seed}")
    vocab, depths = r.randint(1, 6), r.randint(0, 4)
    kind = seed % 6
    rows = []
    for _ in range(depths):
        if kind == 0:
            row = [r.gauss(0, 3) for _ in range(vocab)]
        elif kind in (1, 5):
            row = [float(r.randint(0, 2)) for _ in range(vocab)]
        elif kind == 2:
            row = [1.5] * vocab
        elif kind == 3:
            row = [r.choice([0.0, 1.0, -math.inf]) for _ in range(vocab)]
        else:
            row = [r.choice([0.0, 200.0, -200.0]) for _ in range(vocab)]
        rows.append([float(f32(v)) for v in row])
    if kind == 5 and rows:
        rows = [rows[0]] * len(rows)
    return rows, r.choice([0, 1, 2, 3, 7, 20, 63, 2000])


def built(bonus: int, rows: Rows, budget: int) -> ddtree.Tree:
    return ddtree.build(bonus, np.array(rows, f32).reshape(len(rows), len(rows[0]) if rows else 1), budget)


@pytest.mark.parametrize("seed", range(600))
def test_reference_builds_the_best_tree(seed: int) -> None:
    rows, budget = draw(seed)
    assert built(3, rows, budget) == brute_force(3, rows, budget), (rows, budget)


def test_the_draws_hold_ties() -> None:
    """Within a depth, across depths, and exactly where the budget cuts."""
    at_the_cut = within = 0
    for seed in range(600):
        rows, budget = draw(seed)
        within += any(len(set(row)) < len(row) for row in rows)
        nodes = sorted(everything(rows, min(budget, len(rows[0]) if rows else 0)), key=lambda n: (-n[2], n[0]))
        at_the_cut += 0 < budget < len(nodes) and nodes[budget - 1][2] == nodes[budget][2]
    assert within > 200
    assert at_the_cut > 60


def wrong(
    key: Callable[[Node], Any], *, fewer: int = 0, order: int = 1
) -> Callable[[Rows, int], list[tuple[int, ...]]]:
    """The nodes' tokens that another rule would choose, in its order."""

    def choose(rows: Rows, budget: int) -> list[tuple[int, ...]]:
        flipped = [list(reversed(row)) for row in rows] if order < 0 else rows
        nodes = sorted(everything(flipped, min(budget, len(rows[0]) if rows else 0)), key=key)[: max(0, budget - fewer)]
        top = len(rows[0]) - 1 if rows else 0
        return [tuple(top - t for t in n[1]) if order < 0 else n[1] for n in nodes]

    return choose


CONTROLS = {
    "longer sequences first among equals": wrong(lambda n: (-n[2], -len(n[0]), n[0])),
    "shorter sequences first among equals": wrong(lambda n: (-n[2], len(n[0]), n[0])),
    "later ranks first among equals": wrong(lambda n: (-n[2], tuple(-r for r in n[0]))),
    "highest token first among equal logits": wrong(lambda n: (-n[2], n[0]), order=-1),
    "scores in float32": wrong(lambda n: (-float(f32(n[2])), n[0])),
    "one node fewer": wrong(lambda n: (-n[2], n[0]), fewer=1),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls(name: str) -> None:
    """Each wrong rule is told apart by some draw."""
    for seed in range(600):
        rows, budget = draw(seed)
        best = sorted(everything(rows, min(budget, len(rows[0]) if rows else 0)), key=lambda n: (-n[2], n[0]))[:budget]
        if CONTROLS[name](rows, budget) != [tokens for _, tokens, _ in best]:
            return
    pytest.fail("no draw tells this rule from the right one")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with six tokens."""
    directory = tmp_path_factory.mktemp("tree")
    given = case(0)
    config = given.config | {"vocab_size": 6, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    given = type(given)(**{**vars(given), "config": config, "layout": "deepseek_v3", "dtype": "float32"})
    path = directory / "model.kdtr"
    assert main([str(hf.save(hf.build(given), given, directory / "hf")), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("seed", range(60))
def test_engine_verifies_the_best_trees(seed: int, small_model: Path, csrc: Any) -> None:
    """Every round's rows, parents and accepted path, and the tokens AR decodes, for tied and untied drafts."""
    r = random.Random(f"engine tree {seed}")
    prompt = [r.randrange(6) for _ in range(r.randint(1, 5))]
    max_tokens, block = r.randint(1, 20), r.randint(1, 5)
    budget = r.choice([0, 1, 2, 3, 7, 20, 63])
    table: list[list[float]] = []
    while len(table) < r.randint(1, 22):
        rows, _ = draw(6 * r.randint(0, 10_000) + seed % 6)
        table += [row + [-5.0] * (6 - len(row)) for row in rows]
    first = len(prompt) + 1
    session = csrc.load(small_model, "fp32")
    try:
        ar = session.decode(DecodeRequest(prompt, max_tokens)).tokens
        draft = Draft(np.array(table, f32), first)
        got = session.decode(DecodeRequest(prompt, max_tokens, draft, block_size=block, budget=budget, record=True))
    finally:
        session.close()
    assert got.tokens == ar
    committed = 0
    for one in got.rounds:
        at = committed  # the bonus stands at position len(prompt) + committed; depth 1 is drafted by table[committed]
        depth = max(0, min(block - 1, max_tokens - committed - 1, len(table) - at))
        tree = brute_force(ar[committed], table[at : at + depth], budget)
        assert one.tokens == tree.tokens, (seed, committed)
        assert one.parents == tree.parents, (seed, committed)
        path, row = [0], 0
        for step in range(1, max_tokens - committed):
            children = [i for i, p in enumerate(tree.parents) if p == row and tree.tokens[i] == ar[committed + step]]
            if not children:
                break
            row = children[0]
            path.append(row)
        assert one.accepted == tuple(path), (seed, committed)
        committed += len(path)
    assert committed == max_tokens
