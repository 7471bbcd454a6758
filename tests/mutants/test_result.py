"""What counts as caught, as located and as good, and how a failed cell becomes a fault's outcome."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cells import Cell, Check, Divergence, Verdict
from harness.mutants.catalogue import CONTROLS, Edit, Fault
from harness.mutants.result import Result, good_ones, line, summary
from harness.mutants.run import NOT_BUILT, Outcome, _failure

FAULT = Fault("off_by_one", "int4", "", (Edit("a.cpp", "a", "b"),), taps=("mla.q", "logits"))
CONTROL = replace(FAULT, name="unedited", group=CONTROLS, edits=(), taps=())
CAUGHT = Outcome("int4-ar-tiny-cpu: tokens", "FAIL_TOKENS", 2.0, "token 3", "layers.10.mla.q", "row 3", 4)
MISSED, UNBUILT = Outcome(ran=9), Outcome(verdict=NOT_BUILT, detail="a.cpp:1: error")
ELSEWHERE = Outcome(verdict="NOT_RUN", detail="its kernels are avx512; this processor has base avx2")


@pytest.mark.parametrize(
    ("fault", "outcome", "caught", "broken", "good", "located"),
    [
        (FAULT, CAUGHT, True, False, True, True),
        (FAULT, MISSED, False, False, False, False),
        (FAULT, UNBUILT, False, True, False, None),
        (CONTROL, CAUGHT, True, False, False, None),
        (CONTROL, MISSED, False, False, True, None),
        (CONTROL, UNBUILT, False, True, False, None),
        (replace(CONTROL, taps=("mla.q",)), MISSED, False, False, True, None),
        (replace(FAULT, taps=()), CAUGHT, True, False, True, None),
        (FAULT, replace(CAUGHT, tap="logits"), True, False, True, True),
        (FAULT, replace(CAUGHT, tap="embed"), True, False, True, False),
        (FAULT, replace(CAUGHT, tap="layers.1.mla.q_lat"), True, False, True, False),
        (FAULT, replace(CAUGHT, tap=""), True, False, True, False),
    ],
)
def test_a_fault_is_to_be_caught_and_a_control_is_not(
    fault: Fault, outcome: Outcome, caught: bool, broken: bool, good: bool, located: bool | None
) -> None:
    result = Result(fault, outcome, 1.0)
    assert (result.caught, result.broken, result.good, result.located) == (caught, broken, good, located)


def test_a_record_has_every_field() -> None:
    assert Result(FAULT, CAUGHT, 1.2345).record() == {
        "name": "off_by_one",
        "group": "int4",
        "device": "cpu",
        "caught_by": "int4-ar-tiny-cpu: tokens",
        "margin": 2.0,
        "verdict": "FAIL_TOKENS",
        "detail": "token 3",
        "tap": "layers.10.mla.q",
        "divergence": "row 3",
        "ran": 4,
        "operation": ["mla.q", "logits"],
        "operation_named": True,
        "seconds": 1.23,
        "edits": FAULT.digest,
    }
    assert Result(FAULT, replace(CAUGHT, margin=math.inf), 1.0).record()["margin"] == "inf"


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        (FAULT, CAUGHT, "int4-ar-tiny-cpu: tokens (FAIL_TOKENS, 2x the bound), located"),
        (
            FAULT,
            replace(CAUGHT, margin=math.inf, tap=""),
            "int4-ar-tiny-cpu: tokens (FAIL_TOKENS), located at nothing ",
        ),
        (FAULT, replace(CAUGHT, tap="embed"), "(FAIL_TOKENS, 2x the bound), located at embed instead"),
        (FAULT, MISSED, "NOT CAUGHT by any of 9"),
        (FAULT, UNBUILT, "DOES NOT BUILD: a.cpp:1: error"),
        (FAULT, ELSEWHERE, "not run: its kernels are avx512"),
        (CONTROL, MISSED, "passed all 9"),
        (CONTROL, Outcome(detail="the same bytes"), "passed: the same bytes"),
        (CONTROL, CAUGHT, "int4-ar-tiny-cpu: tokens (FAIL_TOKENS, 2x the bound): A CONTROL FAILED: token 3"),
    ],
)
def test_a_line_says_what_became_of_it(fault: Fault, outcome: Outcome, said: str) -> None:
    text = line(Result(fault, outcome, 1.0))
    assert text.startswith(f"{fault.name:<34} ")
    assert said in text


def test_a_group_counts_what_is_good_and_what_was_located() -> None:
    plain = replace(FAULT, name="plain", taps=())
    given = [(FAULT, CAUGHT), (FAULT, replace(CAUGHT, tap="")), (plain, MISSED), (CONTROL, CAUGHT), (FAULT, UNBUILT)]
    given += [(FAULT, ELSEWHERE), (replace(FAULT, group="kernels"), ELSEWHERE)]
    assert [text.split(None, 1) for text in summary([Result(*each, 1.0) for each in given])] == [
        ["int4", "2 of   4 caught, 1 not built, 1 not run here, operation named in 1 of 2"],
        [CONTROLS, "0 of   1 passed"],
        ["kernels", "0 of   0 caught, 1 not run here"],
    ]


def test_a_digest_tells_what_is_planted_and_nothing_else() -> None:
    edit = FAULT.edits[0]
    changed = [replace(edit, file="b.cpp"), replace(edit, find="b"), replace(edit, replace="c"), replace(edit, times=2)]
    others = [*(replace(FAULT, edits=(one,)) for one in changed), replace(FAULT, edits=(edit, edit)), CONTROL]
    others += [replace(FAULT, isa="avx2")]
    assert len({fault.digest for fault in (FAULT, *others)}) == 8
    assert replace(FAULT, name="x", says="y", taps=(), first="loader", group="trees").digest == FAULT.digest


def test_a_fault_that_cannot_run_here_is_neither_caught_nor_missed(tmp_path: Path) -> None:
    result = Result(FAULT, ELSEWHERE, 1.0)
    assert (result.good, result.caught, result.broken, result.located) == (True, False, False, None)
    path = tmp_path / "record.json"
    path.write_text(json.dumps([{**result.record(), "engine": "e"}]))
    assert good_ones(path, "e", FAULT.device, [FAULT]) == {}, "another processor's run tries it"


def test_a_failed_cell_is_caught_by_its_first_failed_check() -> None:
    fine, exact = Check("tokens", 0.0, 0.0, Verdict.FAIL_TOKENS), Check("tree", 1.0, 0.0, Verdict.FAIL_TREE)
    off, far = (Check(f"logits.{n}", v, 0.5, Verdict.FAIL_LOGITS) for n, v in (("kl", 1.0), ("nmse", 5.0)))
    place = Divergence("embed", (0,), 1.0, 2.0, 0.1, 1, "row 0")
    cell = Cell("int4-ar-tiny-cpu", Verdict.FAIL_TREE, (fine, exact, off, far), "no such row", divergence=place)
    assert _failure(cell) == {
        "caught_by": "int4-ar-tiny-cpu: tree",
        "verdict": "FAIL_TREE",
        "margin": 2.0,
        "detail": "no such row",
        "tap": "embed",
        "divergence": "row 0",
    }
    assert _failure(replace(cell, verdict=Verdict.PASS, checks=(fine,))) is None
    late = _failure(Cell("int4-ar-tiny-cpu", Verdict.TIMEOUT))
    assert late is not None
    assert (late["caught_by"], late["margin"], late["tap"]) == ("int4-ar-tiny-cpu: timeout", math.inf, "")
