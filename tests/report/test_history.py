"""Runs over time: every readable ledger counts once, in order; times stay with the machine they were taken on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from harness.cells import Ledger, Verdict
from harness.files import point
from harness.ledger import write
from harness.ledger_format import LedgerError
from harness.reports.history import RUNS, load
from harness.reports.html import history_page

ID = "fp32-ar-tiny-cpu"
DDTREE = "fp32-ddtree-tiny-oracle-cpu"


def store(folder: Path, ledgers: Sequence[Ledger]) -> Path:
    """One folder a run, a day apart."""
    for day, ledger in enumerate(ledgers, 1):
        name = f"203001{day:02}T000000Z-{day:06x}"
        (folder / name).mkdir(parents=True)
        write(replace(ledger, run_id=name, started=f"2030-01-{day:02}T00:00:00Z"), folder / name)
    return folder


def faster(ledger: Ledger, factor: float) -> Ledger:
    cells = tuple(replace(c, times={**c.times, "decode": c.times["decode"] / factor}) for c in ledger.cells)
    return replace(ledger, cells=cells)


def test_runs_stand_in_the_order_of_their_start_and_latest_is_no_run(tmp_path: Path) -> None:
    bad = runs.failing(runs.find(runs.light(), ID), Verdict.FAIL_TOKENS, "tokens", 1, 0, "x")
    history = load(store(tmp_path, [runs.light(), runs.change(runs.light(), ID, bad), runs.light()]))
    assert (tmp_path / "latest").is_symlink()
    assert [run.started[:10] for run in history.runs] == ["2030-01-01", "2030-01-02", "2030-01-03"]
    assert [run.status for run in history.runs] == [0, 1, 0]
    assert [run.passed for run in history.runs] == [20, 19, 20]
    cell = next(cell for cell in history.cells if cell.id == ID)
    assert (cell.runs, cell.passed) == (3, 2)
    assert len(history.cells) == len(runs.light().expected)


def test_numbers_of_a_cell_are_those_of_its_ledgers(tmp_path: Path) -> None:
    history = load(store(tmp_path, [runs.light(), faster(runs.light(), 2.0)]))
    record = runs.find(runs.light(), DDTREE)
    cell = next(cell for cell in history.cells if cell.id == DDTREE)
    assert cell.last.margin == record.margin
    assert cell.last.decode == pytest.approx(record.times["decode"] / 2)
    assert cell.last.rows == pytest.approx(sum(record.acceptance) / len(record.acceptance))
    (first, second) = (dot[1] for dot in cell.decode.lines[0].dots)
    assert first < second  # half of the time lies lower


def test_a_run_without_the_cell_leaves_a_gap(tmp_path: Path) -> None:
    history = load(store(tmp_path, [runs.light(), runs.change(runs.light(), ID, None), runs.light(), runs.light()]))
    cell = next(cell for cell in history.cells if cell.id == ID)
    assert cell.runs == 3
    (line,) = cell.margin.lines
    assert [len(path.split()) for path in line.paths] == [2]
    assert len(line.dots) == 3


def test_an_error_has_no_margin(tmp_path: Path) -> None:
    error = replace(runs.find(runs.light(), ID), verdict=Verdict.ERROR, checks=(), detail="x")
    history = load(store(tmp_path, [runs.light(), runs.change(runs.light(), ID, error)]))
    cell = next(cell for cell in history.cells if cell.id == ID)
    assert cell.last.margin is None
    assert len(cell.margin.lines[0].dots) == 1
    assert "Worst margin" in history_page(history)


def test_machines_have_times_of_their_own(tmp_path: Path) -> None:
    other = replace(runs.light(), environments={runs.HOST: {**runs.ENVIRONMENT, "cpu": "Another CPU"}})
    history = load(store(tmp_path, [runs.light(), other]))
    times = [chart for chart in history.charts if chart.title.startswith("Median decode time")]
    assert [chart.title for chart in times] == [
        "Median decode time on box, A CPU, ms",
        "Median decode time on box, Another CPU, ms",
    ]
    assert all(len(line.dots) == 1 for chart in times for line in chart.lines)
    cell = next(cell for cell in history.cells if cell.id == ID)
    assert len(cell.decode.lines[0].dots) == 1


def test_a_damaged_ledger_is_named_and_left_out(tmp_path: Path) -> None:
    store(tmp_path, [runs.light(), runs.light()])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ledger.json").write_text("{}")
    history = load(tmp_path)
    assert len(history.runs) == 2
    assert len(history.unreadable) == 1
    assert "broken/ledger.json" in history.unreadable[0]
    assert "broken/ledger.json" in history_page(history)


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="holds no run"):
        load(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "ledger.json").write_text("{}")
    with pytest.raises(LedgerError, match=r"x/ledger\.json"):
        load(tmp_path)


def test_the_newest_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.reports.history.RUNS", 3)
    small = runs.light({"tiny": ()})
    history = load(store(tmp_path, [small] * 5))
    assert [run.started[8:10] for run in history.runs] == ["03", "04", "05"]
    assert history.unreadable == ("2 older runs are left out",)
    assert RUNS >= 100


def test_reading_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("harness.reports.history.time.monotonic", lambda: next(clock) * 0.7)
    said: list[str] = []
    load(store(tmp_path, [runs.light({"tiny": ()})] * 4), said.append)
    assert said
    assert said[-1].endswith(" of 4")


def test_hosts_of_one_run_show_the_worst_of_them(tmp_path: Path) -> None:
    both = runs.light({"tiny": ()}, hosts=("a", "b"))
    bad = runs.failing(next(c for c in both.cells if c.host == "b"), Verdict.FAIL_TREE, "tree", 1, 0, "x")
    history = load(store(tmp_path, [runs.change(both, bad.id, bad)]))
    cell = next(cell for cell in history.cells if cell.id == bad.id)
    assert not cell.last.passed
    point(tmp_path / "latest", "elsewhere")
