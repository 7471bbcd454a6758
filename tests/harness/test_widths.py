"""The random trees of `harness.widths`: which widths, depths and commits are tried, and that every row is compared.

The engine here computes nothing: its logits are a hash of the tokens that a row follows, so that a row computed after
any other history, committed or not, has other bits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from harness.cells import Check, Verdict
from harness.golden import Golden
from harness.limit import CellTimeout
from harness.protocol import F32, Session
from harness.widths import Tree, ancestors, check_widths, draw, rows_of

PROMPT, TOKENS, VOCAB = (5, 3, 8), (1, 4, 2, 9, 7, 6), 11


def golden(context: int = 64, budget: int = 5, **run: Any) -> Golden:
    fields = {"max_context": context, "vocab_size": VOCAB}
    found = SimpleNamespace(
        prompt=PROMPT, tokens=TOKENS, meta={"run": {"budget": budget, **run}}, field=lambda name: fields[name]
    )
    return cast(Golden, found)


class Hashed:
    """A session that knows nothing but what was committed; ``change`` sees every verify's logits before they leave."""

    def __init__(self, change: Callable[[F32, int], object] = lambda logits, width: None) -> None:
        self.known: tuple[int, ...] = ()
        self.rows: list[tuple[int, ...]] = []
        self.widths: list[int] = []
        self.commits: list[tuple[int, int, int]] = []
        """Width, rows committed, and the token stepped with after it."""
        self.stepped: set[tuple[int, ...]] = set()
        self.change = change

    def logits(self, tokens: tuple[int, ...]) -> F32:
        return np.frombuffer(hashlib.sha256(repr(tokens).encode()).digest(), np.uint8).astype(np.float32)

    def reset(self) -> None:
        self.known = ()

    def prefill(self, tokens: Sequence[int]) -> F32:
        self.known += tuple(tokens)
        return self.logits(self.known)[None]

    def step(self, token: int) -> F32:
        if self.rows and self.commits and self.commits[-1][2] < 0:
            self.commits[-1] = (*self.commits[-1][:2], token)
        self.known += (token,)
        self.stepped.add(self.known)
        return self.logits(self.known)

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F32:
        self.widths.append(len(tokens))
        self.rows = []
        for token, parent in zip(tokens, parents, strict=True):
            self.rows.append((*(self.rows[parent] if parent >= 0 else self.known), token))
        logits = np.stack([self.logits(row) for row in self.rows])
        self.change(logits, len(tokens))
        return logits

    def commit(self, path: Sequence[int]) -> None:
        self.commits.append((len(self.rows), len(path), -1))
        assert [self.rows[row][: len(self.known) + 1 + i] for i, row in enumerate(path)] == [
            self.rows[path[-1]][: len(self.known) + 1 + i] for i in range(len(path))
        ], "not the rows from the root down"
        self.known = self.rows[path[-1]]


def checked(session: Hashed, given: Golden, *, ranked: bool = False) -> Check:
    checks: list[Check] = []
    check_widths(checks, cast(Session, session), given, 1, ranked=ranked)
    (check,) = checks
    return check


def all_trees(given: Golden, seeds: range) -> list[Tree]:
    return [tree for seed in seeds for tree in draw(given, seed)[1]]


@pytest.mark.parametrize(
    ("given", "ranked", "widths"),
    [
        (golden(), False, [*range(1, 66)]),
        (golden(), True, [1, 2, 3, 5, 8, 16, 17, 33, 64, 65]),
        (golden(widths=[1, 24, 65]), False, [1, 24, 65]),
        (golden(widths=[1, 24, 65]), True, [1, 24, 65]),
        (golden(context=len(PROMPT) + 1), False, [1]),  # there is room for the root alone
        (golden(context=len(PROMPT) + 2), False, [*range(1, 66)]),  # for siblings under it too
    ],
)
def test_which_widths_are_tried(given: Golden, ranked: bool, widths: list[int]) -> None:
    if given.field("max_context") < 20:
        given = cast(Golden, SimpleNamespace(**{**vars(given), "tokens": TOKENS[:1]}))
    session = Hashed()
    check = checked(session, given, ranked=ranked)
    assert (check.ok, check.name, check.verdict) == (True, "widths", Verdict.FAIL_BITWISE)
    assert session.widths == widths


@pytest.mark.parametrize("wrong", [True, False])
def test_rows_that_were_wrong_before_time_ran_out_are_told(wrong: bool) -> None:
    def change(logits: F32, width: int) -> None:
        logits[0, 0] += wrong and width == 3
        if width == 5:
            raise CellTimeout

    checks: list[Check] = []
    with pytest.raises(CellTimeout):
        check_widths(checks, cast(Session, Hashed(change)), golden(), 1, ranked=False)
    assert [check.value for check in checks] == [1] * wrong
    assert all(check.detail.startswith("1 of 10 rows are not AR's; width 3, row 0, ") for check in checks)


def test_a_session_has_room_for_every_tree() -> None:
    assert rows_of(golden(budget=5)) == 65
    assert rows_of(golden(budget=64)) == 65
    assert rows_of(golden(budget=65)) == 66


def test_roots_are_every_token_of_the_golden_run() -> None:
    seen = set()
    for tree in all_trees(golden(widths=[1]), range(80)):
        done = len(tree.context) - len(PROMPT)
        assert tree.context == (*PROMPT, *TOKENS[:done])
        assert tree.tokens == [TOKENS[done]]
        seen.add(done)
    assert seen == set(range(len(TOKENS)))


