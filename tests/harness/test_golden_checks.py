"""Checks that no wrong engine strikes: the own drafter's logits and kernels, two goldens that are one."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from harness.bundles import ensure
from harness.cells import Check, Divergence, Findings, Verdict
from harness.checks import _kernels
from harness.golden import Golden
from harness.golden_checks import against_golden, draft, rounds
from harness.protocol import Decoded, Engine, Round

F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.open(ensure(["dflash"])["dflash"], "fp32")


@pytest.fixture
def right(golden: Golden) -> Decoded:
    """What an engine without an error gives."""
    taken = golden.rounds("dflash")
    return Decoded(
        tokens=golden.tokens,
        forwards=len(taken),
        stopped="limit",
        accepted_per_round=tuple(len(round.accepted) for round in taken),
        logits=golden.logits.astype(np.float32),
        rounds=taken,
        draft_logits=golden.draft_logits().astype(np.float32),
        prefill_seconds=0.0,
        decode_seconds=0.0,
        round_seconds=(),
    )


def judged(golden: Golden, decoded: Decoded, known: Divergence | None = None) -> Findings:
    found = Findings()
    found.divergence = known
    rounds(found, golden.rounds("dflash"), decoded)
    found.checks.clear()
    draft(found, golden, decoded)
    return found


def off(decoded: Decoded, where: tuple[int, int, int], by: float) -> Decoded:
    assert decoded.draft_logits is not None
    logits = decoded.draft_logits.copy()
    logits[where] += by
    return replace(decoded, draft_logits=logits)


def failed(found: Findings) -> list[Check]:
    return [check for check in found.checks if not check.ok]


def test_the_drafters_own_logits_pass(golden: Golden, right: Decoded) -> None:
    found = judged(golden, right)
    assert [check.name for check in found.checks] == ["draft.shape", "draft.finite", "draft.max_abs"]
    assert failed(found) == []
    assert found.divergence is None
    assert found.checks[-1].allowed == golden.tolerance("draft")


@pytest.mark.parametrize("kind", ["none", "flat", "shallow", "narrow", "wide"])
def test_draft_logits_of_another_shape_are_named(golden: Golden, right: Decoded, kind: str) -> None:
    assert right.draft_logits is not None
    have = right.draft_logits
    given = {
        "none": None,
        "flat": have[0],
        "shallow": have[:, :-1],
        "narrow": have[:, :, :-1],
        "wide": np.concatenate([have, have], axis=2),
    }[kind]
    (check,) = judged(golden, replace(right, draft_logits=given)).checks
    assert (check.name, check.verdict, check.ok) == ("draft.shape", Verdict.FAIL_SHAPE, False)
    assert str(None if given is None else given.shape) in check.detail
    assert str(have.shape) in check.detail


def test_depths_beyond_the_bundles_are_left_out(golden: Golden, right: Decoded) -> None:
    assert right.draft_logits is not None
    deeper = np.concatenate([right.draft_logits, np.full_like(right.draft_logits, np.nan)], axis=1)
    assert failed(judged(golden, replace(right, draft_logits=deeper))) == []


def test_the_first_wrong_draft_logit_is_the_divergence(golden: Golden, right: Decoded) -> None:
    depths, bound = golden.draft_logits().shape[1], golden.tolerance("draft")
    found = judged(golden, off(right, (2, 1, 5), 3 * bound))
    (check,) = failed(found)
    assert (check.name, check.verdict) == ("draft.max_abs", Verdict.FAIL_LOGITS)
    assert found.divergence is not None
    assert (found.divergence.tap, tuple(found.divergence.index)) == ("draft", (2 * depths + 1, 5))
    earlier = Divergence("embed", (0,), 0.0, 1.0, 0.1, 1, "before it")
    assert judged(golden, off(right, (2, 1, 5), 3 * bound), earlier).divergence == earlier


def test_rounds_of_another_history_are_left_out(golden: Golden, right: Decoded) -> None:
    """The round in which another number of rows is accepted still had the golden's; those after it had not."""
    counts = right.accepted_per_round
    other = Round(right.rounds[2].tokens, right.rounds[2].parents, right.rounds[2].accepted[:0])
    parted = replace(
        right,
        rounds=(*right.rounds[:2], other, *right.rounds[3:]),
        accepted_per_round=(*counts[:2], counts[2] + 1, *counts[3:]),
    )
    bound = golden.tolerance("draft")
    assert failed(judged(golden, off(parted, (3, 0, 0), 9 * bound))) == []
    assert [check.name for check in failed(judged(golden, off(parted, (2, 0, 0), 9 * bound)))] == ["draft.max_abs"]


def test_every_round_has_to_show_what_was_drafted(golden: Golden, right: Decoded) -> None:
    assert right.draft_logits is not None
    for kept in range(len(right.draft_logits)):
        (check,) = failed(judged(golden, replace(right, draft_logits=right.draft_logits[:kept])))
        assert (check.name, check.verdict) == ("draft.shape", Verdict.FAIL_SHAPE)


def held(golden: Golden, decoded: Decoded) -> Findings:
    found = Findings()
    against_golden(found, golden, decoded)
    return found


def test_a_token_more_or_less_is_a_wrong_token(golden: Golden, right: Decoded) -> None:
    assert right.logits is not None
    assert failed(held(golden, right)) == []
    longer = replace(right, tokens=(*right.tokens, 5), logits=np.concatenate([right.logits, right.logits[-1:]]))
    shorter = replace(right, tokens=right.tokens[:-1], logits=right.logits[:-1])
    for decoded in (longer, shorter):
        (check,) = failed(held(golden, decoded))
        assert (check.name, check.verdict, check.value) == ("tokens", Verdict.FAIL_TOKENS, 1)
    other = replace(right, tokens=(*right.tokens[:2], right.tokens[2] + 1, *right.tokens[3:]))
    (check,) = failed(held(golden, other))
    assert (check.name, check.value) == ("tokens", len(right.tokens) - 2)


