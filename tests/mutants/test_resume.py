"""A run of faults in several windows: what a record has of this engine as it should be is not tried again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.mutants import command
from harness.mutants.catalogue import Edit, Fault
from harness.mutants.result import Result
from harness.mutants.run import NOT_BUILT, Outcome
from tests.harness.records import SOURCES

FAULTS = [Fault("unedited", "controls", "", (), device="cuda")]
FAULTS += [Fault(name, "cuda", "", (Edit("x", "a", "b"),), device="cuda") for name in ("a", "b", "c")]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The faults of each run, all of which are caught; nothing is built."""
    found: list[str] = []

    def run_all(faults: Sequence[Fault], *others: Any) -> list[Result]:
        found[:] = [fault.name for fault in faults]
        results = [Result(f, Outcome("" if f.is_control else "cell: check", verdict="FAIL"), 1.0) for f in faults]
        others[-1](results[:1])
        others[-1](results)
        return results

    monkeypatch.setattr(command, "describe", lambda: SOURCES)
    monkeypatch.setattr(command, "chosen", lambda options: FAULTS)
    monkeypatch.setattr(command, "load", lambda: FAULTS)
    monkeypatch.setattr(command, "run_all", run_all)
    monkeypatch.setattr(command, "Workshop", lambda *_: None)
    monkeypatch.setattr(command.bundles, "ensure", lambda *_, **__: {})
    return found


def go(out: Path, *words: str) -> int:
    return command.main(["--device", "cuda", "--out", str(out), *words])


def names(out: Path) -> list[str]:
    return [entry["name"] for entry in json.loads(out.read_text())]


def test_what_is_as_it_should_be_is_kept_in_its_place_and_the_rest_is_tried(tmp_path: Path, tried: list[str]) -> None:
    out = tmp_path / "mutants-cuda.json"
    assert go(out, "--resume") == 0
    assert tried == ["unedited", "a", "b", "c"]
    entries = json.loads(out.read_text())
    assert {entry["engine"] for entry in entries} == {SOURCES.engine}
    kept = entries[2]
    out.write_text(json.dumps([entries[0], replace_in(kept, seconds=99)]))
    assert go(out, "--resume") == 0
    assert tried == ["a", "c"]
    assert names(out) == ["unedited", "a", "b", "c"]
    assert json.loads(out.read_text())[2]["seconds"] == 99
    assert go(out, "--resume") == 0
    assert tried == []
    assert names(out) == ["unedited", "a", "b", "c"]


def replace_in(entry: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {**entry, **changes}


@pytest.mark.parametrize(
    "change",
    [{"caught_by": ""}, {"verdict": NOT_BUILT}, {"engine": "other"}, {"device": "cpu"}, {"edits": "0"}],
    ids=str,
)
def test_what_is_not_as_it_should_be_or_of_another_engine_is_tried_again(
    tmp_path: Path, tried: list[str], change: dict[str, str]
) -> None:
    out = tmp_path / "mutants-cuda.json"
    assert go(out) == 0
    entries = json.loads(out.read_text())
    out.write_text(json.dumps([*entries[:2], replace_in(entries[2], **change), entries[3]]))
    assert go(out, "--resume") == 0
    assert tried == ["b"]
    out.write_text(json.dumps([replace_in(entries[0], caught_by="cell: check"), *entries[1:]]))
    assert go(out, "--resume") == 0
    assert tried == ["unedited"]


def test_what_is_not_chosen_now_stays_in_the_file(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mutants-cuda.json"
    assert go(out) == 0
    entries = json.loads(out.read_text())
    out.write_text(json.dumps([*entries[:2], replace_in(entries[2], engine="other"), entries[3]]))
    monkeypatch.setattr(command, "chosen", lambda options: FAULTS[1:2])
    assert go(out, "--resume") == 0
    assert tried == []
    assert names(out) == ["a", "unedited", "c"], "what another engine had is of no worth"


def test_a_record_that_is_none_and_a_missing_file_name_are_told_of(
    tmp_path: Path, tried: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mutants-cuda.json"
    out.write_text("{}")
    assert go(out, "--resume") == 0  # no entries
    out.write_text("[1]")
    assert go(out, "--resume") == 3
    assert f"{out}: not a record of `kdtree mutants --out`" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda", "--resume"])
    assert "--resume goes with --out" in capsys.readouterr().err


def test_what_is_built_ahead_is_what_will_be_tried(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, built = tmp_path / "mutants-cuda.json", []
    assert go(out) == 0
    out.write_text(json.dumps(json.loads(out.read_text())[:3]))
    monkeypatch.setattr(command, "build_only", lambda faults, *_: built.extend(f.name for f in faults) or 0)
    assert go(out, "--build-only", "--resume") == 0
    assert built == ["c"]
