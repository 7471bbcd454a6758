"""Whole runs in processes of their own: what is expected, recorded and returned, with and without xdist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import asked, workers
from harness import ledger as ledgers
from harness.cells import Ledger, Verdict
from harness.matrix import SCALE
from harness.sources import ROOT
from tests.harness.forked import Forks
from tests.waiting import PATIENCE

Command = Callable[..., subprocess.CompletedProcess[str]]
EXAMPLE = Path(__file__).with_name("example_engine")
CELL = "fp32-ddtree-block1-noisy-cpu"
ONE_BETWEEN = "ar-block1 or fp32-ddtree-block1-oracle"
"""Three cells; the faults that strike in DDTree alone strike the second."""


@pytest.fixture
def start(forks: Forks, tmp_path: Path) -> Command:
    """``python -m COMMAND`` as a user would, without what this test run put into the environment."""

    def one(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        own = ("PYTEST_", "KDTREE_THREADS", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        sites = [str(path)] if path else []
        environment.setdefault("CUDA_VISIBLE_DEVICES", "")  # no engine here needs one, and asking the driver takes time
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sites])
        return forks.run(tmp_path, *command, env=environment, path=sites)

    return one


@pytest.fixture
def run(start: Command) -> Command:
    """The matrix under pytest."""

    def one(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        return start("pytest", "tests/test_matrix.py", "-p", "no:cacheprovider", *arguments, path=path)

    return one


def verdicts(ledger: Ledger) -> dict[str, str]:
    return {cell.id: cell.verdict.value for cell in ledger.cells}


@pytest.mark.slow
def test_a_passing_run_leaves_a_whole_ledger(run: Command, tmp_path: Path) -> None:
    run_dir = tmp_path / "reports" / "one"
    arguments = ("--engine", "reference", "-k", "ar-block1", "-n", "1", "--run-dir", str(run_dir), "--host-name", "box")
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 expected cells passed (filter: ar-block1)" in done.stdout
    assert f"ledger: {run_dir}/ledger.json" in done.stdout
    ledger = ledgers.read(tmp_path / "reports" / "latest")
    assert verdicts(ledger) == {"fp32-ar-block1-cpu": "PASS", "int4-ar-block1-cpu": "PASS"}
    assert (ledger.run_id, ledger.engine, set(ledger.environments)) == ("one", "reference", {"box"})
    assert {(cell.host, cell.worker) for cell in ledger.cells} == {("box", "gw0")}
    assert not (run_dir / "cells").exists()
    suite = ElementTree.parse(run_dir / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "0")

    for folder, reason in ((run_dir, "holds the ledger of an earlier run"), (run_dir / "junit.xml" / "x", "Not a dir")):
        again = run(*arguments[:-3], str(folder))
        assert again.returncode == 3
        assert reason in again.stderr
    assert "--cell-timeout 0: a cell needs a time above 0" in run("--cell-timeout", "0").stderr
    assert ledgers.read(run_dir) == ledger


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_cell_alone(run: Command, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    done = run("--engine", "wrong:crash", "-k", ONE_BETWEEN, "-n", "1", "--run-dir", str(run_dir))
    assert done.returncode == 1, done.stdout + done.stderr
    ledger = ledgers.read(run_dir)
    counts = Counter(cell.verdict for cell in ledger.cells)
    assert counts == {Verdict.PASS: 2, Verdict.ERROR: 1}
    for cell in ledger.cells:
        if cell.verdict is Verdict.ERROR:
            assert "the worker died in this cell" in cell.detail
            assert cell.worker.startswith("gw")
            assert f"again: nox -s test -- -k {cell.id} --engine wrong:crash" in done.stdout


@pytest.mark.slow
def test_a_lost_device_ends_the_worker_after_its_cell_is_recorded(run: Command, tmp_path: Path) -> None:
    options = ("--engine", "wrong:device", "-k", ONE_BETWEEN)
    done = run(*options, "-n", "1", "--run-dir", str(tmp_path / "one"))
    assert done.returncode == 1, done.stdout + done.stderr
    cells = ledgers.read(tmp_path / "one").cells
    assert Counter(cell.verdict for cell in cells) == {Verdict.PASS: 2, Verdict.ERROR: 1}
    assert all("DeviceError: the context is lost" in cell.detail for cell in cells if cell.verdict is Verdict.ERROR)
    assert len({cell.worker for cell in cells}) == 2  # the first AR cell shares the worker that the DDTree cell ends

    alone = run(*options, "--run-dir", str(tmp_path / "two"))
    assert alone.returncode == 3
    counts = Counter(cell.verdict for cell in ledgers.read(tmp_path / "two").cells)
    assert counts == {Verdict.PASS: 1, Verdict.ERROR: 1, Verdict.NOT_RUN: 1}


@pytest.mark.slow
def test_a_run_that_stops_early_owns_up_to_what_it_did_not_run(run: Command, tmp_path: Path) -> None:
    done = run("--engine", "wrong:error", "-x", "-k", "block1 and fp32", "--run-dir", str(tmp_path / "one"))
    assert done.returncode == 1
    counts = Counter(cell.verdict for cell in ledgers.read(tmp_path / "one").cells)
    assert counts == {Verdict.ERROR: 1, Verdict.NOT_RUN: 3}
    assert "EngineError: wrong on purpose" in done.stdout
    assert "0 of 4 expected cells passed, 1 ERROR, 3 NOT_RUN" in done.stdout


@pytest.mark.slow
def test_cells_that_nobody_ran_make_the_run_incomplete(run: Command, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text("def pytest_runtest_teardown(item):\n    item.session.shouldstop = 'enough'\n")
    options = ("-k", "ar-block1", "--run-dir", str(tmp_path / "one"), "-p", "stops")
    done = run("--engine", "reference", *options, path=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert Counter(verdicts(ledgers.read(tmp_path / "one")).values()) == {"PASS": 1, "NOT_RUN": 1}


def test_one_cell_by_its_id_through_the_command(start: Command, tmp_path: Path) -> None:
    options = ("--engine", "wrong:error", "-n", "0", "--device", "cpu", "--run-dir", str(tmp_path / "one"))
    done = start("harness", "test", "-k", CELL, *options)
    assert done.returncode == 1
    ledger = ledgers.read(tmp_path / "one")
    assert verdicts(ledger) == {CELL: "ERROR"}
    assert ledger.filter == CELL
    assert ledger.command.startswith("pytest tests/test_matrix.py ")
    assert ledger.cells[0].seed != 0
    for part in (f"seed {ledger.cells[0].seed}", f"again: nox -s test -- -k {CELL} --engine wrong:error"):
        assert part in done.stdout


@pytest.mark.slow
def test_a_node_id_is_a_choice_too(start: Command, tmp_path: Path) -> None:
    node = f"tests/test_matrix.py::test_cell[{CELL}]"
    done = start(
        "pytest", "-p", "no:cacheprovider", node, "--engine", "wrong:error", "--run-dir", str(tmp_path / "one")
    )
    assert done.returncode == 1
    assert verdicts(ledgers.read(tmp_path / "one")) == {CELL: "ERROR"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-k", "block1 and hostle"), "matches none of "),
        (("-k", "block1 and"), "a word is missing"),
        (("--engine", "nosuch"), "no engine is named 'nosuch'"),
        (("--engine", "reference", "--device", "tpu"), "device 'tpu' is none of cpu, cuda"),
    ],
)
def test_what_cannot_run_ends_with_3_and_no_ledger(
    run: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run("-n", "2", "--run-dir", str(tmp_path / "one"), *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(message) == 1, "said once"
    assert message in done.stderr
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_file_that_is_not_there_is_named_before_anything_is_built(
    start: Command, tmp_path: Path, workers: str
) -> None:
    there = "tests/test_matrix.py"
    done = start("pytest", "-n", workers, "--run-dir", str(tmp_path / "one"), there, "tests/nosuch.py")
    assert (done.returncode, done.stderr) == (3, "kdtree: tests/nosuch.py: no such file or directory\n")
    assert not (tmp_path / "one").exists()


@pytest.mark.slow
def test_a_test_that_no_worker_finds_is_named(start: Command) -> None:
    done = start("pytest", "-p", "no:cacheprovider", "-n", "2", "tests/harness/test_rounding.py::nosuch")
    assert done.returncode == 3, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("kdtree: ")]
    assert "test_rounding.py::nosuch" in line


SMALL_FILES = """
import resource

