"""The pytest plugin: options, the cells as tests, one record per cell, the run's ledger and exit status.

With xdist the controller plans, builds and makes bundles before any worker starts, and writes the ledger at the end;
workers run cells and store their records. Without xdist one process does both. The exit status is that of the ledger
(``harness.cells.exit_status``), joined with pytest's own for the other tests.

Cells are chosen by ``-k`` and by node id, and what was chosen is what is expected; ``-m``, ``--lf`` and ``--deselect``
do not reach them.
"""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness import ledger as ledgers
from harness.cells import INFRASTRUCTURE, Cell, Verdict, exit_status
from harness.describe import describe
from harness.gpu_share import give
from harness.ledger import LedgerError
from harness.matrix import SCALE, MatrixError, is_large, parse
from harness.prepare import Infrastructure, plan, points_of, usable_devices
from harness.run import Run
from harness.runner import Runner
from harness.sources import ROOT

MATRIX = ROOT / "tests" / "test_matrix.py"
NAMES = ("test_cell", "test_matrix.py", "tests")
"""What every cell is also called in a ``-k`` expression."""
CELL_SECONDS, SCALE_CELL_SECONDS = 120.0, 900.0
RUN = pytest.StashKey[Run | None]()
OBSTACLE = pytest.StashKey[str]()
"""Why the run cannot start."""
STOPPED = pytest.StashKey[bool]()
"""The run has ended before its first test, and why has been told."""
NOT_FOUND = pytest.StashKey[str]()
"""What the arguments name and no worker found."""
TOLD = "kdtree_not_found"
"""In what a worker hands back: xdist shows nobody why a worker could not collect."""
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


def pytest_configure(config: pytest.Config) -> None:
    """In a worker: take one share of the processors and one GPU, before anything looks for them."""
    if not _is_worker(config):
        return
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if "OMP_NUM_THREADS" not in os.environ:
        share = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("KDTREE_THREADS", str(max(2, share)))  # two at least: a race between threads can show
        os.environ["OMP_NUM_THREADS"] = str(share)  # these threads spin while they wait
        if "torch" in sys.modules:  # it has read that by now
            sys.modules["torch"].set_num_threads(share)
    handed = _handed(config)
    if handed is not None and handed["gpus"]:
        give(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), handed["gpus"], os.environ)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _chosen_ids(config: pytest.Config) -> list[str] | None:
    """Cell ids given as node ids; empty for all cells; None when this run leaves the matrix out."""
    ids: list[str] = []
    here = False
    for argument in config.args:
        path, _, inner = str(argument).partition("::")
        target = (config.invocation_params.dir / path).resolve()
        if target != MATRIX and target not in MATRIX.parents:
            continue
        here = True
        if target == MATRIX and "[" in inner:
            ids.append(inner[inner.index("[") + 1 : -1])
    ignored = [(config.invocation_params.dir / path).resolve() for path in config.getoption("ignore") or []]
    return ids if here and not any(path == MATRIX or path in MATRIX.parents for path in ignored) else None


def _make_run(config: pytest.Config) -> Run | None:
    """The run of the matrix, or None when other tests alone were asked for. Raises Infrastructure."""
    ids = _chosen_ids(config)
    if ids is None:
        return None
    seconds = config.getoption("--cell-timeout")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise Infrastructure(f"--cell-timeout {seconds:g}: a cell needs a time above 0")
    engine, expression = config.getoption("--engine"), config.getoption("keyword")
    devices, note = usable_devices(engine, config.getoption("--device"), config.getoption("--require-device"))
    try:
        ranks = config.getoption("--ranks")
        scale = config.getoption("--scale")
        chosen = plan(engine, devices, ranks=ranks, ids=ids, expression=expression, names=NAMES, scale=scale)
    except Infrastructure:
        explicit = any(str(argument).partition("::")[0].endswith(MATRIX.name) for argument in config.args)
        if explicit or not expression:
            raise
        plan(engine, devices)  # what is wrong with the whole matrix is wrong here too
        return None
    return Run(
        chosen,
        (note,) if note else (),
        run_dir=config.getoption("--run-dir"),
        host=config.getoption("--host-name"),
        command=as_typed_here(["pytest", *map(str, config.invocation_params.args)]),
    )


def as_typed_here(words: Sequence[str]) -> str:
    """The command for a shell in the project's folder: a ledger is read, and its run repeated, on other machines."""
    inside = [word.replace(f"{ROOT}{os.sep}", "") for word in words]
    return shlex.join("." if word == str(ROOT) else word for word in inside)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """Plan the run while the number of workers can still change; what is in its way is told at the session's start."""
    _plan(config)
    status = yield
    return INFRASTRUCTURE if config.stash.get(STOPPED, False) else status


def _plan(config: pytest.Config) -> None:
    config.stash[RUN] = None
    if _is_worker(config) or config.getoption("collectonly"):
        return
    try:
        _exist(config)
        run = config.stash[RUN] = _make_run(config)
        wanted = config.getoption("numprocesses", None)
        if run is not None and run.gpus and wanted:
            if not isinstance(wanted, int):
                wanted = config.hook.pytest_xdist_auto_num_workers(config=config)
            config.option.numprocesses = run.workers(wanted)
    except Infrastructure as error:
        config.stash[OBSTACLE] = str(error)


