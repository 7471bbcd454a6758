"""Stages behind the prefill, on a session that adds up tokens: what each of them says of one number that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.cells import Divergence
from harness.checks import SAMPLING_TEMPERATURE
from harness.protocol import Decoded, Round
from harness.trace import steps
from harness.widths import ancestors

Rows = npt.NDArray[np.float32]
ODD = 13
"""The token whose row a session may get wrong."""
LITTLE = 2.0**-10


class Adding:
    """A row's logits are the sum of the tokens up to it and twice that, its cache that sum.

    ``wrong`` names the call that is off by `LITTLE` where a row's token is `ODD`.
    """

    def __init__(self, wrong: str = "", decodes: Sequence[Decoded] = ()) -> None:
        self.wrong, self.decodes = wrong, list(decodes)
        self.asked: list[Any] = []
        self.tokens: list[int] = []
        self.cached: list[float] = []

    def reset(self) -> None:
        self.tokens, self.cached = [], []

    def _off(self, call: str, token: int) -> float:
        return LITTLE if call == self.wrong and token == ODD else 0.0

    def _commit(self, tokens: Sequence[int], call: str) -> Rows:
        rows = []
        for token in tokens:
            self.tokens.append(token)
            total = float(sum(self.tokens))
            self.cached.append(total + self._off(f"cache of {call}", token))
            rows.append([total + self._off(call, token), 2 * total])
        return np.array(rows, np.float32)

    def prefill(self, tokens: Sequence[int]) -> Rows:
        return self._commit(tokens, "prefill")

    def step(self, token: int) -> Rows:
        return self._commit([token], "step")[0]

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Rows:
        self.tree = tokens
        ways = [ancestors(parents, row) for row in range(len(parents))]
        sums = [float(sum(self.tokens) + sum(tokens[row] for row in way)) for way in ways]
        odd = [self._off("verify", token) for token in tokens]
        return np.array([[total + off, 2 * total] for total, off in zip(sums, odd, strict=True)], np.float32)

    def commit(self, path: Sequence[int]) -> None:
        self._commit([self.tree[row] for row in path], "commit")

    def decode(self, request: Any) -> Decoded:
        self.asked.append(request)
        done = self.decodes.pop(0)
        self.reset()
        self._commit((*PROMPT, *done.tokens), "decode")
        return done

    def cache(self, layer: int) -> tuple[Rows, Rows]:
        sums = np.array(self.cached, np.float32)[:, None]
        return sums, sums + layer


PROMPT = (1, 2)
TREE = Round((3, 7, 8), (-1, 0, 0), (0, 2))
LAST = Round((4,), (-1,), (0,))


def golden(tokens: Sequence[int] = (3, 8, 4), rounds: Sequence[Round] = (TREE, LAST), *, rounding: bool = False) -> Any:
    """Whose rounds and drafter's logits are given for every drafter."""
    return SimpleNamespace(
        prompt=PROMPT,
        tokens=tuple(tokens),
        rounding=rounding,
        field={"num_layers": 1, "num_heads": 1, "num_experts_per_tok": 1}.__getitem__,
        rounds=lambda drafter: tuple(rounds),
        draft_logits=lambda: np.zeros((2, 2, 2)),
        tolerance={"draft": 0.5}.__getitem__,
        request=lambda drafter="", **changes: (drafter, changes),
    )


def decoded(tokens: Sequence[int] = (3, 8, 4), rounds: Sequence[Round] = (TREE, LAST), **more: Any) -> Decoded:
    return Decoded(tuple(tokens), len(rounds), "limit", (), rounds=tuple(rounds), **more)


def said(found: Divergence | None) -> tuple[str, tuple[int, ...], str]:
    assert found is not None
    assert found.allowed == 0
    return found.tap, found.index, found.detail


def test_a_step_whose_logits_alone_are_off() -> None:
    straight = golden((3, ODD, 4))
    assert steps.stepping(Adding(), straight) is None  # type: ignore[arg-type]
    tap, index, detail = said(steps.stepping(Adding("step"), straight))  # type: ignore[arg-type]
    assert (tap, index) == ("logits", (0, 0))
    assert detail.startswith("step 2 (position 3), against one prefill of the same tokens, which agrees: logits, row 0")
    tap, index, _ = said(steps.stepping(Adding("cache of step"), straight))  # type: ignore[arg-type]
    assert (tap, index) == ("layers.0.mla.latent", (3, 0))


SECOND = Round((4, 5, ODD), (-1, 0, 1), (0, 1, 2))


@pytest.mark.parametrize("rounding", [False, True])
def test_a_later_round_whose_logits_or_commit_alone_are_off(rounding: bool) -> None:
    """Of the golden rounds, or of the engine's own where it may have chosen otherwise."""
    rounds = golden((3, 8, 4, 5, ODD), (TREE, SECOND))
    if rounding:
        rounds = golden((3, 7), (Round((3,), (-1,), (0,)), Round((7,), (-1,), (0,))), rounding=True)

    def trees(wrong: str) -> Divergence | None:
        session = Adding(wrong, [decoded((3, 8, 4, 5, ODD), (TREE, SECOND))] if rounding else [])
        return steps.trees(session, rounds, "noisy")  # type: ignore[arg-type]

    assert trees("") is None
    tap, index, detail = said(trees("verify"))
    assert (tap, index) == ("logits", (0, 0))
    assert detail.startswith(
        f"verify, round 1, row 2 of 3 (depth 2, token {ODD}, position 6, path 0 > 1 > 2), "
        "against a prefill of its path, which agrees: logits, row 0"
    )
    tap, index, detail = said(trees("cache of commit"))
    assert (tap, index) == ("layers.0.mla.latent", (6, 0))
    assert detail.startswith("commit of rows [0, 1, 2], round 1, whose verify agrees: ")