@pytest.mark.parametrize(
    ("given", "ranked", "count", "depth"),
    [(golden(), False, 6, 8), (golden(), True, 3, 4), (golden(widths=[65]), False, 3, 4)],
)
def test_paths_are_as_many_and_as_deep_as_is_said_and_share_beginnings(
    given: Golden, ranked: bool, count: int, depth: int
) -> None:
    shared: set[int] = set()
    tokens: set[int] = set()
    for seed in range(60):
        paths, _ = draw(given, seed, ranked=ranked)
        assert [len(path) for path in paths] == [depth] * count
        tokens |= {token for path in paths for token in path}
        for one, other in pairwise(paths):
            shared.add(next((i for i in range(depth) if one[i] != other[i]), depth))
    assert tokens == set(range(VOCAB))
    assert shared == set(range(depth + 1))


@pytest.mark.parametrize("left", [0, 1, 3])
def test_the_last_row_of_a_tree_may_have_the_last_position(left: int) -> None:
    """Where the run's own tokens leave ``left`` positions, and the root, which is one of them, may be the last."""
    given = golden(context=len(PROMPT) + len(TOKENS) + left, widths=[65])
    ends = {len(tree.context) + 1 + len(path) for tree in all_trees(given, range(30)) for path in tree.paths}
    assert max(ends) == given.field("max_context")


def test_trees_are_what_they_say_and_grow_everywhere() -> None:
    """Rows follow their parents, any row that can have children gets some, and siblings repeat now and then."""
    depths: Counter[int] = Counter()
    repeated = chained = 0
    beginnings: set[tuple[int, tuple[int, ...]]] = set()
    tried: set[tuple[int, tuple[int, ...]]] = set()
    for seed in range(20):
        paths, trees = draw(golden(), seed)
        known = {path[:length] for path in paths for length in range(len(path) + 1)}
        beginnings |= {(seed, path) for path in known}
        for tree in trees:
            assert (tree.paths[0], tree.parents[0]) == ((), -1)
            for row, (path, parent, token) in enumerate(zip(tree.paths, tree.parents, tree.tokens, strict=True)):
                assert path in known
                assert row == 0 or (0 <= parent < row and path == (*tree.paths[parent], token))
            tried |= {(seed, path) for path in tree.paths}
            repeated += len(set(tree.paths)) < len(tree.paths)
            depths.update(map(len, tree.paths))
            chained += sum(parent == row - 1 for row, parent in enumerate(tree.parents) if row)
    assert tried <= beginnings
    assert len(tried) > 0.9 * len(beginnings), "hardly a beginning of a path is in no tree"
    assert set(depths) == set(range(9))
    assert 0.8 < repeated / (65 * 20) < 1
    assert 200 < chained / 20 < 400, "of 2,080 rows below a root"


def test_commits_are_after_every_eighth_width_from_any_row_with_a_child() -> None:
    """In all depths, from the root's own row to a path of which one token is left."""
    lengths: Counter[int] = Counter()
    for tree in all_trees(golden(), range(20)):
        assert (tree.commit >= 0) is (len(tree.tokens) % 8 == 0)
        if tree.commit >= 0:
            assert tree.child[:-1] == tree.paths[tree.commit]
            lengths[len(tree.paths[tree.commit])] += 1
        else:
            assert (tree.commit, tree.child) == (-1, ())
    assert set(lengths) == set(range(8))
    session = Hashed()
    assert checked(session, golden()).ok
    assert [width for width, _, _ in session.commits] == list(range(8, 65, 8))
    assert all(token >= 0 for _, _, token in session.commits), "decoding steps on from what was committed"


def test_ancestors_lead_from_the_root() -> None:
    parents = [-1, 0, 0, 1, 3, 2]
    assert [ancestors(parents, row) for row in (0, 1, 4, 5)] == [[0], [0, 1], [0, 1, 3, 4], [0, 2, 5]]


@pytest.mark.parametrize(("width", "row"), [(1, 0), (2, 1), (24, 0), (24, 17), (64, 63), (65, 64)])
def test_one_wrong_bit_of_one_row_is_found_and_named(width: int, row: int) -> None:
    def change(logits: F32, here: int) -> None:
        if here == width:
            logits[row, -1] = np.nextafter(logits[row, -1], np.float32(1e9))

    check = checked(Hashed(change), golden())
    assert (check.ok, check.value) == (False, 1.0)
    assert f"1 of {sum(range(1, 66)) + 8} rows are not AR's; width {width}, row {row}, path [" in check.detail


def test_wrong_rows_are_counted_and_the_first_is_told() -> None:
    def change(logits: F32, here: int) -> None:
        if here >= 64:
            logits += np.float32(1)

    check = checked(Hashed(change), golden())
    assert check.value == 64 + 65
    assert "; width 64, row 0, path []" in check.detail


def test_a_step_from_a_wrong_cache_is_found_and_named() -> None:
    class Late(Hashed):
        """Commits a row less than it was told to."""

        def commit(self, path: Sequence[int]) -> None:
            super().commit(path)
            self.known = self.known[:-1]

    check = checked(Late(), golden())
    assert check.value == 8
    assert "8 of 2153 rows are not AR's; step after commit of row " in check.detail
    assert "at width 8" in check.detail


def test_what_a_commit_leaves_is_forgotten_before_the_next_tree() -> None:
    class Deaf(Hashed):
        """Does not reset after a commit."""

        def reset(self) -> None:
            if not self.commits:
                super().reset()

    assert checked(Deaf(), golden()).value > 1000


def test_another_seed_tries_other_trees_and_the_same_seed_the_same() -> None:
    assert draw(golden(), 3) == draw(golden(), 3)
    assert draw(golden(), 3) != draw(golden(), 4)
