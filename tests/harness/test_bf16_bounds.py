"""What the checks of the bf16 precisions let through and what they do not, on numbers made for each bound.

`test_rounding.py` asks whole engines, which are far from every bound on either side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from harness import golden_bf16_checks, rounding
from harness.cells import Check, Findings, Verdict
from harness.compare import Array
from harness.golden import Golden
from harness.protocol import OPERATION_TAPS, Decoded, DecodeRequest, Draft, OwnDrafter, Round, Session
from harness.sources import ROOT
from refs.attention import CHUNK
from refs.decode import Request
from refs.golden_bf16 import divergence

F64 = npt.NDArray[np.float64]
FIELDS = {"num_layers": 2, "num_heads": 2, "num_experts_per_tok": 2, "eos_id": 6, "first_k_dense": 1}


def test_the_bounds_are_those_that_are_described() -> None:
    page = (ROOT / "docs" / "harness.md").read_text("utf-8")
    bounds = dict(re.findall(r"^\| (`operations\.[^`]*`|the same, NAME) .*\| ([0-9.e-]+) \|$", page, re.MULTILINE))
    assert {name: float(value) for name, value in bounds.items()} == {
        "`operations.NAME`": rounding.BOUND,
        "the same, NAME": rounding.KEPT,
        "`operations.mla.o_lat.far`": rounding.FREE,
        "`operations.moe.ids`": 0.0,
    }
    assert "nine rows of ten are below it" in page
    assert rounding.SHARE == 0.9
    listed = re.search(r"the same, NAME (.*) \| these read stored values alone", page)
    assert listed is not None
    assert tuple(re.findall("`([^`]+)`", listed[1])) == rounding.FROM_STORED
    assert f"at most {golden_bf16_checks.ZERO_SHARE}, where zeros would have 1" in page


# ---- every operation from its own inputs


def off(right: F64, error: float, rows: slice = slice(None)) -> F64:
    """``right``, of which ``rows`` have a mean square error of ``error`` times their mean square."""
    got = right.copy()
    got[rows] *= 1 + np.sqrt(error)
    return got


def checks_of(kind: str, got: Array, right: Array) -> list[Check]:
    tap = f"layers.1.{kind}"
    return rounding._checks(cast(Golden, None), tap, kind, {tap: got}, right)


@pytest.mark.parametrize("kind", [*(tap for tap in OPERATION_TAPS if tap != "moe.ids"), "embed", "out", "logits"])
def test_each_operation_has_its_bound_on_both_sides(kind: str) -> None:
    right = np.random.default_rng(1).standard_normal((CHUNK, 6))
    bound = rounding.KEPT if kind in rounding.FROM_STORED else rounding.BOUND
    below, beyond = checks_of(kind, off(right, 0.99 * bound), right), checks_of(kind, off(right, 1.01 * bound), right)
    assert [(check.name, check.ok) for check in below + beyond] == [(f"operations.{kind}", ok) for ok in (True, False)]
    assert below[0].detail == ""
    assert beyond[0].value == pytest.approx(1.01 * bound, rel=1e-3)


def test_attention_over_more_keys_than_a_chunk_has_a_bound_of_its_own() -> None:
    right = np.random.default_rng(1).standard_normal((CHUNK + 10, 6))
    got = off(right, 0.99 * rounding.FREE, slice(CHUNK, None))
    assert [(check.name, check.ok) for check in checks_of("mla.o_lat", got, right)] == [
        ("operations.mla.o_lat", True),
        ("operations.mla.o_lat.far", True),
    ]
    far = checks_of("mla.o_lat", off(right, 1.01 * rounding.FREE, slice(CHUNK, None)), right)
    assert [check.ok for check in far] == [True, False]
    near = checks_of("mla.o_lat", off(right, 1.01 * rounding.BOUND, slice(0, CHUNK)), right)
    assert [check.ok for check in near] == [False, True]


@pytest.mark.parametrize("rows", [1, 9, 10, 20, 64])
def test_nine_rows_of_ten_have_to_be_within_the_bound(rows: int) -> None:
    right = np.random.default_rng(2).standard_normal((rows, 5))
    free = rows // 10
    fine, wrong = (checks_of("mla.q", off(right, 1e-3, slice(0, n)), right)[0] for n in (free, free + 1))
    assert fine.ok
    assert not wrong.ok
    assert fine.value == 0.0
    assert wrong.value == pytest.approx(1e-3)


def test_rows_of_zeros_and_of_what_is_not_finite() -> None:
    zeros = np.zeros((4, 3))
    assert checks_of("mla.q", zeros, zeros)[0].value == 0.0
    assert not checks_of("mla.q", zeros + 1e-9, zeros)[0].ok
    got = np.ones((20, 3), np.float32)
    got[7, 1] = np.inf  # one row of twenty would be free
    check = checks_of("mla.q", got, np.ones((20, 3)))[0]
    assert (check.ok, check.verdict) == (False, Verdict.FAIL_NONFINITE)


def made(monkeypatch: pytest.MonkeyPatch, *taps: str) -> tuple[Golden, dict[str, F64]]:
    """A golden whose reference says what ``taps`` should be."""
    rng = np.random.default_rng(3)
    right = {tap: rng.standard_normal((10, 6)) for tap in taps}
    monkeypatch.setattr(rounding, "expected", lambda *_: right)
    return cast(Golden, SimpleNamespace(field=FIELDS.__getitem__)), right


@pytest.mark.parametrize(
    "errors", [(1e-3, 1e-2), (1e-2, 1e-3), (0.0, 1e-3), (1e-3, 0.0), (np.nan, 1e-3), (1e-3, np.nan)]
)
def test_an_operation_is_judged_by_its_worst_layer_and_traced_to_its_first(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float]
) -> None:
    names = ("layers.0.mla.q", "layers.1.mla.q")
    golden, right = made(monkeypatch, *names)
    got = {name: off(right[name], error) for name, error in zip(names, errors, strict=True)}
    checks, found = rounding.operations(golden, (), got)
    (check,) = checks
    worst = int(np.argmax(np.nan_to_num(errors, nan=1.0)))
    assert not check.ok
    assert check.detail.startswith(f"layer {worst}, mla.q: ")
    assert found is not None
    assert found.tap == names[0 if errors[0] else 1]


def test_a_divergence_names_the_worst_element(monkeypatch: pytest.MonkeyPatch) -> None:
    golden, right = made(monkeypatch, "layers.0.mla.q")
    got = right["layers.0.mla.q"].copy()
    got[:9] += 0.5
    got[3, 4] -= 5
    checks, found = rounding.operations(golden, (), {"layers.0.mla.q": got})
    assert found is not None
    assert (found.tap, found.index, found.count) == ("layers.0.mla.q", (3, 1, 1), 54)
    assert (found.got, found.want) == (got[3, 4], right["layers.0.mla.q"][3, 4])
    assert found.allowed == checks[0].allowed
    got[9, 2] = np.nan
    _, found = rounding.operations(golden, (), {"layers.0.mla.q": got})
    assert found is not None
    assert (found.index, found.count) == ((9, 0, 2), 55)


def test_a_tap_that_is_missing_or_has_another_shape_fails_and_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    golden, right = made(monkeypatch, "embed", "layers.0.mla.q", "layers.0.mla.kv")
    got = {"layers.0.mla.q": right["layers.0.mla.q"][:, 1:], "layers.0.mla.kv": right["layers.0.mla.kv"]}
    checks, found = rounding.operations(golden, (), got)
    assert {check.name: (check.ok, check.verdict) for check in checks} == {
        "operations.embed.shape": (False, Verdict.FAIL_SHAPE),
        "operations.mla.kv": (True, Verdict.FAIL_LOGITS),
        "operations.mla.q.shape": (False, Verdict.FAIL_SHAPE),
    }
    assert found is None


def test_choices_count_where_the_engines_own_scores_are_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order; and by sigmoid plus the layer's bias."""
    want = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
    got = np.array([[1, 0], [2, 4], [4, 6], [0, 7]])
    logits = np.log([[1.0, 3.0]] * 4)  # sigmoids of 0.5 and 0.75
    scores: list[F64] = []

    def clear(config: object, biased: F64) -> F64:
        scores.append(biased)
        return np.array([1.01, 1.01, 0.99, 1.01]) * rounding.CLEAR

    model = SimpleNamespace(config=None, router_bias=lambda layer: np.array([0.0, 10.0 * layer]))
    monkeypatch.setattr(rounding, "_model", lambda *_: model)
    monkeypatch.setattr(rounding, "clearance", clear)
    golden = cast(Golden, SimpleNamespace(file=SimpleNamespace(file=""), precision="bf16"))
    taps = {"layers.1.moe.ids": got, "layers.1.moe.router_logits": logits}
    (check,) = rounding._checks(golden, "layers.1.moe.ids", "moe.ids", taps, want)
    assert (check.name, check.value, check.ok) == ("operations.moe.ids", 2.0, False)
    assert "rows [1, 3]" in check.detail
    np.testing.assert_allclose(scores[0], [[0.5, 10.75]] * 4)


