"""The file of waivers is read strictly: whatever is not exactly a waiver is named."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from harness.cells import Verdict
from harness.gate.waivers import Waiver, WaiverError, load
from harness.sources import ROOT

ENTRY = {
    "cell": "int4-ddtree-tiny-noisy-cuda",
    "verdict": "FAIL_LOGITS",
    "reason": "the kernel rounds twice",
    "issue": "https://example.org/issues/7",
    "expires": "2030-01-31",
}


def write(path: Path, **changes: str | None) -> Path:
    lines = [f"{name}: {value}" for name, value in {**ENTRY, **changes}.items() if value is not None]
    path.write_text("waivers:\n- " + "\n  ".join(lines) + "\n")
    return path


def test_a_waiver(tmp_path: Path) -> None:
    (waiver,) = load(write(tmp_path / "w.yaml"))
    assert waiver == Waiver(
        "int4-ddtree-tiny-noisy-cuda",
        Verdict.FAIL_LOGITS,
        "the kernel rounds twice",
        "https://example.org/issues/7",
        date(2030, 1, 31),
    )


def test_the_file_of_this_checkout_can_be_read() -> None:
    assert isinstance(load(ROOT / "waivers.yaml"), tuple)


@pytest.mark.parametrize("name", list(ENTRY))
def test_every_field_is_required(tmp_path: Path, name: str) -> None:
    with pytest.raises(WaiverError, match=rf"waivers\[0\]: {name}: missing"):
        load(write(tmp_path / "w.yaml", **{name: None}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cell": "tiny"}, "cell: 'tiny' is no cell id"),
        ({"cell": "[1]"}, r"cell: is \[1\], not a text"),
        ({"verdict": "PASS"}, "verdict: 'PASS' is no verdict that can be excused"),
        ({"verdict": "FAIL"}, "verdict: 'FAIL' is no verdict"),
        ({"reason": "' '"}, "reason: is ' ', not a text"),
        ({"issue": "'#7'"}, "issue: '#7' is no link"),
        ({"issue": "https://example.org"}, "issue: 'https://example.org' is no link"),
        ({"expires": "soon"}, "expires: 'soon' is no day"),
        ({"expires": "2030-01-31 10:00:00"}, "expires: .* is no day"),
        ({"expires": "2030-02-31"}, r"waivers\[0\]: expires: '2030-02-31' is no day \(YYYY-MM-DD\)"),
        ({"until": "2030-01-31"}, "until: unknown field"),
        ({"reason": "a\n  reason: b"}, "yaml:[0-9]+: 'reason' is given twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    path = write(tmp_path / "w.yaml", **changes)
    with pytest.raises(WaiverError, match=says) as error:
        load(path)
    assert re.match(rf"{path}(:\d+)?: ", str(error.value))


@pytest.mark.parametrize(
    "text",
    ["", "waivers:\n", "[]", "waivers: {}\n", "waivers: []\nother: 1\n", "waivers: [\n", "\x00", "waivers: [x]\n"],
)
def test_other_files_are_no_waivers(tmp_path: Path, text: str) -> None:
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(WaiverError):
        load(tmp_path / "w.yaml")


def test_a_cell_is_waived_once(tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml")
    path.write_text(path.read_text() + path.read_text().removeprefix("waivers:\n"))
    with pytest.raises(WaiverError, match=r"waivers\[1\]: cell: .* is waived twice"):
        load(path)


def test_a_missing_file_says_how_to_write_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(WaiverError, match=r"waivers: \[\]"):
        load(tmp_path / "none.yaml")
