"""The validation matrix: one test per cell. The cells come from the axes, see ``harness/plugin.py``."""

from __future__ import annotations

import pytest

from harness.cells import Verdict
from harness.describe import describe
from harness.plugin import CellRun


def test_cell(cell: str, cell_run: CellRun) -> None:
    """The cell passes all checks of the design."""
    record = cell_run(cell)
    if record.verdict is not Verdict.PASS:
        pytest.fail(describe(record), pytrace=False)
