"""What a run expects, what keeps it from starting, and how its status joins the ledger's with pytest's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import harness.bundles
import harness.run
from harness import asked, host_memory, plugin, prepare
from harness.asked import MATRIX
from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED, Verdict
from harness.matrix import Point, of_run
from harness.prepare import Infrastructure, plan, points_of, usable_devices
from harness.sources import ROOT
from harness.workers import NOT_FOUND, RUN
from tests.harness.records import FINE, OFF, cell, ledger

ID, OTHER = "fp32-ar-tiny-cpu", "int4-ar-tiny-cpu"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One with a usable GPU, until ``reason`` says otherwise."""
    found = SimpleNamespace(reason="", gpus=[object()])
    monkeypatch.setattr(prepare, "survey", lambda: found)
    monkeypatch.setattr(prepare, "ranks_share", lambda: False)
    return found


@pytest.mark.parametrize(
    ("engine", "asked_for", "required", "with_gpu", "without"),
    [
        ("csrc", [], [], ("cpu", "cuda"), ("cpu",)),
        ("csrc", ["cpu"], [], ("cpu",), ("cpu",)),
        ("csrc", ["cuda"], [], ("cuda",), None),
        ("csrc", ["cuda", "cpu", "cuda"], [], ("cpu", "cuda"), None),
        ("csrc", [], ["cuda"], ("cpu", "cuda"), None),
        ("csrc", ["cpu"], ["cuda"], ("cpu", "cuda"), None),
        ("csrc", [], ["cpu"], ("cpu", "cuda"), ("cpu",)),
        ("reference", [], [], ("cpu",), ("cpu",)),
        ("wrong:tokens", [], [], ("cpu",), ("cpu",)),
        ("reference", ["cuda"], [], ("cuda",), None),
        ("reference", [], ["cuda"], ("cpu", "cuda"), None),
    ],
)
def test_a_gpu_is_used_where_it_is_and_missed_where_it_was_asked_for(
    machine: SimpleNamespace,
    engine: str,
    asked_for: list[str],
    required: list[str],
    with_gpu: tuple[str, ...],
    without: tuple[str, ...] | None,
) -> None:
    assert usable_devices(engine, asked_for, required) == (with_gpu, "")
    machine.reason = "no driver"
    if without is None:
        with pytest.raises(Infrastructure, match="device cuda was asked for and is not usable: no driver;"):
            usable_devices(engine, asked_for, required)
    else:
        told = "no CUDA cells: no driver" if engine == "csrc" and not asked_for else ""
        assert usable_devices(engine, asked_for, required) == (without, told)


@pytest.mark.parametrize("where", [(["tpu"], []), ([], ["tpu"])])
def test_a_device_that_there_is_not_is_named(machine: SimpleNamespace, where: tuple[list[str], list[str]]) -> None:
    with pytest.raises(Infrastructure, match="device 'tpu' is none of cpu, cuda"):
        usable_devices("csrc", *where)