def test_a_choice_is_clear_above_a_hundred_thousandth() -> None:
    """Which is far above what a sigmoid in f32 is off by, 1e-7, and far below what scores are apart."""
    assert rounding.CLEAR == 1e-5


# ---- tokens and statistics against the golden

PROMPT, TOKENS, VOCAB, TOLERANCE = (1, 2, 3), (4, 0, 5, 1, 2), 7, 0.25
LIMITS = {"logits": TOLERANCE, "logits.nmse": 0.04, "logits.kl": 0.02, "embed": 1e-3, "layers.0.out": 1e-2}


def given(**changes: Any) -> Golden:
    """Every row of logits has a lead of 4 for the token that follows, and all choices are decided."""
    logits = np.zeros((6, VOCAB))
    for row, token in enumerate((*TOKENS, 3)):
        logits[row, token] = 4.0
        logits[row, 6] = -2.0
    values: dict[str, Any] = {
        "prompt": PROMPT,
        "tokens": TOKENS,
        "logits": logits,
        "decided": np.ones(8, np.bool_),
        "taps": {name: np.ones((8, 2)) for name in ("embed", "layers.0.out")},
        "meta": {"run": {"max_tokens": 5}},
        "field": FIELDS.__getitem__,
        "tolerance": LIMITS.__getitem__,
        "other_logits": lambda: None,
        "has_moe": True,
    }
    return cast(Golden, SimpleNamespace(**{**values, **changes}))


