"""Changing one operator at a time: which changes there are, and that those which no test notices are told."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from harness.sources import ROOT
from tests.operators import changes
from tests.waiting import PATIENCE

SOURCE = """\
LIMIT = 3


def within(values, limit=LIMIT):
    found = []
    for value in values:
        if value < 0:
            raise ValueError(f"{value} + 1")
        if value <= limit and value != 7:
            found.append(value)
    return found


def never(a):
    return a - 1
"""

TESTS = """\
import numbers_of_a_test as n

def test_within():
    assert n.within([1, 3, 4]) == [1, 3]
    assert n.within([9], 9) == [9]

def test_negative():
    try:
        n.within([-1])
    except ValueError:
        return
    assert False
"""


def test_every_operator_number_condition_and_statement_is_changed_and_put_back() -> None:
    tree = ast.parse(SOURCE)
    whole = ast.unparse(tree)
    found = []
    for change in changes(tree):
        with change.made():
            made = ast.unparse(ast.fix_missing_locations(tree))
        assert made != whole
        found.append((change.line, change.what.partition(":")[0]))
    assert ast.unparse(tree) == whole
    assert found == [
        (1, "3 -> 4"),
        (1, "3 -> 2"),
        (7, "if False"),
        (7, "if True"),
        (7, "Lt -> LtE"),
        (7, "Lt -> GtE"),
        (7, "0 -> 1"),
        (8, "without raise ValueError(f'{value} + 1')"),
        (9, "if False"),
        (9, "if True"),
        (9, "And -> Or"),
        (9, "LtE -> Lt"),
        (9, "LtE -> Gt"),
        (9, "NotEq -> Eq"),
        (9, "7 -> 8"),
        (9, "7 -> 6"),
        (10, "without found.append(value)"),
        (15, "Sub -> Add"),
        (15, "1 -> 2"),
    ]


@pytest.mark.slow
def test_what_no_test_notices_is_told(tmp_path: Path) -> None:
    """Nothing is said of what is noticed, and the file stays as it is."""
    module, tests = tmp_path / "numbers_of_a_test.py", tmp_path / "test_it.py"
    module.write_text(SOURCE)
    tests.write_text(TESTS)
    command = [sys.executable, "-m", "tests.operators", str(module), str(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=4 * PATIENCE)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("numbers_of_a_test")] == [
        "numbers_of_a_test.py:7: passes: Lt -> LtE: value < 0",
        "numbers_of_a_test.py:7: passes: 0 -> 1",
        "numbers_of_a_test.py:9: passes: 7 -> 8",
        "numbers_of_a_test.py:9: passes: 7 -> 6",
        "numbers_of_a_test.py:15: not reached: Sub -> Add: a - 1",
        "numbers_of_a_test.py:15: not reached: 1 -> 2",
    ]
    assert "19 changes, 6 pass unnoticed" in done.stderr
    assert module.read_text() == SOURCE
    some = subprocess.run([*command, "--lines", "10-10"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (some.returncode, "1 changes, 0 pass unnoticed" in some.stderr) == (0, True), some.stderr
    tests.write_text(TESTS.replace("[1, 3]", "[1]"))
    broken = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (broken.returncode, broken.stderr.splitlines()[-1]) == (3, "the tests fail unchanged")
