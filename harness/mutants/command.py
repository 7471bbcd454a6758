"""``kdtree mutants``: plants every fault of the catalogue in a copy of ``csrc/``, counts those that the matrix catches.

Controls go the same way: the unedited engine and one whose white space alone was edited have to pass everything. A
fault that nothing catches is a hole in the matrix, and the exit status says so. One that does not fit the sources or
does not compile has a row that says so, and the others go on.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness import bundles, plain_json
from harness.build import cache_folder
from harness.bundle_lock import BundleError
from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.cli import Parser, output, positive
from harness.describe import filled
from harness.files import write_atomic
from harness.filters import matcher
from harness.matrix import MatrixError, Point, expected
from harness.mutants import run as mutants_run
from harness.mutants import syntax
from harness.mutants.build import CompileError, Workshop
from harness.mutants.catalogue import CSRC, CatalogueError, Fault, fraction, load, plant
from harness.mutants.result import Result, good_ones, line, recorded, summary
from harness.mutants.run import NOT_BUILT, Outcome
from harness.sources import ROOT, describe
from harness.toolchain import BuildError

WORKERS = 2
SAME_BYTES = "built anew it has the bytes of the unedited engine, which runs"
EVIDENCE = {
    "cpu": ROOT / "docs" / "evidence" / "mutants.json",
    "cuda": ROOT / "docs" / "evidence" / "mutants-cuda.json",
}


def home() -> Path:
    """Where edited engines are built, and their objects kept. Raises BuildError where nothing can be written."""
    folder = cache_folder() / "mutants"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise BuildError(
            f"{folder}: {error.strerror}; KDTREE_BUILD names another folder than {folder.parent}"
        ) from error


def one(
    fault: Fault,
    workshop: Workshop,
    points: Sequence[Point],
    paths: dict[str, Path],
    caught_by: str = "",
    unedited_runs: bool = False,
) -> Result:
    """Plant, build, run on ``points``. A fault that cannot be planted or built has an outcome that says so.

    ``caught_by``: what did so before, which is tried first. ``unedited_runs``: the unedited engine is one of the
    controls of this run, so that a control with the same bytes need not run as well.
    """
    start = time.monotonic()
    with workshop.scratch(fault.name) as folder:
        scratch = Path(folder)
        try:
            planted, edited = plant(fault, scratch / "csrc"), {edit.file for edit in fault.edits}
            library, _ = workshop.library(planted, scratch, anew=fault.is_control, edited=edited)
        except (CatalogueError, CompileError) as error:
            outcome = Outcome(verdict=NOT_BUILT, detail=str(error).replace(f"{scratch}/", ""))
        else:
            if fault.is_control and fault.edits and unedited_runs and _same(library, workshop, scratch / "unedited"):
                return Result(fault, Outcome(detail=SAME_BYTES), time.monotonic() - start)
            with workshop.places:
                outcome = mutants_run.run(fault, library, mutants_run.order(fault, points, caught_by), paths)
    return Result(fault, outcome, time.monotonic() - start)


def _same(library: Path, workshop: Workshop, folder: Path) -> bool:
    unedited, _ = workshop.library(CSRC, folder, anew=True)
    return library.read_bytes() == unedited.read_bytes()


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0 and up to 1, such as 1/5")
    return share


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree mutants",
        description="Plant every fault of the catalogue in a copy of csrc/, one by one, and count what is caught.",
        epilog="examples:\n  kdtree mutants -k int4\n  kdtree mutants --fraction 1/5 --seed $(git rev-parse HEAD)\n\n"
        f"exit status: {PASSED} every fault was caught and every control passed (with\n"
        f"--compile-only and --build-only: all compile), {FAILED} not so, {INCOMPLETE} interrupted,\n"
        f"{INFRASTRUCTURE} a malformed catalogue, a fault that does not fit the sources or does not build",
    )
    parser.add_argument("-k", metavar="NAME", default="", help="only the faults whose name or group this chooses")
    parser.add_argument(
        "--fraction", metavar="A/B", type=_share, default=Fraction(1), help="a fixed share of them, chosen by --seed"
    )
    parser.add_argument("--seed", metavar="COMMIT", default="", help="what chooses the share (default: this commit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose faults (default: cpu)")
    parser.add_argument("--workers", type=positive, default=WORKERS, help=f"faults at a time (default: {WORKERS})")
    parser.add_argument("--list", action="store_true", help="print the faults and run none")
    parser.add_argument(
        "--build-only", action="store_true", help="compile what a later run of them here will link; run none"
    )
    parser.add_argument("--compile-only", action="store_true", help="see whether they compile, many at once; run none")
    parser.add_json("the records")
    parser.add_argument("--out", type=output, metavar="FILE", help="write the records there, each as it ends")
    parser.add_argument(
        "--resume", action="store_true", help="what FILE of --out has of this engine as it should be is not tried again"
    )
    parser.add_argument(
        "--known",
        type=Path,
        metavar="FILE",
        help="records of an earlier run: what caught a fault is tried first (default: the one in docs/evidence)",
    )
    return parser


def chosen(options: argparse.Namespace) -> list[Fault]:
    """The faults and controls that the options choose. Raises CatalogueError, MatrixError, ValueError."""
    faults = [fault for fault in load() if fault.device == options.device or fault.is_control]
    faults = [Fault(**{**vars(f), "device": options.device}) for f in faults]
    controls = [fault for fault in faults if fault.is_control]
    faults = [fault for fault in faults if not fault.is_control]
    seed = options.seed or describe().commit
    faults = fraction(faults, options.fraction, seed)
    if options.k:
        holds = matcher(options.k)
        faults = [fault for fault in faults if holds([fault.name, fault.group])]
        controls = [fault for fault in controls if holds([fault.name, fault.group])]
        if not faults and not controls:
            raise CatalogueError(f"-k {options.k!r} matches no fault; `kdtree mutants --list` shows their names")
    return [*controls, *faults]


def main(argv: Sequence[str]) -> int:
    """``kdtree mutants``; the exit statuses stand in its help."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.resume and not options.out:
        parser.error("--resume goes with --out: the file whose records are kept")
    engine = describe().engine
    before: dict[str, dict[str, Any]] = {}

    def say(text: str) -> None:
        print(text, file=plain_json.beside(options.json), flush=True)

    def records(results: Sequence[Result]) -> list[dict[str, Any]]:
        found = before | {result.fault.name: {**result.record(), "engine": engine} for result in results}
        return [found[name] for name in names if name in found]

    def keep(results: Sequence[Result]) -> None:
        if options.out:
            write_atomic(options.out, (plain_json.text(records(results)) + "\n").encode())

    try:
        faults = chosen(options)
        if options.list:
            rows = [{"name": fault.name, "group": fault.group, "says": fault.says} for fault in faults]
            plain_json.give(rows, options.json)
            if options.json != plain_json.PRINTED:
                for row in rows:
                    print(filled(f"{row['name']:<34} {row['group']:<10} {row['says']}", " " * 46))
            return PASSED
        names = [fault.name for fault in faults]
        if options.resume:
            before = good_ones(options.out, engine, options.device, load())
            faults = [fault for fault in faults if fault.name not in before]
            say(f"{len(names) - len(faults)} of {len(names)} are in {options.out} as they should be, with this engine")
            names += [name for name in before if name not in names]  # those not chosen now stay in the file
        if options.compile_only:
            return compile_only(faults, options.device, options.json, say)
        if options.build_only:
            return build_only(faults, Workshop(options.device, home(), options.workers), options.workers, say)
        workshop = Workshop(options.device, home(), options.workers)  # without a compiler bundles are of no use
        points = expected([options.device])
        paths = bundles.ensure(list(dict.fromkeys(point.config for point in points)), say=say)
        known = recorded(options.known or EVIDENCE[options.device], must_be=options.known is not None)
        results = run_all(faults, workshop, points, paths, known, options.workers, say, keep)
    except (CatalogueError, MatrixError, BuildError, BundleError, ValueError, ZeroDivisionError) as error:
        print(f"kdtree mutants: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    for text in summary(results):
        say(text)
    plain_json.give(records(results), options.json)
    if any(result.broken for result in results):
        return INFRASTRUCTURE
    return PASSED if all(result.good for result in results) else FAILED


def build_only(faults: Sequence[Fault], workshop: Workshop, workers: int, say: bundles.Say) -> int:
    """Compile what a run of ``faults`` links, as long as there is nothing better to do; the exit status."""

    def build(fault: Fault) -> str:
        with workshop.scratch(fault.name) as folder:
            try:
                planted, edited = plant(fault, Path(folder) / "csrc"), {edit.file for edit in fault.edits}
                _, compiled = workshop.objects(planted, anew=fault.is_control, edited=edited)
            except (CatalogueError, CompileError) as error:
                return f"DOES NOT BUILD: {str(error).replace(f'{folder}/', '')}"
        return f"{compiled} compiled"

    broken = 0
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(build, fault): fault for fault in faults}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                said = future.result()
                broken += not said.endswith(" compiled")
                say(f"[{done:3d}/{len(faults)}] {waiting[future].name:<34} {said}")
        except BaseException:
            abandon(pool, waiting)
            raise
    return INFRASTRUCTURE if broken else PASSED


