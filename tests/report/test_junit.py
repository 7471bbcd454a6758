"""JUnit XML as its readers take it: every cell a case, failures and errors counted, nothing skipped or illegal."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import runs

from harness.cells import Ledger, Verdict
from harness.reports.junit import junit


def suites(ledger: Ledger) -> ElementTree.Element:
    return ElementTree.fromstring(junit(ledger))


def cases(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {str(case.get("name")): case for case in root.iter("testcase")}


def test_every_expected_cell_is_a_case_under_its_id() -> None:
    ledger = runs.broken()
    root = suites(ledger)
    assert sorted(cases(root)) == sorted(ledger.expected)
    for element in (root, *root):
        inside = list(element.iter("testcase"))
        assert int(element.get("tests", "")) == len(inside)
        assert int(element.get("failures", "")) == sum(case.find("failure") is not None for case in inside)
        assert int(element.get("errors", "")) == sum(case.find("error") is not None for case in inside)
        assert element.get("skipped") == "0"
        assert float(element.get("time", "")) == pytest.approx(sum(float(case.get("time", "")) for case in inside))
    assert (root.get("failures"), root.get("errors")) == ("3", "2")
    assert not list(root.iter("skipped"))


def test_a_failure_names_where_it_parted_and_how_to_see_it_again() -> None:
    failure = cases(suites(runs.broken()))["int4-ar-tiny2-cpu"].find("failure")
    assert failure is not None
    assert failure.get("type") == "FAIL_LOGITS"
    assert failure.get("message") == "logits.max_abs: 3 elements beyond 4e-06"
    assert runs.PARTED in str(failure.text)
    assert "nox -s test -- -k int4-ar-tiny2-cpu" in str(failure.text)


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_every_verdict_but_pass_is_red(verdict: Verdict) -> None:
    ledger = runs.run()
    cell = ledger.cells[0]
    root = suites(replace(ledger, cells=(replace(cell, verdict=verdict), *ledger.cells[1:])))
    assert int(root.get("failures", "")) + int(root.get("errors", "")) == 1
    broke = verdict in (Verdict.ERROR, Verdict.TIMEOUT, Verdict.NOT_RUN)
    assert cases(root)[cell.id].find("error" if broke else "failure") is not None


def test_numbers_and_the_machine_are_properties() -> None:
    root = suites(runs.run())
    case = cases(root)["fp32-ar-tiny-cpu"]
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    check = next(c for c in runs.find(runs.run(), "fp32-ar-tiny-cpu").checks if c.name == "logits.max_abs")
    assert properties["check.logits.max_abs"] == f"{check.value:.6g} of 4e-06 allowed"
    assert properties["kernel.linear_f32"] == "120"
    assert properties["rerun"] == "nox -s test -- -k fp32-ar-tiny-cpu"
    suite = {p.get("name"): p.get("value") for p in root[0].iterfind("properties/property")}
    assert suite["cpu"] == "A CPU"
    assert suite["commit"] == runs.SOURCES.commit


def test_problems_make_the_file_red_even_without_a_cell() -> None:
    ledger = replace(runs.run(), problems=("build: g++ failed\nline two",))
    root = suites(ledger)
    error = cases(root)["infrastructure 1"].find("error")
    assert error is not None
    assert error.get("message") == "build: g++ failed"
    assert "line two" in str(error.text)
    assert root.get("errors") == "1"
    nothing = suites(replace(runs.run(), expected=(), cells=()))
    assert nothing.get("errors") == "1"


def test_control_characters_and_markup_survive_as_text() -> None:
    error = cases(suites(runs.broken()))["fp32-ar-ties-cpu"].find("error")
    assert error is not None
    assert error.get("message") == r"DeviceError: <b>launch</b> failed | `x` \x1b[31mred\x1b[0m & more"


def test_hosts_are_suites_so_that_names_stay_unique() -> None:
    root = suites(runs.run(hosts=("a", "b")))
    assert [(suite.get("name"), suite.get("hostname")) for suite in root] == [
        ("matrix on a", "a"),
        ("matrix on b", "b"),
    ]
    for suite in root:
        names = [case.get("name") for case in suite.iter("testcase")]
        assert len(set(names)) == len(names) == len(runs.run().expected)
