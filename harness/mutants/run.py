"""Runs an edited engine against the matrix up to the first failed check, in a process that may crash or hang.

A server process imports what every run needs once and is forked for each; the forked process loads one library, runs
cells and loader checks one by one and reports each before and after, so that whoever waits knows where it ended.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.cells import Cell, Verdict
from harness.filters import select
from harness.limit import CellTimeout, limit
from harness.matrix import Point, parse
from harness.mutants.catalogue import Fault
from harness.sources import ROOT

LOADER = "loader"
"""The name under which the hostile files are run."""
OPERATIONS = "operations"
"""The name under which the tests of single operations are run: what is too small to show in a whole model."""
TESTS = ROOT / "tests" / "engine"
CELL_SECONDS = 60.0  # a cell takes 1.3 s; a machine shared with compilers may be many times slower
SILENCE_SECONDS = 400.0  # without a report: a cell, its grace and its trace, or the operations on a busy machine
THREADS = 4  # also on machines with fewer processors, so that threads interleave
PLAIN = "neon" if platform.machine() in ("aarch64", "arm64") else "base"
"""What this machine calls the kernels of isa_base.cpp."""
NOT_BUILT = "NOT_BUILT"
"""The verdict on a fault of which no library could be made or loaded: it was never run, so it is not caught either."""
NOT_RUN = Verdict.NOT_RUN.value
"""The verdict on a fault in kernels that this processor cannot run, where every check would fail, and not for it."""
LOADER_CONFIG = "budget0"
"""The smallest bundle with MoE layers."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run: the first failed check, or none."""

    caught_by: str = ""
    """``CELL: CHECK``, or ``""`` when everything passed."""
    verdict: str = ""
    margin: float = 0.0
    """Value over bound of the first failed check that has a bound above zero, infinite where none has."""
    detail: str = ""
    tap: str = ""
    """Where the trace says the numbers first parted."""
    divergence: str = ""
    ran: int = 0
    """Cells and loader runs, the failed one included."""


def order(fault: Fault, points: Sequence[Point], caught_by: str = "") -> list[str]:
    """Everything that may catch ``fault``, what is likely to first: cell ids, `LOADER` and `OPERATIONS`.

    ``caught_by``: what did so in an earlier run (`Outcome.caught_by`), which comes before all else, or else what the
    fault itself names: a cell, the loader, or tests of the operations, which then come once more among all of them.
    """
    names = _by_likelihood(fault, points)
    for likely in (fault.first, caught_by):
        place, _, check = likely.partition(": ")
        tests = check.removesuffix(": crash").removesuffix(": hang")
        if place == OPERATIONS and (TESTS / tests.partition("::")[0]).is_file():
            place = f"{OPERATIONS}: {tests}"
        elif place not in names:
            continue
        names = [place, *(name for name in names if name != place)]
    return names


def _by_likelihood(fault: Fault, points: Sequence[Point]) -> list[str]:
    def rank(point: Point) -> tuple[int, ...]:
        likely = [point.decoder == "ddtree"] if fault.group in ("trees", "drafter") else [point.decoder == "ar"]
        precision = {"int4": "int4", "kernels": "int4", "bf16": "bf16"}.get(fault.group, "fp32")
        trust = ["dflash", "noisy", "oracle", "hostile"] if fault.group == "drafter" else ["noisy", "oracle", "hostile"]
        drafter = trust.index(point.drafter) if point.drafter in trust else len(trust) if point.drafter else 0
        default = point.config != "tiny"
        return (not likely[0], drafter, point.precision != precision, default)

    ids = [point.id for point in sorted(points, key=rank)]
    if fault.first.partition(": ")[0] == OPERATIONS:
        return [OPERATIONS, *ids, LOADER]
    if fault.first == LOADER or fault.group == "loader":
        return [LOADER, *ids, OPERATIONS]
    if fault.first:
        chosen = [point.id for point in select(points, fault.first)]
        ids = [id for id in ids if id in chosen] + [id for id in ids if id not in chosen]
    return [*ids, LOADER, OPERATIONS]


def run(fault: Fault, library: Path, names: Sequence[str], bundles: Mapping[str, Path]) -> Outcome:
    """Run ``names`` on ``library`` until one fails. Thread-safe."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(theirs, fault.device, fault.isa, str(library), list(names), dict(bundles)), daemon=True
    )
    process.start()
    theirs.close()
    name, ran = "load", 0
    try:
        while True:
            if not ours.poll(SILENCE_SECONDS):
                detail = f"no word for {SILENCE_SECONDS:g} s"
                return Outcome(f"{name}: hang", Verdict.TIMEOUT.value, math.inf, detail, ran=ran)
            kind, content = ours.recv()
            if kind == "start":
                name, ran = content, ran + 1
            elif kind == "failed":
                return Outcome(**content, ran=ran)
            elif kind == "done":
                return Outcome(ran=ran)
    except EOFError:
        process.join(10)
        how = (
            f"exit status {process.exitcode}" if (process.exitcode or 0) >= 0 else f"signal {-(process.exitcode or 0)}"
        )
        return Outcome(f"{name}: crash", Verdict.ERROR.value, math.inf, f"the process ended: {how}", ran=ran)
    finally:
        process.kill()
        process.join()
        ours.close()


def serve(modules: Sequence[str] = ("torch", "harness.runner", "harness.mutants.hostile", "engine")) -> None:
    """Start the server that runs are forked from; to be called before the first run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])


