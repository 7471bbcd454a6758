"""Where a step's time goes, launch by launch: ``python -m harness.bench.timeline --file MODEL.kdtr -M 1 -M 16``.

A decode is traced by CUPTI, through ``torch.profiler``, with the graphs and overlaps that it always has. Launches
overlap: one may begin, wait and fetch while those before it still run. So what a launch costs is the time from the
latest end before it to its own, which adds up to the step's time; what it lasts is more than that. Tracing itself costs
a few percent: `kdtree bench` has the times that count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import plain_json
from harness.bench import k26, step
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser, ended, positive
from harness.environment import survey
from harness.protocol import EngineError
from harness.sources import describe
from refs.config import ModelConfig
from refs.drafter_config import split
from refs.kdtr import read

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
TEMPLATE = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class Launch:
    """One kernel or copy of a trace; microseconds."""

    name: str
    grid: tuple[int, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class Line:
    """Launches of one kernel and grid behind the same other one; microseconds, medians."""

    name: str
    grid: tuple[int, ...]
    a_forward: float
    """Launches a forward."""
    lasts: float
    costs: float
    """From the latest end before it to its own."""
    share: float
    """Of all that the decode's forwards took."""


def short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    while TEMPLATE.search(name):
        name = TEMPLATE.sub("", name)
    return name.split("(")[0].strip().rsplit("::", 1)[-1]


def launches(events: Sequence[dict[str, Any]]) -> list[Launch]:
    """The device's work of a Chrome trace, in the order in which it began."""
    found = [
        Launch(short(e["name"]), tuple(e.get("args", {}).get("grid") or ()), float(e["ts"]), float(e["ts"] + e["dur"]))
        for e in events
        if e.get("cat") in KINDS
    ]
    return sorted(found, key=lambda launch: (launch.begin, launch.end))


def lines(found: Sequence[Launch], forwards: int) -> list[Line]:
    """One line for every kernel, grid and kernel before it that runs in every forward, in the order of a forward."""
    groups: dict[tuple[str, tuple[int, ...], str], list[tuple[int, float, float]]] = {}
    latest, before = None, ""
    for place, launch in enumerate(found):
        cost = launch.end - launch.begin if latest is None else max(0.0, launch.end - latest)
        key = (launch.name, launch.grid, before)
        groups.setdefault(key, []).append((place, launch.end - launch.begin, cost))
        latest, before = max(launch.end, latest or launch.end), launch.name
    kept = {key: seen for key, seen in groups.items() if len(seen) >= forwards}
    total = sum(cost for seen in kept.values() for _, _, cost in seen)
    order = sorted(kept.items(), key=lambda item: item[1][len(item[1]) // 2][0])
    made = []
    for (name, grid, _), seen in order:
        lasts, costs = (round(statistics.median(s[i] for s in seen), 2) for i in (1, 2))
        share = round(sum(s[2] for s in seen) / total, 4) if total else 0.0
        made.append(Line(name, grid, round(len(seen) / forwards, 2), lasts, costs, share))
    return made


def trace(session: Any, request: Any) -> tuple[list[Launch], int]:
    """A decode's launches, graphs captured before, and its forwards."""
    import torch

    session.decode(request)
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        forwards = session.decode(request).forwards
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        return launches(json.loads(Path(file.name).read_text("utf-8"))["traceEvents"]), forwards


def table(width: int, found: Sequence[Line]) -> list[str]:
    """Lines for a reader, in the step's order."""
    rows = [f"M={width}: {'launch':<40} {'grid':>14} {'a forward':>9} {'lasts us':>9} {'costs us':>9} {'share':>6}"]
    for line in found:
        grid = "x".join(str(n) for n in line.grid)
        rows.append(
            f"     {line.name:<40.40} {grid:>14} {line.a_forward:>9.2f} {line.lasts:>9.2f} {line.costs:>9.2f} "
            f"{line.share:>6.1%}"
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Trace and print: 0, or 3 when the file or the device cannot be used."""
    parser = Parser(
        prog="python -m harness.bench.timeline",
        description="Where a step's time goes on a GPU, launch by launch.",
        epilog="examples:\n  python -m harness.bench.timeline --file /tmp/k26.kdtr -M 1 -M 16\n"
        "  python -m harness.bench.timeline --file MODEL.kdtr --precision fp32 -M 1 --json timeline.json\n\n"
        f"exit status: {PASSED}, {INFRASTRUCTURE} the file, the device or the arguments",
    )
    parser.add_argument("--file", type=Path, required=True, help="made with layers of K2.6's sizes if it is not there")
    parser.add_argument("--layers", type=int, default=k26.LAYERS, help="of a file that is made")
    parser.add_argument("--vocab", type=int, default=8192, help="of a file that is made")
    parser.add_argument(
        "--share-of", type=positive, action="append", default=[], metavar="N",
        help="one of N ranks alone, by itself; repeatable (default: 1)",
    )  # fmt: skip
    parser.add_argument("--precision", default="int4-bf16")
    parser.add_argument("-M", type=positive, action="append", default=[], help="rows of a forward (default 1 and 16)")
    parser.add_json("the lines")
    options = parser.parse_args(argv)
    try:
        with contextlib.redirect_stdout(plain_json.beside(options.json)):
            seen = _traced(options)
    except (EngineError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    plain_json.give(seen, options.json)
    return PASSED


def _traced(options: argparse.Namespace) -> dict[str, Any]:
    """As ``docs/evidence/share-<device>.json`` holds it: lines by share and width."""
    from engine import create
    from engine.session import CsrcEngine
    from harness.bench import share

    judged = describe()
    if not options.file.exists():
        config = k26.model(num_layers=options.layers, vocab_size=options.vocab)
        f32 = not options.precision.endswith("bf16")
        k26.write(options.file, config, lambda text: print(text, file=sys.stderr, flush=True), f32=f32)
    widths = options.M or [1, 16]
    config = ModelConfig.of(split(read(options.file).fields)[0], str(options.file))
    given = k26.requests(config, tuple(m for m in widths if m > 1), step.BLOCK)
    seen: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for n in options.share_of or [1]:
        engine = create("cuda") if n == 1 else CsrcEngine("cuda:0", share.alone(n))
        print(f"one of {n} ranks, alone" if n > 1 else "one rank", flush=True)
        lines_of = seen.setdefault(str(n), {})
        with engine.load(options.file, options.precision, max_rows=max(widths)) as session:
            for width in widths:
                found = lines(*trace(session, given[width]))
                print("\n".join(table(width, found)), flush=True)
                lines_of[str(width)] = [asdict(line) for line in found]
    about = {"commit": judged.commit, "engine": judged.engine, "device": ", ".join(g.name for g in survey().gpus)}
    return {**about, "precision": options.precision, "layers": config.num_layers, "shares": seen}


if __name__ == "__main__":
    sys.exit(ended("python -m harness.bench.timeline", main))