def test_ranks_need_a_gpu_each_unless_they_may_share(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert points_of("csrc", ["cpu", "cuda"]) == of_run(["cpu", "cuda"], gpus=1)
    assert points_of("reference", ["cpu"]) == of_run(["cpu"], shared=False)
    assert points_of("csrc", ["cpu"], [4]) == of_run(["cpu"], ranks=[4])
    assert points_of("csrc", ["cuda"], [1]) == of_run(["cuda"], ranks=[1])
    with pytest.raises(Infrastructure, match="--ranks 2: every rank needs a GPU, and there is 1 here"):
        points_of("csrc", ["cuda"], [1, 2])
    machine.gpus *= 2
    assert points_of("csrc", ["cuda"], [2]) == of_run(["cuda"], ranks=[2])
    assert points_of("csrc", ["cuda"]) == of_run(["cuda"], gpus=2) != of_run(["cuda"], gpus=1)
    with pytest.raises(Infrastructure, match="--ranks 4: every rank needs a GPU, and there are 2 here"):
        points_of("csrc", ["cuda"], [4])
    monkeypatch.setattr(prepare, "ranks_share", lambda: True)
    assert points_of("csrc", ["cuda"], [4]) == of_run(["cuda"], ranks=[4])
    assert points_of("csrc", ["cpu"], scale=True) == of_run(["cpu"], scale=True)


def test_what_was_chosen_is_what_is_expected() -> None:
    whole = plan("csrc", ["cpu"])
    assert list(whole.expected) == [point.id for point in of_run(["cpu"])]
    assert (whole.engine, whole.devices, whole.filter) == ("csrc", ("cpu",), "")
    two = plan("csrc", ["cpu"], ids=[OTHER, ID])
    assert (two.expected, two.filter) == ((ID, OTHER), f"{ID} or {OTHER}")
    one = plan("csrc", ["cpu"], ids=[OTHER, ID], expression="int4")
    assert (one.expected, one.filter) == ((OTHER,), f"{ID} or {OTHER} and int4")
    assert len(plan("csrc", ["cpu"], expression="tests", names=("tests",)).expected) == len(whole.expected)
    assert plan("wrong:tokens", ["cpu"], ids=[ID]).expected == (ID,)
    for options, message in (
        ({"ids": [ID, "fp32-ar-gone-cpu"]}, "fp32-ar-gone-cpu is no cell of this run"),
        ({"ids": [ID], "expression": "int4"}, "matches none of 1 cell"),
        ({"expression": "nosuch"}, "matches none of"),
        ({"ranks": [97]}, "--ranks 97: no config's sizes"),
    ):
        with pytest.raises(Infrastructure, match=message):
            plan("csrc", ["cpu"], **cast(Any, options))
    with pytest.raises(Infrastructure, match=r"no engine is named 'nosuch'; known: .*csrc, "):
        plan("nosuch", ["cpu"])


def test_what_a_run_needs_is_looked_for_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and memory before a build, every device's build before the CPU's variables, and those before bundles."""
    log: list[str] = []
    broken: set[str] = set()

    def create(engine: str, device: str) -> object:
        log.append(f"{engine} on {device}")
        if device == "cuda" and "build" in broken:
            raise OSError("no nvcc")
        return object()

    def check(points: object) -> None:
        if "memory" in broken:
            raise host_memory.TooLittleMemory("8 GB more")

    def check_variables() -> None:
        log.append("variables")
        if "variables" in broken:
            raise Infrastructure("no number of threads")

    def ensure(configs: list[str], say: object) -> dict[str, Path]:
        log.append(" ".join(configs))
        if "bundles" in broken:
            raise ValueError("full")
        return {name: Path(name) for name in configs}

    monkeypatch.setattr(prepare, "create", create)
    monkeypatch.setattr(host_memory, "check", check)
    monkeypatch.setattr(prepare, "check_variables", check_variables)
    monkeypatch.setattr(harness.bundles, "ensure", ensure)
    points = [Point("fp32", "ar", config, "", device) for device in ("cpu", "cuda") for config in ("tiny", "wide")]
    assert prepare.prepare("csrc", points, print) == {"tiny": Path("tiny"), "wide": Path("wide")}
    assert log == ["csrc on cpu", "csrc on cuda", "variables", "tiny wide"]
    log.clear()
    prepare.prepare("csrc", points[2:], print)
    prepare.prepare("wrong", points[:2], print)
    assert log == ["csrc on cuda", "tiny wide", "wrong on cpu", "tiny wide"], "of the project's own on a CPU alone"
    for part, message, done in (
        ("memory", "8 GB more", 0),
        ("build", r"engine 'csrc' is not usable on cuda: OSError: no nvcc", 2),
        ("variables", "no number of threads", 3),
        ("bundles", "bundles: ValueError: full", 4),
    ):
        log.clear()
        broken = {part}
        with pytest.raises(Infrastructure, match=message):
            prepare.prepare("csrc", points, print)
        assert len(log) == done
    log.clear()
    with pytest.raises(Infrastructure, match=r"gone\.yaml"):
        prepare.prepare("csrc", [Point("fp32", "ar", "gone", "", "cpu")], print)
    assert log == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KDTREE_THREADS", "two", "^KDTREE_THREADS=two: is no number of threads; set one from 1 on, or unset it$"),
        ("KDTREE_ISA", "sse", "^KDTREE_ISA=sse: this processor has (base|neon)"),
        ("KDTREE_THREADS", "257", ""),
        ("KDTREE_ISA", "", ""),
    ],
)
def test_what_the_engine_refuses_of_its_variables_is_told_once(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Infrastructure, match=message) if message else nullcontext():
        prepare.check_variables()


def test_the_engine_is_not_loaded_where_no_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.library.library", lambda device: pytest.fail(f"{device} is loaded"))
    for name in ("KDTREE_THREADS", "KDTREE_ISA"):
        monkeypatch.delenv(name, raising=False)
    prepare.check_variables()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of planned runs appear; in the real checkout an empty one of each would stay."""
    monkeypatch.setattr(harness.run, "ROOT", tmp_path)
    return tmp_path


def typed(*arguments: str, here: Path = ROOT, **options: Any) -> pytest.Config:
    given = {"engine": "csrc", "device": ["cpu"], "require_device": [], "ranks": [], "scale": False, "keyword": ""}
    given |= {"cell_timeout": None, "run_dir": None, "host_name": "box", "ignore": None, "pyargs": False, **options}
    found = SimpleNamespace(
        args=list(arguments),
        invocation_params=SimpleNamespace(dir=here, args=arguments),
        getoption=lambda name: given[name.removeprefix("--").replace("-", "_")],
    )
    return cast(pytest.Config, found)


@pytest.mark.parametrize(
    ("arguments", "ignored", "chosen"),
    [
        (["tests"], None, []),
        (["tests/test_matrix.py"], None, []),
        (["tests/harness"], None, None),
        (["tests/harness", "tests/test_matrix.py::test_cell"], None, []),
        ([f"tests/test_matrix.py::test_cell[{ID}]", f"tests/test_matrix.py::test_cell[{OTHER}]"], None, [ID, OTHER]),
        (["tests/harness/test_x.py::test_y[a]"], None, None),
        (["tests"], ["tests/test_matrix.py"], None),
        (["tests"], ["tests"], None),
        (["tests"], ["tests/harness"], []),
    ],
)
def test_which_cells_arguments_name(arguments: list[str], ignored: list[str] | None, chosen: list[str] | None) -> None:
    assert asked._chosen_ids(typed(*arguments, ignore=ignored)) == chosen
    below = [f"../{argument}" for argument in arguments]
    aside = None if ignored is None else [f"../{path}" for path in ignored]
    assert asked._chosen_ids(typed(*below, ignore=aside, here=ROOT / "docs")) == chosen


def test_a_filter_that_chooses_other_tests_alone_leaves_the_matrix_out(checkout: Path) -> None:
    run = asked.run_of(typed("tests", keyword=ID))
    assert run is not None
    assert run.run_dir.parent == checkout / "reports"
    assert (run.plan.expected, run.plan.filter) == ((ID,), ID)
    assert asked.run_of(typed("tests", keyword="test_of_another_kind")) is None
    assert asked.run_of(typed("tests/harness", keyword=ID)) is None
    for arguments, options in (
        ((str(MATRIX),), {"keyword": "test_of_another_kind"}),
        ((f"{MATRIX}::test_cell[x]",), {}),
        (("tests",), {"keyword": "test_of_another_kind", "engine": "nosuch"}),
        (("tests",), {"ranks": [97]}),
    ):
        with pytest.raises(Infrastructure):
            asked.run_of(typed(*arguments, **options))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cell_needs_a_time(seconds: float, checkout: Path) -> None:
    with pytest.raises(Infrastructure, match="a cell needs a time above 0"):
        asked.run_of(typed("tests", cell_timeout=seconds))
    assert asked.run_of(typed("tests", cell_timeout=0.5)) is not None


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    asked.check_files(typed("a.py::test_x[1]", ".", here=tmp_path))
    asked.check_files(typed("package.of.tests", here=tmp_path, pyargs=True))
    with pytest.raises(Infrastructure, match=r"^b\.py::x: no such file"):
        asked.check_files(typed("a.py", "b.py::x", here=tmp_path))


PASSING, FAILING = ledger(cell(ID, FINE)), ledger(cell(ID, OFF))
LACKING, BROKEN = ledger(cell(ID, verdict=Verdict.NOT_RUN)), ledger(cell(ID, FINE), problems=("no build",))


@pytest.mark.parametrize(
    ("whole", "pytests", "status"),
    [
        (PASSING, 0, PASSED),
        (PASSING, 1, FAILED),
        (PASSING, 2, INCOMPLETE),
        (PASSING, 3, INFRASTRUCTURE),
        (PASSING, 4, 4),
        (PASSING, 5, PASSED),
        (FAILING, 0, FAILED),
        (FAILING, 1, FAILED),
        (FAILING, 2, FAILED),
        (FAILING, 3, INFRASTRUCTURE),
        (LACKING, 0, INCOMPLETE),
        (LACKING, 1, FAILED),
        (LACKING, 5, INCOMPLETE),
        (BROKEN, 0, INFRASTRUCTURE),
        (BROKEN, 1, INFRASTRUCTURE),
        (None, 0, 0),
        (None, 1, 1),
        (None, 2, 2),
        (None, 3, INFRASTRUCTURE),
        (None, 5, INFRASTRUCTURE),
    ],
)
def test_the_worse_of_the_ledgers_status_and_pytests_is_the_runs(whole: Any, pytests: int, status: int) -> None:
    """4 is pytest's for wrong arguments, 5 its word for nothing collected."""

    def ended(stash: dict[Any, Any], **worker: Any) -> int:
        config = SimpleNamespace(stash=stash, getoption=lambda name: collecting, **worker)
        session = SimpleNamespace(config=config, exitstatus=pytests)
        plugin.pytest_sessionfinish(cast(pytest.Session, session), pytests)
        return session.exitstatus

    collecting = False
    run = whole and SimpleNamespace(finish=lambda: whole)
    assert ended({RUN: run}) == status
    assert ended({RUN: run, NOT_FOUND: "x"}) == INFRASTRUCTURE
    assert ended({RUN: run}, workerinput={}) == pytests, "the controller's is the one that counts"
    collecting = True
    assert ended({RUN: run}) == pytests


def test_a_ledger_that_cannot_be_written_is_a_status_of_its_own() -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "ledger.json")

    config = SimpleNamespace(stash={RUN: SimpleNamespace(finish=full)}, getoption=lambda name: False)
    session = SimpleNamespace(config=config, exitstatus=0)
    plugin.pytest_sessionfinish(cast(pytest.Session, session), 0)
    assert session.exitstatus == INFRASTRUCTURE
    assert "No space left" in config.stash[plugin.UNWRITTEN]


def test_a_second_interrupt_is_told_where_the_ledger_is(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    run = SimpleNamespace(finish=interrupted, path="reports/x/ledger.json")
    config = SimpleNamespace(stash={RUN: run}, getoption=lambda name: False)
    with pytest.raises(KeyboardInterrupt):
        plugin.pytest_sessionfinish(cast(pytest.Session, SimpleNamespace(config=config, exitstatus=2)), 2)
    assert capsys.readouterr().err == "\nledger: reports/x/ledger.json\n"
