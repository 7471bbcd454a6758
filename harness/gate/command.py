"""``kdtree gate``: may a merge go through? Only if a ledger of this very checkout has every expected cell, green.

The exit status is that of the worst finding, as for a run: 3 outweighs 1, and 1 outweighs 2. Whoever reads the output,
or stops reading it, changes nothing about that.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from harness import plain_json
from harness.cells import DEVICES, FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED, Ledger, Verdict
from harness.cli import EXIT_STATUSES, Parser
from harness.describe import filled
from harness.gate.rules import AGAIN, ENGINE, Demand, Finding, judge, status
from harness.gate.waivers import Waiver, WaiverError, load
from harness.ledger import read
from harness.ledger_format import LedgerError
from harness.matrix import GPU_RANKS, MatrixError, config_precisions, configs, is_large, parse, rankable
from harness.sources import ROOT, describe

WAIVERS = "waivers.yaml"
SEVERITY = (INFRASTRUCTURE, FAILED, INCOMPLETE)
LISTED = 20  # findings of one kind; where everything is missing, the first few say so


def _describe(ledger: Ledger, waivers: Sequence[Waiver]) -> str:
    devices = ", ".join(sorted({parse(id).device for id in ledger.expected})) or "no device"
    excused = {waiver.cell for waiver in waivers}
    waived = sum(cell.id in excused and cell.verdict is not Verdict.PASS for cell in ledger.cells)
    also = f", {waived} waived" if waived else ""
    return f"{ledger.passed} of {ledger.wanted} expected cells passed on {devices}{also}"


def _say(
    path: Path, ledger: Ledger | None, findings: Sequence[Finding], demand: Demand | None, json: Path | None
) -> None:
    outcome = status(findings)
    summary = _describe(ledger, demand.waivers) if ledger and demand else "no ledger could be judged"
    content = {"ledger": str(path), "status": outcome, "open": outcome == PASSED, "summary": summary}
    plain_json.give({**content, "findings": findings}, json)
    if json == plain_json.PRINTED:
        return
    width = max((len(finding.kind) for finding in findings), default=0)
    indent = " " * (width + 4)
    worst_first = sorted(findings, key=lambda finding: SEVERITY.index(finding.status))
    for kind in dict.fromkeys(finding.kind for finding in worst_first):
        alike = [finding for finding in findings if finding.kind == kind]
        for finding in alike[:LISTED]:
            what, _, again = finding.message.partition(AGAIN)
            print(filled(f"  {kind:<{width}}  {what}", indent) + (f"\n{indent}again: {again}" if again else ""))
        if len(alike) > LISTED:
            print(f"  {kind:<{width}}  ... and {len(alike) - LISTED} more; --json lists them all")
    if demand and ledger and demand.sources.dirty:
        print(f"  note: {len(demand.sources.dirty)} files of this checkout are not committed")
    word = "open" if outcome == PASSED else f"CLOSED by {len(findings)} finding{'s' if len(findings) > 1 else ''}"
    print(f"gate: {word}: {summary} ({path})")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="kdtree gate",
        description="Exit 0 only if LEDGER was made from this checkout and every expected cell in it is green.",
        epilog="examples:\n  kdtree gate reports/latest\n"
        "  kdtree gate reports/latest --require-device cuda --against main.json --max-slowdown 1.1\n\n"
        f"docs/gate.md explains every finding.\n{EXIT_STATUSES}",
    )
    parser.add_argument("ledger", type=Path, metavar="LEDGER", help="ledger.json, or the folder of a run")
    parser.add_argument("--against", type=Path, metavar="OLDER", help="a ledger whose cells must all be here still")
    parser.add_argument("--max-slowdown", type=float, metavar="RATIO", help="decode time against OLDER, e.g. 1.1")
    parser.add_argument("--allow-removed", action="store_true", help="cells of OLDER may have left the matrix")
    parser.add_argument(
        "--require-device", action="append", default=[], choices=DEVICES, help="that must have run; repeatable"
    )
    parser.add_argument("--engine", default=ENGINE, help=f"the engine that must have been judged (default: {ENGINE})")
    parser.add_argument("--waivers", type=Path, metavar="FILE", help=f"default: {WAIVERS} of this checkout")
    parser.add_json("findings for machines")
    options = parser.parse_args(argv)
    if options.against is None and (options.max_slowdown is not None or options.allow_removed):
        parser.error("--max-slowdown and --allow-removed need --against")
    if options.max_slowdown is not None and not 0 < options.max_slowdown < math.inf:
        parser.error(f"--max-slowdown: {options.max_slowdown} is no ratio")
    return options


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """``kdtree gate``; ``root`` is the checkout that the ledger is held against."""
    options = _arguments(argv)
    ledger = demand = None
    try:
        ledger = read(options.ledger)
        folder = root / "refs" / "configs"
        scale = any(is_large(parse(id).config, folder) for id in ledger.expected)  # then all of them are owed
        demand = Demand(
            sources=describe(root),
            table=configs(folder, scale=scale),
            precisions=config_precisions(folder, scale=scale),
            waivers=load(options.waivers or root / WAIVERS),
            today=datetime.now(timezone.utc).date(),
            devices=tuple(options.require_device),
            engine=options.engine,
            against=read(options.against) if options.against else None,
            max_slowdown=options.max_slowdown,
            allow_removed=options.allow_removed,
            rankable={count: rankable(count, folder, scale=scale) for count in GPU_RANKS},
        )
        findings = judge(ledger, demand)
    except LedgerError as error:
        findings = [Finding("ledger", INFRASTRUCTURE, str(error))]
    except (WaiverError, MatrixError) as error:
        findings = [Finding("configuration", INFRASTRUCTURE, str(error))]
    try:
        _say(options.ledger, ledger, findings, demand, options.json)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads the reasons, and the answer stands
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status(findings)
