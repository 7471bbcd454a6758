"""``kdtree bench [project] [ops] [step]``: measure, print each figure beside its target, and write JSON and a plot.

Nothing is asserted: a missed target is printed as missed and leaves the exit status at 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import plain_json
from harness.cells import DEVICES, INFRASTRUCTURE, PASSED
from harness.cli import DEVICE_HELP, Parser, output, positive
from harness.files import said, write_atomic
from harness.matrix import DRAFTERS

if TYPE_CHECKING:
    from harness.bench.cases import Case
    from harness.bench.ceilings import Ceilings
    from harness.bench.step import Plan

WHAT = ("project", "ops", "step")
EXPERTS_CHOSEN = 8  # by a token of K2.6
CONFIGS = ("tiny", "tiny2", "experts", "long")
SCHEMA = 1


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _width(text: str) -> int:
    value = positive(text)
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
    )
    parser.add_argument("what", nargs="*", metavar="project|ops|step", help="default: ops and step")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help=DEVICE_HELP)
    parser.add_json("everything that was measured")
    parser.add_argument("--plot", type=output, metavar="OUT", help="write share of the roofline per case as SVG")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="TEXT", help="cases whose name has it; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="the names that --filter takes, and nothing else")
    parser.add_argument(
        "--seconds", type=_positive, default=0.5, help="of sampling per case and peer, in all its turns (default: 0.5)"
    )
    parser.add_argument("--no-peers", action="store_true", help="the engine alone")
    parser.add_argument("--config", action="append", choices=CONFIGS, help="step: of these (default: all of them)")
    parser.add_argument("--width", action="append", type=_width, help="step: rows of a tree (default: 2, 4, ... 64)")
    parser.add_argument("--drafter", choices=DRAFTERS, default="noisy", help="step: whose trees (default: noisy)")
    parser.add_argument(
        "--k26",
        type=int,
        metavar="EXPERTS",
        help="step: also a model of K2.6's sizes, 1 dense and 3 MoE layers, so many experts (384: 30 GB of the GPU)",
    )
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where that file lies meanwhile (default: TMPDIR)")
    parser.add_argument("--runs", type=positive, default=3, help="project: of each command (default: 3)")
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
        "engine": sources.engine,
        "threads": threads(),
        "load_average": list(os.getloadavg()),
        "environment": environment(),
    }


def _rounded(value: Any) -> Any:
    """Figures as a record holds them: what is behind the fourth decimal, no clock sees."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _limits(options: argparse.Namespace, out: dict[str, Any]) -> Ceilings:
    from harness.bench import ceilings

    if "ceilings" not in out["header"]:
        _say("measuring this machine's ceilings")
    limits = ceilings.measure(options.device)
    if "ceilings" not in out["header"]:
        peaks = ", ".join(f"{kind} {peak / 1e9:.0f} GFLOP/s" for kind, peak in limits.matmul.items())
        node = "" if limits.empty_node_us is None else f", empty graph node {limits.empty_node_us:.2f} us"
        _say(f"ceilings: read {limits.read / 1e9:.1f} GB/s, matmul {peaks}{node}")
    out["header"]["ceilings"] = {
        "read_bytes_per_second": limits.read,
        "matmul_flops_per_second": limits.matmul,
        "empty_graph_node_us": limits.empty_node_us,
        "cache_bytes": limits.cache_bytes,
    }
    return limits


def _ops(options: argparse.Namespace, chosen: Sequence[Case], out: dict[str, Any]) -> bool:
    from harness.bench import ops, peers, plot

    limits = _limits(options, out)
    known = [] if options.no_peers else peers.peers(options.device)
    out["header"]["peers"] = {p.name: {"what": p.what, "absent": p.absent} for p in known}
    for peer in known:
        _say(f"peer {peer.name}: {'absent, ' + peer.absent if peer.absent else peer.what}")
    present = [peer for peer in known if not peer.absent]
    out["cases"] = []
    lines, failed = ops.run(
        options.device, chosen, limits, present, options.seconds, _say,
        lambda line: out["cases"].append(_rounded(line.as_json())),
    )  # fmt: skip
    out["not_measured"]["ops"] = failed
    if options.plot:
        title = f"Share of the roofline on {options.device}"
        svg = plot.roofline(title, [(line.case, line.roofline, line.cold) for line in lines])
        write_atomic(options.plot, svg.encode())
    return not failed


def _step(options: argparse.Namespace, chosen: Sequence[Plan], out: dict[str, Any]) -> bool:
    from harness.bench import k26, step
    from harness.engines import create
    from harness.matrix import Point
    from harness.prepare import prepare

    configs = dict.fromkeys(plan.config for plan in chosen)
    points = [Point("fp32", "ar", config, "", options.device) for config in configs if config != step.K26]
    files = prepare("csrc", points, _say) if points else {}
    limits = _limits(options, out)
    with tempfile.TemporaryDirectory(prefix="kdtree-bench-", dir=options.scratch) as folder:
        if step.K26 in configs:
            files[step.K26] = Path(folder) / "k26.kdtr"
            k26.write(files[step.K26], k26.model(n_routed_experts=options.k26), _say, f32=False)
        engine = create("csrc", options.device)
        found = step.run(engine, files, chosen, options.drafter, limits, _say)
    out["steps"] = [_rounded(line.as_json()) for line in found]
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
    if options.k26 is not None and options.k26 < EXPERTS_CHOSEN:
        parser.error(f"--k26 {options.k26} is below the {EXPERTS_CHOSEN} experts that a token chooses")
    from harness.bench.cases import cases, choose
    from harness.bench.step import K26, WIDTHS, plans

    configs = [*(options.config or CONFIGS), *([K26] if options.k26 else [])]
    chosen = choose(cases(options.device), options.filter) if "ops" in wanted else []
    steps = plans(configs, options.width or WIDTHS, options.filter) if "step" in wanted else []
    if not chosen and not steps and "project" not in wanted:
        parser.error(f"--filter {' '.join(options.filter)} chooses nothing; `kdtree bench --list` shows the names")
    if options.plot and not chosen:
        parser.error("--plot shows operations, and none is chosen: add ops, or another --filter")
    if options.list:
        names = [case.name for case in chosen] + [plan.name for plan in steps]
        plain_json.give(names, options.json)
        if options.json != plain_json.PRINTED:
            print("\n".join(names))
        return PASSED
    from harness.prepare import Infrastructure, usable_devices
    from harness.protocol import EngineError
    from harness.toolchain import BuildError

    out: dict[str, Any] = {"header": {}, "not_measured": {}}

    def keep() -> None:
        out["header"]["load_average_after"] = list(os.getloadavg())
        plain_json.give(out, options.json)

    try:
        with contextlib.redirect_stdout(plain_json.beside(options.json)):
            usable_devices("csrc", [options.device], [])
            out["header"] = header(options.device)
            good = _project(options, out) if "project" in wanted else True
            good = (_ops(options, chosen, out) if chosen else True) and good
            good = (_step(options, steps, out) if steps else True) and good
    except (KeyboardInterrupt, BrokenPipeError) as error:
        left = "whoever read the output left" if isinstance(error, BrokenPipeError) else "interrupted"
        out["not_measured"]["rest"] = left
        keep()
        raise
    except (Infrastructure, EngineError, BuildError, OSError) as error:
        print(f"kdtree bench: {said(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        out["not_measured"]["rest"] = f"{type(error).__name__}: {error}"
        good = False
    keep()
    return PASSED if good else INFRASTRUCTURE