def pytest_collection_finish():
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
"""


def test_a_disk_that_is_full_at_the_end_is_a_line_and_status_3(run: Command, tmp_path: Path) -> None:
    (tmp_path / "small_files.py").write_text(SMALL_FILES)
    place = tmp_path / "one"
    options = ("-n", "0", "-p", "small_files", "--engine", "reference", "-k", "fp32-ar-block1-cpu")
    done = run(*options, f"--run-dir={place}", path=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"kdtree: not written: {place}" in done.stdout
    assert "fp32-ar-block1-cpu: PASS, and not recorded: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "The above exception" not in done.stdout
    assert done.stdout.index("short test summary info") < done.stdout.index("validation matrix ===")
    assert "matrix: 1 cell expected on cpu" in done.stdout


@pytest.mark.slow
def test_a_required_gpu_that_is_not_there_ends_with_3(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--require-device", "cuda", "--run-dir", str(tmp_path / "one"))
    assert done.returncode == 3
    assert "device cuda was asked for and is not usable" in done.stderr


@pytest.mark.slow
def test_an_engine_that_cannot_start_leaves_a_ledger_that_says_so(run: Command, tmp_path: Path) -> None:
    done = run("--engine", "wrong:nothing", "-k", "ar-block1", "--run-dir", str(tmp_path / "one"))
    assert done.returncode == 3
    ledger = ledgers.read(tmp_path / "one")
    assert set(verdicts(ledger).values()) == {"NOT_RUN"}
    assert "no such fault" in ledger.problems[0]


@pytest.mark.slow
def test_other_tests_alone_leave_no_ledger(start: Command, tmp_path: Path) -> None:
    tests = ROOT / "tests"
    others = [path for path in tests.iterdir() if path.is_dir() and path.name != "harness"]  # costs time alone
    others += [path for path in (tests / "harness").glob("test_*.py") if path.name != "test_ledger.py"]
    command = ["pytest", "-q", "-p", "no:cacheprovider", "tests"]
    command += [*(f"--ignore={path}" for path in others), "--run-dir", str(tmp_path / "one"), "-k"]
    done = start(*command, "test_exit_statuses")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "one").exists()
    none = start(*command, "no_such_thing")
    assert none.returncode == 3
    assert "matches no cell and no test" in none.stdout


@pytest.mark.slow
def test_an_installed_package_brings_an_engine(run: Command, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "example_engine.py"):  # setuptools writes beside what it builds
        (copy / name).write_bytes((EXAMPLE / name).read_bytes())
    subprocess.run([*pip, str(site), str(copy)], check=True, capture_output=True, timeout=4 * PATIENCE)
    done = run("--engine", "example", "-k", "ar-block1", "--run-dir", str(tmp_path / "one"), path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    ledger = ledgers.read(tmp_path / "one")
    assert (ledger.engine, ledger.passed) == ("example", 2)
    errors = [error for cell in ledger.cells for error in cell.step_errors]
    assert max(errors) > 2e-7  # float32's noise, more than the reference's rounding of its results


@pytest.mark.slow
def test_collecting_alone_runs_and_writes_nothing(run: Command, tmp_path: Path) -> None:
    done = run("--engine", "reference", "--collect-only", "-q", "-k", CELL, "--run-dir", str(tmp_path / "one"))
    assert done.returncode == 0
    assert f"test_cell[{CELL}]" in done.stdout
    assert not (tmp_path / "one").exists()


def test_the_matrix_as_json_is_the_expected_set(start: Command) -> None:
    done = start("harness", "matrix", "--json", "-k", "tiny2")
    assert [entry["id"] for entry in json.loads(done.stdout)][1] == "fp32-ddtree-tiny2-oracle-cpu"
    listed = start("harness", "matrix", "--list", "-k", "tiny2")
    assert listed.stdout.split() == [entry["id"] for entry in json.loads(done.stdout)]


def test_large_cells_are_one_worker_s_and_nothing_else_is() -> None:
    cell = "tests/test_matrix.py::test_cell[{}]".format
    assert {workers.scope_of(cell(f"int4-ar-k26_{name}-cpu")) for name in ("slice", "layer")} == {SCALE}
    for other in (cell("int4-ar-tiny-cpu"), "tests/refs/test_exact.py::test_x[k26_slice]"):
        assert workers.scope_of(other) == other


def test_the_command_of_a_ledger_names_no_folder_of_the_machine_it_ran_on() -> None:
    typed = [
        "pytest",
        f"{ROOT}/tests/test_matrix.py",
        "--rootdir",
        str(ROOT),
        f"--run-dir={ROOT}/reports/a b",
        "-k",
        "x or y",
    ]
    assert asked.as_typed_here(typed) == "pytest tests/test_matrix.py --rootdir . '--run-dir=reports/a b' -k 'x or y'"
