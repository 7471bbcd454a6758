"""Looking at other processes, which may end at any moment."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.ranks.job import _is_rank
from harness.sources import ROOT
from tests import processes
from tests.waiting import until

SECONDS = f"1{os.getpid()}.5"  # that no other process sleeps
# All processes in /proc, one of them by its number, or a signal to another process than this.
LOOKS = re.compile(r"""["']/proc/?["']|/proc/[{%]|\bos\.kill(pg)?\((?!os\.getpid\(\))""")
QUESTIONS: dict[str, tuple[Callable[[int], Any], Any]] = {
    "alive": (processes.alive, False),
    "parent": (processes.parent, 0),
    "ancestors": (processes.ancestors, []),
    "name": (processes.name, ""),
    "threads": (processes.threads, {}),
    "scheduling": (processes.scheduling, None),
    "tell": (processes.tell, False),
    "tell its group": (lambda pid: processes.tell(pid, group=True), False),
    "flip": (lambda pid: processes.flip(pid, 4096), False),
    "running": (lambda pid: pid in processes.running(SECONDS), False),
    "tree": (lambda pid: pid in processes.tree(os.getpid()), False),
    "a rank": (_is_rank, False),
}
LOOKED_AT = ("alive", "parent", "ancestors", "name", "running", "tree", "a rank")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", SECONDS], start_new_session=True) as made:
        until(lambda: processes.name(made.pid) == "sleep")
        yield made
        made.kill()


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


def test_what_lives_is_seen(child: subprocess.Popen[bytes]) -> None:
    assert processes.alive(child.pid)
    assert processes.parent(child.pid) == os.getpid()
    assert processes.ancestors(child.pid)[:2] == [os.getpid(), os.getppid()]
    assert processes.tree(os.getpid())[0] == os.getpid()
    assert child.pid in processes.tree(os.getpid())
    assert processes.running(SECONDS) == [child.pid]
    assert processes.threads(child.pid) == {child.pid: "sleep"}
    assert processes.scheduling(child.pid) == os.sched_getscheduler(child.pid)
    assert processes.tell(child.pid, 0)
    assert processes.tell(child.pid, 0, group=True)


def test_one_bit_of_memory_is_changed() -> None:
    held = ctypes.create_string_buffer(b"abc")
    assert processes.flip(os.getpid(), ctypes.addressof(held) + 1)
    assert held.value == b"acc"


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_process_that_is_gone_is_an_answer(child: subprocess.Popen[bytes], question: str) -> None:
    ask, answer = QUESTIONS[question]
    end(child)
    assert ask(child.pid) == answer


@pytest.mark.parametrize("question", LOOKED_AT)
@pytest.mark.parametrize("moment", ["listed", "opened"])
def test_a_process_ends_while_it_is_looked_at(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, question: str, moment: str
) -> None:
    """Once its file is opened, reading is what fails, and with another error."""

    def late(file: Path) -> bytes:
        if moment == "listed" and str(child.pid) in file.parts:
            end(child)
        with file.open("rb", buffering=0) as opened:
            if moment == "opened" and str(child.pid) in file.parts:
                end(child)
            return opened.read()

    monkeypatch.setattr(Path, "read_bytes", late)
    ask, answer = QUESTIONS[question]
    assert ask(child.pid) == answer
    assert child.returncode == -signal.SIGKILL


def test_a_process_that_nobody_has_waited_for_is_not_alive(child: subprocess.Popen[bytes]) -> None:
    assert processes.tell(child.pid)
    until(lambda: not processes.alive(child.pid))
    assert processes.parent(child.pid) == os.getpid()
    assert not processes.flip(child.pid, 4096)


def test_no_other_test_looks_by_itself() -> None:
    """What it would take for granted is that the process stays."""
    files = [file for file in sorted((ROOT / "tests").rglob("*.py")) if file.name != "processes.py"]
    looks = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if LOOKS.search(line)
    ]
    assert looks == [], "ask tests/processes.py"
