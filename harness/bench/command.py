"""``kdtree bench [project] [ops] [step]``: measure, print each figure beside its target, and write JSON and a plot.

Nothing is asserted: a missed target is printed as missed and leaves the exit status at 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser
from harness.files import write_atomic
from harness.matrix import DEVICES, PRECISIONS

WHAT = ("project", "ops", "step")
CONFIGS = ("tiny", "tiny2", "experts", "long")
SCHEMA = 1


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _width(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value} is below 2: the root and at least one node")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree bench",
        description="Times of the project, of every operation, and of whole steps, beside peers and this machine's "
        "ceilings measured in the same run. Run it on a machine that does nothing else.",
        epilog="examples:\n  kdtree bench ops --filter linear-int4 --json speed.json\n"
        "  kdtree bench ops --filter 'k26-mla*' --device cuda\n  kdtree bench step --config tiny --width 8\n"
        "  kdtree bench project --runs 5 --full\n\n"
        f"exit status: {PASSED} measured, whether targets were held or missed; {INFRASTRUCTURE} something could not be"
        " measured, or wrong arguments (a filter that chooses nothing is one)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="*", metavar="project|ops|step", help="default: ops and step")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="write share of the roofline per case as SVG")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="TEXT", help="cases whose name has it; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="the names of the cases of ops, and nothing else")
    parser.add_argument("--seconds", type=_positive, default=0.5, help="of sampling per case and peer (default 0.5)")
    parser.add_argument("--no-peers", action="store_true", help="the engine alone")
    parser.add_argument("--config", action="append", choices=CONFIGS, help="step: of these (default: all of them)")
    parser.add_argument("--width", action="append", type=_width, help="step: rows of a tree (default 2, 4, ... 64)")
    parser.add_argument("--drafter", default="noisy", help="step: oracle, noisy or hostile (default noisy)")
    parser.add_argument("--runs", type=int, default=3, help="project: of each command (default 3)")
    parser.add_argument("--full", action="store_true", help="project: also nox -s test")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def header(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    from harness.bench.ceilings import threads
    from harness.environment import environment
    from harness.sources import describe

    sources = describe()
    return {
        "schema": SCHEMA,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "commit": sources.commit,
        "dirty": list(sources.dirty),
        "threads": threads(),
        "load_average": list(os.getloadavg()),
        "environment": environment(),
    }


def _ops(options: argparse.Namespace, out: dict[str, Any]) -> bool:
    from harness.bench import ceilings, ops, peers, plot
    from harness.bench.cases import cases, choose

    chosen = choose(cases(options.device), options.filter)
    _say(f"ops: {len(chosen)} cases; measuring this machine's ceilings")
    limits = ceilings.measure(options.device)
    known = [] if options.no_peers else peers.peers(options.device)
    out["header"]["ceilings"] = {
        "read_bytes_per_second": limits.read,
        "matmul_flops_per_second": limits.matmul,
        "empty_graph_node_us": limits.empty_node_us,
        "cache_bytes": limits.cache_bytes,
    }
    out["header"]["peers"] = {p.name: {"what": p.what, "absent": p.absent} for p in known}
    peaks = ", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in limits.matmul.items())
    node = "" if limits.empty_node_us is None else f", empty graph node {limits.empty_node_us:.2f} us"
    _say(f"ceilings: read {limits.read / 1e9:.1f} GB/s, matmul {peaks}{node}")
    for peer in known:
        _say(f"peer {peer.name}: {'absent, ' + peer.absent if peer.absent else peer.what}")
    present = [peer for peer in known if not peer.absent]
    lines, failed = ops.run(options.device, chosen, limits, present, options.seconds, _say)
    out["cases"], out["not_measured"]["ops"] = [line.as_json() for line in lines], failed
    if options.plot:
        title = f"Share of the roofline on {options.device}"
        svg = plot.roofline(title, [(line.case, line.roofline, line.cold) for line in lines])
        write_atomic(options.plot, svg.encode())
    return not failed


def _step(options: argparse.Namespace, out: dict[str, Any]) -> bool:
    from harness.bench import step
    from harness.engines import create
    from harness.matrix import Point
    from harness.prepare import prepare

    configs = options.config or CONFIGS
    points = [Point("fp32", "ar", config, "", options.device) for config in configs]
    bundles = prepare("csrc", points, _say)
    engine = create("csrc", options.device)
    widths = options.width or step.WIDTHS
    found = step.run(engine, bundles, PRECISIONS, options.drafter, widths, options.filter, _say)
    out["steps"] = [line.as_json() for line in found]
    return True


def _project(options: argparse.Namespace, out: dict[str, Any]) -> bool:
    from harness.bench import project

    waits, failed = project.run(options.device, options.runs, options.full, _say)
    out["project"], out["not_measured"]["project"] = [wait.as_json() for wait in waits], failed
    return not failed


def main(argv: Sequence[str]) -> int:
    """See ``kdtree bench --help``."""
    parser = _parser()
    options = parser.parse_args(argv)
    wanted = list(dict.fromkeys(options.what)) or ["ops", "step"]
    unknown = [name for name in wanted if name not in WHAT]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(WHAT)}")
    if options.runs < 1:
        parser.error(f"--runs {options.runs} is below 1")
    from harness.bench.cases import cases, choose

    chosen = choose(cases(options.device), options.filter)
    if options.list:
        print("\n".join(case.name for case in chosen))
        return PASSED
    if "ops" in wanted and not chosen:
        parser.error(f"--filter {' '.join(options.filter)} chooses no case; `kdtree bench --list` shows them")
    from harness.build import BuildError
    from harness.prepare import Infrastructure, usable_devices
    from harness.protocol import EngineError

    out: dict[str, Any] = {"header": {}, "not_measured": {}}
    try:
        usable_devices("csrc", [options.device], [])
        out["header"] = header(options.device)
        good = True
        for name, run in (("project", _project), ("ops", _ops), ("step", _step)):
            if name in wanted:
                good = run(options, out) and good
    except (Infrastructure, EngineError, BuildError) as error:
        print(f"kdtree bench: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    out["header"]["load_average_after"] = list(os.getloadavg())
    if options.json:
        write_atomic(options.json, (json.dumps(out, indent=1) + "\n").encode())
    return PASSED if good else INFRASTRUCTURE