def test_one_token_over_and_over_is_said(golden: Golden, right: Decoded) -> None:
    again = replace(right, tokens=right.tokens[:1] * len(right.tokens))
    assert [check.name for check in failed(held(golden, again))] == ["degenerate", "tokens"]
    assert right.logits is not None
    once = replace(right, tokens=right.tokens[:1], logits=right.logits[:2])
    assert [check.name for check in failed(held(golden, once))] == ["tokens"]


def test_the_first_wrong_logit_is_the_divergence_and_errors_are_by_step(golden: Golden, right: Decoded) -> None:
    assert right.logits is not None
    assert held(golden, right).divergence is None
    bound, logits = golden.tolerance("logits"), right.logits.copy()
    logits[2, 7] += 9 * bound
    found = held(golden, replace(right, logits=logits))
    assert {check.verdict for check in failed(found)} == {Verdict.FAIL_LOGITS}
    assert found.divergence is not None
    assert (found.divergence.tap, tuple(found.divergence.index)) == ("logits", (2, 7))
    assert found.divergence.detail.startswith("step 2: ")
    assert [round(error / bound) for error in found.step_errors] == [0, 0, 9, *[0] * (len(logits) - 3)]


class Ended(Golden):
    """Whose last token is the end token."""

    def field(self, name: str) -> int:
        return self.tokens[-1] if name == "eos_id" else super().field(name)


@pytest.mark.parametrize(("kind", "stops"), [(Golden, "limit"), (Ended, "eos")])
def test_how_a_decode_ends(golden: Golden, right: Decoded, kind: type[Golden], stops: str) -> None:
    judge = kind(golden.file, golden.precision, golden.meta)
    for said in ("limit", "eos"):
        names = [check.name for check in failed(held(judge, replace(right, stopped=said)))]
        assert names == ([] if said == stops else ["stopped"])


def test_the_first_unlike_round_is_told(right: Decoded) -> None:
    want = right.rounds

    def changed(round: Round, row: int, tokens: int, parent: int) -> Round:
        edited, parents = list(round.tokens), list(round.parents)
        edited[row] += tokens
        parents[1] += parent
        return Round(tuple(edited), tuple(parents), round.accepted)

    first, second = changed(want[1], 2, 1, 7), changed(want[2], 1, 1, 0)
    found = Findings()
    rounds(found, want, replace(right, rounds=(want[0], first, second, *want[3:])))
    (check,) = failed(found)
    assert (check.name, check.verdict) == ("tree", Verdict.FAIL_TREE)
    assert check.detail.startswith(f"round 1, row 1: got token {want[1].tokens[1]} under row 7, golden token ")
    assert found.bad_round is not None
    assert found.bad_round.round == 1
    cut = Round(want[1].tokens[:1], want[1].parents[:1], want[1].accepted)
    found = Findings()
    rounds(found, want, replace(right, rounds=(want[0], cut, *want[2:])))
    assert failed(found)[0].detail.startswith("round 1, row 1: got no such row (1 rows), golden token ")


class Same(Golden):
    """A bundle whose INT4 golden is its FP32 one, but for what is within the tolerance."""

    apart = 0.99

    def other_logits(self) -> F64 | None:
        return self.logits + self.apart * self.tolerance("logits")


def precisions(golden: Golden, right: Decoded) -> list[Check]:
    found = Findings()
    against_golden(found, golden, right)
    return [check for check in found.checks if check.name == "golden.precisions"]


def test_goldens_of_two_precisions_that_are_one_fail(
    golden: Golden, right: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an INT4 cell would pass with FP32 experts."""
    (check,) = precisions(golden, right)
    assert check.ok
    same = Same(golden.file, golden.precision, golden.meta)
    (check,) = precisions(same, right)
    assert (check.ok, check.verdict) == (False, Verdict.FAIL_LOGITS)
    assert "they could be one" in check.detail
    monkeypatch.setattr(Same, "apart", 1.01)
    (check,) = precisions(same, right)
    assert check.ok


def test_a_model_without_experts_has_one_golden(
    golden: Golden, right: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Golden, "has_moe", False)
    assert precisions(Same(golden.file, golden.precision, golden.meta), right) == []


class Counting:
    """What an engine says of its kernels."""

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        return frozenset({precision, "norm"})

    def drafter_kernels(self) -> frozenset[str]:
        return frozenset({"drafted"})


@pytest.mark.parametrize(
    ("drafter", "counted", "idle", "foreign"),
    [
        ("", {"int4", "norm"}, 0, 0),
        ("", {"norm"}, 1, 0),
        ("", {"int4", "norm", "fp32"}, 0, 1),
        ("noisy", {"int4", "norm", "drafted"}, 0, 1),
        ("dflash", {"int4", "norm", "drafted"}, 0, 0),
        ("dflash", {"int4", "norm"}, 1, 0),
        ("dflash", {"int4", "norm", "drafted", "fp32"}, 0, 0),  # the drafter itself is f32
        ("dflash", {"int4", "norm", "drafted", "bf16"}, 0, 1),
    ],
)
def test_the_kernels_of_a_cell(drafter: str, counted: set[str], idle: int, foreign: int) -> None:
    golden = Golden.open(ensure(["dflash"])["dflash"], "int4")
    checks = _kernels(cast(Engine, Counting()), golden, dict.fromkeys(counted, 1), drafter)
    assert {check.name: check.value for check in checks} == {"kernels": idle, "kernels.foreign": foreign}
