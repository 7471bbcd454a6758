"""The documents' tables of a bench's record: which figures, which side of a target, and where they are put."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from harness.bench import tables
from harness.bench.tables import FLOOR, US, digits, made

TIMES, HUMMING, _, _, TARGETS = tables.TABLES


def line(case: str, m: int, us: float, x_floor: float, **peers: float) -> dict[str, Any]:
    return {"case": f"{case}{m}", "M": m, "device": "cuda", "us": us, "x_floor": x_floor, "peers": peers}


CASE = "k26-linear-int4-bf16-k7168-n4096-m"
RECORD = {
    "cases": [
        line(CASE, 16, 123.4, 1.3504),
        line(CASE, 1, 5.0, 1.2, humming=8.0),
        line(CASE, 64, 9.0, 1.7, humming=9.0),
    ],
    "steps": [],
}


@pytest.mark.parametrize(
    ("value", "at", "against", "text"),
    [
        (1.3504, 1.35, FLOOR, "1.350"),
        (1.35, 1.35, FLOOR, "1.35"),
        (1.356, 1.35, FLOOR, "1.36"),
        (0.948, 0.95, "flash-mla", "0.948"),
        (0.944, 0.95, "flash-mla", "0.94"),
        (12.04, 12.0, US, "12.040"),
        (1.234, None, FLOOR, "1.23"),
    ],
)
def test_a_figure_shows_on_which_side_of_its_target_it_is(
    value: float, at: float | None, against: str, text: str
) -> None:
    assert digits(value, at, against) == text


def test_a_table_has_a_column_a_width_and_held_targets_are_bold() -> None:
    assert made(TIMES, RECORD) == [
        TIMES.head,
        "|---|---|---|---|---|---|",
        "| INT4 K7168 N4096 | 5.0 (**1.20**) | | | 123 (1.350) | 9.0 (**1.70**) |",
    ]
    assert made(HUMMING, RECORD)[2:] == ["| INT4 K7168, fastest mode | 8.0 (**1.60**) | | | | 9.0 (1.00) |"]


def test_targets_are_told_by_what_they_want_and_whether_it_was_held() -> None:
    assert made(TARGETS, RECORD)[2:] == [
        "  | INT4 K7168 | 1.20 (1) of 1.35; 1.70 (64) of 1.7 | 1.350 (16) of 1.35 |",
        "  | the same, humming | 1.60 (1) of 1.6 | 1.00 (64) of 1.7 |",
    ]


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the documents, to write into."""
    for table in tables.TABLES:
        (tmp_path / table.page).parent.mkdir(exist_ok=True)
        (tmp_path / table.page).write_bytes((tables.ROOT / table.page).read_bytes())
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def test_a_new_record_is_written_in_its_place(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(tables.RECORD.read_text("utf-8"))
    other = copy.deepcopy(record)
    other["cases"][0]["us"] *= 2
    (pages / "record.json").write_text(json.dumps(other))
    before = {table.page: (pages / table.page).read_text("utf-8") for table in tables.TABLES}
    assert tables.main([str(pages / "record.json")]) == 1
    assert tables.main([str(pages / "record.json"), "--write"]) == 0
    assert tables.main([str(pages / "record.json")]) == 0
    assert "docs/kernels.md: written" in capsys.readouterr().out
    after = {page: (pages / page).read_text("utf-8") for page in before}
    changed = {page for page in before if before[page] != after[page]}
    assert changed == {"docs/kernels.md"}, "bf16 products stand in one table"
    assert len(before["docs/kernels.md"].splitlines()) == len(after["docs/kernels.md"].splitlines())
    assert tables.main([str(tables.RECORD), "--write"]) == 0
    assert {page: (pages / page).read_text("utf-8") for page in before} == before


def test_what_cannot_be_made_is_named(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main([str(pages / "nosuch.json")]) == 3
    page = pages / TIMES.page
    page.write_text(page.read_text("utf-8").replace(TIMES.head, "| us |"))
    assert tables.main([]) == 3
    assert f"docs/kernels.md: no table begins with '{TIMES.head}'" in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_fault_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> list[str]:
        raise BrokenPipeError

    monkeypatch.setattr(tables, "made", closed)
    with pytest.raises(BrokenPipeError):
        tables.main([])
