"""The record of a run on disk: one file per cell while it runs, one ledger at its end, shards merged into one.

``docs/ledger.md`` describes the format. Guarantees: a ledger is written whole or not at all; what is read back was
checked field by field and against its checksum; a cell is recorded at most once; an expected cell that nobody
recorded is ``NOT_RUN``.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from harness.cells import Cell, Check, Ledger, Verdict
from harness.describe import rerun_line
from harness.files import point, write_atomic
from harness.ledger_format import LedgerError, cell_bytes, ledger_bytes, parse_cell, parse_ledger
from harness.matrix import parse

LEDGER_FILE = "ledger.json"
CELLS_FOLDER = "cells"
LATEST = "latest"


def timestamp() -> str:
    """UTC to the second, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id() -> str:
    """Sorts by time; unique between runs that start in the same second."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def _largest_logit_differences(cells: Sequence[Cell]) -> list[str]:
    """Per precision, the greatest difference from the float64 golden and what was allowed there."""
    found: dict[str, tuple[Check, str]] = {}
    for cell in cells:
        precision = parse(cell.id).precision
        for check in cell.checks:
            if check.name == "logits.max_abs" and (precision not in found or check.value > found[precision][0].value):
                found[precision] = (check, cell.id)
    return [
        f"largest logit difference, {precision}: {check.value:.2e} of {check.allowed:.2e} allowed ({id})"
        for precision, (check, id) in sorted(found.items())
    ]


NAMED = 6  # what a line of a summary lists before it counts the rest


def first_divergences(cells: Sequence[Cell]) -> list[str]:
    """Of the cells that failed: the taps that diverge first, most frequent first, whatever the layer, and where."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.divergence:
            tap = cell.divergence.tap
            found.setdefault(tap.split(".", 2)[2] if tap.startswith("layers.") else tap, []).append(cell)
    lines = []
    for tap, here in sorted(found.items(), key=lambda item: -len(item[1])):
        configs = sorted({parse(cell.id).config for cell in here})
        more = f" and {len(configs) - NAMED} more" if len(configs) > NAMED else ""
        count = f"{len(here)} cell{'s' if len(here) > 1 else ''}"
        lines.append(f"first divergence: {tap} in {count} of {', '.join(configs[:NAMED])}{more}")
    if lines:
        lines[-1] += " (docs/trace.md says what each tap is)"
    return lines


