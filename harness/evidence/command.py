"""``kdtree evidence``: its arguments, the list of its stages, and which of them a machine without a GPU rehearses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.cli import Parser, output
from harness.describe import WIDTH
from harness.environment import processors, survey
from harness.evidence.record import EvidenceError
from harness.evidence.stages import Stage, device_name, stages
from harness.evidence.window import Window, alone_here
from harness.mutants.catalogue import CatalogueError

BUDGET = 560.0  # of machines that are lent for ten minutes a command
LEAST = 60.0
REHEARSAL, REHEARSED_SECONDS = "rehearsal", 60.0


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from {LEAST:.0f} on")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree evidence",
        description="Build, test and measure the CUDA engine within a given time. OUT gets every record under its name "
        "in docs/evidence, a summary and the logs, each whole, as a stage ends (docs/cuda.md).",
        epilog="examples:\n  kdtree evidence OUT\n  kdtree evidence OUT --only bench pairs --budget 300\n"
        "  kdtree evidence OUT --resume docs/evidence\n  kdtree evidence --list\n\n"
        f"exit status: {PASSED} every chosen stage passed, {FAILED} one failed, {INCOMPLETE} one did not end "
        f"or did not start, {INFRASTRUCTURE} no GPU, a build that failed, a file of OUT that could not be written, "
        "wrong arguments",
    )
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="a folder")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="these, and what prepares them")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STAGE", help="all but these")
    parser.add_argument(
        "--budget", type=_budget, default=BUDGET, metavar="SECONDS", help=f"for everything (default: {BUDGET:.0f})"
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the run of the same engine there")
    parser.add_argument("--tar", type=output, metavar="FILE", help="all of OUT as one file as well, whole at any time")
    parser.add_argument("--list", action="store_true", help="the stages: seconds, records, what they need; run none")
    parser.add_argument(
        "--rehearse", action="store_true", help="without a GPU: read options, collect tests, run one cell on the CPU"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """See ``kdtree evidence --help``."""
    parser = _parser()
    options = parser.parse_args(argv)
    seen = survey()
    if options.list:
        known = stages(device_name(seen.gpus[0].name) if seen.gpus else "DEVICE", len(seen.gpus) or 1)
        print("\n".join(listing(known)))
        return PASSED
    if options.out is None:
        parser.error("OUT is missing: the folder that gets the records")
    device = REHEARSAL if options.rehearse else device_name(seen.gpus[0].name) if seen.gpus else ""
    known = stages(device, max(1, len(seen.gpus)))
    if options.rehearse:
        known = {name: rehearsed(stage) for name, stage in known.items() if stage.rehearsal}
    wrong = [name for name in [*options.only, *options.skip] if name not in known]
    if wrong:
        parser.error(f"no stage {wrong[0]}; there are {', '.join(known)}")
    if not device:
        print(f"kdtree evidence: no GPU: {seen.reason}; --rehearse does what can be done without one", file=sys.stderr)
        return INFRASTRUCTURE
    try:
        with alone_here():
            return Window(known, device, len(seen.gpus), options).go()
    except (EvidenceError, CatalogueError) as error:
        print(f"kdtree evidence: {error}", file=sys.stderr)
        return INFRASTRUCTURE


def rehearsed(stage: Stage) -> Stage:
    """What stands for a stage on a machine without a GPU. It waits for nothing: its command makes what it needs."""
    whole = stage.counts == "cells"
    return Stage(
        stage.rehearsal, REHEARSED_SECONDS, "cells" if whole else "", stage.made, stage.record if whole else "", gpus=0
    )


def listing(known: Mapping[str, Stage]) -> list[str]:
    """A line or two a stage."""
    lines = [f"on {processors()} processors here; seconds are those of 16 and one H200", ""]
    for name, stage in known.items():
        how = ["quiet"] if stage.quiet else ["beside the others"] if stage.beside else []
        how += [f"needs {', '.join(stage.needs)}"] if stage.needs else []
        how += [f"after {', '.join(stage.after)}"] if stage.after else []
        how += [f"{stage.gpus} GPUs"] if stage.gpus > 1 else []
        how += [part for part in (stage.tool, stage.module) if part]
        what = stage.record or ("" if stage.prepares else "counts")
        lines.append(f"{name:<15} {stage.seconds:>4.0f} s  {what:<32} {'; '.join(how)}"[:WIDTH].rstrip())
        variables = [f"{key}={value}" for key, value in stage.environment.items()]
        lines += wrapped([*variables, *stage.command])
    return lines


def wrapped(words: Sequence[str]) -> list[str]:
    """A command over lines that fit, indented."""
    lines = ["   "]
    for word in words:
        shown = f"'{word}'" if set(word) & set(" *") else word
        if len(lines[-1]) + 1 + len(shown) > WIDTH:
            lines.append("       ")
        lines[-1] += f" {shown}"
    return lines
