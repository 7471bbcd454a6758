"""Planted faults are caught under their check's name, controls pass, and a run that dies or hangs is told of."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.library import library_path
from harness import bundles
from harness.describe import WIDTH
from harness.matrix import configs, expected
from harness.mutants import command as mutants
from harness.mutants import run as mutants_run
from harness.mutants.build import Workshop
from harness.mutants.catalogue import CatalogueError, Edit, Fault, load, plant
from harness.mutants.result import Result, recorded
from harness.mutants.run import LOADER, LOADER_CONFIG, NOT_BUILT, OPERATIONS, Outcome
from tests.waiting import PATIENCE

CELLS = [f"int4-ar-{LOADER_CONFIG}-cpu", f"fp32-ddtree-{LOADER_CONFIG}-noisy-cpu", LOADER]
BY_NAME = {fault.name: fault for fault in load()}


@pytest.fixture(scope="module")
def workshop() -> Workshop:
    mutants_run.serve()
    return Workshop("cpu", mutants.home())


@pytest.fixture(scope="module")
def paths() -> dict[str, Path]:
    return bundles.ensure([LOADER_CONFIG], say=print)


def outcome(fault: Fault, workshop: Workshop, paths: dict[str, Path], folder: Path, *names: str) -> Outcome:
    library, _ = workshop.library(plant(fault, folder / "csrc"), folder)
    return mutants_run.run(fault, library, names or CELLS, paths)


def edit(file: str, find: str, replace: str) -> Fault:
    return Fault("made_here", "int4", "made for a test", (Edit(file, find, replace),))


def test_edited_engines_are_kept_where_the_real_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that can only be read is used with KDTREE_BUILD, which names a folder of the user's."""
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path))
    assert mutants.home() == tmp_path / "mutants"


def test_a_machine_that_cannot_build_says_so_before_bundles_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants.bundles, "ensure", lambda *_, **__: pytest.fail("bundles"))
    monkeypatch.setattr("harness.toolchain.cxx", lambda: "no-such-compiler")
    assert mutants.main(["-k", "nibble"]) == 3
    assert "no C++ compiler: 'no-such-compiler' is not on PATH; install" in capsys.readouterr().err


@pytest.mark.slow
def test_a_known_fault_is_caught_and_located(workshop: Workshop, paths: dict[str, Path], tmp_path: Path) -> None:
    fault = BY_NAME["weights_from_biased_scores"]
    found = outcome(fault, workshop, paths, tmp_path)
    assert found.caught_by.startswith(f"int4-ar-{LOADER_CONFIG}-cpu: ")
    assert found.ran == 1
    assert found.tap.endswith(".moe.weights")
    result = Result(fault, found, 1.0)
    assert (result.good, result.located) == (True, True)
    assert result.record()["caught_by"] == found.caught_by
    json.dumps(result.record(), allow_nan=False)


@pytest.mark.slow
def test_a_loader_fault_is_caught_by_a_file(workshop: Workshop, paths: dict[str, Path], tmp_path: Path) -> None:
    found = outcome(BY_NAME["tensor_twice"], workshop, paths, tmp_path, LOADER)
    assert found.caught_by == f"{LOADER}: tensor_twice"
    assert found.detail.startswith("says 'MissingTensor: FILE: ")


@pytest.mark.slow
def test_what_no_cell_sees_is_caught_by_the_operations(
    workshop: Workshop, paths: dict[str, Path], tmp_path: Path
) -> None:
    fault = BY_NAME["exp_constant_mistyped"]
    found = outcome(fault, workshop, paths, tmp_path, f"fp32-ar-{LOADER_CONFIG}-cpu", OPERATIONS)
    assert found.caught_by.startswith(f"{OPERATIONS}: test_op_")
    assert found.ran == 2
    again = outcome(fault, workshop, paths, tmp_path / "again", *mutants_run.order(fault, [], found.caught_by))
    assert (again.caught_by, again.ran) == (found.caught_by, 1)
    gone = f"{OPERATIONS}: {found.caught_by.split(': ')[1].partition('::')[0]}::test_of_another_time"
    again = outcome(fault, workshop, paths, tmp_path / "gone", gone, *CELLS[:1])
    assert again == Outcome(ran=2), "a test that is gone shows nothing"


