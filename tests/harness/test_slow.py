"""Slow tests are left out of a run of everything, never silently, and run by whoever asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.forked import Forks

LINE = "2 slow tests left out; --all runs them"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a quick test and two slow ones."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = checks\naddopts = --strict-markers\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.slow"]\n')
    (tmp_path / "checks").mkdir()
    waits = "@pytest.mark.slow\n@pytest.mark.parametrize('x', [1, 2])\ndef test_waits(x):\n    pass\n"
    (tmp_path / "checks" / "test_both.py").write_text(f"import pytest\n\ndef test_quick():\n    pass\n\n{waits}")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "ran", "left_out"),
    [
        ([], 1, True),
        pytest.param(["-n", "1"], 1, True, marks=pytest.mark.slow),
        (["--all"], 3, False),
        (["checks"], 3, False),
        pytest.param(["checks/test_both.py", "-n", "1"], 3, False, marks=pytest.mark.slow),
        pytest.param(["-k", "waits"], 2, False, marks=pytest.mark.slow),
        pytest.param(["-m", "slow"], 2, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_runs_and_what_is_said(
    forks: Forks, project: Path, tmp_path: Path, arguments: list[str], ran: int, left_out: bool
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = forks.run(tmp_path, "pytest", "-p", "no:cacheprovider", *arguments, env=environment, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ran} passed" in done.stdout
    assert (LINE in done.stdout) == left_out
