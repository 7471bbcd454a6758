"""Runs over time: margins, decode times and acceptance from every ledger below a folder.

Times are drawn apart for each host and its hardware, since they compare nowhere else. A ledger that cannot be read is
named and left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.cells import Ledger, Verdict, exit_status
from harness.ledger import LEDGER_FILE, read
from harness.ledger_format import LedgerError
from harness.matrix import MatrixError, parse
from harness.reports.against import TIMED, group
from harness.reports.plots import Chart, Series, chart

RUNS = 100  # the newest ones; more points than that no chart can show
TELL_EVERY = 1.0  # seconds between lines of progress


@dataclass(frozen=True)
class Sample:
    """One cell of one run."""

    passed: bool
    margin: float | None
    """None where no check with a bound was reached."""
    decode: float | None
    """Seconds."""
    rows: float | None
    """Committed by a DDTree round, on average."""
    hardware: str


@dataclass(frozen=True)
class RunSummary:
    """What a history keeps of a ledger."""

    run_id: str
    started: str
    commit: str
    dirty: bool
    engine: str
    hosts: tuple[str, ...]
    filter: str
    status: int
    passed: int
    wanted: int
    folder: str
    samples: dict[str, Sample]
    """By cell id; with several hosts, the worst margin and the longest time of them."""


@dataclass(frozen=True)
class CellHistory:
    """One cell over all runs, oldest first."""

    id: str
    runs: int
    passed: int
    margin: Chart
    decode: Chart
    rows: Chart | None
    last: Sample


@dataclass(frozen=True)
class History:
    """Everything a reader sees of a folder of runs."""

    folder: str
    runs: tuple[RunSummary, ...]
    """Oldest first."""
    unreadable: tuple[str, ...]
    charts: tuple[Chart, ...]
    cells: tuple[CellHistory, ...]


def summarise(ledger: Ledger, folder: str) -> RunSummary:
    """The numbers of ``ledger`` that change over time. Raises MatrixError for an id that is none."""
    samples: dict[str, Sample] = {}
    for cell in ledger.cells:
        parse(cell.id)
        if cell.verdict is Verdict.NOT_RUN:
            continue
        machine = ledger.environments.get(cell.host, {})
        hardware = ", ".join(filter(None, (cell.host, machine.get("cpu", ""), machine.get("gpus", ""))))
        rounds = cell.acceptance
        sample = Sample(
            cell.verdict is Verdict.PASS,
            cell.margin if any(check.allowed > 0 for check in cell.checks) else None,
            cell.times.get(TIMED),
            sum(rounds) / len(rounds) if rounds else None,
            hardware,
        )
        other = samples.get(cell.id)
        samples[cell.id] = sample if other is None else _worse(sample, other)
    return RunSummary(
        run_id=ledger.run_id,
        started=ledger.started,
        commit=ledger.sources.commit,
        dirty=bool(ledger.sources.dirty),
        engine=ledger.engine,
        hosts=tuple(sorted(ledger.environments)),
        filter=ledger.filter,
        status=exit_status(ledger),
        passed=ledger.passed,
        wanted=ledger.wanted,
        folder=folder,
        samples=samples,
    )


def _worse(a: Sample, b: Sample) -> Sample:
    return max((a, b), key=lambda sample: (not sample.passed, sample.margin or 0.0))


def load(folder: Path, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> History:
    """The newest runs below ``folder``. Raises LedgerError when there is none that can be read."""
    paths = sorted(path for path in folder.glob(f"*/{LEDGER_FILE}") if not path.parent.is_symlink())
    runs: list[RunSummary] = []
    unreadable: list[str] = []
    told = time.monotonic()
    for i, path in enumerate(paths[-RUNS:], 1):
        try:
            runs.append(summarise(read(path), path.parent.name))
        except (LedgerError, MatrixError) as error:
            unreadable.append(str(error))
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            say(f"reading ledgers: {i} of {len(paths[-RUNS:])}")
    if len(paths) > RUNS:
        unreadable.append(f"{len(paths) - RUNS} older runs are left out")
    if not runs:
        reason = unreadable[0] if unreadable else f"{folder}: holds no run (*/{LEDGER_FILE})"
        raise LedgerError(reason)
    runs.sort(key=lambda run: (run.started, run.run_id))
    return History(str(folder), tuple(runs), tuple(unreadable), tuple(_overview(runs)), tuple(_cells(runs)))


def _last(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{known[-1]:.3g}" if known else "none"


def _chart(title: str, unit: str, series: list[Series], *, bound: float | None = None) -> Chart:
    said = ", ".join(f"{s.label} {_last(s.values)}{unit}" for s in series)
    return chart(title, f"in the last run that has it: {said}", series, bound=bound, x_label="run")


def _overview(runs: list[RunSummary]) -> Iterable[Chart]:
    groups = sorted({group(id) for run in runs for id in run.samples})
    margins = []
    for name in groups:
        margins.append(Series(name, [_worst_margin(run, name) for run in runs]))
    yield _chart("Worst margin among the cells that passed", " of 1", margins, bound=1.0)
    for hardware in sorted({s.hardware for run in runs for s in run.samples.values()}):
        paces = [Series(name, _times(runs, name, hardware)) for name in groups]
        paces = [series for series in paces if any(value is not None for value in series.values)]
        if paces:
            yield _chart(f"Median decode time on {hardware or 'an unknown machine'}, ms", " ms", paces)
    drafters = sorted({parse(id).drafter for run in runs for id, s in run.samples.items() if s.rows is not None})
    rows = []
    for drafter in drafters:
        at = [
            [s.rows for id, s in run.samples.items() if parse(id).drafter == drafter and s.rows is not None]
            for run in runs
        ]
        rows.append(Series(drafter, [sum(values) / len(values) if values else None for values in at]))
    if rows:
        yield _chart("Rows committed per round, mean over the cells of each drafter", " rows", rows)


def _worst_margin(run: RunSummary, name: str) -> float | None:
    margins = [s.margin for id, s in run.samples.items() if group(id) == name and s.passed and s.margin is not None]
    return max(margins, default=None)


def _times(runs: list[RunSummary], name: str, hardware: str) -> list[float | None]:
    """Milliseconds per run: the median over the cells of the group ``name`` that passed on ``hardware``."""
    found: list[float | None] = []
    for run in runs:
        times = [
            1e3 * s.decode
            for id, s in run.samples.items()
            if group(id) == name and s.hardware == hardware and s.passed and s.decode is not None
        ]
        found.append(statistics.median(times) if times else None)
    return found


def _cells(runs: list[RunSummary]) -> Iterable[CellHistory]:
    for id in sorted({id for run in runs for id in run.samples}):
        samples = [run.samples.get(id) for run in runs]
        there = [sample for sample in samples if sample is not None]
        rows = [sample.rows if sample else None for sample in samples]
        last = there[-1]
        times = [sample.decode if sample and sample.hardware == last.hardware else None for sample in samples]
        yield CellHistory(
            id=id,
            runs=len(there),
            passed=sum(sample.passed for sample in there),
            margin=chart(f"Margins of {id}", "", [Series(id, [s.margin if s else None for s in samples])]),
            decode=chart(f"Decode times of {id}", "", [Series(id, times)]),
            rows=chart(f"Rows a round of {id}", "", [Series(id, rows)]) if any(r is not None for r in rows) else None,
            last=last,
        )
