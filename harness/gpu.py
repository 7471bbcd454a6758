"""The GPUs this machine lets us use, and sharing one between workers and runs.

For whoever starts tests (all of it works, and says "none", on a machine without a GPU or driver):

* ``survey()`` -> ``Survey``: the usable GPUs in CUDA's own order, or one line that says why there is none. An outer
  ``CUDA_VISIBLE_DEVICES`` is obeyed, the empty one too. The question is put to the driver in a process of its own, so
  that the caller holds no CUDA context afterwards and may still fork.
* ``worker_cap(free_bytes, cell_bytes, wanted)``: how many workers fit, from the memory one cell is known to need.
* ``Lease(gpu, run=...)``: one run at a time on a GPU, held by the process that starts the workers and not by the
  workers. ``with Lease(...)`` waits and says who holds it; ``GpuBusy`` when the wait is over. The kernel drops it when
  the holder dies.
* ``is_sticky(text)``: whether an error's text means that this process's CUDA context is lost, so that the worker that
  met it must end and be replaced; every later CUDA call in it fails with the same error.

``python -m harness.gpu [--json]`` prints the survey; exit status 0 when a GPU is usable, 3 when not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import plain_json
from harness.cli import Parser

_PROBE = Path(__file__).with_name("gpu_probe.py")

CONTEXT_BYTES = 640 << 20
"""What a CUDA context with this engine's and torch's modules takes beside the session's own memory (upper estimate)."""

STICKY = (
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "invalid address space",
    "invalid program counter",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "cudaErrorLaunchFailure",
    "cudaErrorIllegalAddress",
    "cudaErrorContained",
    "context is lost",  # the words of csrc/cuda for every error of this kind
)


class GpuBusy(Exception):
    """Another run holds the GPU; the message says which process, since when, and what to do."""


@dataclass(frozen=True)
class Gpu:
    """One usable GPU. ``index`` is its number among the visible ones, memory in bytes."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int

    @property
    def described(self) -> str:
        """``NAME (sm_90)``."""
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"

    @property
    def arch(self) -> str:
        """``9.0``: what ``--arch`` takes."""
        return f"{self.capability[0]}.{self.capability[1]}"


@dataclass(frozen=True)
class Survey:
    """What the driver said. ``reason`` is empty exactly when there is a GPU."""

    gpus: tuple[Gpu, ...]
    reason: str
    driver: str


def survey(*, timeout: float = 60.0) -> Survey:
    """Ask the driver which GPUs this process may use; never raises for a machine that has none."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is not None and outer.strip() in ("", "-1"):
        # Not left to the libraries: torch can answer is_available() with True here.
        return Survey((), f"CUDA_VISIBLE_DEVICES={outer!r} hides every GPU; unset it to use one", "")
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_PROBE)], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Survey((), f"the NVIDIA driver did not answer within {timeout:.0f} s", "")
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Survey((), f"asking the NVIDIA driver failed with exit status {done.returncode}: {last}", "")
    gpus = tuple(Gpu(**{**g, "capability": (g["capability"][0], g["capability"][1])}) for g in answer.get("gpus", []))
    hint = f" (CUDA_VISIBLE_DEVICES={outer!r})" if outer is not None else ""
    return Survey(gpus, "" if gpus else answer["reason"] + hint, answer.get("driver", ""))


def worker_cap(free_bytes: int, cell_bytes: int, wanted: int) -> int:
    """How many of ``wanted`` workers may share a GPU with ``free_bytes`` free when one cell needs ``cell_bytes``.

    0 when not even one fits: the caller must fail with the figures, not start and run out of memory. A tenth stays free
    for the driver and for fragmentation. Raises ValueError for a negative number.
    """
    if cell_bytes < 0 or wanted < 0:
        raise ValueError("bytes and workers must not be negative")
    return max(0, min(wanted, int(free_bytes * 0.9) // (cell_bytes + CONTEXT_BYTES)))


def is_sticky(text: str) -> bool:
    """Whether an error's text says that the CUDA context of the process that met it is lost."""
    lowered = text.lower()
    return any(mark.lower() in lowered for mark in STICKY)


def lock_folder() -> Path:
    """This user's folder for locks, the same for every run on the machine.

    Raises PermissionError if it belongs to another.
    """
    folder = Path(os.environ.get("KDTREE_LOCKS", "") or Path(tempfile.gettempdir()) / f"kdtree-locks-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set KDTREE_LOCKS to a folder of your own")
    return folder


class Lease:
    """An exclusive lock on one GPU, kept as long as the ``with`` block runs or the process lives.

    An advisory lock on a file that is never removed: it ends with its holder however that ends, so none is stale.
    Raises ``GpuBusy`` after ``timeout`` seconds.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        run: str = "",
        timeout: float = 1800.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.path = lock_folder() / f"{gpu.uuid}.lock"
        self._what, self._run, self._timeout = f"{gpu.name} ({gpu.uuid})", run, timeout
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._handle = -1

    def holder(self) -> str:
        """Who wrote itself into the lock file last: the present holder whenever the lock is held."""
        try:
            who = json.loads(self.path.read_text("utf-8"))
            return f"process {who['pid']} ({who['command']}), run {who['run'] or '-'}, since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that has not written its name yet"

    def __enter__(self) -> Lease:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait(handle)
            command = " ".join(sys.argv)[:200]
            who = {
                "pid": os.getpid(),
                "run": self._run,
                "command": command,
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(who).encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return self

    def _wait(self, handle: int) -> None:
        end, told = time.monotonic() + self._timeout, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= end:
                raise GpuBusy(
                    f"{self._what} is held by {self.holder()}; waited {self._timeout:.0f} s. "
                    "Let it end, or choose another GPU with CUDA_VISIBLE_DEVICES."
                )
            if not told:
                self._say(f"waiting for {self._what}: held by {self.holder()}")
                told = True
            time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
        self._handle = -1


def main(arguments: list[str] | None = None) -> int:
    """Print the survey."""
    parser = Parser(prog="python -m harness.gpu", description="GPUs this machine lets us use")
    parser.add_json("one JSON object")
    options = parser.parse_args(arguments)
    seen = survey()
    plain_json.give(seen, options.json)
    if options.json != plain_json.PRINTED:
        for g in seen.gpus:
            free = f"{g.free_bytes >> 20} of {g.total_bytes >> 20} MiB free"
            print(f"cuda:{g.index}  {g.described}  {free}  {g.uuid}")
        if not seen.gpus:
            print(seen.reason)
    return 0 if seen.gpus else 3


if __name__ == "__main__":
    sys.exit(main())
