"""The stages of a run: their names after the GPU, and command lines that their commands take."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.evidence.record import LOGS
from harness.evidence.stages import Stage, device_name, stages
from harness.sources import ROOT
from tests.waiting import PATIENCE


def test_records_are_called_after_the_gpu() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 5090": "rtx5090"}
    assert {name: device_name(name) for name in names} == names


class Parsed(Exception):
    """The arguments of a command were read to their end."""


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end as soon as they have read their arguments."""

    def parse(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> None:
        _, rest = parser.parse_known_args(arguments, namespace)
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)


def entries(known: Mapping[str, Stage]) -> Iterator[tuple[str, str, list[str]]]:
    """Stage, module and arguments of every command of ours that reads its arguments by itself."""
    for name, one in known.items():
        words = list(one.command)
        at = words.index("python")
        module, arguments = words[at + 2], words[at + 3 :]
        if module == "harness" and arguments[0] != "test":
            yield name, cli.COMMANDS[arguments[0]][0], arguments[1:]
        elif module not in ("harness", "pytest", "tests.cuda.sweep"):
            yield name, f"{module}:main", arguments


ENTRIES = list(entries(stages("h200", 2)))


@pytest.mark.parametrize(("name", "target", "arguments"), ENTRIES, ids=[name for name, _, _ in ENTRIES])
def test_every_command_line_is_one_that_its_command_takes(
    only_parsed: None, monkeypatch: pytest.MonkeyPatch, name: str, target: str, arguments: list[str]
) -> None:
    module, _, function = target.partition(":")
    run = getattr(importlib.import_module(module), function)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        run(arguments) if run.__code__.co_argcount else run()


@pytest.mark.slow
def test_a_rehearsal_collects_the_tests_and_runs_a_cell(tmp_path: Path) -> None:
    """In processes of their own, as on a machine with a GPU: options, collection, a ledger, the summary."""
    out = tmp_path / "out"
    only = ("step", "matrix")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "evidence", str(out), "--rehearse", "--only", *only],
        cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "cuda-rehearsal-run.json").read_text())["stages"]
    assert {name for name, one in found.items() if one["status"] == "passed"} == set(only)
    assert found["matrix"]["counts"] == {"expected": 1, "passed": 1, "failed": 0, "not run": 0}
    ledger = json.loads((out / "cuda-rehearsal-ledger.json").read_text())
    assert ledger["run_id"] == "cuda-rehearsal-ledger"
    assert "/" not in ledger["command"].replace("tests/test_matrix.py", "").replace("build/evidence/cuda-", "")
    assert io.BytesIO((out / LOGS).read_bytes()).getbuffer().nbytes > 0
