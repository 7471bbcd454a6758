"""Starting a command apart from everything else, and ending it with whatever it started.

A process that adopts orphans (Linux' child subreaper) stays the ancestor of every process a command starts, however
often they fork, change session or are abandoned by their parents; so "all descendants" is "everything to end".
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from harness.remote.farside.wire import ERR, OUT

KILL_SECONDS = 8.0  # that SIGKILL may take: a process in a call of the system ends when that does
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h


def adopt_orphans() -> bool:
    """Make this process the parent of descendants that lose theirs; False where the system cannot."""
    try:
        return bool(ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def _parents() -> dict[int, tuple[int, bool]]:
    """Parent and "is a zombie" of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue  # it ended while we looked
            found[int(name)] = (int(parent), state == b"Z")
    return found


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, parents first; adopted zombies of this process are buried on the way."""
    parents = _parents()
    children = defaultdict(list)
    for pid, (parent, _) in parents.items():
        children[parent].append(pid)
    found, queue = [], [root]
    while queue:
        for pid in children[queue.pop(0)]:
            queue.append(pid)
            if not parents[pid][1]:
                found.append(pid)
    return found


def bury(*keep: int) -> None:
    """Collect the exit of adopted processes, but not of ``keep``, whose status somebody waits for."""
    me = os.getpid()
    for pid, (parent, zombie) in _parents().items():
        if zombie and parent == me and pid not in keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone, or another user's (sudo): counted by the caller as left over


def end_descendants(root: int, grace: float, *, first: int = signal.SIGTERM) -> list[int]:
    """Send ``first`` to what descends from ``root``, SIGKILL ``grace`` seconds later; who is left.

    Those left after another `KILL_SECONDS` are in an uninterruptible call or belong to another user.
    """
    started = time.monotonic()
    if grace > 0:
        _signal(descendants(root), first)
        _signal(descendants(root), signal.SIGCONT)  # a stopped process would never see the first signal
    while (left := descendants(root)) and time.monotonic() < started + grace:
        time.sleep(0.05)
    while left and time.monotonic() < started + grace + KILL_SECONDS:
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)
        left = descendants(root)
    return left


class Command:
    """One command in a session of its own; its two streams go to ``emit`` as they come, ``ended`` is called at its end.

    Both streams are drained by threads of their own, so neither can block the other.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cwd: str | bytes,
        env: Mapping[str, str],
        emit: Callable[[bytes, bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._emit = emit
        self._pumps = [
            threading.Thread(target=self._pump, args=(kind, stream.fileno()), daemon=True)
            for kind, stream in ((OUT, self._process.stdout), (ERR, self._process.stderr))
            if stream is not None
        ]
        self._waiter = threading.Thread(target=self._wait, args=(ended,), daemon=True)
        for thread in (*self._pumps, self._waiter):
            thread.start()

    def _pump(self, kind: bytes, descriptor: int) -> None:
        while data := os.read(descriptor, 65536):
            self._emit(kind, data)

    def _wait(self, ended: Callable[[], None]) -> None:
        self._process.wait()
        ended()

    def finish(self, grace: float, *, first: int = signal.SIGTERM) -> tuple[int, list[int], int]:
        """End what is left of the command; its return code, pids that cannot be ended, how many it had left behind."""
        running = self._process.poll() is None
        behind = len(descendants(os.getpid()))
        left = end_descendants(os.getpid(), grace if running else 0.5 if behind else 0, first=first)
        self._waiter.join(10)
        for pump in self._pumps:
            pump.join(10)  # at once, unless a process that cannot be ended holds the stream
        bury(self._process.pid)
        return self._process.poll() or 0, left, 0 if running else behind
