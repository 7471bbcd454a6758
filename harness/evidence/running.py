"""A stage under way: started in a session of its own, suspended, told to end, and ended with all that it started.

Whatever a stage starts carries its mark in the environment, and this process adopts what loses its parent, so that also
a grandchild in another session whose parents are gone is known for the stage's. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.evidence.stages import Stage
from harness.remote.farside.process import descendants
from harness.sources import ROOT

MARK = "KDTREE_STAGE"
LOWEST = 19
GRACE = 8.0  # seconds from SIGINT to SIGKILL
LEFT_BEHIND = 1.0  # likewise for what a stage that has ended leaves behind
PATIENCE = 4.0  # seconds for SIGKILL to work; what is in the driver's hands may not end


class Running:
    """One stage's processes. ``why`` is the reason for which it was told to end, ``""`` as long as it was not."""

    def __init__(self, name: str, stage: Stage, log: Path) -> None:
        """Raises OSError where the command cannot be started."""
        self.name, self.stage, self.log, self.why = name, stage, log, ""
        self._mark = f"{name}.{os.getpid()}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment, MARK: self._mark}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable if word == "python" else word for word in stage.command],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        if stage.beside:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST)
        self.began = time.monotonic()
        self._suspended: float | None = None
        self._paused = 0.0
        self._told: float | None = None
        self._left: float | None = None

    @property
    def seconds(self) -> float:
        """That it has run, suspensions left out."""
        now = time.monotonic()
        return now - self.began - self._paused - (now - self._suspended if self._suspended is not None else 0.0)

    def members(self) -> list[int]:
        """Its living processes."""
        below = descendants(os.getpid())
        own = {self.process.pid, *descendants(self.process.pid)}
        return [pid for pid in below if pid in own or _mark_of(pid) == self._mark]

    def suspend(self, quiet: bool) -> None:
        """Stop all its processes, or let them go on."""
        if quiet and self._suspended is None and not self._told:
            self._suspended = time.monotonic()
            self._send(signal.SIGSTOP)
        elif not quiet and self._suspended is not None:
            self._paused += time.monotonic() - self._suspended
            self._suspended = None
            self._send(signal.SIGCONT)

    def tell(self, why: str) -> None:
        """Interrupt it, as Ctrl-C in its terminal would. The first reason stays."""
        if self._told is None:
            self.suspend(False)
            self.why, self._told = why, time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """All of it, on the spot."""
        self._send(signal.SIGKILL)

    def ended(self) -> bool:
        """Whether nothing of it is left, or what is left cannot be ended; to be asked again and again."""
        now, running = time.monotonic(), self.process.poll() is None
        if running and (self._told is None or now < self._told + GRACE):
            return False
        if not self.members():
            return True
        self._left = self._left or now
        if running or now > self._left + LEFT_BEHIND:
            self.kill()
        return now > self._left + LEFT_BEHIND + PATIENCE

    def _send(self, number: int) -> None:
        """Again, until it has reached all: one that is just forked is in the next list."""
        reached: set[int] = set()
        while new := set(self.members()) - reached:
            for pid in new:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            reached |= new


def _mark_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return ""
    found = [word for word in words if word.startswith(f"{MARK}=".encode())]
    return os.fsdecode(found[0]).partition("=")[2] if found else ""
