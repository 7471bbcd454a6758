"""One run of the matrix as its controller sees it: from the plan over build, bundles and GPUs to the ledger.

However a run ends - all passed, interrupted, or kept from starting - it leaves one whole ledger, written once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import ledger as ledgers
from harness.cells import Ledger
from harness.describe import counted
from harness.ending import uninterrupted
from harness.environment import environment, survey
from harness.files import said
from harness.gpu import Gpu, GpuBusy
from harness.gpu_share import SHARE, GpuTooSmall, leased, workers_that_fit
from harness.matrix import parse
from harness.prepare import Infrastructure, Plan, Say, prepare
from harness.reports.command import write_reports
from harness.sources import ROOT, describe


class Run:
    """A planned run. ``run_dir`` is where its ledger goes, ``reports/<run id>`` unless given."""

    def __init__(self, plan: Plan, notes: tuple[str, ...], *, run_dir: Path | None, host: str, command: str) -> None:
        """Raises Infrastructure when ``run_dir`` cannot be written to, or has a ledger already."""
        self.plan, self.notes, self.host = plan, list(notes), host
        self.problems: list[str] = []
        self.bundles: Mapping[str, Path] = {}
        self.run_id = run_dir.name if run_dir else ledgers.new_run_id()
        self.run_dir = (run_dir or ROOT / "reports" / self.run_id).absolute()
        most = max((point.ranks for point in map(parse, plan.expected) if point.device == "cuda"), default=0)
        if most > len(self.gpus):
            self.notes.append(f"up to {most} ranks shared {len(self.gpus)} GPU(s) of {host} ({SHARE})")
        self.ledger: Ledger | None = None
        self.path = self.run_dir / ledgers.LEDGER_FILE
        self._command, self._started = command, ledgers.timestamp()
        self._sources = describe()  # before anything is built from them
        self._held = ExitStack()
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            used = self.path.exists()
            if not os.access(self.run_dir, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.run_dir))
        except OSError as error:
            raise Infrastructure(f"{said(error)}; name another folder with --run-dir") from error
        if used:
            raise Infrastructure(
                f"{self.run_dir} holds the ledger of an earlier run; name another folder with --run-dir"
            )

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that its cells use."""
        return survey().gpus if any(parse(id).device == "cuda" for id in self.plan.expected) else ()

    def workers(self, wanted: int) -> int:
        """How many of ``wanted`` workers may start. Raises Infrastructure when the GPUs have no room for one."""
        if not self.gpus or wanted < 1:
            return wanted
        try:
            fitting = workers_that_fit(self.gpus, {parse(id).config for id in self.plan.expected}, wanted)
        except GpuTooSmall as error:
            raise Infrastructure(str(error)) from error
        if fitting < wanted:
            self.notes.append(f"{fitting} of {wanted} workers: GPU memory has room for no more")
        return fitting

    def start(self, say: Say) -> None:
        """Take the GPUs, build, make bundles. After Infrastructure the ledger is there and says what was in the way."""
        where = ", ".join(self.plan.devices)
        say(f"matrix: {counted(len(self.plan.expected), 'cell')} expected on {where}, engine {self.plan.engine}")
        for note in self.notes:
            say(f"matrix: {note}")
        try:
            self._held.enter_context(leased(self.gpus, self.run_id))
            self.bundles = prepare(self.plan.engine, [parse(id) for id in self.plan.expected], say)
        except (Infrastructure, GpuBusy, OSError) as error:
            self.problems.append(str(error))
            self.finish()
            raise Infrastructure(f"{error}\nledger: {self.path}") from error

    def for_workers(self) -> dict[str, Any]:
        """What a worker needs, in values that execnet can carry."""
        return {
            "engine": self.plan.engine,
            "expected": list(self.plan.expected),
            "bundles": {config: str(path) for config, path in self.bundles.items()},
            "run_dir": str(self.run_dir),
            "gpus": [gpu.uuid for gpu in self.gpus],
        }

    def finish(self) -> Ledger:
        """Collect the cells, write the ledger and the reports, give the GPUs back; once. Raises OSError."""
        with uninterrupted():
            return self._finished() if self.ledger is None else self.ledger

    def _finished(self) -> Ledger:
        blank = Ledger(
            run_id=self.run_id,
            started=self._started,
            finished=ledgers.timestamp(),
            engine=self.plan.engine,
            command=self._command,
            sources=self._sources,
            environments={self.host: environment()},
            expected=tuple(sorted(self.plan.expected)),
            cells=(),
            filter=self.plan.filter,
            problems=tuple(self.problems),
            notes=tuple(self.notes),
        )
        self.ledger = ledgers.complete(blank, ledgers.collect(self.run_dir))
        try:
            ledgers.write(self.ledger, self.run_dir)
            write_reports(self.ledger, self.run_dir)
        finally:
            self._held.close()
        return self.ledger