def undecided(*rows: int) -> npt.NDArray[np.bool_]:
    """All rows of prompt and tokens but these."""
    return ~np.isin(np.arange(8), rows)


def decoded(golden: Golden, tokens: tuple[int, ...] = TOKENS, **changes: Any) -> Decoded:
    logits = golden.logits[: len(tokens) + 1].astype(np.float32)
    whole = Decoded(tokens, len(tokens), "limit", (1,) * len(tokens), logits)
    return replace(whole, **changes)


def judged(golden: Golden, got: Decoded) -> tuple[dict[str, Check], Findings]:
    found = Findings()
    golden_bf16_checks.tokens(found, golden, got)
    return {check.name: check for check in found.checks}, found


def failing(golden: Golden, got: Decoded) -> list[str]:
    return [name for name, check in judged(golden, got)[0].items() if not check.ok]


def test_a_right_decode_passes_every_check() -> None:
    checks, found = judged(given(), decoded(given()))
    names = ["logits.shape", "logits.finite", "degenerate", "tokens", "stopped", "logits.max_abs"]
    assert (list(checks), all(check.ok for check in checks.values())) == (names, True)
    assert found.step_errors == (0.0,) * 6


@pytest.mark.parametrize("lead", [2 * TOLERANCE, 2.01 * TOLERANCE])
def test_a_token_may_be_another_up_to_a_lead_of_twice_the_tolerance(lead: float) -> None:
    logits = given().logits.copy()
    logits[2] = [0, 0, 0, 0, 0, lead, 0]
    golden = given(logits=logits)
    other = decoded(golden, (4, 0, 1, 1, 2))
    assert failing(golden, other) == (["tokens"] if lead > 2 * TOLERANCE else [])
    assert golden_bf16_checks.clear_tokens(golden)[2] == (lead > 2 * TOLERANCE)


