"""One window of ``kdtree evidence``: the loop that starts, watches and ends stages, and keeps what each has made."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from harness.cells import FAILED as SOME_FAILED
from harness.cells import INCOMPLETE, INFRASTRUCTURE
from harness.cells import PASSED as ALL_PASSED
from harness.describe import WIDTH
from harness.evidence import record, schedule
from harness.evidence.record import EvidenceError, Folder
from harness.evidence.running import GRACE, LEFT_BEHIND, PATIENCE, Running
from harness.evidence.schedule import FAILED, INTERRUPTED, NOT_CHOSEN, NOT_NEEDED, OUT_OF_TIME, PASSED, RUNNING, WAITING
from harness.evidence.stages import FAULTS_RECORD, SCRATCH, Stage, summary_name, with_faults_left
from harness.files import said
from harness.mutants.result import share_left
from harness.remote.farside.process import adopt_orphans, bury
from harness.sources import ROOT, describe, misfit

SPARE = 5.0  # seconds at the end of the budget, to write the last files
ENDING = GRACE + LEFT_BEHIND + PATIENCE  # seconds that a stage may take to end when it is told to
TICK = 0.2
KEEP_EVERY, TELL_EVERY = 15.0, 30.0


@contextlib.contextmanager
def alone_here() -> Iterator[None]:
    """One run at a time in a checkout, in an empty scratch folder. Raises EvidenceError."""
    path = ROOT / SCRATCH
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise EvidenceError(
            f"{said(error)}; stages leave what they make there: run it in a checkout of your own"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EvidenceError(f"{lock.name}: another run is under way in this checkout; let it end") from None
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)


def usable(out: Path) -> None:
    """Make the folder. Raises EvidenceError where nothing can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvidenceError(f"{said(error)}; OUT is a folder that can be made") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise EvidenceError(f"{out}: not for this user to write to; name another folder")


