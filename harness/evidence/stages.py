"""What there is to show on a GPU: one command a stage, how long it takes, what it leaves, what it waits for.

Commands run in the checkout and name its own folders alone, so that a record's command reads the same on any machine;
the word ``python`` stands for the interpreter that runs them. Stages are tried in the order below, most telling first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import gpu_share
from harness.bench import tables

SCRATCH = Path("build/evidence")
"""Where stages leave what they make, in the checkout; emptied as a run begins."""
K26_STEP, RANKS = "tests/cuda/test_step_k26.py", "tests/cuda/test_ranks.py"
OPERATIONS = ("tests/cuda", "--ignore", K26_STEP, "--ignore", RANKS)
SCALE = ("k26_slice", "k26_layer", "k26_bf16", "stated")
GENERIC = {"KDTREE_CUDA_TENSOR": "0"}
SHARED = {gpu_share.SHARE: "1"}
SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20")
OURS = ("--kernel-name", "kns=kdtree")
"""The engine's kernels alone. initcheck watches all: what torch's kernels had written would count as never written."""
BARRIERS = ("--num-cuda-barriers", "128")
"""A block's. By itself synccheck makes room for fewer, says so, and ends a kernel at one that it does not know."""
SWEEP = ("python", "-m", "tests.cuda.sweep")
PEERS = ("k26-linear-int4-bf16-*", "k26-routed-moe_block-int4-bf16-*")
"""Cases of the peer that compiles a kernel for each shape it meets."""
CELL = "int4-ar-tiny-cpu"
"""What stands for the matrix in a rehearsal."""


