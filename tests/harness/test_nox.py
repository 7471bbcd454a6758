"""What nox does with what it runs: ends it when it is told to end, and finds its interpreter."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.sources import ROOT
from tests import processes
from tests.waiting import until

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


class Session:
    """What ``noxfile.py`` asks of nox's: notes what is installed, runs nothing."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.virtualenv = SimpleNamespace(location=str(folder), venv_backend="virtualenv")
        self.env: dict[str, str] = {}
        self.installed: list[str] = []

    def install(self, *wanted: str, **options: Any) -> None:
        assert options == {"silent": False}  # a minute and more: pip says how far it is
        self.installed += wanted

    def run_install(self, *_: str, **__: Any) -> str:
        return str(self.virtualenv.location)

    def run(self, *_: str, **__: Any) -> None:
        pass


def test_sessions_that_run_the_engine_share_one_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever runs first makes it, and the others find it; each of its own would take gigabytes."""
    monkeypatch.chdir(ROOT)
    told = signal.getsignal(signal.SIGTERM)
    noxfile = runpy.run_path("noxfile.py")
    signal.signal(signal.SIGTERM, told)
    noxfile["LOCK"].close()
    (tmp_path / "bench").mkdir()  # made before sessions shared: left alone
    first = Session(tmp_path / "demo")
    noxfile["install_shared"](first)
    assert "pytest>=8" in first.installed
    assert {path.name for path in tmp_path.iterdir()} == set(noxfile["SHARED"])
    assert {path.name for path in tmp_path.iterdir() if path.resolve() != tmp_path / "demo"} == {"bench"}
    second = Session(tmp_path / "test")
    noxfile["install_shared"](second)
    assert second.installed == []
    text = (ROOT / "noxfile.py").read_text("utf-8")
    for name in noxfile["SHARED"]:
        assert f"def {name}(session: nox.Session)" in text
    assert text.count("    install_shared(session)\n") == len(noxfile["SHARED"])


NOXFILE = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
noxfile = runpy.run_path("noxfile.py")
print("in", flush=True)
sys.stdin.readline()
from tests.harness.test_nox import Session, Path
noxfile["python"](Session(Path(".nox/demo")), "-m", "harness")
sys.stdin.readline()
"""


def test_of_two_nox_at_once_one_makes_the_environment(tmp_path: Path) -> None:
    """The other waits for it, and not for what then runs."""
    for name in ("noxfile.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    with contextlib.ExitStack() as ending:

        def start(name: str) -> tuple[subprocess.Popen[str], Callable[[], str]]:
            told = tmp_path / name
            file = ending.enter_context(open(told, "w"))
            line = [sys.executable, "-c", NOXFILE, str(ROOT)]
            nox = subprocess.Popen(line, cwd=tmp_path, text=True, stdin=subprocess.PIPE, stdout=file, stderr=file)
            ending.callback(nox.communicate)
            ending.callback(nox.kill)
            return nox, told.read_text

        one, said = start("one")
        until(lambda: said() == "in\n")
        _, other_said = start("other")
        until(lambda: other_said() == "nox > waiting for another nox that makes an environment\n")
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
        until(lambda: other_said().endswith("\nin\n"))
        assert one.poll() is None
