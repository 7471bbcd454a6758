"""Tests whose nature is waiting, compiling, starting processes or making a bundle again carry ``@pytest.mark.slow``.

A run of everything leaves them out and says how many, in one line; ``--all`` runs them too, as CI does. A run that
chooses its tests itself, by path, node id, ``-k`` or ``-m``, runs what it chose, slow or not.
"""

from __future__ import annotations

from typing import Any

import pytest

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: waits, compiles, starts processes or makes a bundle; left out of a run without --all"
    )


def _takes_all(config: pytest.Config) -> bool:
    """Whether slow tests run. A worker is told: to it every argument looks like a choice."""
    if hasattr(config, "workerinput"):
        return bool(config.workerinput["kdtree_all"])
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return bool(named or config.getoption("all") or config.getoption("keyword") or config.getoption("markexpr"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["kdtree_all"] = _takes_all(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _takes_all(config):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    config.stash[LEFT_OUT] = len(slow)
    if hasattr(config, "workeroutput"):
        config.workeroutput["kdtree_left_out"] = len(slow)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """xdist, in the controller, which collects nothing itself: every worker left out the same ones."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("kdtree_left_out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} slow tests left out; --all runs them")
