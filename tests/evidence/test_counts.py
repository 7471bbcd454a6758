"""Counts of records: those that are committed, which commands wrote, and what is cut off or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.evidence import counts
from harness.evidence.record import counted
from harness.evidence.stages import Stage
from harness.ledger_format import ledger_bytes
from harness.mutants.run import NOT_BUILT, NOT_RUN
from harness.sources import ROOT
from tests.harness.records import FINE, OFF, cell, ledger

EVIDENCE = ROOT / "docs" / "evidence"

COMMITTED: dict[str, tuple[str, dict[str, Any]]] = {
    "cells": ("scale-h200.json", {"expected": 15, "passed": 14, "failed": 1, "not run": 0}),
    "faults": ("mutants-cuda.json", {"named": None}),
    "broken": ("broken-h200.json", {"breaks": 56, "not built": 0}),
    "pairs": ("pairs-h200.json", {"shapes": 21, "pairs": 21000, "rows": 662781, "differing_rows": 0, "unfit": 0}),
    "bench": ("bench-cuda.json", {"cases": 77, "steps": 7, "absent peers": [], "not measured": {}}),
    "counters": ("counters-h200.json", {}),
    "latency": ("cuda-h200-latency.json", {"decodes": 8}),
    "acceptance": ("text-acceptance.json", {"lines": 16, "as AR": 16}),
    "timeline": ("share-h200.json", {}),
}


@pytest.mark.parametrize("kind", COMMITTED)
def test_a_committed_record_is_counted(kind: str) -> None:
    name, some = COMMITTED[kind]
    found = counts.COUNTS[kind]((EVIDENCE / name).read_bytes())
    assert {key: found.get(key) for key in some} == some
    assert counts.shows(found)
    assert all(value for key, value in found.items() if key in ("cases", "kernels", "launches of 1/2", "caught"))


JUNIT = b"""<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
<testcase classname="tests.a" name="interrupted"/>
<testcase classname="tests.a" name="good" time="1"/>
<testcase classname="tests.a" name="bad[1]"><failure message="x">E</failure></testcase>
<testcase classname="tests.b" name="worse"><error message="setup">E</error></testcase>
<testcase classname="tests.b" name="left"><skipped message="no"/></testcase></testsuite></testsuites>"""


def test_tests_are_counted_by_what_became_of_them() -> None:
    named = ["tests.a::bad[1]", "tests.b::worse"]
    assert counts.tests(JUNIT) == {"passed": 1, "failed": 2, "skipped": 1, "named": named}
    skipped = counts.tests(JUNIT.replace(b'"1"', b'"0"').replace(b'skipped="0"', b'skipped="4"'))
    assert (skipped["passed"], counts.shows(skipped)) == (0, False)


def test_cells_that_failed_are_named_and_those_that_did_not_run_counted() -> None:
    a, b, c = (f"int4-ar-{name}-cuda" for name in ("long", "tiny", "yarn"))
    made = ledger(cell(a, FINE), cell(b, OFF), expected=(a, b))
    assert counts.cells(ledger_bytes(made)) == {"expected": 2, "passed": 1, "failed": 1, "not run": 0, "named": [b]}
    from harness.ledger import complete

    made = complete(ledger(expected=(a, b, c)), [cell(a, FINE)])
    assert counts.cells(ledger_bytes(made))["not run"] == 2


def test_sanitizers_are_counted_by_their_last_words() -> None:
    text = (
        b"operations: 27.9 s\ncells: 43.7 s\n========= RACECHECK SUMMARY: 6 hazards displayed (4 errors, 2 warnings)\n"
    )
    expected = {"hazards": 6, "errors": 4, "warnings": 2, "parts": ["operations", "cells"]}
    assert counts.sanitizer(text) == expected
    assert counts.sanitizer(b"operations: 1.0 s\n========= ERROR SUMMARY: 1 error\n")["errors"] == 1
    cut_off = counts.sanitizer(b"operations: 1.0 s\n")
    assert cut_off == {"parts": [], "without a verdict": ["operations"]}
    assert counts.shows(counts.sanitizer(text))
    assert not counts.shows(cut_off)


def test_a_record_that_is_missing_or_none_is_told_of(tmp_path: Any) -> None:
    path = tmp_path / "record"
    for kind in counts.COUNTS:
        if kind == "sanitizer":
            continue
        stage = Stage((), 1, kind, path)
        assert counted(stage, path) == {"none": "it wrote no record"}
        for data in (b"", b"{}", b"[1]", b"null", b"<a>"):
            path.write_bytes(data)
            found = counted(stage, path)
            assert "none" in found or not any(found.values()), (kind, data)
            assert not counts.shows(found)
        path.unlink()


def test_faults_and_controls_are_counted_apart() -> None:
    def line(name: str, caught: str, named: bool | None, group: str = "trees", verdict: str = "") -> dict[str, Any]:
        verdict = "FAIL_TREE" if caught else verdict
        return {"name": name, "group": group, "caught_by": caught, "verdict": verdict, "operation_named": named}

    lines = [line("a", "x", True), line("b", "x", False), line("c", "", None), line("d", "x", None)]
    controls = [
        line("unedited", "", None, "controls"), line("white_space", "x", None, "controls"),
        line("comment", "", None, "controls", NOT_BUILT), line("avx512", "", None, "controls", NOT_RUN),
    ]  # fmt: skip
    both = json.dumps([*lines, *controls]).encode()
    assert counts.faults(both) == {
        "faults": 4, "caught": 3, "operation named": 1, "operation stated": 2, "named": ["c"],
    }  # fmt: skip
    assert counts.controls(both) == {"controls": 4, "passed": 1, "named": ["avx512", "comment", "white_space"]}
    assert not counts.shows(counts.faults(json.dumps(controls).encode())), "controls alone show no fault"
    assert not counts.shows(counts.controls(json.dumps(lines).encode())), "nor faults a control"


def test_bits_that_differ_between_ranks_are_counted() -> None:
    lines = [{"equal": True}, {"equal": False}, {"equal": None}, {"equal": False}]
    assert counts.ranks(json.dumps({"lines": lines}).encode()) == {"lines": 4, "bits differ": 2}


def test_problems_of_a_ledger_are_told_and_nothing_counted_shows_nothing() -> None:
    a = "int4-ar-long-cuda"
    found = counts.cells(ledger_bytes(ledger(cell(a, FINE), problems=("no bundle",))))
    assert found == {"expected": 1, "passed": 1, "failed": 0, "not run": 0, "problems": ["no bundle"]}
    assert "problems" not in counts.cells(ledger_bytes(ledger(cell(a, FINE))))
    assert not counts.shows(counts.timeline(b'{"shares": {}}'))


def test_a_record_that_differs_in_pairs_or_builds_is_counted_by_hand() -> None:
    shapes = [{"pairs": 3, "rows": 5, "differing_rows": 2, "unfit": ""},
              {"pairs": 4, "rows": 6, "differing_rows": 0, "unfit": "no room"}]  # fmt: skip
    found = counts.pairs(json.dumps({"shapes": shapes}).encode())
    assert found == {"shapes": 2, "pairs": 7, "rows": 11, "differing_rows": 2, "unfit": 1}
    breaks = [{"how": {"t1": "noticed", "t2": "passed"}, "not_built": ""}, {"how": {}, "not_built": "error"}]
    assert counts.broken(json.dumps(breaks).encode()) == {"breaks": 2, "noticed": 1, "passed": 1, "not built": 1}