def kill_all() -> None:
    """End every run under way, whatever its cell is waiting for; its outcome is of no worth."""
    for process in multiprocessing.active_children():
        process.kill()


def _child(report: Connection, device: str, isa: str, library: str, names: list[str], bundles: dict[str, Path]) -> None:
    os.environ["KDTREE_THREADS"] = str(THREADS)
    os.environ.pop("KDTREE_ISA", None)
    if isa:
        os.environ["KDTREE_ISA"] = PLAIN if isa == "base" else isa
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # what a broken engine's allocator says as it dies helps nobody
    from engine.library import library as load
    from engine.library import use
    from harness.runner import Runner

    use(device, Path(library))
    try:
        engine = load(device)
    except OSError as error:  # the linker leaves it to the loader to miss a symbol
        said = str(error.__cause__ or error).replace(f"{Path(library).parent}/", "")
        report.send(("failed", {"verdict": NOT_BUILT, "detail": said}))
        return
    needed = os.environ.get("KDTREE_ISA", "")
    if needed and needed not in (has := engine.isa_names()).split():
        report.send(("failed", {"verdict": NOT_RUN, "detail": f"its kernels are {needed}; this processor has {has}"}))
        return
    runner = Runner("csrc", bundles, seconds=CELL_SECONDS, host="", worker="")
    for name in names:
        report.send(("start", name))
        place, _, test = name.partition(": ")
        if place == LOADER:
            failed = _loader(device, bundles, report)
        elif place == OPERATIONS:
            failed = _operations(device, test)
        else:
            failed = _cell(runner, name, report)
        if failed is not None:
            report.send(("failed", failed))
            return
    report.send(("done", None))


def _cell(runner: Any, id: str, report: Connection) -> dict[str, Any] | None:
    def on_hang(record: Cell) -> None:
        failed = _failure(record)
        with suppress(OSError):
            report.send(("failed", failed))

    return _failure(runner.run(parse(id), on_hang))


def _failure(cell: Cell) -> dict[str, Any] | None:
    if cell.verdict is Verdict.PASS:
        return None
    wrong = [check for check in cell.checks if not check.ok]
    first = wrong[0] if wrong else None
    margins = [check.margin for check in wrong if check.allowed > 0]
    divergence = cell.divergence
    return {
        "caught_by": f"{cell.id}: {first.name if first else cell.verdict.value.lower()}",
        "verdict": cell.verdict.value,
        "margin": margins[0] if margins else math.inf,
        "detail": cell.detail,
        "tap": divergence.tap if divergence else "",
        "divergence": divergence.detail if divergence else "",
    }


class _FirstFailure:
    """A pytest plugin that notes the first failed test."""

    id = detail = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.id:
            self.id = report.nodeid
            self.detail = next((line[2:] for line in report.longreprtext.splitlines() if line.startswith("E ")), "")


def _operations(device: str, test: str) -> dict[str, Any] | None:
    """All tests of operations up to the first that fails, or one alone, which an earlier run knew and may be gone."""
    import pytest

    first = _FirstFailure()
    tests = [str(TESTS / test)] if test else sorted(str(path) for path in TESTS.glob("test_op_*.py"))
    chosen = "cuda" if device == "cuda" else "not cuda"
    arguments = ["-x", "-q", "-k", chosen, "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        status = pytest.main([*arguments, *tests], plugins=[first])
    if status == 0 or (test and not first.id):
        return None
    return {
        "caught_by": f"{OPERATIONS}: {Path(first.id).name or f'pytest ended with {int(status)}'}",
        "verdict": Verdict.ERROR.value,
        "margin": math.inf,
        "detail": first.detail.strip(),
    }


def _loader(device: str, bundles: Mapping[str, Path], report: Connection) -> dict[str, Any] | None:
    from harness.engines import create
    from harness.mutants.hostile import check_files

    def failed(what: str, verdict: Verdict, detail: str) -> dict[str, Any]:
        return {
            "caught_by": f"{LOADER}: {what}",
            "verdict": verdict.value,
            "margin": math.inf,
            "detail": detail,
        }

    late = failed("hang", Verdict.TIMEOUT, f"took longer than {CELL_SECONDS:g} s")
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            limit(CELL_SECONDS, lambda: report.send(("failed", late))),
        ):
            for check in check_files(create("csrc", device), bundles[LOADER_CONFIG], Path(folder)):
                if not check.ok:
                    return failed(check.name.partition(".")[2], check.verdict, check.detail)
    except CellTimeout:
        return late
    return None
