"""``kdtree mutants``: plants every fault of the catalogue in a copy of ``csrc/``, counts those that the matrix catches.

Controls go the same way: the unedited engine and one whose white space alone was edited have to pass everything. A
fault that nothing catches is a hole in the matrix, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness import bundles
from harness.bundle_lock import BundleError
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser, output
from harness.files import write_atomic
from harness.matrix import MatrixError, Point, expected, matcher
from harness.mutants import run as mutants_run
from harness.mutants.build import CompileError, Workshop
from harness.mutants.catalogue import CatalogueError, Fault, fraction, load, plant
from harness.mutants.run import Outcome
from harness.sources import ROOT, describe
from harness.toolchain import BuildError

WORKERS = 2
HOME = ROOT / "build" / "mutants"


@dataclass(frozen=True)
class Result:
    """One fault and what became of it."""

    fault: Fault
    outcome: Outcome
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.outcome.caught_by)

    @property
    def good(self) -> bool:
        """A fault is to be caught, a control is not."""
        return self.caught != self.fault.is_control

    @property
    def located(self) -> bool | None:
        """Whether the trace named the faulted operation; None for a fault that states none."""
        if not self.fault.taps or self.fault.is_control:
            return None
        operation = self.outcome.tap.split(".", 2)[2] if self.outcome.tap.startswith("layers.") else self.outcome.tap
        return operation in self.fault.taps

    def record(self) -> dict[str, Any]:
        """As ``docs/evidence/mutants.json`` holds it (docs/mutants.md)."""
        found = asdict(self.outcome)
        margin = found.pop("margin")
        found["detail"] = found["detail"].replace(f"{ROOT}/", "")  # the record is the same wherever the checkout lies
        return {
            "name": self.fault.name,
            "group": self.fault.group,
            "device": self.fault.device,
            "caught_by": found.pop("caught_by"),
            "margin": margin if math.isfinite(margin) else str(margin),
            **found,
            "operation": list(self.fault.taps),
            "operation_named": self.located,
            "seconds": round(self.seconds, 2),
        }


def one(fault: Fault, workshop: Workshop, points: Sequence[Point], paths: dict[str, Path]) -> Result:
    """Plant, build, run on ``points``. Raises CompileError naming the fault."""
    start = time.monotonic()
    with workshop.scratch(fault.name) as folder:
        scratch = Path(folder)
        try:
            library, _ = workshop.library(plant(fault, scratch / "csrc"), scratch, anew=fault.is_control)
        except CompileError as error:
            raise CompileError(f"{fault.name}: does not compile: {error}") from None
        outcome = mutants_run.run(fault, library, mutants_run.order(fault, points), paths)
    return Result(fault, outcome, time.monotonic() - start)


def line(result: Result) -> str:
    """One fault on one line."""
    o = result.outcome
    if not result.caught:
        what = f"passed all {o.ran}" if result.fault.is_control else f"NOT CAUGHT by any of {o.ran}"
        return f"{result.fault.name:<34} {what}"
    share = f", {o.margin:.2g}x the bound" if math.isfinite(o.margin) else ""
    said = f"{result.fault.name:<34} {o.caught_by} ({o.verdict}{share})"
    if result.fault.is_control:
        return f"{said}: A CONTROL FAILED: {o.detail}"
    named = {True: ", located", False: f", located at {o.tap or 'nothing'} instead", None: ""}[result.located]
    return said + named


def summary(results: Sequence[Result]) -> list[str]:
    """Shares by group."""
    lines = []
    for group in dict.fromkeys(result.fault.group for result in results):
        here = [result for result in results if result.fault.group == group]
        done = sum(result.good for result in here)
        stated = [result for result in here if result.located is not None]
        located = (
            f", operation named in {sum(map(bool, (r.located for r in stated)))} of {len(stated)}" if stated else ""
        )
        lines.append(
            f"{group:<12} {done:3d} of {len(here):3d} {'passed' if here[0].fault.is_control else 'caught'}{located}"
        )
    return lines


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree mutants",
        description="Plant every fault of the catalogue in a copy of csrc/, one by one, and count what is caught.",
        epilog="examples:\n  kdtree mutants -k int4\n  kdtree mutants --fraction 1/5 --seed $(git rev-parse HEAD)\n\n"
        f"exit status: {PASSED} every fault was caught and every control passed, {FAILED} not so, {INFRASTRUCTURE} the "
        "catalogue does not fit the sources, or something does not build",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-k", metavar="NAME", default="", help="only the faults whose name or group this chooses")
    parser.add_argument("--fraction", metavar="A/B", default="1", help="a fixed share of them, chosen by --seed")
    parser.add_argument("--seed", metavar="COMMIT", default="", help="what chooses the share (default: this commit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose faults (default: cpu)")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"faults at a time (default: {WORKERS})")
    parser.add_argument("--list", action="store_true", help="print the faults and run none")
    parser.add_argument("--json", action="store_true", help="the records on stdout, everything else on stderr")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the records there")
    return parser


def chosen(options: argparse.Namespace) -> list[Fault]:
    """The faults and controls that the options choose. Raises CatalogueError, MatrixError, ValueError."""
    faults = [fault for fault in load() if fault.device == options.device or fault.is_control]
    faults = [Fault(**{**vars(f), "device": options.device}) for f in faults]
    controls = [fault for fault in faults if fault.is_control]
    faults = [fault for fault in faults if not fault.is_control]
    seed = options.seed or describe().commit
    faults = fraction(faults, Fraction(options.fraction), seed)
    if options.k:
        holds = matcher(options.k)
        faults = [fault for fault in faults if holds([fault.name, fault.group])]
        controls = [fault for fault in controls if holds([fault.name, fault.group])]
        if not faults and not controls:
            raise CatalogueError(f"-k {options.k!r} matches no fault; `kdtree mutants --list` shows their names")
    return [*controls, *faults]


def main(argv: Sequence[str]) -> int:
    """``kdtree mutants``; the exit statuses stand in its help."""
    options = _parser().parse_args(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        faults = chosen(options)
        if options.list:
            for fault in faults:
                say(f"{fault.name:<34} {fault.group:<10} {fault.says}")
            return PASSED
        points = expected([options.device])
        paths = bundles.ensure(list(dict.fromkeys(point.config for point in points)), say=say)
        results = run_all(faults, Workshop(options.device, HOME), points, paths, options.workers, say)
    except (CatalogueError, MatrixError, BuildError, BundleError, CompileError, ValueError, ZeroDivisionError) as error:
        print(f"kdtree mutants: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    for text in summary(results):
        say(text)
    records = [result.record() for result in results]
    if options.out:
        write_atomic(options.out, (json.dumps(records, indent=1) + "\n").encode())
    if options.json:
        print(json.dumps(records, indent=1))
    return PASSED if all(result.good for result in results) else FAILED


def run_all(
    faults: Sequence[Fault],
    workshop: Workshop,
    points: Sequence[Point],
    paths: dict[str, Path],
    workers: int,
    say: bundles.Say,
) -> list[Result]:
    """Every fault, ``workers`` at a time, each told of as it ends; in the order given. Raises CompileError."""
    mutants_run.serve()
    start, lock = time.monotonic(), threading.Lock()
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(max(1, workers)) as pool:
        waiting: list[Future[Result]] = [pool.submit(one, fault, workshop, points, paths) for fault in faults]
        try:
            for future in as_completed(waiting):
                result = future.result()
                with lock:
                    results[result.fault.name] = result
                left = (time.monotonic() - start) / len(results) * (len(faults) - len(results))
                counted = f"[{len(results):3d}/{len(faults)}]"
                say(f"{counted} {line(result)}; {result.seconds:.1f} s, about {math.ceil(left / 60)} min left")
        finally:
            pool.shutdown(cancel_futures=True)
    workshop.prune()
    taken = time.monotonic() - start
    say(f"{len(faults)} faults and controls in {taken:.0f} s with {workers} workers")
    return [results[fault.name] for fault in faults]