def test_what_leads_together_leads_by_what_is_below() -> None:
    logits = given().logits.copy()
    logits[2, :2] = 4.0
    assert golden_bf16_checks.clear_tokens(given(logits=logits)).all()
    logits[2, 2:6] = 4.0 - TOLERANCE
    assert golden_bf16_checks.clear_tokens(given(logits=logits)).tolist() == [True, True, False, True, True, True]


@pytest.mark.parametrize("row", range(8))
def test_tokens_after_a_row_that_is_not_decided_are_free(row: int) -> None:
    """Row 2 is the last of the prompt, whose logits choose token 0."""
    golden = given(decided=undecided(row))
    for at in range(5):
        tokens = (*TOKENS[:at], 6, *TOKENS[at + 1 :])
        got = decoded(golden, tokens, stopped="eos" if at == 4 else "limit")
        assert failing(golden, got) == ([] if row == at + 2 else ["tokens"])


def test_a_decode_has_to_end_where_it_says() -> None:
    golden = given(decided=undecided(5))  # token 3 is free
    assert failing(golden, decoded(golden, stopped="eos")) == ["stopped"]
    assert failing(golden, decoded(golden, (4, 0, 5, 6), stopped="eos")) == []
    assert failing(golden, decoded(golden, (4, 0, 5, 6))) == ["stopped"]
    assert failing(golden, decoded(golden, (4, 0, 5, 1))) == ["tokens", "stopped"]
    longer = replace(decoded(golden), tokens=(*TOKENS, 3), logits=np.zeros((7, VOCAB), np.float32))
    assert failing(golden, longer) == ["tokens", "stopped"]
    assert failing(given(decided=undecided(7)), longer) == ["tokens", "stopped"], "there is no token to be unclear"
    assert failing(golden, replace(decoded(golden, ()), logits=np.zeros((1, VOCAB), np.float32))) == [
        "tokens",
        "stopped",
    ]


def test_logits_have_to_be_there_in_shape_and_finite() -> None:
    golden = given()
    for logits in (None, golden.logits, golden.logits[1:].astype(np.float32)):
        assert failing(golden, decoded(golden, logits=logits)) == ["logits.shape"]
    logits = golden.logits.astype(np.float32)
    logits[2, :3] = np.nan
    checks, found = judged(golden, decoded(golden, logits=logits))
    assert checks["logits.finite"].value == 3.0
    assert "logits.max_abs" not in checks
    assert found.step_errors == ()


def test_one_token_over_and_over_is_degenerate_unless_the_golden_does_it_too() -> None:
    golden = given(decided=np.zeros(8, np.bool_))
    assert failing(golden, decoded(golden, (4,) * 5)) == ["degenerate"]
    assert failing(golden, decoded(golden, (4, 4, 4, 4, 5))) == []
    same = given(decided=np.zeros(8, np.bool_), tokens=(4,) * 5)
    assert failing(same, decoded(same, (3,) * 5)) == []
    two = given(tokens=(4, 0), decided=np.zeros(8, np.bool_), meta={"run": {"max_tokens": 2}})
    assert failing(two, decoded(two, (3, 3))) == ["degenerate"]
    assert failing(given(), decoded(given(), (4,))) == ["tokens", "stopped"]
    one = given(tokens=(4,), meta={"run": {"max_tokens": 1}})
    assert failing(one, decoded(one, (4,))) == []


def test_logits_are_compared_in_decided_rows_with_the_golden_history() -> None:
    golden = given(decided=undecided(3, 4))
    logits = golden.logits.astype(np.float32)
    logits[1:3] += 9  # rows 3 and 4
    checks, found = judged(golden, decoded(golden, logits=logits))
    assert checks["logits.max_abs"].ok
    assert found.step_errors == (0.0,) * 6
    logits[0, 1] += 0.99 * TOLERANCE
    assert judged(golden, decoded(golden, logits=logits))[0]["logits.max_abs"].ok
    logits[3, 1] += 1.01 * TOLERANCE
    checks, found = judged(golden, decoded(golden, logits=logits))
    assert not checks["logits.max_abs"].ok
    assert found.step_errors == pytest.approx((0.99 * TOLERANCE, 0, 0, 1.01 * TOLERANCE, 0, 0))
    parted = decoded(
        golden, (4, 6, 5, 1, 2), logits=logits
    )  # at row 3, which is free: what follows has another history
    checks, found = judged(golden, parted)
    assert checks["logits.max_abs"].ok
    assert len(found.step_errors) == 2
    nothing = given(decided=np.zeros(8, np.bool_))
    assert "logits.max_abs" not in judged(nothing, decoded(nothing))[0]


