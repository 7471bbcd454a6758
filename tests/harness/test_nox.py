"""What nox does with what it runs: ends it when it is told to end, and finds its interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.sources import ROOT
from tests import processes

SLEEPS = """
import os, time

def test_sleep():
    try:
        print(f"\\n{os.getpid()}", flush=True)
        time.sleep(60)
    finally:
        time.sleep(1.5)  # what cleaning up may take
        print("cleaned up", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nox_ends_what_it_runs_and_lets_it_clean_up(tmp_path: Path, number: int) -> None:
    (tmp_path / "test_sleep.py").write_text(SLEEPS)
    sleeping = [str(tmp_path / "test_sleep.py"), "-n0", "-s", "-p", "no:cacheprovider", "-c", os.devnull]
    command = [sys.executable, "-m", "nox", "--no-venv", "-s", "test", "--", *sleeping]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}

    def heeds_ctrl_c() -> None:
        """This run may be a script's background job, which ignores it."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(  # type: ignore[call-overload]
        command, cwd=ROOT, text=True, env=own, preexec_fn=heeds_ctrl_c, **pipes
    ) as nox:
        assert nox.stdout is not None
        pid = next(int(line) for line in nox.stdout if line.strip().isdigit())
        nox.send_signal(number)
        if number == signal.SIGINT:  # a terminal's goes to both
            assert processes.tell(pid, number)
        left = nox.stdout.read()
    assert "cleaned up" in left
    assert nox.returncode not in (0, None)
    assert not processes.alive(pid)


@pytest.mark.slow
def test_nox_without_an_environment_uses_its_own_interpreter(tmp_path: Path) -> None:
    """Whatever, or nothing, is called python on PATH."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "python").chmod(0o755)
    line = [sys.executable, "-m", "nox", "--no-venv", "-s", "gate", "--", "--help"]
    done = subprocess.run(line, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, "usage: kdtree gate" in done.stdout) == (0, True), done.stderr
