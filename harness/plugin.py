"""The pytest plugin: options, the cells as tests, one record per cell, the run's ledger and exit status.

With xdist the controller plans, builds and makes bundles before any worker starts, and writes the ledger at the end;
workers run cells and store their records. Without xdist one process does both. The exit status is that of the ledger
(``harness.cells.exit_status``), joined with pytest's own for the other tests.

What is asked for is in ``harness/asked.py``, the workers' part in ``harness/workers.py``. What was chosen is what is
expected; ``-m``, ``--lf`` and ``--deselect`` do not reach cells.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness import ledger as ledgers
from harness.asked import MATRIX, check_files, run_of
from harness.cells import INFRASTRUCTURE, Cell, exit_status
from harness.files import said
from harness.matrix import MatrixError, parse
from harness.prepare import Infrastructure, points_of, usable_devices
from harness.runner import Runner
from harness.workers import NOT_FOUND, RUN, handed, is_worker

CELL_SECONDS, SCALE_CELL_SECONDS = 120.0, 900.0
OBSTACLE = pytest.StashKey[str]()
"""Why the run cannot start."""
STOPPED = pytest.StashKey[bool]()
"""The run has ended before its first test, and why has been told."""
UNWRITTEN = pytest.StashKey[str]()
"""Why the ledger or a report is not there: a full disk, say."""
CellRun = Callable[[str], Cell]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kdtree", "validation matrix")
    group.addoption("--engine", default="csrc", help="csrc, reference, wrong:FAULT, or a registered one")
    group.addoption("--device", action="append", default=[], help="cpu or cuda; default: cpu, and cuda where usable")
    group.addoption("--require-device", action="append", default=[], help="as --device, beside the default ones")
    group.addoption("--ranks", action="append", type=int, default=[], help="cells of so many ranks alone; repeatable")
    group.addoption(
        "--run-dir",
        type=Path,
        help="where the ledger goes (default: reports/<run id>); with =, or pytest takes the folder for tests",
    )
    group.addoption("--cell-timeout", type=float, help="seconds one cell may take (default: 120; with --scale 900)")
    group.addoption("--scale", action="store_true", help="with the configs of real sizes (docs/bundles.md)")
    group.addoption("--host-name", default=socket.gethostname(), help="how the ledger names this machine")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """Plan the run while the number of workers can still change; what is in its way is told at the session's start."""
    _plan(config)
    status = yield
    return INFRASTRUCTURE if config.stash.get(STOPPED, False) else status


def _plan(config: pytest.Config) -> None:
    config.stash[RUN] = None
    if is_worker(config) or config.getoption("collectonly"):
        return
    try:
        check_files(config)
        run = config.stash[RUN] = run_of(config)
        wanted = config.getoption("numprocesses", None)
        if run is not None and run.gpus and wanted:
            if not isinstance(wanted, int):
                wanted = config.hook.pytest_xdist_auto_num_workers(config=config)
            config.option.numprocesses = run.workers(wanted)
    except Infrastructure as error:
        config.stash[OBSTACLE] = str(error)


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if OBSTACLE in config.stash:
        _stop(session, config.stash[OBSTACLE])
    run = config.stash.get(RUN, None)
    if run is None:
        return
    terminal = config.pluginmanager.get_plugin("terminalreporter")

    def say(line: str) -> None:
        if terminal is not None:
            terminal.write_line(line)
            terminal.flush()

    try:
        run.start(say)
    except Infrastructure as error:
        _stop(session, str(error))


