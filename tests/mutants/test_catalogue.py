"""The catalogue fits the sources, has what it promises, and says which fault is wrong when it does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from harness.mutants import catalogue as fault_catalogue
from harness.mutants.catalogue import CSRC, CatalogueError, Fault, edited, fraction, load, plant
from harness.protocol import OPERATION_TAPS

FAULTS = load()
PROMISED = {
    "int4": 10,
    "mla": 12,
    "moe": 12,
    "trees": 20,
    "loader": 10,
    "numerics": 8,
    "bf16": 15,
    "kernels": 4,
    "cuda": 15,
    "hopper": 16,
}
"""Least number of faults in each group."""
ALL_TAPS = {*OPERATION_TAPS, "embed", "out", "logits"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_the_sources(fault: Fault) -> None:
    texts = edited(fault)
    assert set(texts) == {edit.file for edit in fault.edits}
    for file, text in texts.items():
        assert text != (CSRC / file).read_text("utf-8")


def test_groups_have_what_they_promise() -> None:
    counts = Counter(fault.group for fault in FAULTS)
    assert {group: count for group, count in PROMISED.items() if counts[group] < count} == {}
    assert counts[fault_catalogue.CONTROLS] == 2
    assert sum(bool(fault.taps) and not fault.is_control for fault in FAULTS if fault.device == "cpu") >= 60
    assert {tap for fault in FAULTS for tap in fault.taps} <= ALL_TAPS


def test_every_fault_says_what_it_is() -> None:
    said = [fault.says for fault in FAULTS]
    assert all(said)
    assert len(set(said)) == len(said)
    for fault in FAULTS:
        assert fault.device == ("cuda" if fault.group in ("cuda", "hopper") else "cpu")


def test_a_fifth_of_them_by_commit_and_all_over_time() -> None:
    seen: set[str] = set()
    for commit in range(40):
        share = fraction(FAULTS, Fraction(1, 5), f"{commit:040x}")
        assert share == fraction(FAULTS, Fraction(1, 5), f"{commit:040x}")
        assert abs(len(share) - len(FAULTS) / 5) <= 1
        seen |= {fault.name for fault in share}
    assert seen == {fault.name for fault in FAULTS}
    assert fraction(FAULTS, Fraction(1), "any") == FAULTS


def write(folder: Path, *entries: object) -> Path:
    (folder / "odd.yaml").write_text(yaml.safe_dump(list(entries)))
    return folder


FINE = {"name": "fine", "says": "x", "edits": [{"file": "kdtr.cpp", "find": "kVersion = 1", "replace": "kVersion = 2"}]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "Not Fine"}, "entry 0: name 'Not Fine'"),
        ({"name": None}, "entry 0: name None"),
        ({"edits": []}, "fine: no edits"),
        ({"tap": "mla.r_rope.x"}, "fine: tap 'mla.r_rope.x' is none"),
        ({"wanted": 1}, "fine: unknown field wanted"),
        ({"edits": [{"file": "kdtr.cpp", "find": "", "replace": "x"}]}, "fine: edit: file, find and replace"),
        ({"edits": [{"file": "kdtr.cpp", "find": "x", "replace": 1}]}, "fine: edit: file, find and replace"),
        ({"edits": [{"file": "kdtr.cpp", "find": "x", "replace": "x"}]}, "fine: edit: find and replace are the same"),
        ({"edits": [{"file": "kdtr.cpp", "with": "x"}]}, "fine: edit: "),
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with pytest.raises(CatalogueError, match=r"odd\.yaml") as raised:
        load(write(tmp_path, {**FINE, **change}))
    assert says in str(raised.value)


def test_a_fault_is_what_its_entry_says(tmp_path: Path) -> None:
    more = {"tap": "mla.q", "isa": "avx2", "device": "cuda", "first": "loader"}
    twice = [{**FINE["edits"][0], "times": 2}]  # type: ignore[index]
    taps = ["embed", "moe.weights"]
    found = load(write(tmp_path, {**FINE, **more}, {**FINE, "name": "other", "edits": twice, "tap": taps}))
    edit = fault_catalogue.Edit("kdtr.cpp", "kVersion = 1", "kVersion = 2")
    assert found == [
        Fault("fine", "odd", "x", (edit,), ("mla.q",), "avx2", "cuda", "loader"),
        Fault("other", "odd", "x", (replace(edit, times=2),), ("embed", "moe.weights")),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a: 1\n", "not a list of faults"), (b"- 1\n", "entry 0: name None"), (b"- \xff\n", "can't decode byte 0xff")],
)
def test_a_file_that_holds_no_faults_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(CatalogueError, match=rf"odd\.yaml: .*{says}"):
        load(tmp_path)


@pytest.mark.parametrize("share", [Fraction(0), Fraction(-1, 5), Fraction(6, 5)])
def test_a_share_that_is_none_is_refused(share: Fraction) -> None:
    with pytest.raises(CatalogueError, match=r"is not in \(0, 1\]"):
        fraction(FAULTS, share, "any")


def test_two_of_one_name_and_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="fine: named twice"):
        load(write(tmp_path, FINE, FINE))
    with pytest.raises(CatalogueError, match="holds no fault"):
        load(tmp_path / "nowhere")


def test_a_field_given_twice_is_named(tmp_path: Path) -> None:
    """PyYAML alone would plant the second edit and forget the first."""
    path = write(tmp_path, FINE) / "odd.yaml"
    path.write_text(f"{path.read_text()}  edits: []\n")
    with pytest.raises(CatalogueError, match=r"odd\.yaml:[0-9]+: 'edits' is given twice"):
        load(tmp_path)


def test_drift_names_the_fault_and_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("one two two\n")
    for find, times, found in (("gone", 1, 0), ("two", 1, 2), ("one", 2, 1)):
        fault = Fault("drifted", "int4", "", (fault_catalogue.Edit("a.cpp", find, "x", times),))
        with pytest.raises(
            CatalogueError, match=f"drifted: csrc/a.cpp: '{find}' is there {found} times instead of {times}"
        ):
            edited(fault, tmp_path)
    fault = Fault("drifted", "int4", "", (fault_catalogue.Edit("b.cpp", "one", "x"),))
    with pytest.raises(CatalogueError, match=r"drifted: csrc/b\.cpp: No such file"):
        edited(fault, tmp_path)


def test_planting_leaves_the_sources_alone(tmp_path: Path) -> None:
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "a.cpp").write_text("one two two\n")
    (tmp_path / "csrc" / "cpu" / "b.cpp").write_text("three\n")
    edits = (fault_catalogue.Edit("a.cpp", "two", "2", 2), fault_catalogue.Edit("a.cpp", "2 2", "4"))
    planted = plant(Fault("f", "int4", "", edits), tmp_path / "copy", tmp_path / "csrc")
    assert (planted / "a.cpp").read_text() == "one 4\n"
    assert (planted / "cpu" / "b.cpp").read_text() == "three\n"
    assert (tmp_path / "csrc" / "a.cpp").read_text() == "one two two\n"
