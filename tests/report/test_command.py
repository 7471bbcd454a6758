"""``kdtree report``: what is asked for is written whole, and statuses say whether it could be, not what it says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import runs

from harness.cells import INFRASTRUCTURE, PASSED
from harness.ledger import write
from harness.reports.command import main, write_reports

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that failed, as it lies on disk."""
    run_dir = tmp_path / "reports" / "run"
    run_dir.mkdir(parents=True)
    write(runs.broken(), run_dir)
    return run_dir


def test_a_run_gets_its_page_and_its_junit_file(tmp_path: Path) -> None:
    paths = write_reports(runs.broken(), tmp_path)
    assert sorted(path.name for path in paths) == ["index.html", "junit.xml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "junit.xml"]
    assert "15 of 20 expected cells passed" in paths[0].read_text("utf-8")
    assert ElementTree.parse(paths[1]).getroot().get("tests") == "20"


def test_without_options_the_reports_go_beside_the_ledger(folder: Path, capsys: Capture) -> None:
    assert main([str(folder / "ledger.json")]) == PASSED
    assert {path.name for path in folder.iterdir()} == {"ledger.json", "index.html", "junit.xml"}
    assert "15 of 20 expected cells passed" in capsys.readouterr().out


def test_every_output_of_one_call(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "deep" / "page.html"
    arguments = [str(folder), "--html", str(out), "--junit", str(tmp_path / "j.xml"), "--markdown"]
    assert main(arguments) == PASSED
    said = capsys.readouterr()
    assert said.out.startswith("## ❌ 15 of 20")
    assert str(out) in said.err
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert ElementTree.parse(tmp_path / "j.xml").getroot().tag == "testsuites"
    assert {path.name for path in folder.iterdir()} == {"ledger.json"}


def test_the_summary_for_machines(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    older = tmp_path / "older"
    older.mkdir()
    write(replace(runs.run(), run_id="older"), older)
    assert main([str(folder), "--json", "--against", str(older)]) == PASSED
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["passed"], said["wanted"]) == (1, 15, 20)
    cells = {cell["id"]: cell for cell in said["cells"]}
    assert cells["int4-ar-tiny2-cpu"]["verdict"] == "FAIL_LOGITS"
    assert cells["int4-ar-tiny2-cpu"]["margin"] == pytest.approx(300)
    assert said["against"]["run_id"] == "older"
    assert {change["kind"] for change in said["against"]["changes"]} == {"broken"}


def test_history_of_a_folder(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["--history", str(folder.parent)]) == PASSED
    assert "<h1>1 run in " in (folder.parent / "history.html").read_text("utf-8")
    assert main(["--history", str(folder.parent), "--json"]) == PASSED
    said = json.loads(capsys.readouterr().out.partition("history.html\n")[2])
    assert [run["passed"] for run in said["runs"]] == [15]
    assert len(said["runs"][0]["cells"]) == 19


@pytest.mark.parametrize("place", ["reports/history.html", "h.html", "deep/er/h.html"])
def test_a_history_leads_to_its_runs_from_wherever_it_lies(folder: Path, tmp_path: Path, place: str) -> None:
    out = tmp_path / place
    assert main([str(folder)]) == PASSED
    assert main(["--history", str(folder.parent), "--html", str(out)]) == PASSED
    (link,) = re.findall(r'<a href="([^"#]+)"', out.read_text("utf-8"))
    assert (out.parent / link).resolve() == (folder / "index.html").resolve()
    assert (out.parent / link).is_file()


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: Capture, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ledger.json").write_text(content)
    assert main([str(tmp_path)]) == INFRASTRUCTURE
    assert f"kdtree report: {tmp_path / 'ledger.json'}" in capsys.readouterr().err
    assert main(["--history", str(tmp_path)]) == INFRASTRUCTURE
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["a", "--history", "b"], ["--history", "b", "--markdown"], ["a", "--markdown", "--json"], ["a", "b"]],
)
def test_wrong_arguments_are_configuration_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == INFRASTRUCTURE
