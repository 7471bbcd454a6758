"""Everything there is to show on a GPU, in one command: builds, tests, measures, and leaves the evidence in a folder.

    python -m tests.cuda.device_run OUT [--only STAGE ...] [--skip STAGE ...] [--budget SECONDS] [--list]

Stages run in the order below, most telling first; one that fails or runs out of time does not keep the others from
running. Bundles of real sizes are made beside the first ones. OUT gets ``summary.json`` (status, seconds and last lines
of every stage), ``logs.tar.gz`` (whole outputs), and what stages measured, named after them: ``matrix.json`` and the
other ledgers, ``mutants.json``, ``broken.json``, ``pairs.json``, ``latency.json``, ``bench.json``, ``ranks.json``.
Stages for two GPUs are left out where there is one. Exit status 0 when every stage that ran succeeded, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.gpu import survey
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--kernel-name", "kns=kdtree", "--print-limit", "20"]


def sanitize(tool: str, *options: str) -> list[str]:
    """The sweep of operations and cells under one tool."""
    return [*SANITIZER, "--tool", tool, *options, PYTHON, "-m", "tests.cuda.sweep"]


@dataclass(frozen=True)
class Stage:
    """One command, its time limit in seconds, what its environment adds, and the GPUs it needs."""

    command: list[str]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    gpus: int = 1


GENERIC = {"KDTREE_CUDA_TENSOR": "0"}
K26_STEP = "tests/cuda/test_step_k26.py"
"""Asks for tensor cores itself, and fills the GPU: alone."""
RANKS = "tests/cuda/test_ranks.py"
"""Jobs of several processes, with times that they must keep: alone."""
SCALE = ("k26_slice", "k26_layer", "k26_bf16", "stated")


def stages(out: Path, scratch: Path) -> dict[str, Stage]:
    """By name, in the order in which they run."""
    module = [PYTHON, "-m"]
    # Relative paths, so that the ledger's command names no folder of this machine.
    pytest = [*module, "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    harness = [*module, "harness"]
    operations = ["tests/cuda", "--ignore", K26_STEP, "--ignore", RANKS]

    def matrix(name: str, *options: str) -> list[str]:
        folder = ["--run-dir", str(scratch / name)]
        return [*harness, "test", "--device", "cuda", "--require-device", "cuda", *folder, *options]

    def faults() -> list[str]:
        return [*harness, "mutants", "--device", "cuda", "--workers", "10", "--out", str(out / "mutants.json")]

    def bench() -> list[str]:
        return [*harness, "bench", "ops", "step", "--device", "cuda", "--k26", "384", "--json", str(out / "bench.json")]

    def ranks() -> list[str]:
        file = ["--file", str(scratch / "k26.kdtr"), "--json", str(out / "ranks.json")]
        return [*module, "harness.bench.ranks", "--ranks", "2", *file]

    def timeline() -> list[str]:
        file = ["--file", str(scratch / "k26.kdtr"), "--layers", "8"]
        return [
            *module,
            "harness.bench.timeline",
            *file,
            "-M",
            "1",
            "-M",
            "16",
            "-M",
            "64",
            "--json",
            str(out / "timeline.json"),
        ]

    return {
        "environment": Stage([*harness, "doctor"], 60),
        "gpu": Stage([*module, "harness.gpu", "--json"], 60),
        "build": Stage([*harness, "build", "--device", "cuda"], 240),
        "build-cpu": Stage([*harness, "build", "--device", "cpu"], 240),
        "scale-bundles": Stage([*harness, "bundles", *SCALE], 520),
        "tests": Stage([*pytest, *operations, "-n", "8"], 200),
        "step": Stage([*pytest, K26_STEP, "-n", "0"], 300),
        "pairs": Stage([*module, "tests.cuda.pairs", "--json", str(out / "pairs.json")], 120),
        "engine": Stage([*pytest, "tests/engine", "-n", "8", "-k", "cuda"], 200),
        "tests-generic": Stage([*pytest, *operations, "tests/engine", "-n", "8", "-k", "cuda"], 300, GENERIC),
        "bundles": Stage([*harness, "bundles"], 240),
        "matrix": Stage(matrix("matrix", "-n", "6"), 400),
        "matrix-generic": Stage(matrix("matrix-generic", "-n", "6", "-k", "bf16"), 300, GENERIC),
        "scale": Stage(matrix("scale", "-n", "1", "--scale", "-k", " or ".join(SCALE)), 400),
        "scale-generic": Stage(matrix("scale-generic", "-n", "1", "--scale", "-k", "k26_bf16"), 300, GENERIC),
        "mutants": Stage(faults(), 500),
        "broken": Stage([*module, "tests.cuda.broken", "--workers", "12", "--json", str(out / "broken.json")], 240),
        "latency": Stage([*module, "tests.cuda.latency", "--profile", "--json", str(out / "latency.json")], 120),
        "memcheck": Stage(sanitize("memcheck", "--leak-check", "no"), 400),
        "synccheck": Stage(sanitize("synccheck"), 400),
        "initcheck": Stage(sanitize("initcheck"), 400),
        "racecheck": Stage(sanitize("racecheck", "--racecheck-report", "all"), 500),
        "ranks-tests": Stage([*pytest, RANKS], 200),
        "ranks-matrix": Stage(matrix("ranks-matrix", "-n", "0", "--ranks", "2"), 500, gpus=2),
        "ranks": Stage(ranks(), 400, gpus=2),
        "timeline": Stage(timeline(), 120),
        "counters": Stage([*module, "harness.bench.counters", "--json", str(out / "counters.json")], 300),
        "bench": Stage(bench(), 550),
    }


BESIDE = {"scale-bundles": "scale"}
"""Stages that run beside those that follow, up to the one that needs what they make."""
TOGETHER = ("memcheck", "synccheck", "initcheck", "racecheck")
"""Stages that only check, and may share the GPU."""


def start(name: str, stage: Stage, logs: Path) -> tuple[subprocess.Popen[bytes], float]:
    """Begin a stage, its output in a file of its own."""
    print(f"{name}: {' '.join(stage.command)}", flush=True)
    with open(logs / f"{name}.log", "wb") as log:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment}
        process = subprocess.Popen(
            stage.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return process, time.monotonic()


def allowed(stage: Stage, began: float, stop: float) -> float:
    """Seconds a stage may take from its own beginning, which is long ago for one that ran beside others."""
    return min(stage.limit, stop - began)


def end(name: str, running: tuple[subprocess.Popen[bytes], float], limit: float, logs: Path) -> dict[str, Any]:
    """Wait for a stage and say what became of it."""
    process, began = running
    try:
        status = process.wait(max(1.0, limit - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        processes.tell(process.pid, group=True)
        process.wait()
        status = 124
    whole = (logs / f"{name}.log").read_text("utf-8", "replace")
    text = whole.replace(str(ROOT), ".").replace(sys.prefix, "PYTHON").splitlines()  # as evidence elsewhere needs it
    found = {"status": status, "seconds": round(time.monotonic() - began, 1), "tail": text[-15:]}
    print(f"{name}: status {status}, {found['seconds']} s", flush=True)
    for line in text[-40:] if status else text[-4:]:
        print(f"    {line[:300]}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and pack the evidence."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.device_run", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--list", action="store_true", help="print the stages and their commands, and run none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kdtree-device-run-") as scratch:
        return run(parser, options, Path(scratch))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace, scratch: Path) -> int:
    """The stages that ``options`` choose; exit status."""
    known = stages(options.out.resolve(), scratch)
    wrong = [name for name in [*options.only, *options.skip] if name not in known]
    if wrong:
        parser.error(f"no stage {wrong[0]}; there are {', '.join(known)}")
    if options.list:
        for name, stage in known.items():
            print(name, *[f"{key}={value}" for key, value in stage.environment.items()], *stage.command)
        return 0
    gpus = len(survey().gpus)
    chosen = [n for n in known if (not options.only or n in options.only) and n not in options.skip]
    chosen = [n for n in chosen if known[n].gpus <= max(gpus, 1)]
    options.out.mkdir(parents=True, exist_ok=True)
    logs = scratch / "logs"
    logs.mkdir()
    stop = time.monotonic() + options.budget
    summary: dict[str, Any] = {}

    def pack() -> None:
        (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        for ledger in scratch.glob("*/ledger.json"):
            shutil.copy(ledger, options.out / f"{ledger.parent.name}.json")
        with tarfile.open(options.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(logs, arcname="logs")

    def finish(name: str) -> None:
        summary[name] = end(name, running[name], allowed(known[name], running[name][1], stop), logs)

    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    groups = [[n] for n in chosen if n not in TOGETHER] + [[n for n in chosen if n in TOGETHER]]
    for group in groups:
        for name, needed_by in BESIDE.items():
            if needed_by in group and name in running:
                finish(name)
        if stop - time.monotonic() < 10:
            summary.update({name: {"status": "no time left"} for name in group})
            continue
        for name in group:
            running[name] = start(name, known[name], logs)
        for name in group:
            if name not in BESIDE:
                finish(name)
        pack()
    for name in BESIDE:
        if name in running and name not in summary:
            finish(name)
    pack()
    for name, found in summary.items():
        print(f"{name:12} {found['status']!s:14} {found.get('seconds', '')}")
    return 0 if all(found["status"] == 0 for found in summary.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