class Forced:
    """A session that gives these taps, and says for which tokens it was asked."""

    def __init__(self, taps: Mapping[str, Array]) -> None:
        self.given, self.asked = taps, list[tuple[int, ...]]()

    def taps(self, tokens: tuple[int, ...], *, operations: bool = False) -> dict[str, Array]:
        self.asked.append(tuple(tokens))
        assert operations is (len(self.asked) == 1)
        return dict(self.given)


def right_taps(golden: Golden) -> dict[str, F64]:
    return {**golden.taps, "logits": np.concatenate([np.full((2, VOCAB), 5.0), golden.logits])}


RIGHT = Check("operations.mla.q", 0.0, 1.0, Verdict.FAIL_LOGITS)


def statistics(
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
    taps: Mapping[str, Array],
    got: Decoded | None = None,
    operation: Check = RIGHT,
) -> tuple[dict[str, Check], Forced]:
    monkeypatch.setattr(golden_bf16_checks, "operations", lambda *_: ([RIGHT, operation], None))
    session = Forced({name: rows.astype(np.float32) for name, rows in taps.items()})
    checks = golden_bf16_checks.teacher_forced(Findings(), golden, cast(Session, session), got or decoded(golden))
    return {check.name: check for check in checks}, session


def test_a_right_prefill_passes_every_statistic(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = given()
    checks, session = statistics(monkeypatch, golden, right_taps(golden))
    assert {name: (check.ok, check.allowed) for name, check in checks.items()} == {
        "operations.mla.q": (True, 1.0),
        "taps.embed.nmse": (True, 1e-3),
        "taps.layers.0.out.nmse": (True, 1e-2),
        "logits.nmse": (True, 0.04),
        "logits.kl": (True, 0.02),
        "logits.top1": (True, 0.0),
        "logits.scale": (True, 0.05),
        "prefill": (True, 0.0),
    }
    assert session.asked == [(*PROMPT, *TOKENS)]


def test_what_follows_a_wrong_operation_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Check("operations.mla.kv", 2.0, 1.0, Verdict.FAIL_LOGITS)
    checks, _ = statistics(monkeypatch, given(), {}, operation=wrong)
    assert list(checks) == ["operations.mla.q", "operations.mla.kv"]


@pytest.mark.parametrize("name", ["embed", "layers.0.out"])
def test_the_residual_stream_is_judged_over_decided_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for rows, fine in (((4,), True), ((4, 5), False)):
        golden = given(decided=undecided(4))
        taps = right_taps(golden)
        taps[name] = taps[name].copy()
        taps[name][list(rows)] = 3.0
        assert statistics(monkeypatch, golden, taps)[0][f"taps.{name}.nmse"].ok is fine


def test_logits_are_judged_over_decided_rows_from_the_prompts_last_on(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = given(decided=undecided(5))
    taps = right_taps(golden)
    taps["logits"][[0, 1, 5]] = -9.0
    checks, _ = statistics(monkeypatch, golden, taps)
    assert all(checks[f"logits.{name}"].ok for name in ("nmse", "kl", "top1"))
    for row in (2, 7):
        worse = {**taps, "logits": taps["logits"].copy()}
        worse["logits"][row] = -9.0
        checks, _ = statistics(monkeypatch, golden, worse)
        assert not any(checks[f"logits.{name}"].ok for name in ("nmse", "kl", "top1"))
        assert checks["logits.top1"].value == 1.0
        assert f"rows [{row - 2}]" in checks["logits.top1"].detail


def test_the_worst_row_decides_by_its_divergence_of_either_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = given()
    taps = right_taps(golden)
    taps["logits"][4, 5] -= 0.4
    rows = np.abs(divergence(taps["logits"][2:].astype(np.float32), golden.logits))
    checks, _ = statistics(monkeypatch, golden, taps)
    assert checks["logits.kl"].value == rows.max() > 2 * rows.mean()
    monkeypatch.setattr(golden_bf16_checks, "divergence", lambda got, want: np.array([0.001, -0.5, 0.0]))
    assert statistics(monkeypatch, golden, taps)[0]["logits.kl"].value == 0.5


def test_a_token_that_leads_clearly_leads_in_a_prefill_too(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = given().logits.copy()
    logits[2, 1] = 4.0 - 2 * TOLERANCE  # token 5 leads by no more
    golden = given(logits=logits)
    taps = right_taps(golden)
    taps["logits"][4, 1] = 4.1
    assert statistics(monkeypatch, golden, taps)[0]["logits.top1"].ok
    assert not statistics(monkeypatch, given(), taps)[0]["logits.top1"].ok


def test_a_tolerance_that_zeros_could_meet_and_goldens_that_are_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for nmse, scale in ((0.05, True), (0.051, False)):
        golden = given(tolerance={**LIMITS, "logits.nmse": nmse}.__getitem__)
        assert statistics(monkeypatch, golden, right_taps(golden))[0]["logits.scale"].ok is scale
    plain = given().logits
    for other, fine in ((plain * 1.19, False), (plain * 1.21, True), (plain[:4] * 1.21, True), (plain[:4], False)):
        golden = given(other_logits=lambda other=other: other)
        assert statistics(monkeypatch, golden, right_taps(golden))[0]["golden.precisions"].ok is fine
    longer = np.concatenate([plain * 1.21, plain])
    golden = given(other_logits=lambda: longer)
    assert statistics(monkeypatch, golden, right_taps(golden))[0]["golden.precisions"].ok
    dense = given(other_logits=lambda: plain, has_moe=False)
    assert "golden.precisions" not in statistics(monkeypatch, dense, right_taps(dense))[0]


def test_a_prefill_of_the_engines_own_tokens_has_the_bits_of_its_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = given()
    taps = right_taps(golden)
    checks, session = statistics(monkeypatch, golden, taps, decoded(golden, (4, 0, 5, 1, 3)))
    assert session.asked == [(*PROMPT, *TOKENS), (*PROMPT, 4, 0, 5, 1, 3)]
    assert checks["prefill"].ok
    taps["logits"][2, 0] += 1e-6
    assert statistics(monkeypatch, golden, taps)[0]["prefill"].value == 1.0


def test_rounds_follow_from_the_engines_own_tokens_and_from_what_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def replay(*arguments: Any) -> list[Any]:
        asked.append(arguments)
        return [(SimpleNamespace(tokens=[4, 1], parents=[-1, 0]), [0, 1])]

    monkeypatch.setattr(golden_bf16_checks, "replay", replay)
    golden, ar = given(), decoded(given(), (4, 0, 5))
    table = np.ones((3, VOCAB), np.float32)
    request = DecodeRequest(PROMPT, 5, Draft(table, 4), block_size=3, budget=2)
    drafted = decoded(golden, draft_logits=np.arange(2 * 4 * VOCAB).reshape(2, 4, VOCAB))
    assert golden_bf16_checks.own_rounds(golden, request, ar, drafted) == (Round((4, 1), (-1, 0), (0, 1)),)
    recorded = Request(PROMPT, 5, draft=table, first=4, block_size=3, budget=2)
    assert asked.pop() == (recorded, (4, 0, 5), (4, 0, 5), 6, None)
    request = replace(request, draft=OwnDrafter())
    golden_bf16_checks.own_rounds(golden, request, ar, drafted)
    own = Request(PROMPT, 5, dflash=True, block_size=3, budget=2)
    *rest, rows = asked.pop()
    assert rest == [own, (4, 0, 5), (4, 0, 5), 6]
    assert [each.tolist() for each in rows] == drafted.draft_logits[:, :2].tolist(), "a block's root is not drafted"
    golden_bf16_checks.own_rounds(golden, request, ar, decoded(golden))
    assert asked.pop()[4] == []
