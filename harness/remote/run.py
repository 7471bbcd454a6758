"""The matrix on remote hosts: every host in a thread of its own, their cells from one pool, one merged ledger.

Whatever happens to a host, the ledger says so: a host that was lost is a note if others ran all of its cells, and a
problem (exit status 3) if they did not.
"""

from __future__ import annotations

import shlex
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness import ledger as ledgers
from harness.cells import FAILED, INCOMPLETE, PASSED, Ledger, Verdict, exit_status
from harness.ledger_format import LedgerError
from harness.remote.console import Console
from harness.remote.hosts import Host
from harness.remote.known_hosts import HostKeyError
from harness.remote.link import FarError, LinkLost
from harness.remote.order import Order, batch_line, environment, step_lines
from harness.remote.session import Outcome, Session, Stopped
from harness.remote.share import Pool
from harness.remote.ssh_auth import ConnectionFailed
from harness.remote.sync import Snapshot, SyncError

FOLDER = "hosts"
"""Of a run's folder: what came back, by host and batch."""
SKEW = 2.0  # seconds of clock difference below which nobody need be told
KNOWN = (ConnectionFailed, HostKeyError, LinkLost, FarError, SyncError, LedgerError, OSError)
"""What may go wrong with a host; the text of each is for its reader."""


