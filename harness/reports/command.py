"""Reports made from a ledger, and the ``kdtree report`` command; what they say is what the ledger says.

``write_reports`` runs at the end of every run. A report judges nothing: the command exits with 0 when it was written,
and with 3 when the ledger cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import plain_json
from harness.cells import INFRASTRUCTURE, PASSED, Ledger
from harness.cli import Parser, output
from harness.files import write_atomic
from harness.ledger import read, summary
from harness.ledger_format import LedgerError
from harness.matrix import MatrixError
from harness.reports.against import Comparison, compare
from harness.reports.history import History, load
from harness.reports.html import history_page, page
from harness.reports.junit import junit
from harness.reports.markdown import markdown
from harness.reports.view import View, view

PAGE, JUNIT, HISTORY = "index.html", "junit.xml", "history.html"


def write_reports(ledger: Ledger, run_dir: Path, comparison: Comparison | None = None) -> tuple[Path, Path]:
    """Write the page and the JUnit file of a run beside its ledger; their paths."""
    target = run_dir / PAGE, run_dir / JUNIT
    write_atomic(target[0], page(view(ledger), comparison).encode())
    write_atomic(target[1], junit(ledger))
    return target


def machine(shown: View, comparison: Comparison | None) -> dict[str, Any]:
    """The summary for machines; the ledger itself has everything else."""
    ledger = shown.ledger
    content: dict[str, Any] = {
        "run_id": ledger.run_id,
        "status": shown.status,
        "passed": ledger.passed,
        "wanted": ledger.wanted,
        "problems": list(ledger.problems),
        "cells": [
            {
                "id": v.cell.id,
                "host": v.cell.host,
                "verdict": v.cell.verdict.value,
                "margin": v.cell.margin,
                "closest": v.closest.name if v.closest else None,
                "detail": v.cell.detail,
                "rerun": v.cell.rerun,
            }
            for v in shown.cells
        ],
    }
    if comparison:
        content["against"] = {
            "run_id": comparison.old.run_id,
            "changes": [asdict(change) for change in comparison.changes],
            "paces": [asdict(pace) for pace in comparison.paces],
            "untimed": comparison.untimed,
        }
    return content


def _machine_history(history: History) -> dict[str, Any]:
    runs = [
        {
            **{
                name: getattr(run, name)
                for name in ("run_id", "started", "commit", "engine", "status", "passed", "wanted")
            },
            "cells": {id: asdict(sample) for id, sample in sorted(run.samples.items())},
        }
        for run in history.runs
    ]
    return {"folder": history.folder, "runs": runs, "unreadable": list(history.unreadable)}


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="kdtree report",
        description="HTML, JUnit XML and Markdown from a ledger, or the history of a folder of runs. Without an output "
        f"option {PAGE} and {JUNIT} are written beside the ledger; a history goes to DIR/{HISTORY}.",
        epilog="examples:\n  kdtree report reports/latest --against main/ledger.json --html report.html\n"
        '  kdtree report reports/latest --markdown >> "$GITHUB_STEP_SUMMARY"\n  kdtree report --history reports\n\n'
        "exit status: 0 the report was written, whatever it says; 3 it could not be made. `kdtree gate` judges.",
    )
    parser.add_argument("ledger", type=Path, nargs="?", metavar="LEDGER", help="ledger.json, or the folder of a run")
    parser.add_argument("--html", type=output, metavar="OUT", help="write the page (with --history: that page) here")
    parser.add_argument("--junit", type=output, metavar="OUT", help="write JUnit XML here")
    parser.add_argument("--against", type=Path, metavar="OLDER", help="show what changed since this ledger")
    parser.add_argument("--history", type=Path, metavar="DIR", help="margins, times and acceptance of the runs in DIR")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_json("a summary for machines", shown)
    options = parser.parse_args(argv)
    if (options.ledger is None) == (options.history is None):
        parser.error("a LEDGER or --history DIR is required")
    if options.history and (options.junit or options.against or options.markdown):
        parser.error("--history goes with --html and --json alone")
    return options


def _report(options: argparse.Namespace) -> list[Path]:
    ledger = read(options.ledger)
    comparison = compare(ledger, read(options.against)) if options.against else None
    shown = view(ledger)
    written = []
    if options.html:
        write_atomic(options.html, page(shown, comparison).encode())
        written.append(options.html)
    if options.junit:
        write_atomic(options.junit, junit(ledger))
        written.append(options.junit)
    if options.markdown:
        print(markdown(shown, comparison), end="")
    plain_json.give(machine(shown, comparison) if options.json else None, options.json)
    if not (written or options.markdown or options.json):
        folder = options.ledger if options.ledger.is_dir() else options.ledger.parent
        written += write_reports(ledger, folder, comparison)
        print("\n".join(summary(ledger)))
    return written


def _history(options: argparse.Namespace) -> list[Path]:
    history = load(options.history)
    if options.json:
        plain_json.give(_machine_history(history), options.json)
        if not options.html:
            return []
    target = options.html or options.history / HISTORY
    folder = Path(os.path.relpath(options.history, target.parent)).as_posix()
    write_atomic(target, history_page(history, folder).encode())
    return [target]


def main(argv: Sequence[str]) -> int:
    """``kdtree report``."""
    options = _arguments(argv)
    try:
        written = _history(options) if options.history else _report(options)
    except (LedgerError, MatrixError) as error:
        print(f"kdtree report: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    for path in written:
        print(path, file=sys.stderr if options.markdown or options.json == plain_json.PRINTED else sys.stdout)
    return PASSED