@pytest.mark.parametrize(
    ("rounds", "place", "text"),
    [
        ([Round((3, 7, 9), TREE.parents, (0, 2))], ("tokens", 0, 2), "9, golden 8 (3 and 3 rows); PATH"),
        ([Round((3, 7), (-1, 0), (0, 1))], ("tokens", 0, 2), "none, golden 8 (2 and 3 rows); PATH"),
        ([Round((3, 7, 8, 9), (-1, 0, 0, 0), (0, 2))], ("tokens", 0, 3), "9, golden none (4 and 3 rows)"),
        ([Round(TREE.tokens, (-1, 0, 1), (0, 2))], ("parents", 0, 2), "1, golden 0 (3 and 3 rows); PATH"),
        ([Round(TREE.tokens, TREE.parents, (0, 1))], ("accepted", 0, 1), "1, golden 2 (2 and 2 rows)"),
        ([Round(TREE.tokens, TREE.parents, (0,))], ("accepted", 0, 1), "none, golden 2 (1 and 2 rows)"),
        ([TREE, Round((5,), (-1,), (0,))], ("tokens", 1, 0), "5, golden 4 (1 and 1 rows); ROOT"),
    ],
)
def test_the_first_row_of_a_round_that_is_another(rounds: list[Round], place: tuple[str, int, int], text: str) -> None:
    found = steps.decoding(Adding(decodes=[decoded(rounds=rounds)]), golden(), "noisy")  # type: ignore[arg-type]
    name, number, row = place
    paths = {"PATH": "0 > 2, tokens [3, 8]", "ROOT": "0, tokens [4]"}
    for key, path in paths.items():
        text = text.replace(key, f"the golden row's path is {path}")
    assert said(found) == (f"rounds.{name}", (number, row), f"round {number}, {name}, row {row}: got {text}")
    assert found is not None
    assert found.count == 1
    for value, word in zip((found.got, found.want), text.replace(",", "").split()[::2], strict=False):
        assert str(value) == ("nan" if word == "none" else f"{float(word)}")


@pytest.mark.parametrize(
    ("tokens", "at", "got", "want"),
    [((3, 9, 4), 1, "9", "8"), ((3, 8), 2, "none", "4"), ((3, 8, 4, 6), 3, "6", "none")],
)
def test_the_first_token_that_is_another(tokens: Sequence[int], at: int, got: str, want: str) -> None:
    for drafter, rounds in (("", []), ("noisy", [TREE])):  # a decode that ended early has fewer rounds
        session = Adding(decodes=[decoded(tokens, rounds)])
        found = steps.decoding(session, golden(), drafter)  # type: ignore[arg-type]
        assert said(found) == ("tokens", (at,), f"token {at} of the decode: got {got}, golden {want}")
    ar, trees = (3, 8, 4), tokens
    for drawn, text in (((ar, trees), f"DDTree {got}, AR {want}"), ((trees, ar), f"DDTree {want}, AR {got}")):
        session = Adding(decodes=[decoded(each, []) for each in drawn])
        found = steps.sampling(session, golden(), "noisy", 5)  # type: ignore[arg-type]
        assert said(found) == ("tokens", (at,), f"token {at} of a sampled decode: {text}")
        changes = {"temperature": SAMPLING_TEMPERATURE, "seed": 5}
        assert session.asked == [("", changes), ("noisy", changes)]
    same = Adding(decodes=[decoded(tokens, [])] * 2)
    assert steps.sampling(same, golden(), "noisy", 5) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("rounding", [False, True])
def test_what_a_decode_leaves_is_what_a_prefill_of_its_tokens_gives(rounding: bool) -> None:
    """Of its own tokens where they may be others than the golden ones."""
    tokens = (3, 8, ODD)
    fixed = golden((3, 8, 4) if rounding else tokens, rounding=rounding)
    logits = np.array([[total, 2 * total] for total in list(accumulate((*PROMPT, *tokens)))[1:]], np.float32)

    def after(logits: Rows | None, wrong: str = "") -> Divergence | None:
        session = Adding(wrong, [decoded(tokens, logits=logits)])
        return steps.decoding(session, fixed, "noisy")  # type: ignore[arg-type]

    assert after(logits) is None
    assert after(None) is None
    off = logits.copy()
    off[2, 1] += LITTLE
    told = "after the whole decode, against one prefill of the same tokens"
    tap, index, detail = said(after(off))
    assert (tap, index) == ("logits", (2, 1))
    assert detail.startswith(f"{told}, by step: logits, row 2, token 1")
    for given in (logits, None):
        tap, index, detail = said(after(given, "cache of decode"))
        assert (tap, index) == ("layers.0.mla.latent", (4, 0))
        assert detail.startswith(f"{told}: layer 0, mla.latent, row 4")


def test_an_own_drafters_logits_are_held_to_the_bundles_bound() -> None:
    def drafted(logits: Rows | None, drafter: str = "dflash") -> Divergence | None:
        session = Adding(decodes=[decoded(draft_logits=logits)])
        return steps.decoding(session, golden(), drafter)  # type: ignore[arg-type]

    fine = np.full((2, 3, 2), 0.5, np.float32)
    fine[:, 2] = 9  # deeper than the golden's
    assert drafted(None) is None
    assert drafted(fine) is None
    fine[1, 1, 0] = 0.75
    assert drafted(fine[:1]) is None, "a round that it does not give"
    assert drafted(fine, "noisy") is None, "not its drafter"
    found = drafted(fine)
    assert found is not None
    assert (found.tap, found.index, found.allowed) == ("draft", (1, 0), 0.5)
    assert found.detail.startswith("round 1 of the drafter, by depth: draft, row 1, token 0: got 0.75, want 0")