class HostRun:
    """One host's part of a run."""

    def __init__(
        self, host: Host, order: Order, tree: Snapshot, pool: Pool, console: Console, stop: threading.Event
    ) -> None:
        self.host, self.order, self.tree, self.pool, self.console = host, order, tree, pool, console
        self._stop = stop
        self.over = threading.Event()
        """Set when nothing more happens here."""
        self.shards: list[Ledger] = []
        self.salvaged: list[Ledger] = []
        """Of batches that left records alone, which do not say what was judged."""
        self.trouble = ""
        """Why the host takes no more cells; empty if it did all there was to do."""
        self.doing = "connecting"
        """What a lost connection interrupts."""
        self.notes: list[str] = []
        self.session: Session | None = None
        self.folder = order.run_dir / FOLDER / host.name

    def work(self) -> None:
        """Everything, from the connection to the last file fetched; at its end, however it comes, ``over`` is set."""
        try:
            self._guarded()
        finally:
            self.over.set()

    def _guarded(self) -> None:
        try:
            self._work()
        except Stopped:
            self.trouble = self._stopped()
        except KNOWN as error:
            said = str(error).strip() or type(error).__name__
            lost = (
                f" ({self.doing}); what ran there ends by itself, run it again" if isinstance(error, LinkLost) else ""
            )
            self.trouble = "interrupted" if self._stop.is_set() else f"{said}{lost}"
        except Exception as error:
            self.trouble = f"internal error: {type(error).__name__}: {error}"
            (self.folder / "error.txt").write_text(traceback.format_exc(), "utf-8")
        finally:
            returned = self.pool.leave(self.host.name)
            if self.session:
                self.session.close()
            if self.trouble:
                self._say(f"FAILED: {self.trouble}" + (f"; gives back {len(returned)} cells" if returned else ""))

    def _stopped(self) -> str:
        """What it means for this host that it was told to stop."""
        return "interrupted"

    def _say(self, text: str) -> None:
        self.console.say(self.host.name, text)

    def _work(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        output = self.console.sink(self.host.name, self.folder / "output.log")
        self._say(f"connecting to {self.host.address}")
        session = self.session = Session(self.host, self.order.options, self.order.id, output, self._stop)
        facts = session.facts
        self._say(f"{facts['user']}@{facts['node']}: Python {facts['python']}, {facts['system']} {facts['machine']}")
        if abs(session.link.skew) > SKEW:
            note = (
                f"the host's clock is {abs(session.link.skew):.0f} s {'ahead' if session.link.skew > 0 else 'behind'}"
            )
            self.notes.append(f"{self.host.name}: {note}; times in its entries are by its clock")
            self._say(note)
        self._send(session)
        if not session.lock(self.order.command, lambda text: self._say(f"waiting: {text}")):
            self.trouble = f"the box was not free within {self.host.limits.queue:.0f} s"
            return
        self._prepare(session)
        if not self.trouble:
            self._cells(session)
        session.unlock()

    def _cells(self, session: Session) -> None:
        """What the host was prepared for."""
        while not self.trouble and (cells := self.pool.take(self.host.name)):
            self._batch(session, cells)

    def _send(self, session: Session) -> None:
        for part, tree in (("tree", self.tree), ("wheels", self.order.wheels)):
            if tree is None:
                continue
            told, self.doing = [time.monotonic()], f"sending the {part}"

            def progress(done: int, total: int, told: list[float] = told) -> None:
                if time.monotonic() - told[0] > 1:
                    told[0] = time.monotonic()
                    self._say(f"sending: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

            sent = session.sync(tree, part, progress)
            self._say(
                f"sent {sent.contents} of {sent.files} files of the {part}, {sent.bytes} bytes, {sent.seconds:.1f} s"
            )
        removed = session.prune()
        if removed["runs"]:
            self._say(f"removed {removed['runs']} old runs, {removed['bytes'] / 1e6:.1f} MB")

    def _prepare(self, session: Session) -> None:
        self.doing = "prepare"
        if self.host.prepare:
            self._step("prepare", session.prepare(self._env(session)))
        if self.order.wheels and not self.trouble:
            self._step("wheels", self._install(session))
        for name, argv in step_lines(self.host, self.order):
            if not self.trouble:
                self.doing = name
                self._say(f"{name}: {shlex.join(argv)}")
                self._step(name, session.run(argv, limit=self.host.limits.prepare, env=self._env(session)))

    def _env(self, session: Session) -> Mapping[str, str]:
        workdir = session.facts["workdir"]
        wheels = self.order.wheels is not None
        return environment(self.host, session.directory, workdir, wheels=wheels, extra=self.order.extra)

    def _install(self, session: Session) -> Outcome:
        names = [file.path.decode() for file in self.order.wheels.files] if self.order.wheels else []
        folder = f"{session.directory}/wheels"
        own = next((name for name in names if name.startswith("pip-")), None)  # a host may have a Python without pip
        pip = [self.host.python, f"{folder}/{own}/pip"] if own else [self.host.python, "-m", "pip"]
        argv = [*pip, "install", "--no-index", "--no-deps", "--disable-pip-version-check", "--no-input", "--quiet"]
        argv += ["--target", f"{session.directory}/site", *(f"{folder}/{name}" for name in names)]
        return session.run(argv, limit=self.host.limits.prepare)

    def _step(self, name: str, outcome: Outcome) -> None:
        if outcome.trouble or outcome.status:
            self.trouble = f"{name}: {outcome.trouble or f'ended with status {outcome.status}'}"

    def _batch(self, session: Session, cells: list[str]) -> None:
        """Run one batch, bring back what it left, and hand unfinished cells back to the pool."""
        began = time.monotonic()
        shard_id = ledgers.new_run_id()
        argv = batch_line(self.host, self.order, cells, f"{session.directory}/reports/{shard_id}")
        self.doing = f"running {len(cells)} cells"
        self._say(self.doing)
        outcome = session.run(argv, limit=self.host.limits.command, env=self._env(session))
        folder = self.folder / shard_id
        count = session.fetch(f"reports/{shard_id}", folder)
        if (folder / ledgers.LEDGER_FILE).is_file():
            shard, kept = ledgers.read(folder), self.shards
        elif count:
            shard, kept = self._salvage(folder, cells), self.salvaged
        else:
            self.trouble = outcome.trouble or f"ended with status {outcome.status} and left no ledger"
            return
        self.trouble = _contradiction(outcome, shard)
        if self.trouble:
            return
        self.trouble = _why_unusable(outcome, shard)
        done = [cell.id for cell in shard.cells if cell.verdict is not Verdict.NOT_RUN]
        if not self.trouble and not done:
            self.trouble = "ran none of its cells"
        kept.append(replace(shard, problems=()))
        self.pool.finish(self.host.name, done, time.monotonic() - began)
        total = len(self.order.expected)
        self._say(
            f"{len(done)} cells in {time.monotonic() - began:.1f} s; {sum(self.pool.done.values())} of {total} in all"
        )

    def _salvage(self, folder: Path, cells: Sequence[str]) -> Ledger:
        """A ledger of what had been recorded when the command was ended."""
        unknown = [] if self.shards else [self.host.name]  # an earlier batch has told more of the host's environment
        return ledgers.complete(blank(self.order, unknown, folder.name, cells), ledgers.collect(folder))


def _contradiction(outcome: Outcome, shard: Ledger) -> str:
    """Why no cell of a batch is believed: that it passed is said by its status or by its ledger, and not by both."""
    told = exit_status(shard)
    if outcome.trouble or outcome.status == told or PASSED not in (outcome.status, told):
        return ""
    return f"status {outcome.status} came back with a ledger of status {told}"


def _why_unusable(outcome: Outcome, shard: Ledger) -> str:
    """Why a batch's host should get no further one; empty if all is well."""
    if outcome.trouble:
        return outcome.trouble
    if shard.problems:
        return "; ".join(shard.problems)
    if outcome.status not in (PASSED, FAILED, INCOMPLETE):
        return f"the matrix ended with status {outcome.status}"
    return ""


def blank(order: Order, hosts: Sequence[str], run_id: str, cells: Sequence[str]) -> Ledger:
    """A ledger in which nothing ran."""
    return ledgers.complete(
        Ledger(
            run_id=run_id,
            started=ledgers.timestamp(),
            finished=ledgers.timestamp(),
            engine=order.engine,
            command=order.command,
            sources=order.sources,
            environments={host: {} for host in hosts},
            expected=tuple(sorted(cells)),
            cells=(),
            per_host=order.each,
        ),
        (),
    )


def assemble(order: Order, started: str, runs: Sequence[HostRun]) -> Ledger:
    """One ledger of all that came back, and of what did not."""
    shards = [shard for run in runs for shard in run.shards]
    salvaged = [part for run in runs for part in run.salvaged]
    names = [run.host.name for run in runs] if order.each or not (shards or salvaged) else []
    rest = blank(order, names, order.run_dir.name, order.expected)
    if shards:
        rest = replace(rest, sources=shards[0].sources)  # what was judged, in the words of who judged it
    salvaged = [replace(part, sources=rest.sources) for part in salvaged]
    troubles = [f"{run.host.name}: {run.trouble}" for run in runs if run.trouble]
    try:
        merged = ledgers.merge(
            [rest, *shards, *salvaged],
            run_id=order.run_dir.name,
            expected=order.expected,
            command=order.command,
            per_host=order.each,
        )
    except LedgerError as error:
        merged = rest
        troubles.append(f"what came back does not fit together: {error}")
    incomplete = order.each or any(cell.verdict is Verdict.NOT_RUN for cell in merged.cells)
    notes = [note for run in runs for note in run.notes]
    if not incomplete:
        notes += [f"{trouble}; its cells ran elsewhere" for trouble in troubles]
    return replace(
        merged,
        started=started,
        finished=ledgers.timestamp(),
        filter=order.filter,
        problems=tuple(troubles) if incomplete else (),
        notes=(*merged.notes, *notes),
    )
