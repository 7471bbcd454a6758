"""Verify of every width against AR: a tree's rows have the bits that stepping along their paths gives.

A trie of random continuations of the golden context is stepped once, path by path. Then, for every width M, a random
tree of M rows over that trie (siblings may repeat) is verified, and every row is compared with what AR gave for its
path. After some widths a random row's path is committed and decoding steps on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.cells import Check, Verdict
from harness.compare import bits, exactly
from harness.golden import Golden
from harness.protocol import F32, Session

MAX_ROWS = 65  # a budget of 64 and the root
PATHS, DEPTH = 6, 8
FEW_PATHS, FEW_DEPTH = 3, 4  # where a config names its widths, because each row is dear
COMMIT_EVERY = 8
RANKED_WIDTHS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65)
"""What several ranks are held to: one rank ran all widths, and each forward of several costs exchanges."""

Prefix = tuple[int, ...]


def rows_of(golden: Golden) -> int:
    """Rows that a session needs for the cell's own trees and for these widths."""
    return max(MAX_ROWS, int(golden.meta["run"]["budget"]) + 1)


@dataclass(frozen=True)
class Tree:
    """A tree to verify after ``context``: row 0 is the root."""

    context: Prefix
    paths: list[Prefix]
    """Tokens from below the root to each row; the root's is empty."""
    tokens: list[int]
    parents: list[int]
    commit: int
    """The row whose path is committed afterwards, or -1."""
    child: Prefix
    """The path that steps on from there by one token."""


def _draw_paths(count: int, depth: int, rng: np.random.Generator, vocab: int) -> list[Prefix]:
    """Random paths below the root that share beginnings."""
    paths: list[Prefix] = []
    for _ in range(count):
        shared = paths[rng.integers(len(paths))][: rng.integers(depth + 1)] if paths else ()
        paths.append((*shared, *rng.integers(vocab, size=depth - len(shared)).tolist()))
    return paths


def _step_along(session: Session, context: Prefix, root: int, paths: list[Prefix]) -> dict[Prefix, F32]:
    """AR logits [V] after ``context``, the root and every beginning of ``paths``."""
    known: dict[Prefix, F32] = {}
    for path in paths:
        session.reset()
        session.prefill(context)
        for length in range(len(path) + 1):
            known[path[:length]] = session.step(path[length - 1] if length else root).copy()
    return known


def _grow(children: dict[Prefix, list[Prefix]], width: int, rng: np.random.Generator) -> tuple[list[Prefix], list[int]]:
    """A random tree of ``width`` rows: the path of each row, and its parent's row."""
    rows: list[Prefix] = [()]
    parents = [-1]
    open_rows = [0] if children[()] else []
    for where, which in rng.random((width - 1, 2)).tolist():  # one call: a call for each number costs ten times as much
        parent = open_rows[int(where * len(open_rows))]
        options = children[rows[parent]]
        rows.append(options[int(which * len(options))])
        parents.append(parent)
        if children[rows[-1]]:
            open_rows.append(len(rows) - 1)
    return rows, parents


def draw(golden: Golden, seed: int, *, ranked: bool = False) -> tuple[list[Prefix], list[Tree]]:
    """The random paths below a root of the golden run, and a tree over them for every width 1..65 (or some).

    Where the context ends at the root there is width 1 alone.
    """
    rng = np.random.default_rng(seed)
    committed = int(rng.integers(len(golden.tokens)))
    context, root = (*golden.prompt, *golden.tokens[:committed]), golden.tokens[committed]
    few = tuple(golden.meta["run"].get("widths", ())) or (RANKED_WIDTHS if ranked else ())
    count, most = (FEW_PATHS, FEW_DEPTH) if few else (PATHS, DEPTH)
    depth = min(most, golden.field("max_context") - len(context) - 1)  # the root needs one position
    paths = _draw_paths(count, depth, rng, golden.field("vocab_size"))
    prefixes = dict.fromkeys(path[:length] for path in paths for length in range(depth + 1))
    children: dict[Prefix, list[Prefix]] = {prefix: [] for prefix in prefixes}
    for prefix in prefixes:
        if prefix:
            children[prefix[:-1]].append(prefix)
    trees = []
    for width in (few or range(1, MAX_ROWS + 1)) if depth > 0 else (1,):
        rows, parents = _grow(children, width, rng)
        inner = [row for row, path in enumerate(rows) if children[path]]
        commit = -1
        child: Prefix = ()
        if width % COMMIT_EVERY == 0 and inner:
            commit = inner[rng.integers(len(inner))]
            child = children[rows[commit]][0]
        trees.append(Tree(context, rows, [root, *(path[-1] for path in rows[1:])], parents, commit, child))
    return paths, trees


def check_widths(checks: list[Check], session: Session, golden: Golden, seed: int, *, ranked: bool) -> None:
    """Add one check over all widths, whose value counts wrong rows. If there are some when time runs out, too."""
    paths, trees = draw(golden, seed, ranked=ranked)
    context, root = trees[0].context, trees[0].tokens[0]
    known = _step_along(session, context, root, paths)
    wrong, detail, compared, ended = 0, "", 0, False

    def compare(got: F32, path: Prefix, what: str) -> None:
        nonlocal wrong, detail
        check = bits("widths", got, known[path], what)
        wrong += not check.ok
        detail = detail or check.detail

    try:
        session.reset()
        session.prefill(context)
        for tree in trees:
            width = len(tree.tokens)
            logits = session.verify(tree.tokens, tree.parents)
            compared += width
            if not bits("widths", logits, np.stack([known[path] for path in tree.paths])).ok:  # at once, then each
                for row, path in enumerate(tree.paths):
                    compare(logits[row], path, f"width {width}, row {row}, path {list(path)}")
            if tree.commit >= 0:
                session.commit(ancestors(tree.parents, tree.commit))
                compared += 1
                what = f"step after commit of row {tree.commit} at width {width}"
                compare(session.step(tree.child[-1]), tree.child, what)
                session.reset()
                session.prefill(context)
        ended = True
    finally:
        if ended or wrong:
            said = f"{wrong} of {compared} rows are not AR's; {detail}"
            checks.append(exactly("widths", wrong, Verdict.FAIL_BITWISE, said))


def ancestors(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to ``row``, both included."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
