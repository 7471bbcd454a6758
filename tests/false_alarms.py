"""Does the unmutated matrix ever fail? Runs it again and again under load, in random order, with several worker counts.

    python -m tests.false_alarms --runs 50 --workers 1 2 4 [--together N] [--loops N] [--json FILE] [--device cpu]

A busy loop per processor, or as many as ``--loops`` says, takes the machine's time away throughout. Each run has its
own seed for the order of the cells, and the next of the worker counts; ``--together`` runs are under way at a time. A
run is green when its ledger has every expected cell passed. ``--json`` gets one record a run as soon as it ends: seed,
workers, status, cells passed, seconds, load average, verdict and detail of what failed. The same command goes on where
an earlier one on the same commit ended. Exit status 0 when every run was green, 1 otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import ledger
from harness.cells import Verdict
from harness.environment import environment
from harness.files import write_atomic
from harness.ledger_format import LedgerError
from harness.sources import ROOT, describe

SEED = "KDTREE_ORDER_SEED"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin of each run: shuffle. Every xdist worker draws the same order, as xdist demands."""
    random.Random(int(os.environ[SEED])).shuffle(items)


@contextmanager
def load(count: int) -> Iterator[None]:
    """``count`` endless loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one(seed: int, workers: int, device: str, folder: Path) -> dict[str, Any]:
    """One run of the matrix; what became of it."""
    argv = ["tests/test_matrix.py", "-q", "-p", "tests.false_alarms", "-p", "no:cacheprovider", "-n", str(workers)]
    argv += ["--device", device, "--run-dir", str(folder)]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *argv],
        cwd=ROOT,
        env={**os.environ, SEED: str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    record: dict[str, Any] = {
        "seed": seed,
        "workers": workers,
        "status": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }
    try:
        found = ledger.read(folder)
    except LedgerError as error:
        return {**record, "passed": 0, "expected": 0, "failed": {"": f"{error}\n{done.stdout[-2000:]}"}}
    failed = {
        cell.id: f"{cell.verdict.value}: {cell.detail}" for cell in found.cells if cell.verdict is not Verdict.PASS
    }
    if done.returncode != 0 and not failed:
        failed = {"": done.stdout[-2000:]}
    return {**record, "passed": len(found.cells) - len(failed), "expected": len(found.expected), "failed": failed}


def earlier(path: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs that ``path`` holds of the same commit, device and number of loops; none without such a file."""
    if path is None or not path.exists():
        return []
    content = json.loads(path.read_text("utf-8"))
    return list(content["runs"]) if about.items() <= content.items() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Run, tell of each run, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="taken in turn (default: 1 2 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next one")
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="busy loops (default: a processor each)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if min(options.runs, options.together, *options.workers) < 1 or options.loops < 0:
        parser.error("--runs, --together and --workers take numbers from 1 on, --loops from 0 on")
    sources = describe()
    record = options.json.resolve() if options.json else None
    dirty = [path for path in sources.dirty if (ROOT / path).resolve() != record]  # the record may lie in the checkout
    about = {"commit": sources.commit, "dirty": dirty, "device": options.device, "loops": options.loops}
    runs = earlier(options.json, about)
    seen = {run["seed"] for run in runs}
    with tempfile.TemporaryDirectory() as scratch, load(options.loops), ThreadPoolExecutor(options.together) as pool:
        waiting = [
            pool.submit(one, options.seed + number, workers, options.device, Path(scratch) / str(number))
            for number, workers in zip(range(options.runs), itertools.cycle(options.workers), strict=False)
            if options.seed + number not in seen
        ]
        for future in as_completed(waiting):
            run = future.result()
            run["load"] = [round(value, 1) for value in os.getloadavg()]
            runs.append(run)
            said = f"{run['passed']} of {run['expected']} passed, status {run['status']}, {run['seconds']:.0f} s"
            print(f"[{len(runs)}/{options.runs}] seed {run['seed']}, {run['workers']} workers: {said}", flush=True)
            if options.json:  # after every run, so that an interrupted series leaves what it saw
                content = {**about, "environment": environment(), "runs": runs}
                write_atomic(options.json, (json.dumps(content, indent=1) + "\n").encode())
    green = sum(run["status"] == 0 and run["passed"] == run["expected"] > 0 for run in runs)
    print(f"{green} of {len(runs)} runs green")
    return 0 if green == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
