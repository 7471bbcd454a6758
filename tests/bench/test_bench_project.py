"""Commands are timed to their end or to their first line, and one that fails gives no time."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest

from harness.bench import project, targets
from harness.bench.clock import MeasureError
from tests.waiting import until

SLOW = "import sys, time; print('first', flush=True); time.sleep(1); print('last')"


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.mark.slow
def test_the_first_line_comes_before_the_end() -> None:
    began = time.perf_counter()
    first = project.once(python(SLOW), os.environ, first_line=True)
    assert 0 < first < time.perf_counter() - began - 0.3  # not all of the second: this process may look late
    assert project.once(python(SLOW), os.environ, first_line=False) >= 1


def test_a_failure_names_its_status_and_last_line() -> None:
    with pytest.raises(MeasureError, match="ended with 3: told why"):
        project.once(python("import sys; print('told why', file=sys.stderr); sys.exit(3)"), os.environ, False)
    with pytest.raises(MeasureError, match="printed nothing"):
        project.once(python("pass"), os.environ, True)


def test_a_command_that_hangs_is_ended() -> None:
    with pytest.raises(MeasureError, match="longer than"):
        project.once(python("import time; time.sleep(600)"), os.environ, False, limit=0.2)


def taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


@pytest.mark.slow
def test_its_children_end_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "held"
    holds = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    holds += "print('held', flush=True); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    with pytest.raises(MeasureError, match="longer than"):
        project.once(python(child), os.environ, True, limit=0.2)  # from its first line, which its child prints
    with lock.open() as file:
        until(lambda: not taken(file))  # a lock is dropped when its holder is gone


def test_each_run_has_an_empty_cache_of_its_own_and_the_warm_up_does_not_count() -> None:
    code = "import os, pathlib; p = pathlib.Path(os.environ['CACHE']); assert not list(p.iterdir()); (p / 'x').touch()"
    said: list[str] = []
    job = project.Job("fill", python(code), 60.0, "CACHE", warm=True)
    wait = project.measure(job, 2, said.append)
    assert (wait.runs, len(said)) == (2, 3)
    assert wait.as_json()["verdict"] == "held"
    assert "target 60 s: held" in project.text(wait)


def test_a_missed_target_is_said_and_nothing_more() -> None:
    wait = project.Wait("x", 61.0, 60.0, 62.0, 59.0, 3, 60.0)
    assert "target 60 s: missed" in project.text(wait)
    assert wait.as_json()["verdict"] == "missed"
    assert "target" not in project.text(project.Wait("x", 61.0, 60.0, 62.0, 59.0, 3, None))


def test_the_jobs_have_the_stated_targets() -> None:
    found = {job.name: job.target for job in project.jobs("cpu", full=True)}
    stated = {targets.BUILD_SECONDS: 15.0, targets.BUNDLES_SECONDS: 30.0, targets.TEST_SECONDS: 60.0}
    assert all(key == value for key, value in stated.items())
    assert found == {
        "build from nothing": 15.0,
        "bundles from nothing": 30.0,
        "matrix, warm": None,
        "demo, first line": None,
        "nox -s test, warm": 60.0,
    }
    assert "nox -s test, warm" not in {job.name for job in project.jobs("cpu", full=False)}
