"""These tests need transformers and compressed-tensors, so they are collected only when this directory is asked for
(``nox -s oracles``, or ``pytest tests/oracles``); then a missing package is an error, not a skip.

At the end the run says how many random models agreed; near-ties beyond 1 % of them fail it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
MODEL_TEST = "test_random_model["
NEAR_TIES = 0.01


def _asked_for(config: pytest.Config) -> bool:
    given = [(config.invocation_params.dir / str(a).partition("::")[0]).resolve() for a in config.args]
    return any(path == HERE or HERE in path.parents for path in given)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this directory out of a run of everything."""
    return None if _asked_for(config) else True


@pytest.fixture(scope="session")
def csrc() -> Any:
    """The engine of csrc/ on the CPU, built if need be."""
    import engine

    return engine.create("cpu")


class Summary:
    """What the random models said, in the process that sees all reports."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, Any]] = {}
        self.run: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the figures of a model that was run."""
        if report.when == "call" and MODEL_TEST in report.nodeid:
            self.run.add(report.nodeid)
            for name, value in report.user_properties:
                if name == "oracle" and report.passed:
                    self.said[report.nodeid] = json.loads(str(value))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Too many near-ties fail the run."""
        ties = sum(s["near_tie"] for s in self.said.values())
        if self.run and ties > NEAR_TIES * len(self.run) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line for the reference, one for the engine."""
        if not self.run:
            return
        said = list(self.said.values())
        write = terminalreporter.write_line
        ties = sum(s["near_tie"] for s in said)
        allowed = f"at most {NEAR_TIES:.0%} of {len(self.run)}"
        write(f"random models against transformers: {len(said)} of {len(self.run)} agree, {ties} near-ties ({allowed})")
        for who in ("reference", "engine"):
            worst = max(said, key=lambda s: s[who], default=None)
            if worst:
                write(f"  {who}: worst difference {worst[who]:.2f} of what is allowed (model {worst['index']})")


def pytest_configure(config: pytest.Config) -> None:
    """One thread a process: these models are so small that threads only wait for each other. With xdist the controller
    alone sums up."""
    if _asked_for(config):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # transformers builds a shared expert of size 0 where the config asks for none
        config.addinivalue_line("filterwarnings", "ignore:Initializing zero-element tensors")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Summary(), "oracle-summary")
