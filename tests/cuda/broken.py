"""Whether the GPU tests notice what they are there for: each of `breaks.yaml` is built, and its tests have to fail.

    python -m tests.cuda.broken [-k WORDS] [--workers N] [--json FILE [--resume]] [--list]

A break is planted as `kdtree mutants` plants its faults, and its tests run on that library in a process of their own.
One that ends by a signal or does not end has noticed, too; a test that passes has not, nor has one that is not there.
Exit status 0 when every test and every shape of `tests.cuda.pairs` noticed, 1 otherwise, 3 where a break does not build
or there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.files import write_atomic
from harness.filters import matcher
from harness.gpu import survey
from harness.mutants.build import CompileError, Workshop
from harness.mutants.catalogue import Edit, Fault, load, plant
from harness.mutants.command import home
from harness.sources import ROOT, describe
from harness.yaml_nodes import parsed

HERE = Path(__file__).parent
BREAKS = HERE / "breaks.yaml"
SECONDS = 90.0  # for the tests of one break, on a machine that also compiles
PAIRS = 150
FAILS, PASSES, MISSING, CRASHES, HANGS = "fails", "passes", "is not there", "crashes", "hangs"


@dataclass(frozen=True)
class Break:
    """One break and what has to notice it."""

    fault: Fault
    tests: tuple[str, ...]
    """Below tests/cuda, as pytest names them."""
    pairs: tuple[str, ...]
    """Shapes of `tests.cuda.pairs`."""
    checkout: bool = False
    """The tests compile files of the checkout themselves, so they run in an edited copy of it."""


@dataclass
class Noticed:
    """What became of one break: how each test or shape took it, and the first of what it said."""

    name: str
    says: str
    how: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    not_built: str = ""
    seconds: float = 0.0
    engine: str = ""
    """Hash of the sources that the break was planted in."""
    edits: str = ""
    """`Fault.digest` of what was planted."""

    @property
    def good(self) -> bool:
        return not self.not_built and all(how in (FAILS, CRASHES, HANGS) for how in self.how.values())


def breaks(path: Path = BREAKS) -> list[Break]:
    """All of them. Raises ValueError for an entry that is none, KeyError for a fault that the catalogue has not."""
    faults = {fault.name: fault for fault in load()}
    found = []
    for at, entry in enumerate(parsed(path.read_text("utf-8"), path)):
        unknown = set(entry) - {"fault", "says", "edits", "tests", "pairs", "checkout"}
        if unknown or ("fault" in entry) == ("edits" in entry):
            raise ValueError(f"{path.name}: entry {at}: needs a fault or edits, and tests or pairs: {sorted(entry)}")
        fault = (
            faults[entry["fault"]]
            if "fault" in entry
            else Fault(f"break_{at}", "breaks", entry["says"], tuple(Edit(**edit) for edit in entry["edits"]))
        )
        noticing = tuple(entry.get("tests", ())), tuple(entry.get("pairs", ()))
        found.append(Break(fault, *noticing, checkout=entry.get("checkout", False)))
    return found


class _Outcomes:
    """A pytest plugin that keeps what became of each test where it outlives this process."""

    def __init__(self, keep: Callable[[str, str, str], None]) -> None:
        self.keep = keep

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/cuda/")
        if report.failed:
            lines = (line[2:].strip() for line in report.longreprtext.splitlines() if line.startswith("E "))
            self.keep(name, FAILS, next(lines, ""))
        elif report.when == "call" and report.passed:
            self.keep(name, PASSES, "")


def within(library: Path | None, out: Path, tests: Sequence[str], shapes: Sequence[str]) -> None:
    """Run the tests and shapes on ``library`` (None: what they build themselves), and write what became of each into
    ``out`` as it ends."""
    if library is not None:
        from engine.library import use

        use("cuda", library)
    found: dict[str, tuple[str, str]] = {}

    def keep(name: str, how: str, said: str) -> None:
        if found.get(name, ("",))[0] != FAILS:
            found[name] = (how, said[:200])
        out.write_text(json.dumps(found))

    if tests:
        import pytest

        paths = [str(HERE / test) for test in tests]
        flags = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
        pytest.main([*flags, *paths], plugins=[_Outcomes(keep)])
    if shapes:
        from tests.cuda import pairs

        for name in shapes:
            try:
                (result,) = pairs.run("cuda", {name: pairs.shapes()[name]}, PAIRS, 1, lambda results: None)
            except Exception as error:
                keep(name, FAILS, f"{type(error).__name__}: {error}")
            else:
                keep(name, PASSES if result.good else FAILS, pairs.text(result))


def one(broken: Break, workshop: Workshop) -> Noticed:
    """Plant, build, and run what has to notice."""
    start = time.monotonic()
    noticed = Noticed(broken.fault.name, broken.fault.says, edits=broken.fault.digest)
    with workshop.scratch(broken.fault.name) as folder:
        scratch = Path(folder)
        planted, checkout, on = plant(broken.fault, scratch / "csrc"), ROOT, []
        if broken.checkout:
            checkout = scratch
            _copy_checkout(scratch)
        else:
            try:
                library, _ = workshop.library(planted, scratch, edited={edit.file for edit in broken.fault.edits})
            except CompileError as error:
                noticed.not_built = str(error)
                return noticed
            on = [f"--library={library}"]
        out = scratch / "outcomes.json"
        given = [*(f"--test={test}" for test in broken.tests), *(f"--shape={shape}" for shape in broken.pairs)]
        command = [sys.executable, "-m", "tests.cuda.broken", "--within", str(out), *on, *given]
        with workshop.places:
            try:
                done = subprocess.run(command, cwd=checkout, capture_output=True, timeout=SECONDS, check=False)
                otherwise = CRASHES if done.returncode < 0 else MISSING
            except subprocess.TimeoutExpired:
                otherwise = HANGS
        found = json.loads(out.read_text()) if out.exists() else {}
    for name in (*broken.tests, *broken.pairs):
        noticed.how[name], noticed.said[name] = found.get(name, (otherwise, ""))
    noticed.seconds = round(time.monotonic() - start, 1)
    return noticed


def _copy_checkout(target: Path) -> None:
    """What tests need of it, beside the ``csrc/`` that is there."""
    for name in ("engine", "harness", "refs", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    shutil.copy(ROOT / "pyproject.toml", target)


def text(noticed: Noticed) -> str:
    """One break, and a line for each that has to notice it."""
    if noticed.not_built:
        return f"{noticed.name}: DOES NOT BUILD: {noticed.not_built}"
    lines = [f"    {name} {how}: {noticed.said[name]}" for name, how in noticed.how.items()]
    return "\n".join([f"{noticed.name}: {noticed.says} ({noticed.seconds:.0f} s)", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """The breaks that were asked for; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.broken", description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="WORDS", default="", help="only breaks of whose name, tests or shapes it holds")
    parser.add_argument("--workers", type=int, default=8, help="breaks at a time (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of them there, each as it ends")
    parser.add_argument("--resume", action="store_true", help="what FILE has as it should be, with this engine, stays")
    parser.add_argument("--list", action="store_true", help="print the breaks and what has to notice them, run none")
    parser.add_argument("--within", type=Path, metavar="OUT", help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--test", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--shape", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.within:
        within(options.library, options.within, options.test, options.shape)
        return PASSED
    holds = matcher(options.k) if options.k else lambda names: True
    chosen = [b for b in breaks() if holds([b.fault.name, *b.tests, *b.pairs])]
    if not chosen:
        parser.error(f"-k {options.k!r} matches no break")
    if options.list:
        for b in chosen:
            print(f"{b.fault.name}: {b.fault.says}", *b.tests, *b.pairs, sep="\n    ")
        return PASSED
    if options.resume and not options.json:
        parser.error("--resume goes with --json: the file whose records stay")
    if not survey().gpus:
        print(f"broken: no GPU: {survey().reason}", file=sys.stderr)
        return INFRASTRUCTURE
    engine = describe().engine
    before = earlier(options.json, engine) if options.resume else []
    return run(chosen, options.workers, options.json, engine, before)


def earlier(record: Path, engine: str) -> list[Noticed]:
    """What a record has of breaks that were noticed as they should be, with this engine; none where there is no file.
    Raises ValueError for a malformed one."""
    if not record.exists():
        return []
    try:
        found = [Noticed(**entry) for entry in json.loads(record.read_text("utf-8"))]
    except TypeError as error:
        raise ValueError(f"{record}: not a record of tests.cuda.broken: {error}") from error
    return [noticed for noticed in found if noticed.good and noticed.engine == engine]


def run(
    chosen: Sequence[Break], workers: int, record: Path | None, engine: str = "", before: Sequence[Noticed] = ()
) -> int:
    """Every break, ``workers`` at a time, that is not among those seen ``before``; exit status."""
    start, known = time.monotonic(), {(noticed.edits, *noticed.how): noticed for noticed in before}
    results = {b.fault.name: known.get((b.fault.digest, *b.tests, *b.pairs)) for b in chosen}
    workshop = Workshop("cuda", home(), workers)
    queue = [b for b in chosen if results[b.fault.name] is None]
    queue.sort(key=lambda b: workshop.reach({edit.file for edit in b.fault.edits}))
    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(one, b, workshop) for b in queue]):
            noticed = replace(future.result(), engine=engine)
            results[noticed.name] = noticed
            print(text(noticed), flush=True)
            if record:
                ended = [asdict(found) for found in results.values() if found]
                write_atomic(record, (json.dumps(ended, indent=1) + "\n").encode())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt waits for no break that has not begun
    return verdict([found for found in results.values() if found], time.monotonic() - start)


def verdict(results: Sequence[Noticed], seconds: float) -> int:
    """Say how many noticed; exit status."""
    asked = sum(len(result.how) for result in results)
    unnoticed = sum(how in (PASSES, MISSING) for result in results for how in result.how.values())
    print(f"{len(results)} breaks, {asked} to notice them, {unnoticed} did not: {seconds:.0f} s")
    if any(result.not_built for result in results):
        return INFRASTRUCTURE
    return PASSED if all(result.good for result in results) else FAILED


if __name__ == "__main__":
    sys.exit(main())
