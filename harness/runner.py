"""Runs cells and turns whatever happens into their records: results, errors by name, timeouts.

Cells that share a bundle, a precision and a device share a session; one that saw a failure is closed, not shared on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from harness.cells import Cell, Findings, Verdict, judge
from harness.checks import Ran, run_ar, run_checks
from harness.compare import exactly
from harness.describe import rerun_line
from harness.engines import create
from harness.golden import Golden
from harness.gpu import is_sticky
from harness.limit import CellTimeout, limit
from harness.matrix import Point
from harness.protocol import DeviceError, Engine, NonFiniteError, OutOfMemory, Session
from harness.trace.command import first_divergence
from harness.widths import rows_of

Key = tuple[str, int, str, str]
"""Device, ranks, config and precision: what the cells of one session share."""
TRACE_SECONDS = 60.0  # for finding where a failed cell's numbers part
KEPT_SESSIONS = 2  # the precisions of one bundle; more would hold memory that no neighbouring cell uses


class Runner:
    """One worker's engines and open sessions."""

    def __init__(self, engine: str, bundles: Mapping[str, Path], *, seconds: float, host: str, worker: str) -> None:
        """``bundles`` by config; ``seconds`` one cell may take."""
        self._name, self._bundles, self._seconds = engine, bundles, seconds
        self._host, self._worker = host, worker
        self._engines: dict[tuple[str, int], Engine] = {}
        self._sessions: OrderedDict[Key, tuple[Session, Golden]] = OrderedDict()
        self._ar: dict[Key, Ran] = {}
        self.device_lost = False
        """A device failed for good: this process can run no further cell on it."""

    def blank(self, point: Point, verdict: Verdict, detail: str) -> Cell:
        """A record without checks."""
        return Cell(
            id=point.id,
            verdict=verdict,
            detail=detail,
            seed=point.seed,
            host=self._host,
            worker=self._worker,
            rerun=rerun_line(self._name, point.id),
        )

    def run(self, point: Point, on_hang: Callable[[Cell], None]) -> Cell:
        """The cell's record; never raises for what the engine does.

        ``on_hang`` gets the record when native code does not return and this process is about to end.
        """
        start = time.perf_counter()
        main = threading.get_ident()
        found, timed_out = Findings(), False

        def late(frames: traceback.StackSummary) -> Cell:
            """What was found wrong before says more than that time ran out: a wrong tree can be a slow one."""
            more = f"took longer than {self._seconds:g} s{_doing(frames)}; --cell-timeout SECONDS allows more"
            checks = tuple(found.checks)
            verdict, detail = judge(checks)
            if verdict is Verdict.PASS:
                return self.blank(point, Verdict.TIMEOUT, more)
            return replace(self.blank(point, verdict, f"{detail}; then it {more}"), checks=checks)

        def hangs() -> None:
            on_hang(late(traceback.extract_stack(sys._current_frames()[main])))

        try:
            with _turn(point), limit(self._seconds, hangs):
                cell = self._judge(point, found)
        except CellTimeout as error:
            timed_out = True
            cell = late(traceback.extract_tb(error.__traceback__))
        except NonFiniteError as error:
            check = exactly("engine.finite", 1, Verdict.FAIL_NONFINITE, f"NonFiniteError: {error}")
            cell = replace(self.blank(point, *judge([check])), checks=(check,))
        except Exception as error:
            where = _place(traceback.extract_tb(error.__traceback__)[-1])
            first, _, rest = str(error).partition("\n")
            if rest:  # a job of ranks tells what each of them said: for the reader of this test, not for the ledger
                print(error, file=sys.stderr, flush=True)
            cell = self.blank(point, Verdict.ERROR, f"{type(error).__name__}: {first} (at {where})")
            self.device_lost = _lost(error)
        if cell.verdict is not Verdict.PASS:
            cell = cell if timed_out else self._trace(point, cell, on_hang)
            cell = self._drop(point, cell)
        return replace(cell, times={**cell.times, "total": time.perf_counter() - start})

    def close(self) -> None:
        """Close every session, and end the ranks of engines that have some."""
        while self._sessions:
            _close(self._sessions.popitem()[1][0])
        for engine in self._engines.values():
            if hasattr(engine, "close"):
                engine.close()

    def _judge(self, point: Point, found: Findings) -> Cell:
        start = time.perf_counter()
        engine, session, golden = self._open(point)
        alone = self._open(replace(point, ranks=1))[1] if point.ranks > 1 else None
        loaded = time.perf_counter() - start
        blank = self.blank(point, Verdict.PASS, "")
        known = self._known(point, session, golden) if alone is not None and point.drafter else None
        run_checks(found, engine, session, golden, point.drafter, blank.seed, alone, known)
        verdict, detail = judge(found.checks)
        return replace(
            blank,
            verdict=verdict,
            detail=detail,
            checks=tuple(found.checks),
            kernels=found.kernels,
            times={"load": loaded, **found.times},
            divergence=found.divergence,
            step_errors=found.step_errors,
            acceptance=found.acceptance,
            bad_round=found.bad_round,
        )

    def _known(self, point: Point, session: Session, golden: Golden) -> Ran:
        """AR's run of a session of several ranks, made once: every exchange of theirs costs a millisecond."""
        key = _key(point)
        if key not in self._ar:
            self._ar = {key: run_ar(session, golden)}
        return self._ar[key]

    def _trace(self, point: Point, cell: Cell, on_hang: Callable[[Cell], None]) -> Cell:
        """``cell`` with where its numbers first parted; a search that raises or runs late changes no verdict."""
        found = self._sessions.get(_key(point))
        if found is None or self.device_lost or cell.verdict is Verdict.FAIL_KERNEL:
            return cell
        try:
            with limit(min(self._seconds, TRACE_SECONDS), lambda: on_hang(cell)):
                divergence = first_divergence(*found, point.drafter, cell.seed)
        except (Exception, CellTimeout) as error:
            return self._after(cell, error, "was traced")
        return replace(cell, divergence=divergence or cell.divergence)

    def _after(self, cell: Cell, error: BaseException, doing: str) -> Cell:
        """``cell``, judged already, after an error: a device that is lost then is lost for the next cell too."""
        if not _lost(error):
            return cell
        self.device_lost = True
        told = str(error).partition("\n")[0]
        return replace(
            cell, detail=f"{cell.detail}; as it {doing}, the device was lost: {type(error).__name__}: {told}"
        )

    def _open(self, point: Point) -> tuple[Engine, Session, Golden]:
        place = (point.device, point.ranks)
        if place not in self._engines:
            self._engines[place] = create(self._name, *place)
        engine = self._engines[place]
        key = _key(point)
        if key not in self._sessions:
            while len(self._sessions) >= KEPT_SESSIONS:
                left, (other, _) = self._sessions.popitem(last=False)
                self._ar.pop(left, None)
                if (error := _close(other)) and _lost(error):
                    raise error
            path = self._bundles[point.config]
            golden = Golden.open(path, point.precision)
            session = engine.load(path, point.precision, max_rows=rows_of(golden), poison=True)
            self._sessions[key] = (session, golden)
        self._sessions.move_to_end(key)
        return engine, *self._sessions[key]

    def _drop(self, point: Point, cell: Cell) -> Cell:
        found = self._sessions.pop(_key(point), None)
        self._ar.pop(_key(point), None)
        error = _close(found[0]) if found else None
        return self._after(cell, error, "was closed") if error and not self.device_lost else cell


