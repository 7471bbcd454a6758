"""Every reason why a ledger lets no merge through: the rules of the gate, each with its kind and message.

What is expected is computed from the axes of the checkout, never taken from the ledger alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date

from harness.cells import DEVICES, FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED, Cell, Ledger, Verdict
from harness.gate.waivers import Waiver
from harness.matrix import RANKED_CONFIGS, Point, expected, parse
from harness.reports.against import compare
from harness.sources import Sources

ENGINE = "csrc"
AGAIN = "; again: "
"""Between a finding and the line that runs its cell again."""
Table = dict[str, tuple[str, ...]]
"""Drafters by config."""


@dataclass(frozen=True)
class Finding:
    """One reason to say no."""

    kind: str
    status: int
    message: str


@dataclass(frozen=True)
class Demand:
    """What a ledger is held against."""

    sources: Sources
    table: Table
    precisions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By config; all where it names none."""
    waivers: tuple[Waiver, ...] = ()
    today: date = date.min
    devices: tuple[str, ...] = ()
    """That must be among those of the ledger."""
    engine: str = ENGINE
    against: Ledger | None = None
    max_slowdown: float | None = None
    allow_removed: bool = False
    rankable: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Configs that several ranks can share, by their number; empty: nothing is asked of ranks."""


def judge(ledger: Ledger, demand: Demand) -> list[Finding]:
    """Every reason why ``ledger`` lets nothing through; none if it does."""
    if not ledger.expected:
        return [_nothing(ledger), *_problems(ledger)]
    return [
        *_problems(ledger),
        *_sources(ledger, demand),
        *_expected(ledger, demand),
        *_cells(ledger, demand),
        *_waivers(ledger, demand),
        *_against(ledger, demand),
    ]


def _nothing(ledger: Ledger) -> Finding:
    if ledger.filter:
        return Finding("filter-empty", INFRASTRUCTURE, f"the filter {ledger.filter!r} of this run matched nothing")
    return Finding("empty", INFRASTRUCTURE, "the ledger is empty: the run expected no cell")


def _problems(ledger: Ledger) -> Iterable[Finding]:
    for problem in ledger.problems:
        yield Finding("problem", INFRASTRUCTURE, problem)


def _sources(ledger: Ledger, demand: Demand) -> Iterable[Finding]:
    remedy = "run the matrix on this checkout"
    for item in fields(Sources):
        theirs, ours = getattr(ledger.sources, item.name), getattr(demand.sources, item.name)
        if theirs == ours:
            continue
        if item.name == "dirty":
            apart = sorted(set(theirs) ^ set(ours))
            what = f"other uncommitted files: {', '.join(apart[:5])}{' and more' if len(apart) > 5 else ''}"
        else:
            what = f"{theirs[:12] or 'unknown'}, here it is {ours[:12] or 'unknown'}"
        yield Finding("sources", INFRASTRUCTURE, f"made from another {_NAMES[item.name]}: {what}; {remedy}")
    if ledger.engine != demand.engine:
        message = f"the engine {ledger.engine!r} was judged, not {demand.engine!r}; --engine names another one"
        yield Finding("engine", INFRASTRUCTURE, message)


_NAMES = {
    "commit": "commit",
    "dirty": "state of the tree",
    "engine": "engine (csrc/, engine/)",
    "lock": "refs/bundles.lock",
    "harness": "harness (harness/, refs/, tests/)",
}


def _expected(ledger: Ledger, demand: Demand) -> Iterable[Finding]:
    """The axes of this checkout against what the run expected."""
    points = [parse(id) for id in ledger.expected]
    devices = sorted({p.device for p in points})
    for device in demand.devices:
        if device not in devices:
            message = f"{device} is required, and no cell ran on it; it ran on {', '.join(devices)}"
            yield Finding("device", INFRASTRUCTURE, message)
    wanted = {id for device in devices for id in _wanted(device, points, demand)}
    missing = sorted(wanted - set(ledger.expected))
    if ledger.filter:  # which they are follows from it
        message = (
            f"the filter {ledger.filter!r} left out {len(missing)} of {len(wanted)} cells; run the matrix without -k"
        )
        yield Finding("filtered", INCOMPLETE, message)
    else:
        for id in missing:
            yield Finding("missing", INCOMPLETE, f"{id}: in the matrix, and the run did not expect it")
    for id in sorted(set(ledger.expected) - wanted):
        yield Finding("unexpected", INFRASTRUCTURE, f"{id}: in the ledger, and not in the matrix of this checkout")


def _wanted(device: str, points: Sequence[Point], demand: Demand) -> Iterable[str]:
    """What a run on a device owes: of several ranks the chosen configs, or all if it ran others as well."""
    ranks = {1, *(point.ranks for point in points if point.device == device)}
    if device == "cpu" and demand.engine == ENGINE and demand.rankable:
        ranks.add(2)
    ranked: dict[int, Sequence[str]] = {}
    for count in ranks - {1}:
        here = {point.config for point in points if (point.device, point.ranks) == (device, count)}
        able = demand.rankable.get(count, tuple(demand.table))
        ranked[count] = [name for name in able if name in RANKED_CONFIGS] if here <= set(RANKED_CONFIGS) else able
    for point in expected([device], demand.table, offered=demand.precisions, ranks=sorted(ranks), ranked=ranked):
        yield point.id


def _metrics(cell: Cell) -> Iterable[tuple[str, float]]:
    yield from ((check.name, check.value) for check in cell.checks)
    yield from ((f"bound of {check.name}", check.allowed) for check in cell.checks)
    yield from ((f"logit error of step {i}", error) for i, error in enumerate(cell.step_errors))


def _cells(ledger: Ledger, demand: Demand) -> Iterable[Finding]:
    excused = {(waiver.cell, waiver.verdict) for waiver in demand.waivers}
    for cell in ledger.cells:
        if (cell.id, cell.verdict) in excused:
            continue
        where = f"{cell.id} on {cell.host}" if ledger.per_host else cell.id
        if cell.verdict is Verdict.NOT_RUN:
            yield Finding("not-run", INCOMPLETE, f"{where}: {cell.detail or 'did not run'}")
        elif cell.verdict is not Verdict.PASS:
            again = f"{AGAIN}{cell.rerun}" if cell.rerun else ""
            yield Finding("failed", FAILED, f"{where}: {cell.verdict.value}: {cell.detail}{again}")
        bad = [name for name, value in _metrics(cell) if not math.isfinite(value)]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            yield Finding("nan", FAILED, f"{where}: {bad[0]} is no finite number{more}")


def _waivers(ledger: Ledger, demand: Demand) -> Iterable[Finding]:
    for waiver in demand.waivers:
        point = parse(waiver.cell)
        if point not in expected(DEVICES, demand.table, offered=demand.precisions, ranks=(point.ranks,)):
            message = f"the waiver of {waiver.cell} is not needed: the matrix has no such cell"
            yield Finding("waiver-unneeded", FAILED, message)
            continue
        verdicts = [cell.verdict for cell in ledger.cells if cell.id == waiver.cell]
        if verdicts and waiver.verdict not in verdicts:  # without any, the run had not the device
            got = ", ".join(sorted({verdict.value for verdict in verdicts}))
            message = (
                f"the waiver of {waiver.cell} is not needed: it excuses {waiver.verdict.value}, the cell gave {got}"
            )
            yield Finding("waiver-unneeded", FAILED, message)
        elif waiver.expires < demand.today:
            message = f"the waiver of {waiver.cell} expired on {waiver.expires}: mend the cell, or see {waiver.issue}"
            yield Finding("waiver-expired", FAILED, message)


def _against(ledger: Ledger, demand: Demand) -> Iterable[Finding]:
    if demand.against is None:
        return
    comparison = compare(ledger, demand.against)
    if not demand.allow_removed:
        for change in comparison.of("missing"):
            message = f"{change.id}: {demand.against.run_id} had it; --allow-removed if it was taken out on purpose"
            yield Finding("removed", FAILED, message)
    if demand.max_slowdown is None:
        return
    if comparison.untimed:
        message = f"slowdown cannot be judged against {demand.against.run_id}: {comparison.untimed}"
        yield Finding("untimed", INFRASTRUCTURE, message)
    for pace in comparison.paces:
        if pace.ratio > demand.max_slowdown:
            message = (
                f"{pace.group}: decoding takes {pace.ratio:.2f} times as long as in {demand.against.run_id} "
                f"(median of {pace.cells} cells), allowed {demand.max_slowdown:g}"
            )
            yield Finding("slower", FAILED, message)


def status(findings: Sequence[Finding]) -> int:
    """The exit status of the worst finding."""
    found = {finding.status for finding in findings}
    return next((s for s in (INFRASTRUCTURE, FAILED, INCOMPLETE) if s in found), PASSED)