@dataclass(frozen=True)
class Stage:
    """One command and when it may run. The fields are all that the schedule knows."""

    command: tuple[str, ...]
    seconds: float
    """Expected, on 16 cores and one H200; a stage that takes more than `limit` is ended."""
    counts: str = ""
    """How its result is counted: a name of ``record.COUNTS``."""
    made: Path | None = None
    """The file that the counts are taken from; None: its output."""
    record: str = ""
    """That file's name in ``docs/evidence``; empty: the counts are all that is kept."""
    needs: tuple[str, ...] = ()
    """Stages that have to have passed."""
    after: tuple[str, ...] = ()
    """Stages that have to have ended, however they did."""
    share: float = 1.0
    """Of the machine: stages run together whose shares are one at most."""
    quiet: bool = False
    """It measures: its share is the whole machine, and what runs beside is suspended."""
    beside: bool = False
    """It runs beside all others, at the lowest priority."""
    piecewise: bool = False
    """What it has done by its end is kept and not done again, so it begins where a third of its time is left."""
    every_cell: bool = False
    """A config that is new leaves what it has shown incomplete."""
    prepares: bool = False
    """It shows nothing by itself: it runs where a stage that waits for it does, on every fresh machine again."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 1
    tool: str = ""
    """A program that it cannot do without, beside Python and the compilers."""
    module: str = ""
    """A Python package likewise."""
    rehearsal: tuple[str, ...] = ()
    """What stands for the command on a machine without a GPU; empty: nothing does."""

    @property
    def limit(self) -> float:
        """Seconds after which it is told to end."""
        return 2 * self.seconds + 30

    @property
    def least(self) -> float:
        """Seconds without which it does not begin."""
        return self.seconds / 3 if self.piecewise else self.seconds

    @property
    def waits_for(self) -> tuple[str, ...]:
        return self.needs + self.after


def device_name(gpu: str) -> str:
    """``NVIDIA H200`` -> ``h200``, as records' names have it: no maker, and nothing behind the model's number."""
    words = [word for word in re.findall(r"[A-Za-z0-9]+", gpu) if word not in ("NVIDIA", "GeForce", "Tesla")]
    last = next((at for at, word in enumerate(words) if re.search(r"\d", word)), len(words) - 1)
    return "".join(words[: last + 1]).lower() or "gpu"


def summary_name(device: str) -> str:
    """The record of a run itself."""
    return f"cuda-{device}-run.json"


def _harness(*words: str) -> tuple[str, ...]:
    return ("python", "-m", "harness", *words)


def _pytest(name: str, seconds: float, *words: str, **fields: object) -> Stage:
    """Tests, counted by the JUnit file that pytest writes."""
    junit = SCRATCH / f"{name}.xml"
    command = ("python", "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", *words)
    looks = ("--collect-only", "--noconftest", "-p", "tests.slow")  # the conftest leaves out what needs a GPU
    return Stage(
        (*command, f"--junitxml={junit}"),
        seconds,
        "tests",
        junit,
        rehearsal=(*command, *looks),
        **fields,  # type: ignore[arg-type]
    )


def _cells(record: str, device: str, seconds: float, *words: str, **fields: object) -> Stage:
    """Cells of the matrix, as a ledger named as it is committed, of a host that is called as the device is."""
    stem = record.removesuffix(".json")
    folder = SCRATCH / stem
    where = ("--host-name", device, "--run-dir", str(folder))
    command = _harness("test", *words, "--device", "cuda", "--require-device", "cuda", *where)
    stands = _harness("test", "-n", "0", "--engine", "reference", "--device", "cpu", "-k", CELL, *where)  # no build
    return Stage(command, seconds, "cells", folder / "ledger.json", record, rehearsal=stands, **fields)  # type: ignore[arg-type]


def _writes(record: str, counts: str, seconds: float, *words: str, to: str = "json", **fields: object) -> Stage:
    """A command that writes the record itself; ``--list`` of those that have it reads the other options too."""
    listed = fields.pop("listed", False)
    made = SCRATCH / record
    command = (*words, f"--{to}", str(made))
    stands = (*command, "--list") if listed else ()
    return Stage(command, seconds, counts, made, record, rehearsal=stands, **fields)  # type: ignore[arg-type]


def _sanitizer(tool: str, seconds: float, *options: str) -> Stage:
    """The sweep of operations and cells under one tool: it only checks, so all tools share the GPU."""
    command = (*SANITIZER, "--tool", tool, *options, *SWEEP)
    return Stage(command, seconds, "sanitizer", needs=BUILT, share=0.25, tool="compute-sanitizer")


BUILT = ("build", "build-cpu", "bundles")
MODULE, WORKERS = ("python", "-m"), ("-n", "8")
K26 = ("--file", str(SCRATCH / "k26.kdtr"), "--layers", "8")
WIDTHS = ("-M", "1", "-M", "16", "-M", "64")
FAULT_STAGES, FAULTS_RECORD = ("faults-build", "faults"), "mutants-cuda.json"
FEW_FAULTS = 60.0
"""Seconds of the fewest: a launch that never ends takes longer than all that do."""
FAULTS = ("mutants", "--device", "cuda", "--workers", "14", "-k", "not controls")


def _filters(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--filter", name))


def _preparations() -> dict[str, Stage]:
    return {
        "build": Stage(_harness("build", "--device", "cuda"), 35, share=0.5, prepares=True),
        "build-cpu": Stage(_harness("build", "--device", "cpu"), 20, share=0.25, prepares=True),
        "bundles": Stage(_harness("bundles"), 25, share=0.25, prepares=True),
        "faults-build": Stage(
            _harness(*FAULTS, "--build-only", "--resume", "--out", str(SCRATCH / FAULTS_RECORD)),
            220, needs=("build",), beside=True, prepares=True,
        ),
        "peers-build": Stage(
            _harness("bench", "ops", "--device", "cuda", *_filters(PEERS), "--seconds", "0.001"),
            95, needs=("build",), beside=True, prepares=True, module="humming",
        ),
        "scale-bundles": Stage(_harness("bundles", *SCALE), 420, beside=True, prepares=True),
    }  # fmt: skip


def _first(device: str) -> dict[str, Stage]:
    """What one window of ten minutes shows."""
    return {
        "tests": _pytest("tests", 95, *OPERATIONS, *WORKERS, needs=BUILT),
        "engine": _pytest("engine", 25, "tests/engine", *WORKERS, "-k", "cuda", needs=BUILT),
        "matrix": _cells(f"cuda-{device}-ledger.json", device, 50, "-n", "6", needs=BUILT, every_cell=True),
        "step": _pytest("step", 20, K26_STEP, "-n", "0", needs=BUILT),
        "bench": _writes(
            "bench-cuda.json", "bench", 285, *_harness("bench", "ops", "step", "--device", "cuda", "--k26", "384"),
            *_filters(tables.patterns()), "--seconds", "0.3", "--scratch", str(SCRATCH),
            needs=BUILT, after=("peers-build",), quiet=True, listed=True,
        ),
        "pairs": _writes(
            f"pairs-{device}.json", "pairs", 25, *MODULE, "tests.cuda.pairs", needs=("build",), listed=True
        ),
        "share": _writes(
            f"share-{device}.json", "timeline", 20, *MODULE, "harness.bench.timeline", *K26, *WIDTHS,
            "--share-of", "1", "--share-of", "2", needs=("build",), quiet=True,
        ),
    }  # fmt: skip


def _deeper(device: str) -> dict[str, Stage]:
    """Ranks in one process, planted faults, real sizes, the sanitizers."""
    return {
        "ranks-tests": _pytest("ranks-tests", 90, RANKS, "-n", "0", needs=BUILT, quiet=True),
        "faults": _writes(
            FAULTS_RECORD, "faults", 360, *_harness(*FAULTS, "--resume"),
            to="out", needs=BUILT, after=("faults-build",), piecewise=True, listed=True,
        ),
        "controls": _writes(
            "mutants-cuda-controls.json", "controls", 150,
            *_harness("mutants", "--device", "cuda", "--workers", "2", "-k", "controls"),
            to="out", needs=BUILT, listed=True, every_cell=True,
        ),
        "broken": _writes(
            f"broken-{device}.json", "broken", 90, *MODULE, "tests.cuda.broken", "--workers", "12", "--resume",
            needs=BUILT, piecewise=True, listed=True,
        ),
        "scale": _cells(
            f"scale-{device}.json", device, 100, "-n", "1", "--scale", "-k", " or ".join(SCALE),
            needs=(*BUILT, "scale-bundles"),
        ),
        "memcheck": _sanitizer("memcheck", 45, *OURS, "--leak-check", "no"),
        "synccheck": _sanitizer("synccheck", 45, *OURS, *BARRIERS),
        "initcheck": _sanitizer("initcheck", 60),
        "racecheck": _sanitizer("racecheck", 150, *OURS, "--racecheck-report", "all"),
    }  # fmt: skip


def _others(device: str, gpus: int) -> dict[str, Stage]:
    """The generic kernels, what bounds the others, and ranks."""
    several = f"ranks-{device}x{gpus}" if gpus > 1 else f"ranks-{device}-shared"
    return {
        "tests-generic": _pytest(
            "tests-generic", 135, *OPERATIONS, "tests/engine", *WORKERS, "-k", "cuda", needs=BUILT, environment=GENERIC
        ),
        "matrix-generic": _cells(
            f"cuda-{device}-generic-ledger.json", device, 30, "-n", "6", "-k", "bf16",
            needs=BUILT, environment=GENERIC, every_cell=True,
        ),
        "latency": _writes(
            f"cuda-{device}-latency.json", "latency", 20, *MODULE, "tests.cuda.latency", "--profile",
            needs=BUILT, quiet=True,
        ),
        "counters": _writes(
            f"counters-{device}.json", "counters", 30, *MODULE, "harness.bench.counters",
            needs=("build",), quiet=True, tool="ncu",
        ),
        "acceptance": _writes(
            f"text-acceptance-{device}.json", "acceptance", 30, *_harness("acceptance", "--device", "cuda"),
            needs=BUILT, quiet=True,
        ),
        "ranks-matrix": _cells(  # both together take longer than a window
            f"{several}-ledger.json", device, 480, "-n", "0", "--ranks", "2", "-k", "not text",
            needs=BUILT, environment=SHARED if gpus == 1 else {}, every_cell=True,
        ),
        "ranks-text": _cells(
            f"{several}-text-ledger.json", device, 200, "-n", "0", "--ranks", "2", "-k", "text",
            needs=BUILT, environment=SHARED if gpus == 1 else {},
        ),
        "ranks": _writes(
            f"{several}-times.json", "ranks", 90, *MODULE, "harness.bench.ranks", "--ranks", "2", *K26, *WIDTHS,
            needs=("build",), after=("share",), quiet=True, gpus=2,
        ),
    }  # fmt: skip


def with_faults_left(known: Mapping[str, Stage], share: float) -> dict[str, Stage]:
    """The stages, of which those of the faults take as long as that share of the catalogue."""
    found = dict(known)
    for name in set(FAULT_STAGES) & set(known):
        found[name] = replace(known[name], seconds=max(FEW_FAULTS, share * known[name].seconds))
    return found


def stages(device: str, gpus: int = 1) -> dict[str, Stage]:
    """By name, in the order in which they are tried. ``device``: as `device_name` has it."""
    return _preparations() | _first(device) | _deeper(device) | _others(device, gpus)
