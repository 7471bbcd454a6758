"""The pytest plugin for xdist: what its controller hands to the workers, and what it hears of them.

A worker takes its share of the processors and one GPU before anything looks for them. Large cells are one worker's. The
cell in which a worker died is recorded, and whoever replaces the worker goes on with the next.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from harness import ledger as ledgers
from harness.asked import MATRIX
from harness.cells import Verdict
from harness.describe import describe
from harness.gpu_share import give
from harness.ledger_format import LedgerError
from harness.matrix import SCALE, is_large, parse
from harness.run import Run
from harness.runner import Runner

RUN = pytest.StashKey[Run | None]()
"""In the controller, or the one process where there is no xdist."""
NOT_FOUND = pytest.StashKey[str]()
"""What the arguments name and no worker found."""
TOLD = "kdtree_not_found"
"""In what a worker hands back: xdist shows nobody why a worker could not collect."""


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def handed(config: pytest.Config) -> dict[str, Any] | None:
    """The run as the process that runs the cells sees it."""
    if is_worker(config):
        given: dict[str, Any] | None = config.workerinput.get("kdtree")  # type: ignore[attr-defined]
        return given
    run = config.stash.get(RUN, None)
    return run.for_workers() if run is not None else None


def pytest_configure(config: pytest.Config) -> None:
    """In a worker: take one share of the processors and one GPU, before anything looks for them."""
    if not is_worker(config):
        return
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if "OMP_NUM_THREADS" not in os.environ:
        share = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("KDTREE_THREADS", str(max(2, share)))  # two at least: a race between threads can show
        os.environ["OMP_NUM_THREADS"] = str(share)  # these threads spin while they wait
        if "torch" in sys.modules:  # it has read that by now
            sys.modules["torch"].set_num_threads(share)
    run = handed(config)
    if run is not None and run["gpus"]:
        give(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), run["gpus"], os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """In a worker: hand on what it could not find, a test that a file does not have."""
    try:
        return (yield)
    except pytest.UsageError as error:
        if is_worker(session.config):
            session.config.workeroutput[TOLD] = "; ".join(map(str, error.args))  # type: ignore[attr-defined]
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """In the controller: a worker has ended."""
    told = getattr(node, "workeroutput", {}).get(TOLD)
    if told:
        node.config.stash[NOT_FOUND] = told


def scope_of(nodeid: str) -> str:
    """What one worker runs as a whole: a test, or all cells of large configs, whose weights two would hold twice."""
    inner = nodeid.partition(f"{MATRIX.name}::test_cell[")[2]
    return SCALE if inner and is_large(parse(inner[:-1]).config) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In the controller: the order of its own, the large cells on one worker."""
    if not config.getoption("--scale"):
        return None
    scheduler = importlib.import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of  # the method that its documentation offers for other scopes
    return scheduler


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the controller: hand the run to a worker."""
    run = node.config.stash.get(RUN, None)
    if run is not None:
        node.workerinput["kdtree"] = run.for_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any, sched: Any) -> None:
    """In the controller: the worker died in this cell; whoever replaces it goes on with the next."""
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
