"""Trees against brute force over all nodes there could be, accept against a walk written out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from refs.ddtree import Tree, accept, build, depth_limit
from refs.elementary import lse32
from refs.errors import DrafterError


def every_node(draft: Any, budget: int) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """All nodes of all depths as (-score, ranks, tokens), sorted: the best ``budget`` are the tree."""
    k = min(budget, draft.shape[1])
    columns = []
    for row in draft:
        order = sorted(range(row.size), key=lambda t: (-row[t], t))[:k]
        columns.append([(t, float(np.float32(row[t] - lse32(row)[0]))) for t in order if row[t] > -np.inf])
    nodes = []
    for depth in range(1, len(columns) + 1):
        for ranks in itertools.product(*(range(len(c)) for c in columns[:depth])):
            score = 0.0
            for column, rank in zip(columns, ranks, strict=False):
                score = score + column[rank][1]
            nodes.append((-score, ranks, tuple(c[r][0] for c, r in zip(columns, ranks, strict=False))))
    return sorted(nodes)[:budget]


def paths(tree: Tree) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for row in range(1, tree.size):
        out.append((*out[tree.parents[row]], tree.tokens[row]))
    return out[1:]


def drafts(vocab: int, depths: int, step: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    table = rng.normal(0, 2, (depths, vocab))
    return (np.rint(table / step) * step if step else table).astype(np.float32)


@pytest.mark.parametrize("step", [0.0, 1.0, 4.0])
@pytest.mark.parametrize(("vocab", "depths"), [(1, 5), (2, 6), (5, 4), (9, 3)])
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 30, 400])
def test_the_tree_is_the_best_nodes_in_order(vocab: int, depths: int, budget: int, step: float) -> None:
    for seed in range(3):
        draft = drafts(vocab, depths, step, seed)
        if seed == 2:
            draft[np.random.default_rng(seed).random(draft.shape) < 0.3] = -np.inf
        tree = build(3, draft, budget)
        want = every_node(draft, budget)
        assert paths(tree) == [tokens for _, _, tokens in want]
        assert list(tree.scores[1:]) == [-score for score, _, _ in want]
        assert tree.depths[1:] == tuple(len(ranks) for _, ranks, _ in want)
        assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.scores[0]) == (3, -1, 0, 0.0)
        assert all(parent < row for row, parent in enumerate(tree.parents))


def test_ties_go_to_the_lowest_token_then_to_the_shallower_path() -> None:
    flat = np.zeros((2, 4), np.float32)
    assert paths(build(0, flat, 9)) == [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    sure = np.full((3, 3), -np.inf, np.float32)
    sure[:, 1] = 2.0  # log-probability exactly 0: parent and child tie, the prefix comes first
    assert paths(build(0, sure, 5)) == [(1,), (1, 1), (1, 1, 1)]


def test_a_depth_of_nothing_ends_the_tree_there() -> None:
    draft = drafts(4, 3, 0.0, 1)
    draft[1] = -np.inf
    assert max(build(0, draft, 50).depths) == 1
    draft[0] = -np.inf
    assert build(0, draft, 50).size == 1
    assert build(0, draft[:0], 50).size == 1


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_a_chain_is_the_best_token_of_each_depth(budget: int) -> None:
    draft = drafts(6, 4, 1.0, 5)
    tree = build(3, draft, budget, chain=True)
    assert tree.tokens == (3, *draft.argmax(axis=1)[:budget].tolist())
    assert tree.parents == tuple(range(-1, min(budget, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_cannot_be_ranked_are_an_error(bad: float) -> None:
    draft = drafts(4, 3, 0.0, 1)
    draft[2, 3] = bad
    with pytest.raises(DrafterError, match="NaN or"):
        build(0, draft, 2)


def test_accept_walks_the_choices() -> None:
    #        0 root(9) -> 1 (5), 2 (6); 1 -> 3 (0), 4 (7); 3 -> 5 (0)
    tree = Tree((9, 5, 6, 0, 7, 0), (-1, 0, 0, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0.0,) * 6)
    assert accept(tree, [5, 0, 0, 0, 0, 0], -1) == (0, 1, 3, 5)  # token 0 is a token like any other
    assert accept(tree, [6, 0, 1, 0, 0, 0], -1) == (0, 2)
    assert accept(tree, [8, 5, 5, 5, 5, 5], -1) == (0,)
    assert accept(tree, [5, 7, 0, 0, 9, 0], -1) == (0, 1, 4)
    assert accept(tree, [5, 0, 0, 0, 0, 0], 0) == (0, 1, 3)  # EOS 0 is committed and ends the path
    assert accept(tree, [5, 0, 0, 0, 0, 0], 5) == (0, 1)
    assert accept(tree, [5, 0, 0, 0, 0, 0], 9) == (0,)


def test_depth_is_limited_by_block_tokens_and_table() -> None:
    assert depth_limit(8, 100, 11, 50, 10) == 7
    assert depth_limit(8, 4, 11, 50, 10) == 3
    assert depth_limit(8, 1, 11, 50, 10) == 0
    assert depth_limit(1, 100, 11, 50, 10) == 0
    assert depth_limit(8, 100, 11, 50, 57) == 3  # rows for positions 58, 59, 60
    assert depth_limit(8, 100, 11, 50, 60) == 0
    assert depth_limit(8, 100, 11, 50, 9) == 0  # the table starts after the position that is asked for first