@pytest.mark.slow
def test_white_space_passes(workshop: Workshop, paths: dict[str, Path], tmp_path: Path) -> None:
    fault = Fault("white_space", "controls", "", (Edit("cpu/norm.cpp", 'count("embed");', 'count( "embed" );'),))
    found = outcome(fault, workshop, paths, tmp_path)
    assert found == Outcome(ran=len(CELLS))
    assert Result(fault, found, 1.0).good


@pytest.mark.slow
def test_a_crash_and_a_hang_are_told_of(
    workshop: Workshop, paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = "void CpuBackend::embed(const EmbedArgs& a) {\n"
    crash = edit("cpu/norm.cpp", entry, entry + "  *static_cast<volatile int*>(nullptr) = 1;\n")
    found = outcome(crash, workshop, paths, tmp_path / "crash")
    assert found.caught_by == f"{CELLS[0]}: crash"
    assert found.verdict == "ERROR"
    assert "signal 11" in found.detail
    hang = edit("cpu/norm.cpp", entry, entry + "  for (volatile int i = 0; i < 1;) {\n  }\n")
    monkeypatch.setattr(mutants_run, "SILENCE_SECONDS", 1.0)
    found = outcome(hang, workshop, paths, tmp_path / "hang")
    assert found.caught_by == f"{CELLS[0]}: hang"


@pytest.mark.slow
def test_what_does_not_build_has_a_row_of_its_own(workshop: Workshop, paths: dict[str, Path], tmp_path: Path) -> None:
    uncompiled = mutants.one(edit("cpu/norm.cpp", 'count("embed");', "undeclared_name;"), workshop, [], paths)
    unfit = mutants.one(edit("cpu/norm.cpp", "no such text", "x"), workshop, [], paths)
    (tmp_path / "unlinked.cpp").write_text(
        'int missing_symbol();\nextern "C" int called() { return missing_symbol(); }\n'
    )
    library = tmp_path / "unlinked.so"
    subprocess.run(["c++", "-shared", "-fPIC", str(tmp_path / "unlinked.cpp"), "-o", str(library)], check=True)
    unloaded = mutants_run.run(BY_NAME["tensor_twice"], library, CELLS, paths)
    for result, why in (
        (uncompiled, "csrc/cpu/norm.cpp:"),
        (unfit, "made_here: csrc/cpu/norm.cpp: 'no such text' is there 0 times"),
        (Result(BY_NAME["tensor_twice"], unloaded, 1.0), "unlinked.so: undefined symbol: "),
    ):
        assert (result.broken, result.good, result.caught, result.located) == (True, False, False, None)
        assert result.record()["verdict"] == "NOT_BUILT"
        assert result.record()["detail"].startswith(why)
        assert result.outcome.ran == 0
    assert not Result(Fault("control", "controls", "", ()), uncompiled.outcome, 1.0).good


@pytest.mark.slow
def test_what_this_processor_cannot_run_is_not_caught(paths: dict[str, Path]) -> None:
    """Every cell would fail where the instruction set is missing, whatever the fault."""
    built = library_path("cpu")
    for isa, there in (("base", True), ("of_another_processor", False)):
        found = mutants_run.run(Fault("f", "g", "", (), isa=isa), built, CELLS[:1], paths)
        assert (found.caught_by, found.ran) == ("", int(there)), isa
        assert (found.verdict == "NOT_RUN") is not there
    assert found.detail.startswith("its kernels are of_another_processor; this processor has base ")


def test_all_cells_are_tried_before_a_fault_is_not_caught() -> None:
    points = expected(["cpu"])
    for fault in BY_NAME.values():
        names = mutants_run.order(fault, points)
        chosen = [name for name in names if not name.startswith(f"{OPERATIONS}: ")]
        assert sorted(chosen) == sorted([LOADER, OPERATIONS, *(point.id for point in points)])
    for name, first in (("tensor_twice", LOADER), ("nan_logits_unnoticed", LOADER), ("chain_ranks_two", OPERATIONS)):
        assert mutants_run.order(BY_NAME[name], points)[0] == first
    assert mutants_run.order(BY_NAME["position_by_row"], points)[0].split("-")[1] == "ddtree"
    assert LOADER_CONFIG in configs()


@pytest.mark.parametrize(
    ("caught_by", "first"),
    [
        ("fp32-ddtree-budget0-noisy-cpu: tokens", "fp32-ddtree-budget0-noisy-cpu"),
        ("int4-ar-budget0-cpu: hang", "int4-ar-budget0-cpu"),
        ("loader: tensor_twice", LOADER),
        ("operations: test_op_mla.py::test_rows[cpu-3]", "operations: test_op_mla.py::test_rows[cpu-3]"),
        ("operations: test_op_mla.py::test_rows[cpu-3]: crash", "operations: test_op_mla.py::test_rows[cpu-3]"),
        ("operations: pytest ended with 2", OPERATIONS),
        ("operations: test_op_gone.py::test_x", OPERATIONS),
    ],
)
def test_what_caught_it_before_is_tried_first_and_nothing_is_left_out(caught_by: str, first: str) -> None:
    points, fault = expected(["cpu"]), BY_NAME["position_by_row"]
    names = mutants_run.order(fault, points, caught_by)
    assert names[0] == first
    assert set(names) == {first, *mutants_run.order(fault, points)}
    assert len(names) == len(set(names))
    if "::" in first:
        named = replace(fault, first=first)
        assert mutants_run.order(named, points)[:2] == [first, OPERATIONS]
        assert mutants_run.order(named, points, points[9].id)[:2] == [points[9].id, first]
    assert [name for name in names if name != first] == [n for n in mutants_run.order(fault, points) if n != first]


@pytest.mark.parametrize("caught_by", ["", "fp32-ar-of_another_time-cpu: tokens"])
def test_what_is_not_there_changes_no_order(caught_by: str) -> None:
    points, fault = expected(["cpu"]), BY_NAME["position_by_row"]
    assert mutants_run.order(fault, points, caught_by) == mutants_run.order(fault, points)


def test_tests_that_a_fault_names_are_there() -> None:
    """By file and function: one that is gone would make its fault dear, and nobody would notice."""
    for fault in BY_NAME.values():
        place, _, tests = fault.first.partition(": ")
        if place == OPERATIONS and tests:
            file, _, function = tests.partition("::")
            text = (mutants_run.TESTS / file).read_text("utf-8")
            assert f"\ndef {function}(" in text or not function, fault.name


def test_a_record_says_what_caught_each_fault(tmp_path: Path) -> None:
    path = tmp_path / "mutants.json"
    assert recorded(path, must_be=False) == {}
    with pytest.raises(CatalogueError, match=r"mutants\.json: No such file"):
        recorded(path, must_be=True)
    found = Outcome("fp32-ar-tiny-cpu: tokens", "FAIL_TOKENS", ran=3)
    path.write_text(json.dumps([Result(BY_NAME["tensor_twice"], found, 1.0).record()]))
    assert recorded(path, must_be=True) == {"tensor_twice": found.caught_by}
    for text in ("{", '{"a": 1}', "[1]", '[{"name": "x"}]'):
        path.write_text(text)
        with pytest.raises(CatalogueError, match="not a record of"):
            recorded(path, must_be=False)


def test_the_committed_records_name_what_is_there() -> None:
    """Of most faults: a record is older than the catalogue, but one that knew nothing would cost an hour."""
    for device, path in mutants.EVIDENCE.items():
        points = expected([device])
        ids = {point.id for point in points}
        places = [text.partition(": ")[0] for text in recorded(path, must_be=True).values()]
        assert sum(place in {*ids, LOADER, OPERATIONS, ""} for place in places) > 0.9 * len(places)


@pytest.mark.slow
def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """0 all caught and controls passed; 1 a fault passed or a control failed; 3 the catalogue does not fit or build."""
    caught, missed = Outcome("a: b", "FAIL_LOGITS", 2.0, tap="embed"), Outcome(ran=9)
    unbuilt = Outcome(verdict=NOT_BUILT, detail="csrc/a.cpp:1: error: what")

    def run(**by_name: Outcome) -> int:
        monkeypatch.setattr(mutants, "one", lambda f, *_: Result(f, by_name.get(f.name, missed), 1.0))
        workshop = {"prune": lambda self: None, "reach": lambda self, edited: 1}
        monkeypatch.setattr(mutants, "Workshop", lambda *_: type("W", (), workshop)())
        return mutants.main(["-k", "unedited or tensor_twice", "--workers", "1"])

    assert run(tensor_twice=caught) == 0
    assert run() == 1
    assert "tensor_twice" in capsys.readouterr().out.split("NOT CAUGHT")[0]
    assert run(tensor_twice=caught, unedited=caught) == 1
    assert "A CONTROL FAILED" in capsys.readouterr().out
    assert run(tensor_twice=unbuilt, unedited=caught) == 3
    said = capsys.readouterr().out
    assert "tensor_twice                       DOES NOT BUILD: csrc/a.cpp:1: error: what" in said
    assert "A CONTROL FAILED" in said, "the others go on"
    assert "0 of   1 caught, 1 not built" in said
    assert run(tensor_twice=caught, unedited=unbuilt) == 3
    assert mutants.main(["-k", "no_such_fault"]) == 3
    assert "matches no fault" in capsys.readouterr().err

    def drifted() -> list[Fault]:
        raise CatalogueError("x: drifted")

    monkeypatch.setattr(mutants, "load", drifted)
    assert mutants.main([]) == 3
    assert "drifted" in capsys.readouterr().err


def test_what_has_ended_is_kept_when_a_run_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def one(fault: Fault, *_: object) -> Result:
        if fault.name == "tensor_twice":
            raise KeyboardInterrupt
        return Result(fault, Outcome(ran=9), 1.0)

    monkeypatch.setattr(mutants, "one", one)
    monkeypatch.setattr(mutants, "Workshop", lambda *_: type("W", (), {"reach": lambda self, edited: 1})())
    out = tmp_path / "records.json"
    with pytest.raises(KeyboardInterrupt):
        mutants.main(["-k", "unedited or tensor_twice", "--workers", "1", "--out", str(out)])
    assert [record["name"] for record in json.loads(out.read_text())] == ["unedited"]


@pytest.mark.parametrize("way", [["--compile-only"], ["--build-only"], []])
def test_a_folder_that_cannot_be_written_has_a_remedy(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mutants").touch()
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path))
    monkeypatch.setattr(mutants, "Workshop", lambda *_: pytest.fail("built"))
    assert mutants.main(["-k", "rope", *way]) == 3
    told = f"{tmp_path / 'mutants'}: File exists; KDTREE_BUILD names another folder than {tmp_path}"
    assert told in capsys.readouterr().err


