"""``kdtree bench project``: what a user waits for: build, bundles, the matrix, the first line of the demo.

Every figure is the wall time of the command itself in a process of its own. Builds and bundles go to an empty folder
that is removed afterwards, so that nothing is found in a cache and nothing in the checkout changes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.bench import targets
from harness.bench.clock import MeasureError, Timing, summarise
from harness.sources import ROOT

Say = Callable[[str], None]
FOLDER = "{folder}"  # in a command: a new empty folder of this run
LIMIT = 1800.0  # seconds after which a command is given up
KDTREE = (sys.executable, "-m", "harness")


@dataclass(frozen=True)
class Job:
    """One command to time. ``fresh``: the environment variable that names its cache, an empty folder each time."""

    name: str
    command: tuple[str, ...]
    target: float | None = None
    """Seconds, where this project has one."""
    fresh: str = ""
    warm: bool = False
    """Run once before, untimed."""
    first_line: bool = False
    """Until the first line of output, not to the end."""


@dataclass(frozen=True)
class Wait:
    """A job's seconds: median, quartiles, fastest."""

    name: str
    seconds: float
    q1: float
    q3: float
    fastest: float
    runs: int
    target: float | None

    def as_json(self) -> dict[str, Any]:
        held = {} if self.target is None else {"verdict": targets.word(self.seconds <= self.target)}
        return {**asdict(self), **held}


def jobs(device: str, full: bool) -> list[Job]:
    """In the order in which they run; the build and the bundles that the later ones want are made by their warm-up."""
    found = [
        Job("build from nothing", (*KDTREE, "build", "--device", device), targets.BUILD_SECONDS, "KDTREE_BUILD"),
        Job("bundles from nothing", (*KDTREE, "bundles"), targets.BUNDLES_SECONDS, "KDTREE_BUNDLES"),
        Job("matrix, warm", (*KDTREE, "test", "--device", device, "--run-dir", f"{FOLDER}/run"), None, warm=True),
        Job("demo, first line", (*KDTREE, "demo", "--device", device), None, warm=True, first_line=True),
    ]
    if full:
        found.append(
            Job("nox -s test, warm", (sys.executable, "-m", "nox", "-s", "test"), targets.TEST_SECONDS, warm=True)
        )
    return found


def once(command: Sequence[str], environment: Mapping[str, str], first_line: bool, limit: float = LIMIT) -> float:
    """Seconds until ``command`` ends, or until its first line on standard output. `MeasureError` unless it succeeds."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.stdout.readline() if first_line and process.stdout else ""
            seen = time.perf_counter() - begin
            rest, _ = process.communicate(timeout=limit)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its own children, such as a matrix's workers
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise MeasureError(f"{' '.join(command)} took longer than {limit:.0f} s") from error
            raise
        took = time.perf_counter() - begin
        if process.returncode != 0:
            errors.seek(0)
            last = [text for text in (errors.read() + "\n" + said + rest).splitlines() if text.strip()][-1:]
            raise MeasureError(f"{' '.join(command)} ended with {process.returncode}: {' '.join(last)}")
    if first_line and not said:
        raise MeasureError(f"{' '.join(command)} printed nothing")
    return seen if first_line else took


def measure(job: Job, runs: int, say: Say) -> Wait:
    """Time ``job`` ``runs`` times. Raises MeasureError."""
    samples: list[float] = []
    for at in range(-1 if job.warm else 0, runs):
        with tempfile.TemporaryDirectory(prefix="kdtree-bench-") as folder:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **({job.fresh: folder} if job.fresh else {})}
            command = [part.replace(FOLDER, folder) for part in job.command]
            seconds = once(command, environment, job.first_line)
        if at >= 0:
            samples.append(seconds)
        say(f"{job.name}: {'to warm up' if at < 0 else f'run {at + 1} of {runs}'}: {seconds:.2f} s")
    t: Timing = summarise(samples)
    return Wait(job.name, t.us, t.q1, t.q3, t.fastest, t.samples, job.target)


def text(wait: Wait) -> str:
    """The line for a reader."""
    goal = f"  target {wait.target:g} s: {targets.word(wait.seconds <= wait.target)}" if wait.target is not None else ""
    return f"{wait.name:<24} {wait.seconds:>8.2f} s [{wait.q1:.2f}, {wait.q3:.2f}] of {wait.runs} runs{goal}"


def run(device: str, runs: int, full: bool, say: Say) -> tuple[list[Wait], dict[str, str]]:
    """Every job; the waits, and why a job has none."""
    waits: list[Wait] = []
    failed: dict[str, str] = {}
    for job in jobs(device, full):
        try:
            waits.append(measure(job, runs, say))
        except (MeasureError, OSError) as error:
            failed[job.name] = str(error)
            say(f"{job.name}: {error}")
            continue
        say(text(waits[-1]))
    return waits, failed
