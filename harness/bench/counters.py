"""Hardware counters of the CUDA kernels that bench cases launch: ``python -m harness.bench.counters [--json OUT]``.

Nsight Compute (``ncu``, part of the CUDA toolkit) runs every case once, caches cold, and what bounds a kernel is told
by figures under its own names for them: share of the memory's and the issue slots' peak, warps that could issue,
registers, shared memory. Every case is one call; its time is that of a kernel alone, without the overlap that a graph
gives it, so `kdtree bench` has the times that count.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import plain_json
from harness.bench.cases import cases, choose
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser, ended
from harness.sources import ROOT, describe

FIGURES = {
    "Duration": "ns", "DRAM Throughput": "%", "L2 Cache Throughput": "%", "Issue Slots Busy": "%",
    "Executed Ipc Active": "inst/cycle", "No Eligible": "%", "Active Warps Per Scheduler": "warp",
    "Eligible Warps Per Scheduler": "warp", "Executed Instructions": "inst", "Registers Per Thread": "register/thread",
    "Dynamic Shared Memory Per Block": "byte/block", "Static Shared Memory Per Block": "byte/block",
    "Achieved Occupancy": "%", "Local Memory Spilling Requests": "",
}  # fmt: skip
"""What is kept of each kernel, and the unit in which it is asked for; none is a pure number."""
SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
    "InstructionStats", "LaunchStats", "Occupancy",
)  # fmt: skip
DEFAULT = (
    "k26-linear-int4-bf16-*-m1", "k26-linear-int4-bf16-*-m16", "k26-linear-int4-bf16-*-m64", "k26-linear-bf16-*-m1",
    "k26-moe_block-int4-bf16-*-m1", "k26-moe_block-int4-bf16-*-m16", "k26-moe_block-int4-bf16-*-m64",
    "k26-mla_*-bf16-t1024-*-m16", "k26-mla_attention-bf16-t32768-*-m16", "k26-mla_value-bf16-*-m16", "k26-tree_build-*",
)  # fmt: skip
EXPERTS = 64  # of a case: a profiler saves and restores what a kernel may write, and 384 would take minutes
PROFILED = re.compile(r'^==PROF== Profiling "[^"]*" - (\d+)')
DONE = "case "  # what the profiled process prints after a case's kernels


class CountersError(Exception):
    """The profiler is not there, or failed; the text has its own words."""


def child(names: Sequence[str]) -> None:
    """The process under the profiler: one call of every case between the profiler's start and stop."""
    import torch

    from harness.bench.operands import Bench

    known = {case.name: case for case in cases("cuda")}
    with Bench("cuda") as bench:
        for name in names:
            case = known[name]
            made = bench.calls(replace(case, experts=EXPERTS) if case.experts else case, 0)
            for call in made.calls:
                call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            made.calls[0]()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(DONE + name, flush=True)
            del made


def owners(log: str) -> dict[int, str]:
    """Kernel number -> case, from what the profiler and the process under it printed in turn."""
    found: dict[int, str] = {}
    waiting: list[int] = []
    for line in log.splitlines():
        if profiled := PROFILED.match(line):
            waiting.append(int(profiled[1]))
        elif line.startswith(DONE):
            found.update(dict.fromkeys(waiting, line.removeprefix(DONE)))
            waiting.clear()
    return found


def kernels(rows: Iterable[dict[str, str]], owner: dict[int, str]) -> list[dict[str, Any]]:
    """Of the profiler's table, a line a figure, one entry a kernel. Raises CountersError for another unit."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if not (row.get("ID") or "").isdigit():
            continue
        number = int(row["ID"])
        name = re.sub(r"kdtree::|<unnamed>::|\(anonymous namespace\)::|cuda::|\((?:int|bool)\)", "", row["Kernel Name"])
        new = {"case": owner.get(number, ""), "kernel": name, "grid": row["Grid Size"], "block": row["Block Size"]}
        entry = found.setdefault(number, {**new, "figures": {}})
        metric = row.get("Metric Name") or ""
        if metric not in FIGURES or not row["Metric Value"]:
            continue
        if row["Metric Unit"] != FIGURES[metric]:
            raise CountersError(f"ncu gives {metric} in {row['Metric Unit']!r}, not in {FIGURES[metric]!r}")
        label = f"{metric} [{FIGURES[metric]}]" if FIGURES[metric] else metric
        entry["figures"][label] = float(row["Metric Value"].replace(",", ""))
    return [found[number] for number in sorted(found)]


def measure(names: Sequence[str]) -> list[dict[str, Any]]:
    """Figures of every kernel that these cases launch. Raises CountersError."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersError("ncu, Nsight Compute's command line, is not on PATH; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory(prefix="kdtree-counters-") as folder:
        report = str(Path(folder) / "report")
        sections = [word for name in SECTIONS for word in ("--section", name)]
        command = [ncu, *sections, "--clock-control", "none", "--profile-from-start", "off", "-f", "-o", report]
        own = [sys.executable, "-m", "harness.bench.counters", "--child", *names]
        run = subprocess.run([*command, *own], cwd=ROOT, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CountersError(f"ncu failed with {run.returncode}:\n" + (run.stdout + run.stderr)[-2000:])
        shown = ["--import", f"{report}.ncu-rep", "--page", "details", "--csv", "--print-units", "base"]
        table = subprocess.run([ncu, *shown], capture_output=True, text=True, check=False)
        if table.returncode:
            raise CountersError(f"ncu --import failed with {table.returncode}:\n{table.stderr[-2000:]}")
    lines = table.stdout.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise CountersError("ncu printed no table")
    return kernels(csv.DictReader(io.StringIO("\n".join(lines[begin:]))), owners(run.stdout))


def main(arguments: Sequence[str] | None = None) -> int:
    """See ``--help``."""
    parser = Parser(
        prog="python -m harness.bench.counters",
        description="Hardware counters of the CUDA kernels of bench cases, by Nsight Compute.",
        epilog="example:\n  python -m harness.bench.counters --filter moe_block --json counters.json\n\n"
        f"exit status: {PASSED} measured; {INFRASTRUCTURE} no profiler, no GPU, or wrong arguments",
    )
    parser.add_argument("--filter", action="append", default=[], metavar="TEXT", help="cases (kdtree bench --list)")
    parser.add_json("everything that was measured")
    parser.add_argument("--child", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child)
        return PASSED
    names = [case.name for case in choose(cases("cuda"), options.filter or DEFAULT)]
    if not names:
        parser.error(f"--filter {' '.join(options.filter)} chooses nothing; `kdtree bench --list` shows the names")
    people, judged = plain_json.beside(options.json), describe()
    print(f"ncu runs {len(names)} cases, some seconds each", file=people, flush=True)
    try:
        found = measure(names)
    except CountersError as error:
        print(f"counters: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    for entry in found:
        figures = entry["figures"]
        parts = [f"{label.split(' [')[0]} {value:g}" for label, value in figures.items()]
        print(f"{entry['case']}: {entry['kernel'][:60]}\n    {'; '.join(parts)}", file=people)
    plain_json.give({"commit": judged.commit, "engine": judged.engine, "kernels": found}, options.json)
    return PASSED


if __name__ == "__main__":
    sys.exit(ended("python -m harness.bench.counters", main))