def test_the_list_fits_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 200
    assert max(map(len, lines)) <= WIDTH


def test_an_interrupt_waits_for_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one under way nor for those that have not begun."""
    begun = threading.Event()
    others: list[str] = []

    def one(fault: Fault, *_: object) -> Result:
        if not fault.is_control:
            assert begun.wait(PATIENCE)
            others.append(fault.name)
            if len(others) == 1:
                raise KeyboardInterrupt
            time.sleep(0.2)
            return Result(fault, Outcome(ran=9), 1.0)
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(3600,), daemon=True)
        process.start()
        begun.set()
        process.join()
        return Result(fault, Outcome(ran=9), 1.0)

    monkeypatch.setattr(mutants, "one", one)
    monkeypatch.setattr(mutants, "Workshop", lambda *_: type("W", (), {"reach": lambda self, edited: 1})())
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        mutants.main(["-k", "unedited or rope", "--workers", "2"])
    assert time.monotonic() - start < PATIENCE
    assert len(others) < 9


@pytest.mark.parametrize("folder", ["bundles", "checkout"])
def test_a_record_names_no_folder_of_this_machine(folder: str) -> None:
    place = bundles.cache_folder() if folder == "bundles" else bundles.ROOT
    found = Outcome("cell: error", "ERROR", detail=f"MissingTensor: {place}/tiny.kdtr: lm_head.w")
    detail = Result(edit("a.cpp", "a", "b"), found, 1.0).record()["detail"]
    assert detail == f"MissingTensor: {'bundles/' if folder == 'bundles' else ''}tiny.kdtr: lm_head.w"