def _stop(session: pytest.Session, reason: str) -> NoReturn:
    """End the run before its first test, with the reason said once: ``pytest.exit`` would say it twice."""
    session.config.stash[STOPPED] = True
    print(f"kdtree: {reason}", file=sys.stderr, flush=True)
    raise session.Failed(reason)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path != MATRIX:
        return
    run = handed(metafunc.config)
    if run is not None:
        ids = run["expected"]
    elif metafunc.config.getoption("collectonly"):
        try:
            devices, _ = usable_devices(
                metafunc.config.getoption("--engine"), metafunc.config.getoption("--device"), []
            )
            engine, ranks = metafunc.config.getoption("--engine"), metafunc.config.getoption("--ranks")
            scale = metafunc.config.getoption("--scale")
            ids = [point.id for point in points_of(engine, devices, ranks, scale=scale)]
        except (Infrastructure, MatrixError) as error:
            raise pytest.UsageError(str(error)) from error
    else:
        ids = []
    metafunc.parametrize("cell", ids, ids=ids)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Keep the cells out of reach of other filters: the plan has applied ``-k`` to them, and expects the result."""
    if handed(config) is None:
        items[:] = [item for item in items if item.path != MATRIX or config.getoption("collectonly")]
        return (yield)
    cells = [item for item in items if item.path == MATRIX]
    items[:] = [item for item in items if item.path != MATRIX]
    result = yield
    items[:0] = cells
    return result


@pytest.fixture(scope="session")
def cell_run(pytestconfig: pytest.Config) -> Iterator[CellRun]:
    """Run one cell by id and store its record."""
    given = handed(pytestconfig)
    if given is None:
        raise RuntimeError("no run was planned")
    run_dir = Path(given["run_dir"])
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    bundles = {config: Path(path) for config, path in given["bundles"].items()}
    seconds = pytestconfig.getoption("--cell-timeout")
    if seconds is None:
        seconds = SCALE_CELL_SECONDS if pytestconfig.getoption("--scale") else CELL_SECONDS
    runner = Runner(
        given["engine"], bundles, seconds=seconds, host=pytestconfig.getoption("--host-name"), worker=worker
    )

    def on_hang(record: Cell) -> None:
        ledgers.record(record, run_dir)
        run = pytestconfig.stash.get(RUN, None)
        if run is not None:  # no xdist: this process is the controller too, and nobody comes after it
            run.finish()
            print(f"\n{record.id}: {record.detail}\nledger: {run.path}", file=sys.__stderr__, flush=True)

    def one(id: str) -> Cell:
        record = runner.run(parse(id), on_hang)
        try:
            ledgers.record(record, run_dir)
        except OSError as error:
            why = f"{id}: {record.verdict.value}, and not recorded: {said(error)}"
            raise pytest.fail.Exception(why, pytrace=False) from None
        if runner.device_lost:
            if worker:
                os._exit(1)  # the context cannot be used again; xdist starts another worker
            pytest.exit(f"kdtree: {record.detail}", INFRASTRUCTURE)
        return record

    yield one
    runner.close()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if is_worker(session.config) or session.config.getoption("collectonly"):
        return
    run = session.config.stash.get(RUN, None)
    if NOT_FOUND in session.config.stash:
        exitstatus = INFRASTRUCTURE
    if run is not None:
        try:
            statuses = {exit_status(run.finish()), int(exitstatus)}
        except OSError as error:
            session.config.stash[UNWRITTEN] = said(error)
            session.exitstatus = INFRASTRUCTURE
            return
        except KeyboardInterrupt:  # a second one, while that was written; pytest ends here, without a summary
            print(f"\nledger: {run.path}", file=sys.stderr, flush=True)
            raise
        # 5 is pytest's "nothing collected": the ledger says the same with a better reason
        session.exitstatus = next(status for status in (4, 3, 1, 2, 0) if status in statuses or status == 0)
    elif exitstatus in (pytest.ExitCode.NO_TESTS_COLLECTED, INFRASTRUCTURE):
        session.exitstatus = INFRASTRUCTURE


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: int, config: pytest.Config
) -> Generator[None, object, object]:
    """The last lines are those of the matrix, which say where to look: pytest lists a line for each that failed."""
    result = yield
    run = config.stash.get(RUN, None)
    if run is not None and run.ledger is not None:
        terminalreporter.section("validation matrix")
        for line in ledgers.summary(run.ledger):
            terminalreporter.write_line(line)
        unwritten = config.stash.get(UNWRITTEN, "")
        terminalreporter.write_line(f"kdtree: not written: {unwritten}" if unwritten else f"ledger: {run.path}")
    if NOT_FOUND in config.stash:
        terminalreporter.write_line(f"kdtree: {config.stash[NOT_FOUND]}")
    elif run is None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.getoption("keyword"):
        terminalreporter.write_line(f"kdtree: -k {config.getoption('keyword')!r} matches no cell and no test")
    return result
