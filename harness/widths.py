"""Verify of every width against AR: a tree's rows have the bits that stepping along their paths gives.

A trie of random continuations of the golden context is stepped once, path by path. Then, for every width M, a random
tree of M rows over that trie (siblings may repeat) is verified, and every row is compared with what AR gave for its
path. After some widths a random row's path is committed and decoding steps on from it.
"""

from __future__ import annotations

import numpy as np

from harness.cells import Check, Verdict
from harness.compare import bits, exactly
from harness.golden import Golden
from harness.protocol import F32, Session

MAX_ROWS = 65  # a budget of 64 and the root
PATHS = 6
DEPTH = 8
COMMIT_EVERY = 8

Prefix = tuple[int, ...]


def _trie(
    session: Session, context: Prefix, root: int, depth: int, rng: np.random.Generator, vocab: int
) -> dict[Prefix, F32]:
    """AR logits [V] after ``context + prefix`` for every prefix of the random paths; the paths share beginnings."""
    known: dict[Prefix, F32] = {}
    paths: list[Prefix] = []
    for _ in range(PATHS):
        shared = paths[rng.integers(len(paths))][: rng.integers(depth + 1)] if paths else ()
        path = (*shared, *rng.integers(vocab, size=depth - len(shared)).tolist())
        paths.append(path)
        session.reset()
        session.prefill(context)
        for length in range(depth + 1):
            known[path[:length]] = session.step(path[length - 1] if length else root).copy()
    return known


def _grow(children: dict[Prefix, list[Prefix]], width: int, rng: np.random.Generator) -> tuple[list[Prefix], list[int]]:
    """A random tree of ``width`` rows: the path of each row, and its parent's row."""
    rows: list[Prefix] = [()]
    parents = [-1]
    open_rows = [0] if children[()] else []
    while len(rows) < width:
        parent = open_rows[rng.integers(len(open_rows))]
        options = children[rows[parent]]
        rows.append(options[rng.integers(len(options))])
        parents.append(parent)
        if children[rows[-1]]:
            open_rows.append(len(rows) - 1)
    return rows, parents


def check_widths(session: Session, golden: Golden, seed: int) -> Check:
    """One check over all widths 1..65 (1 where the context ends at the root); the value counts wrong rows."""
    rng = np.random.default_rng(seed)
    committed = int(rng.integers(len(golden.tokens)))
    context, root = (*golden.prompt, *golden.tokens[:committed]), golden.tokens[committed]
    depth = min(DEPTH, golden.field("max_context") - len(context) - 1)  # the root needs one position
    widest = MAX_ROWS if depth > 0 else 1
    known = _trie(session, context, root, depth, rng, golden.field("vocab_size"))
    children: dict[Prefix, list[Prefix]] = {prefix: [] for prefix in known}
    for prefix in known:
        if prefix:
            children[prefix[:-1]].append(prefix)
    wrong, detail, compared = 0, "", 0
    session.reset()
    session.prefill(context)
    for width in range(1, widest + 1):
        rows, parents = _grow(children, width, rng)
        tokens = [root, *(path[-1] for path in rows[1:])]
        logits = session.verify(tokens, parents)
        results = [(f"width {width}, row {row}, path {list(path)}", logits[row], path) for row, path in enumerate(rows)]
        inner = [row for row, path in enumerate(rows) if children[path]]
        if width % COMMIT_EVERY == 0 and inner:
            row = inner[rng.integers(len(inner))]
            child = children[rows[row]][0]
            session.commit(_ancestors(parents, row))
            results.append((f"step after commit of row {row} at width {width}", session.step(child[-1]), child))
            session.reset()
            session.prefill(context)
        for what, got, path in results:
            check = bits("widths", got, known[path], what)
            compared += 1
            wrong += not check.ok
            detail = detail or check.detail
    return exactly("widths", wrong, Verdict.FAIL_BITWISE, f"{wrong} of {compared} rows are not AR's; {detail}")


def _ancestors(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
