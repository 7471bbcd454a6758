"""Does the unmutated matrix ever fail? Runs it again and again under load, in random order, with several worker counts.

    python -m tests.false_alarms --runs 50 --workers 1 2 4 [--together N] [--json FILE] [--device cpu]

A busy loop per processor takes the machine's time away throughout. Each run has its own seed for the order of the
cells, and the next of the worker counts; ``--together`` runs are under way at a time. A run is green when its ledger
has every expected cell passed. ``--json`` gets one record a run: seed, workers, status, cells passed, seconds, load
average, ids and verdicts of what failed. Exit status 0 when every run was green, 1 otherwise.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import ledger
from harness.cells import Verdict
from harness.environment import environment
from harness.sources import ROOT, describe

SEED = "KDTREE_ORDER_SEED"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin of each run: shuffle. Every xdist worker draws the same order, as xdist demands."""
    random.Random(int(os.environ[SEED])).shuffle(items)


@contextmanager
def load() -> Iterator[None]:
    """One endless loop per processor."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
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
    except ledger.LedgerError as error:
        return {**record, "passed": 0, "expected": 0, "failed": {"": f"{error}\n{done.stdout[-2000:]}"}}
    failed = {cell.id: cell.verdict.value for cell in found.cells if cell.verdict is not Verdict.PASS}
    return {**record, "passed": len(found.cells) - len(failed), "expected": len(found.expected), "failed": failed}


def main() -> int:
    """Run, tell of each run, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="taken in turn (default: 1 2 4)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if min(options.runs, options.together, *options.workers) < 1:
        parser.error("--runs, --together and --workers take numbers from 1 on")
    commit, runs = describe().commit, []
    with tempfile.TemporaryDirectory() as scratch, load(), ThreadPoolExecutor(options.together) as pool:
        waiting = [
            pool.submit(one, options.seed + number, workers, options.device, Path(scratch) / str(number))
            for number, workers in zip(range(options.runs), itertools.cycle(options.workers), strict=False)
        ]
        for number, future in enumerate(as_completed(waiting)):
            run = future.result()
            run["load"] = [round(value, 1) for value in os.getloadavg()]
            runs.append(run)
            said = f"{run['passed']} of {run['expected']} passed, status {run['status']}, {run['seconds']:.0f} s"
            print(f"[{number + 1}/{options.runs}] seed {run['seed']}, {run['workers']} workers: {said}", flush=True)
            if options.json:  # after every run, so that an interrupted series leaves what it saw
                content = {"commit": commit, "device": options.device, "environment": environment(), "runs": runs}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
    green = sum(run["status"] == 0 and run["passed"] == run["expected"] > 0 for run in runs)
    print(f"{green} of {len(runs)} runs green")
    return 0 if green == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