class Window:
    """What became of each stage, and what runs."""

    def __init__(self, known: Mapping[str, Stage], device: str, gpus: int, options: argparse.Namespace) -> None:
        """Raises EvidenceError, CatalogueError."""
        self.began = time.monotonic()
        self.stop = self.began + options.budget - SPARE - ENDING
        """When the last stage is told to end."""
        self.stages = dict(known)
        self.name, self.sources = summary_name(device), describe()
        usable(options.out)
        self.folder = Folder(options.out, options.tar)
        self.summary = record.blank(device, self.sources)
        mine = (options.out / self.name).exists()
        if options.resume:
            self.summary = record.earlier(options.resume / self.name, device, self.sources, known)
            self.folder.take(options.resume, self.summary)
            left = share_left(options.resume / FAULTS_RECORD, self.sources.engine, "cuda")
            self.stages = with_faults_left(known, left)
        if mine and (not options.resume or options.resume.resolve() != options.out.resolve()):
            raise EvidenceError(f"{options.out / self.name}: an earlier run's; name another folder, or --resume this")
        self.summary["windows"].append(record.window(self.sources))
        self.number = len(self.summary["windows"]) - 1
        passed = frozenset(name for name, found in self.summary["stages"].items() if found["status"] == PASSED)
        again = passed - set(options.only)
        chosen = schedule.chosen(self.stages, tuple(options.only), tuple(options.skip), again)
        self.states = dict.fromkeys(again, PASSED) | dict.fromkeys(chosen, WAITING)
        for name, stage in self.stages.items():
            if name not in self.states:
                self._note(name, NOT_CHOSEN)
                continue
            self._note(name, WAITING)
            if why := self._cannot(stage, gpus):
                self._drop(name, why)
        self.running: dict[str, Running] = {}
        self.asked = 0
        self._told: dict[str, float] = {}
        self._kept = self.began

    def _cannot(self, stage: Stage, gpus: int) -> str:
        """Why a stage has no place on this machine, or ``""``."""
        if stage.gpus > gpus:
            return f"{NOT_CHOSEN}: it takes {stage.gpus} GPUs"
        if stage.tool and not shutil.which(stage.tool):
            return f"not started: {stage.tool} is not on PATH"
        if stage.module and importlib.util.find_spec(stage.module) is None:
            return f"not started: the package {stage.module} is not installed"
        return ""

    def go(self) -> int:
        """Run it; the exit status."""
        adopt_orphans()
        at_most = self.stop + ENDING + SPARE - self.began
        commit = f"commit {self.sources.commit[:12] or 'unknown'}{', edited' if self.sources.dirty else ''}"
        self._say(
            "", f"{commit}, engine {self.sources.engine[:12]}; ends within {at_most:.0f} s; OUT is whole at any time"
        )
        if wrong := misfit(self.sources):
            self._say("", wrong)
        if not self.sources.commit:
            self._say(
                "", "no .git and no .kdtree-source.json here (docs/cuda.md): records name the engine's hash alone"
            )
        for name in (FAULTS_RECORD, f"broken-{self.summary['device']}.json"):
            if (data := self.folder.held(name)) is not None:  # what these have, they need not try again
                (ROOT / SCRATCH / name).write_bytes(data)
        with self._signals():
            try:
                self._keep()
                while self._step():
                    time.sleep(TICK)
            finally:
                for running in self.running.values():
                    running.kill()
        self._keep()
        print("\n".join(self.table()), flush=True)
        return self.status()

    def _step(self) -> bool:
        """One turn: ask the schedule, start, stop, look after what runs. False when all is over."""
        now = time.monotonic()
        if self.asked:
            self._end_all(INTERRUPTED)
        elif now >= self.stop:
            self._end_all(OUT_OF_TIME)
        decision = schedule.decide(self.stages, self.states, self.stop - now)
        for name, why in decision.dropped.items():
            self._drop(name, why)
        for name in decision.stop:
            self.running[name].tell(NOT_NEEDED)
        for running in self.running.values():
            if running.stage.beside:
                running.suspend(decision.quiet)
        for name in decision.start:
            self._start(name)
        for name, running in list(self.running.items()):
            if running.seconds > running.stage.limit:
                running.tell(OUT_OF_TIME)
            if running.ended():
                self._finish(name, running)
        if not decision.quiet:
            self._look(now)
        return bool(self.running) or WAITING in self.states.values()

    def _end_all(self, why: str) -> None:
        for name, state in self.states.items():
            if state == WAITING:
                self._drop(name, f"not started: {why}" if why == INTERRUPTED else schedule.NO_TIME)
        for running in self.running.values():
            running.tell(why)
            if self.asked > 1:
                running.kill()

    def _start(self, name: str) -> None:
        stage = self.stages[name]
        try:
            self.running[name] = Running(name, stage, ROOT / SCRATCH / f"{name}.log")
        except OSError as error:
            self._drop(name, f"not started: {error.strerror}: {error.filename}")
            return
        self.states[name] = RUNNING
        self._note(name, RUNNING)
        self._told[name] = time.monotonic()
        self._say(name, f"begins, {stage.seconds:.0f} s expected{', beside the others' if stage.beside else ''}")

    def _finish(self, name: str, running: Running) -> None:
        del self.running[name]
        found = record.entry(running, self.number)
        self.states[name] = found["status"]
        self.summary["stages"][name] = found
        self.folder.log(name, running.log)
        self.folder.record(running.stage)
        bury(*(other.process.pid for other in self.running.values()))
        self._say(name, f"{found['status']}, {found['seconds']:.1f} s{told(found)}")
        for line in found.get("said", []):
            print(f"    {line}"[:WIDTH], flush=True)
        self._keep()

    def _drop(self, name: str, why: str) -> None:
        self.states[name] = why
        self._note(name, why)
        if why != NOT_CHOSEN:
            self._say(name, why)

    def _note(self, name: str, status: str) -> None:
        """What a stage that has nothing to show has come to: what an earlier window has of it stays."""
        before = self.summary["stages"].get(name, {})
        if "seconds" not in before:
            kept = {"record": before["record"]} if "record" in before else {}
            self.summary["stages"][name] = {"status": status, "window": self.number, **kept}

    def _look(self, now: float) -> None:
        """Now and then, while nothing is measured: keep what running stages have come to, and show that they live."""
        for name, running in self.running.items():
            if now - self._told[name] > TELL_EVERY:
                self._told[name] = now
                said = record.tail(running.log)[::-1]  # what is indented belongs to a line before it
                last = next((line for line in said if not line[0].isspace()), said[0] if said else "")
                self._say(name, f"{running.seconds:.0f} s: {last.strip()}")
        if self.running and now - self._kept > KEEP_EVERY:
            for name, running in self.running.items():
                if self.folder.record(running.stage):  # a window that ends with its machine is gone on with from there
                    self.summary["stages"][name]["record"] = running.stage.record
            self._keep()

    def _keep(self) -> None:
        """Write everything that is new, the summary last."""
        self._kept = time.monotonic()
        mine = self.summary["windows"][self.number]
        mine["seconds"] = round(self._kept - self.began, 1)
        before = mine["problems"]
        self.folder.write()
        mine["problems"] = list(self.folder.problems)
        self.summary["stages"] = {name: self.summary["stages"][name] for name in self.stages}
        self.folder.summary(self.name, self.summary)
        mine["problems"] = list(self.folder.problems)
        if mine["problems"] and mine["problems"] != before:
            self._say("", f"NOT WRITTEN, to be tried again: {'; '.join(mine['problems'])}")

    def _say(self, name: str, text: str) -> None:
        clean = "".join(sign if sign.isprintable() else " " for sign in text)
        print(f"{time.monotonic() - self.began:5.0f} s  {name:<14} {clean}"[:WIDTH].rstrip(), flush=True)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP end what runs, twice at once. What is ignored (a script's background job) stays
        so, but not for the stages, which are told to end by SIGINT."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked += before[signal.Signals(number)] is not signal.SIG_IGN

        for number in before:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def table(self) -> list[str]:
        """What became of every stage that was chosen, this window's and earlier ones'."""
        lines = [f"{'stage':<15} {'seconds':>7}  what became of it"]
        for name, found in self.summary["stages"].items():
            if found["status"] != NOT_CHOSEN:
                seconds = f"{found['seconds']:.1f}" if "seconds" in found else ""
                before = "" if found["window"] == self.number else " in an earlier window"
                lines.append(f"{name:<15} {seconds:>7}  {found['status']}{before}{told(found)}"[:WIDTH])
        return [*lines, f"summary: {self.folder.out / self.name}"]

    def status(self) -> int:
        """The documented exit status."""
        mine = {name: state for name, state in self.states.items() if not state.startswith(NOT_CHOSEN)}
        bad = [name for name, state in mine.items() if state == FAILED]
        if self.folder.unwritten or any(self.stages[name].prepares for name in bad):
            return INFRASTRUCTURE
        if bad:
            return SOME_FAILED
        return ALL_PASSED if all(state in (PASSED, NOT_NEEDED) for state in mine.values()) else INCOMPLETE


def told(found: Mapping[str, Any]) -> str:
    """Counts on one line, behind a colon."""
    counts = {name: value for name, value in found.get("counts", {}).items() if value not in ([], {}, "")}
    if why := counts.pop("none", ""):
        return f": no counts, {why}"
    lists = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in counts.items()}
    return f": {', '.join(f'{name} {value}' for name, value in lists.items())}" if lists else ""