def _exist(config: pytest.Config) -> None:
    """Told before anything is built. Raises Infrastructure."""
    for argument in map(str, config.args):
        path = config.invocation_params.dir / argument.partition("::")[0]
        if not (config.getoption("pyargs") or path.exists()):
            raise Infrastructure(f"{argument}: no such file or directory")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a worker: hand on what it could not find, a test that a file does not have."""
    try:
        return (yield)
    except pytest.UsageError as error:
        if _is_worker(session.config):
            session.config.workeroutput[TOLD] = "; ".join(map(str, error.args))  # type: ignore[attr-defined]
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist, in the controller: a worker has ended."""
    told = getattr(node, "workeroutput", {}).get(TOLD)
    if told:
        node.config.stash[NOT_FOUND] = told


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


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a test, or all cells of large configs, whose weights two would hold twice."""
    inner = nodeid.partition(f"{MATRIX.name}::test_cell[")[2]
    return SCALE if inner and is_large(parse(inner[:-1]).config) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist, in the controller: the order of its own, the large cells on one worker."""
    if not config.getoption("--scale"):
        return None
    scheduler = importlib.import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of  # the method that its documentation offers for other scopes
    return scheduler


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist, in the controller: hand the run to a worker."""
    run = node.config.stash.get(RUN, None)
    if run is not None:
        node.workerinput["kdtree"] = run.for_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """xdist, in the controller: the worker died in this cell; whoever replaces it goes on with the next."""
    run = sched.config.stash.get(RUN, None)
    if run is None or f"{MATRIX.name}::" not in crashitem:
        return
    runner = Runner(run.plan.engine, {}, seconds=0, host=run.host, worker=report.node.gateway.id)
    point = parse(crashitem[crashitem.index("[") + 1 : -1])
    record = runner.blank(point, Verdict.ERROR, "the worker died in this cell")
    try:
        ledgers.record(record, run.run_dir)
        report.longrepr = describe(record)
    except LedgerError:  # it had recorded the cell, and why, before it ended
        report.longrepr = next(describe(cell) for cell in ledgers.collect(run.run_dir) if cell.id == point.id)


def _handed(config: pytest.Config) -> dict[str, Any] | None:
    """The run as the process that runs the cells sees it."""
    if _is_worker(config):
        handed: dict[str, Any] | None = config.workerinput.get("kdtree")  # type: ignore[attr-defined]
        return handed
    run = config.stash.get(RUN, None)
    return run.for_workers() if run is not None else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path != MATRIX:
        return
    handed = _handed(metafunc.config)
    if handed is not None:
        ids = handed["expected"]
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
    if _handed(config) is None:
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
    handed = _handed(pytestconfig)
    if handed is None:
        raise RuntimeError("no run was planned")
    run_dir = Path(handed["run_dir"])
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    bundles = {config: Path(path) for config, path in handed["bundles"].items()}
    seconds = pytestconfig.getoption("--cell-timeout")
    if seconds is None:
        seconds = SCALE_CELL_SECONDS if pytestconfig.getoption("--scale") else CELL_SECONDS
    runner = Runner(
        handed["engine"], bundles, seconds=seconds, host=pytestconfig.getoption("--host-name"), worker=worker
    )

    def on_hang(record: Cell) -> None:
        ledgers.record(record, run_dir)
        run = pytestconfig.stash.get(RUN, None)
        if run is not None:  # no xdist: this process is the controller too, and nobody comes after it
            run.finish()
            print(f"\n{record.id}: {record.detail}\nledger: {run.path}", file=sys.__stderr__, flush=True)

    def one(id: str) -> Cell:
        record = runner.run(parse(id), on_hang)
        ledgers.record(record, run_dir)
        if runner.device_lost:
            if worker:
                os._exit(1)  # the context cannot be used again; xdist starts another worker
            pytest.exit(f"kdtree: {record.detail}", INFRASTRUCTURE)
        return record

    yield one
    runner.close()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _is_worker(session.config) or session.config.getoption("collectonly"):
        return
    run = session.config.stash.get(RUN, None)
    if NOT_FOUND in session.config.stash:
        exitstatus = INFRASTRUCTURE
    if run is not None:
        statuses = {exit_status(run.finish()), int(exitstatus)}
        # 5 is pytest's "nothing collected": the ledger says the same with a better reason
        session.exitstatus = next(status for status in (4, 3, 1, 2, 0) if status in statuses or status == 0)
    elif exitstatus in (pytest.ExitCode.NO_TESTS_COLLECTED, INFRASTRUCTURE):
        session.exitstatus = INFRASTRUCTURE


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run is not None and run.ledger is not None:
        terminalreporter.section("validation matrix")
        for line in ledgers.summary(run.ledger):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"ledger: {run.path}")
    if NOT_FOUND in config.stash:
        terminalreporter.write_line(f"kdtree: {config.stash[NOT_FOUND]}")
    elif run is None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.getoption("keyword"):
        terminalreporter.write_line(f"kdtree: -k {config.getoption('keyword')!r} matches no cell and no test")