def compile_only(faults: Sequence[Fault], device: str, json: Path | None, say: bundles.Say) -> int:
    """Whether the faults compile; the exit status. Raises BuildError."""
    start = time.monotonic()
    checker = syntax.checker(device, home())
    broken = syntax.broken(faults, checker, say)
    for name, why in broken.items():
        say(f"{name:<34} DOES NOT BUILD: {why}")
    say(f"{len(faults) - len(broken)} of {len(faults)} faults and controls compile ({time.monotonic() - start:.0f} s)")
    plain_json.give(broken, json)
    return INFRASTRUCTURE if broken else PASSED


def abandon(pool: ThreadPoolExecutor, waiting: Iterable[Future[Any]]) -> None:
    """Drop what has not begun and kill the cells under way, until no worker has one: an interrupt waits for none."""
    pool.shutdown(wait=False, cancel_futures=True)
    while any(future.running() for future in waiting):  # what never began is cancelled, which no wait() takes for done
        mutants_run.kill_all()
        time.sleep(0.2)


def run_all(
    faults: Sequence[Fault],
    workshop: Workshop,
    points: Sequence[Point],
    paths: dict[str, Path],
    known: Mapping[str, str],
    workers: int,
    say: bundles.Say,
    keep: Callable[[Sequence[Result]], None],
) -> list[Result]:
    """Every fault, ``workers`` at a time, each told of as it ends; in the order given. ``known``: what caught a fault
    before. ``keep`` gets those that have ended, after each: a run of hours that is cut off has shown something."""
    mutants_run.serve()
    start, lock = time.monotonic(), threading.Lock()
    results: dict[str, Result] = {}
    unedited_runs = any(fault.is_control and not fault.edits for fault in faults)

    def turn(fault: Fault) -> tuple[bool, float]:
        """The unedited engine is the longest run, so it starts first; its objects serve an edited control, which comes
        last. Of faults the first are those with least to compile: a run that is cut off has shown most of them."""
        if fault.is_control:
            return bool(fault.edits), -math.inf
        return False, workshop.reach({edit.file for edit in fault.edits})

    queue = sorted(faults, key=turn)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        waiting: list[Future[Result]] = [
            pool.submit(one, fault, workshop, points, paths, known.get(fault.name, ""), unedited_runs)
            for fault in queue
        ]
        try:
            for future in as_completed(waiting):
                result = future.result()
                with lock:
                    results[result.fault.name] = result
                left = (time.monotonic() - start) / len(results) * (len(faults) - len(results))
                counted = f"[{len(results):3d}/{len(faults)}]"
                say(f"{counted} {line(result)}; {result.seconds:.1f} s, about {math.ceil(left / 60)} min left")
                keep([results[fault.name] for fault in faults if fault.name in results])
        except BaseException:
            abandon(pool, waiting)
            raise
    workshop.prune()
    taken = time.monotonic() - start
    say(f"{len(faults)} faults and controls in {taken:.0f} s with {workers} workers")
    return [results[fault.name] for fault in faults]
