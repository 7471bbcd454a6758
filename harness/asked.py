"""What pytest's arguments ask for: files that must be there, and the run of the matrix, or none.

Cells are chosen by ``-k`` and by node id, and what was chosen is what is expected.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import pytest

from harness.prepare import Infrastructure, plan, usable_devices
from harness.run import Run
from harness.sources import ROOT

MATRIX = ROOT / "tests" / "test_matrix.py"
NAMES = ("test_cell", "test_matrix.py", "tests")
"""What every cell is also called in a ``-k`` expression."""


def check_files(config: pytest.Config) -> None:
    """Raises Infrastructure naming an argument that is no file or folder."""
    for argument in map(str, config.args):
        path = config.invocation_params.dir / argument.partition("::")[0]
        if not (config.getoption("pyargs") or path.exists()):
            raise Infrastructure(f"{argument}: no such file or directory")


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


def run_of(config: pytest.Config) -> Run | None:
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