def summary(ledger: Ledger) -> list[str]:
    """The lines that end a run."""
    lines = [f"problem: {problem}" for problem in ledger.problems]
    counts: Counter[Verdict] = Counter(cell.verdict for cell in ledger.cells if cell.verdict is not Verdict.PASS)
    rest = "".join(f", {counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    wanted = ledger.filter if len(ledger.filter) <= 120 else f"{ledger.filter[:110]} ..."  # ids given one by one
    chosen = f" (filter: {wanted})" if wanted else ""
    lines.append(f"{ledger.passed} of {ledger.wanted} expected cells passed{rest}{chosen}")
    lines += first_divergences(ledger.cells)
    passing = [cell for cell in ledger.cells if cell.verdict is Verdict.PASS]
    if passing:
        worst = max(passing, key=lambda cell: cell.margin)
        check = max((c for c in worst.checks if c.allowed > 0), key=lambda c: c.margin, default=None)
        if check:
            lines.append(
                f"closest to its bound: {worst.id}, {check.name} {check.value:.3g} of {check.allowed:.3g} allowed "
                f"({100 * check.margin:.0f} %)"
            )
    return lines + _largest_logit_differences(passing)


def complete(ledger: Ledger, cells: Iterable[Cell]) -> Ledger:
    """``ledger`` with ``cells``, sorted, and NOT_RUN for every expected cell that is not among them.

    Raises LedgerError for a cell that is not expected or occurs twice.
    """
    hosts = tuple(ledger.environments) if ledger.per_host else ("",)
    found: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        key = (cell.id, cell.host if ledger.per_host else "")
        if cell.id not in ledger.expected:
            raise LedgerError(f"{ledger.run_id}: {cell.id}: recorded but not expected")
        if key in found:
            raise LedgerError(f"{ledger.run_id}: {cell.id}: recorded twice ({found[key].host} and {cell.host})")
        found[key] = cell
    for key in ((id, host) for id in ledger.expected for host in hosts):
        rerun = rerun_line(ledger.engine, key[0])
        missing = Cell(key[0], Verdict.NOT_RUN, detail="no worker recorded this cell", host=key[1], rerun=rerun)
        found.setdefault(key, missing)
    return replace(ledger, cells=tuple(found[key] for key in sorted(found)))


def merge(
    ledgers: Sequence[Ledger], *, run_id: str, expected: Iterable[str], command: str, per_host: bool = False
) -> Ledger:
    """Shards of one run as one ledger, or whole runs of several hosts side by side with ``per_host``.

    A NOT_RUN entry gives way to a real one of the same cell. Raises LedgerError when the shards differ in sources or
    engine, when two recorded the same cell (on the same host with ``per_host``), or when no shard expected a cell that
    ``expected`` has.
    """
    if not ledgers:
        raise LedgerError(f"{run_id}: no ledgers to merge")
    first = ledgers[0]
    environments: dict[str, Mapping[str, str]] = {}
    for ledger in ledgers:
        for name in ("sources", "engine"):
            if getattr(ledger, name) != getattr(first, name):
                mine, other = getattr(ledger, name), getattr(first, name)
                raise LedgerError(f"{ledger.run_id}: {name}: {mine} differs from {other} of {first.run_id}")
        environments.update(ledger.environments)
    wanted = tuple(sorted(set(expected)))
    missing = sorted(set(wanted) - {id for ledger in ledgers for id in ledger.expected})
    if missing:
        raise LedgerError(f"{run_id}: {missing[0]}: no merged ledger expected it ({len(missing)} such cells)")
    merged = Ledger(
        run_id=run_id,
        started=min(ledger.started for ledger in ledgers),
        finished=max(ledger.finished for ledger in ledgers),
        engine=first.engine,
        command=command,
        sources=first.sources,
        environments=environments,
        expected=wanted,
        cells=(),
        filter=" and ".join(sorted({ledger.filter for ledger in ledgers if ledger.filter})),
        per_host=per_host,
        problems=tuple(problem for ledger in ledgers for problem in ledger.problems),
        notes=tuple(note for ledger in ledgers for note in ledger.notes),
    )
    return complete(
        merged, (cell for ledger in ledgers for cell in ledger.cells if cell.verdict is not Verdict.NOT_RUN)
    )


def write(ledger: Ledger, run_dir: Path) -> Path:
    """Write ``run_dir/ledger.json``, checked as a reader would, and point ``latest`` beside ``run_dir`` at it.

    The cells' own files go: the ledger has them all.
    """
    path = run_dir / LEDGER_FILE
    data = ledger_bytes(ledger)
    parse_ledger(data, str(path))
    write_atomic(path, data)
    shutil.rmtree(run_dir / CELLS_FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):  # beside a folder of the user's choice there may be no place for it
        point(run_dir.parent / LATEST, run_dir.name)
    return path


def read(path: Path) -> Ledger:
    """The ledger in ``path`` (a file, or a run's folder). Raises LedgerError."""
    if path.is_dir():
        path = path / LEDGER_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; a run writes it under reports/<run id>/") from None
    return parse_ledger(data, str(path))


def record(cell: Cell, run_dir: Path) -> None:
    """Store one cell for the controller to collect. Raises LedgerError if the run has it already."""
    try:
        write_atomic(run_dir / CELLS_FOLDER / f"{cell.id}.json", cell_bytes(cell), exclusive=True)
    except FileExistsError:
        raise LedgerError(f"{run_dir}: {cell.id}: recorded twice") from None


def collect(run_dir: Path) -> list[Cell]:
    """Every cell recorded under ``run_dir`` so far, by id. Raises LedgerError for a damaged record."""
    cells = []
    for path in sorted((run_dir / CELLS_FOLDER).glob("*.json")):
        cell = parse_cell(path.read_bytes(), str(path))
        if path.stem != cell.id:
            raise LedgerError(f"{path}: id: holds {cell.id}")
        cells.append(cell)
    return cells
