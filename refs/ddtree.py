"""Draft trees: best-first build and greedy accept (docs/model.md, Decoding; Ringel and Romano, arXiv 2604.12989)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refs.elementary import F32, exp32, lse32
from refs.errors import DrafterError


@dataclass(frozen=True)
class Tree:
    """Rows of a verify step in order: row 0 is the root (the bonus), a parent's row is lower than its child's."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """-1 for the root."""
    depths: tuple[int, ...]
    scores: tuple[float, ...]
    """Sum of the log-probabilities from the root, float64 from float32."""

    @property
    def size(self) -> int:
        return len(self.tokens)


def ranked(row: F32, k: int) -> tuple[list[int], list[float]]:
    """The ``k`` best tokens of one depth, ties to the lowest id, with their log-probabilities; none that is -inf."""
    if np.isnan(row).any() or (row == np.inf).any():
        raise DrafterError("a draft logit is NaN or +inf")
    order = [int(t) for t in np.argsort(-row, kind="stable")[:k] if row[t] > -np.inf]
    return order, (row[order] - lse32(row)).astype(np.float64).tolist() if order else []


def build(bonus: int, draft: F32, budget: int, *, chain: bool = False) -> Tree:
    """The tree of at most ``budget`` nodes below ``bonus`` from draft logits [depths, V], best first.

    ``chain``: only the best token of each depth, which is what a drafter without a tree proposes.
    """
    best = [ranked(row, min(1 if chain else budget, draft.shape[1])) for row in draft] if budget else []
    tokens, parents, depths, scores = [bonus], [-1], [0], [0.0]
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, ranks from the root, parent's row)

    def push(ranks: tuple[int, ...], parent: int) -> None:
        depth = len(ranks) - 1
        if depth < len(best) and ranks[-1] < len(best[depth][0]):
            heapq.heappush(heap, (-(scores[parent] + best[depth][1][ranks[-1]]), ranks, parent))

    push((0,), 0)
    while heap and len(tokens) <= budget:
        score, ranks, parent = heapq.heappop(heap)
        row, depth = len(tokens), len(ranks)
        tokens.append(best[depth - 1][0][ranks[-1]])
        parents.append(parent)
        depths.append(depth)
        scores.append(-score)
        push((*ranks[:-1], ranks[-1] + 1), parent)
        push((*ranks, 0), row)
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores))


def cut(tree: Tree, costs: Sequence[float]) -> Tree:
    """The first rows of ``tree``, as many as make expected accepted rows over cost greatest (docs/model.md, Cut).

    ``costs[n]`` is what a forward with n nodes below the root costs, in any unit.
    """
    best, expected, kept = 1.0 / np.float64(costs[0]), 1.0, 1
    for row in range(1, tree.size):
        expected += float(exp32(np.array([tree.scores[row]], np.float32))[0])
        if expected / np.float64(costs[row]) > best:
            best, kept = expected / np.float64(costs[row]), row + 1
    return Tree(tree.tokens[:kept], tree.parents[:kept], tree.depths[:kept], tree.scores[:kept])


def accept(tree: Tree, choices: Sequence[int], eos: int) -> tuple[int, ...]:
    """Rows on the path that the target's choice of every row walks from the root; it ends at EOS."""
    path = [0]
    children = {(p, t): row for row, (p, t) in enumerate(zip(tree.parents, tree.tokens, strict=True)) if row}
    while tree.tokens[path[-1]] != eos:
        child = children.get((path[-1], choices[path[-1]]))
        if child is None:
            break
        path.append(child)
    return tuple(path)


def depth_limit(block_size: int, remaining: int, first: int, rows: int, position: int) -> int:
    """How deep a tree below the bonus at ``position`` may be.

    ``remaining`` tokens may still be committed, the bonus included; the draft table holds ``rows`` rows, the first
    for position ``first``.
    """
    start = position + 1 - first
    available = rows - start if 0 <= start < rows else 0
    return max(0, min(block_size - 1, remaining - 1, available))
