"""Everything there is to show on a GPU, in one command: builds, tests, measures, and leaves the evidence in a folder.

    python -m tests.cuda.device_run OUT [--only STAGE ...] [--skip STAGE ...] [--budget SECONDS]

Stages run in the order below, most telling first; one that fails or runs out of time does not keep the others from
running. OUT gets ``summary.json`` (status, seconds and last lines of every stage), ``logs.tar.gz`` (whole outputs),
``ledger.json`` and ``latency.json``. Exit status 0 when every stage that ran succeeded, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--kernel-name", "kns=kdtree", "--print-limit", "20"]


def sanitize(tool: str, *options: str) -> list[str]:
    """The sweep of operations and cells under one tool."""
    return [*SANITIZER, "--tool", tool, *options, PYTHON, "-m", "tests.cuda.sweep"]


def stages(out: Path, scratch: Path) -> dict[str, tuple[list[str], float]]:
    """Command and time limit in seconds, by name."""
    module = [PYTHON, "-m"]
    # Relative paths, so that the ledger's command names no folder of this machine.
    pytest = [*module, "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    matrix = [*pytest, "tests/test_matrix.py", "--device", "cuda", "--require-device", "cuda", "-n", "6"]
    return {
        "environment": ([*module, "harness", "doctor"], 60),
        "gpu": ([*module, "harness.gpu", "--json"], 60),
        "build": ([*module, "harness", "build", "--device", "cuda"], 240),
        "build-cpu": ([*module, "harness", "build", "--device", "cpu"], 240),
        "tests": ([*pytest, "tests/cuda", "-n", "8"], 200),
        "engine": ([*pytest, "tests/engine", "-n", "8", "-k", "cuda"], 200),
        "latency": ([*module, "tests.cuda.latency", "--profile", "--json", str(out / "latency.json")], 120),
        "bundles": ([*module, "harness", "bundles"], 240),
        "matrix": ([*matrix, "--run-dir", str(scratch / "matrix")], 400),
        "memcheck": (sanitize("memcheck", "--leak-check", "no"), 400),
        "synccheck": (sanitize("synccheck"), 400),
        "initcheck": (sanitize("initcheck"), 400),
        "racecheck": (sanitize("racecheck", "--racecheck-report", "all"), 500),
    }


TOGETHER = ("memcheck", "synccheck", "initcheck", "racecheck")
"""Stages that only check, and may share the GPU."""


def start(name: str, command: list[str], logs: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Begin a stage, its output in a file of its own."""
    print(f"{name}: {' '.join(command)}", flush=True)
    with open(logs / f"{name}.log", "wb") as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return process, time.monotonic()


def end(name: str, running: tuple[subprocess.Popen[bytes], float], limit: float, logs: Path) -> dict[str, Any]:
    """Wait for a stage and say what became of it."""
    process, began = running
    try:
        status = process.wait(max(1.0, limit - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status = 124
    whole = (logs / f"{name}.log").read_text("utf-8", "replace")
    text = whole.replace(str(ROOT), ".").replace(sys.prefix, "PYTHON").splitlines()  # as evidence elsewhere needs it
    found = {"status": status, "seconds": round(time.monotonic() - began, 1), "tail": text[-15:]}
    print(f"{name}: status {status}, {found['seconds']} s", flush=True)
    for line in text[-40:] if status else text[-4:]:
        print(f"    {line[:300]}", flush=True)
    return found


def main() -> int:
    """Run the stages and pack the evidence."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.device_run", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="kdtree-device-run-"))
    known = stages(options.out.resolve(), scratch)
    wrong = [name for name in [*options.only, *options.skip] if name not in known]
    if wrong:
        parser.error(f"no stage {wrong[0]}; there are {', '.join(known)}")
    chosen = [n for n in known if (not options.only or n in options.only) and n not in options.skip]
    logs = scratch / "logs"
    logs.mkdir()
    stop = time.monotonic() + options.budget
    summary: dict[str, Any] = {}

    def pack() -> None:
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        if (ledger := scratch / "matrix" / "ledger.json").exists():
            shutil.copy(ledger, options.out)
        with tarfile.open(options.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(logs, arcname="logs")

    groups = [[n] for n in chosen if n not in TOGETHER] + [[n for n in chosen if n in TOGETHER]]
    for group in groups:
        left = stop - time.monotonic()
        if left < 10:
            summary.update({name: {"status": "no time left"} for name in group})
            continue
        running = {name: start(name, known[name][0], logs) for name in group}
        for name in group:
            limit = min(known[name][1], stop - time.monotonic())
            summary[name] = end(name, running[name], limit, logs)
        pack()
    pack()
    for name, found in summary.items():
        print(f"{name:12} {found['status']!s:14} {found.get('seconds', '')}")
    return 0 if all(found["status"] == 0 for found in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
