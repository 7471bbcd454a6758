"""Other processes, as Linux shows them in /proc and as signals reach them.

Any of them may end between two looks at it, so every question here has an answer for a process that is gone.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

PROC = Path("/proc")


def _read(file: Path) -> bytes:
    """What a file says; nothing once its process is gone, which opening or reading may be the first to notice."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(folder) if name.isdigit())
    except OSError:
        return []


def _state(pid: int) -> tuple[str, int]:
    """The letter of its state, and its parent; ("", 0) of one that is gone."""
    letter, parent, *_ = _read(PROC / f"{pid}/stat").rpartition(b")")[2].split() or (b"", b"0")
    return letter.decode(), int(parent)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    return _state(pid)[0] not in ("", "Z", "X")


def parent(pid: int) -> int:
    """Its parent's number; 0 of one that has none or is gone."""
    return _state(pid)[1]


def ancestors(pid: int) -> list[int]:
    """From its parent upwards; as far as there is somebody to ask."""
    found: list[int] = []
    while pid := parent(pid):
        found.append(pid)
    return found


def tree(root: int) -> list[int]:
    """A process and all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for pid in _numbers(PROC):
        children.setdefault(parent(pid), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def name(pid: int) -> str:
    """The program's short name; empty of a process that is gone."""
    return _read(PROC / f"{pid}/comm").decode().strip()


def running(words: str) -> list[int]:
    """Living processes that have ``words`` in their command line, this one excepted."""
    return [
        pid
        for pid in _numbers(PROC)
        if pid != os.getpid() and words.encode() in _read(PROC / f"{pid}/cmdline")  # a zombie's is empty
    ]


def threads(pid: int) -> dict[int, str]:
    """The names of a process's threads; none of a process that is gone."""
    folder = PROC / f"{pid}/task"
    return {number: _read(folder / f"{number}/comm").decode().strip() for number in _numbers(folder)}


def scheduling(thread: int) -> int | None:
    """How a thread is scheduled; None of one that is gone."""
    try:
        return os.sched_getscheduler(thread)
    except ProcessLookupError:
        return None


def tell(pid: int, number: int = signal.SIGKILL, *, group: bool = False) -> bool:
    """Send a signal to a process, or to the group it leads; whether there was one."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return False
    return True


def flip(pid: int, address: int) -> bool:
    """One bit of its memory, even where it may only read; whether it was there to have it changed."""
    try:
        with open(PROC / f"{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            byte = memory.read(1)
            memory.seek(address)
            return bool(byte) and memory.write(bytes([byte[0] ^ 1])) == 1
    except (FileNotFoundError, ProcessLookupError):
        return False
