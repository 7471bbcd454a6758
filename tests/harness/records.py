"""Small ledgers and cells for the tests of whatever reads or writes them."""

from __future__ import annotations

from harness.cells import Cell, Check, Ledger, Verdict, judge
from harness.sources import Sources

SOURCES = Sources(commit="c" * 40, dirty=("csrc/model.cpp",), engine="e" * 64, lock="l" * 64, harness="h" * 64)
FINE = Check("logits.max_abs", 1e-7, 1e-6, Verdict.FAIL_LOGITS)
OFF = Check("logits.max_abs", 2e-6, 1e-6, Verdict.FAIL_LOGITS, "worst at [3, 17]")


def cell(id: str, *checks: Check, host: str = "here", verdict: Verdict | None = None) -> Cell:
    """A record whose verdict follows from its checks, unless one is given."""
    judged, detail = judge(checks)
    return Cell(
        id, verdict or judged, checks, detail, host=host, times={"total": 0.25}, rerun=f"nox -s test -- -k {id}"
    )


def ledger(*cells: Cell, expected: tuple[str, ...] | None = None, **changes: object) -> Ledger:
    """A ledger of ``cells`` on the host ``here``."""
    values: dict[str, object] = {
        "run_id": "20250102T030405Z-abcdef",
        "started": "2025-01-02T03:04:05Z",
        "finished": "2025-01-02T03:05:05Z",
        "engine": "csrc",
        "command": "pytest",
        "sources": SOURCES,
        "environments": {"here": {"os": "Linux"}},
        "expected": tuple(sorted({c.id for c in cells})) if expected is None else expected,
        "cells": cells,
    }
    return Ledger(**{**values, **changes})  # type: ignore[arg-type]