def _place(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _doing(frames: traceback.StackSummary) -> str:
    """What was under way: the harness's own step, and the line in the engine that it had reached."""
    own = Path(__file__).parent
    at = [frame for frame in frames if Path(frame.filename).name not in ("limit.py", "runner.py")]
    asking = [frame for frame in at if own in Path(frame.filename).parents]
    return f", in {Path(asking[-1].filename).stem}.{asking[-1].name} (at {_place(at[-1])})" if asking else ""


@contextlib.contextmanager
def _turn(point: Point) -> Iterator[None]:
    """One cell of several GPUs at a time on this machine: exchanges of two jobs would wait for each other's turns."""
    if point.ranks == 1 or point.device != "cuda":
        yield
        return
    with (Path(tempfile.gettempdir()) / f"kdtree-ranks-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(point: Point) -> Key:
    return point.device, point.ranks, point.config, point.precision


def _lost(error: BaseException) -> bool:
    """Whether this process can use the device no more. torch reports a lost context as a RuntimeError."""
    return (isinstance(error, DeviceError) and not isinstance(error, OutOfMemory)) or is_sticky(str(error))


def _close(session: Session) -> Exception | None:
    """What it raised: a session that failed may fail to close, and its cell is judged already."""
    try:
        session.close()
    except Exception as error:
        return error
    return None
