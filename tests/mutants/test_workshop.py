"""The real build's ninja file is read as cpp_extension writes it, for both devices, wherever it was made."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import subprocess
from pathlib import Path

import pytest

from harness.mutants import build as mutants_build
from harness.mutants import catalogue, command
from harness.mutants.build import CompileError, Unit, Workshop
from harness.mutants.catalogue import Edit, Fault
from harness.mutants.result import Result
from harness.mutants.run import Outcome
from tests import processes

NINJA = """\
ninja_required_version = 1.3
cxx = c++
nvcc = /usr/local/cuda/bin/nvcc

cflags = -DNAME=x -fPIC -O1 -ffile-prefix-map='/some where/csrc tree'=. -DLAST
post_cflags =
cuda_cflags = -O3 -gencode=arch=compute_90,code=sm_90
cuda_post_cflags = --expt-relaxed
ldflags = -shared

rule compile
  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags
  depfile = $out.d
  deps = gcc

rule cuda_compile
  depfile = $out.d
  deps = gcc
  command = $nvcc --dependency-output $out.d $cuda_cflags -c $in -o $out ${cuda_post_cflags}

rule link
  command = $cxx $in $ldflags -o $out

build one.o: compile /some$ where/csrc$ tree/csrc/one.cpp
build two.o: compile /some$ where/csrc$ tree/csrc/cpu/two.cpp
build three.cuda.o: cuda_compile /some$ where/csrc$ tree/csrc/cuda/three.cu

build kdtree.so: link one.o two.o three.cuda.o

default kdtree.so
"""


def test_rules_variables_and_units() -> None:
    variables, rules, units = mutants_build._parse(NINJA)
    assert units == [
        Unit("one.o", "compile", Path("one.cpp")),
        Unit("two.o", "compile", Path("cpu/two.cpp")),
        Unit("three.cuda.o", "cuda_compile", Path("cuda/three.cu")),
    ]
    assert variables["cflags"].split() == ["-DNAME=x", "-fPIC", "-O1", "-DLAST"]
    assert rules["link"] == "$cxx $in $ldflags -o $out"
    assert set(rules) == {"compile", "cuda_compile", "link"}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny csrc/, a real build of it whose object for two.cpp is not what its source says, and no CUDA."""
    csrc = tmp_path / "csrc"
    (csrc / "cpu").mkdir(parents=True)
    (csrc / "one.cpp").write_text('#include "value.h"\nextern "C" int one() { return VALUE; }\n')
    (csrc / "value.h").write_text('#include "cpu/deep.h"\n#define VALUE DEEP\n')
    (csrc / "cpu" / "deep.h").write_text("#define DEEP 1\n")
    (csrc / "cpu" / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    real = tmp_path / "real"
    real.mkdir()
    lines = [line for line in NINJA.splitlines() if "three" not in line]
    (real / "build.ninja").write_text("\n".join([*lines, "build kdtree.so: link one.o two.o", ""]))
    monkeypatch.setattr(mutants_build, "CSRC", csrc)
    monkeypatch.setattr(mutants_build, "build", lambda device: real / "kdtree.so")
    return csrc


def test_what_an_edit_does_not_reach_is_not_compiled(tree: Path, tmp_path: Path) -> None:
    workshop = Workshop("cpu", tmp_path / "home")
    assert workshop.library(tree, tmp_path / "a")[1] == 2, "the real build has no objects here"
    assert workshop.library(tree, tmp_path / "b")[1] == 0
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int two() { return 22; }\n')
    subprocess.run(["c++", "-c", "-fPIC", str(other), "-o", str(tree.parent / "real" / "two.o")], check=True)
    (tree / "cpu" / "deep.h").write_text("#define DEEP 3\n")  # two includes away from one.cpp
    anew, compiled = workshop.library(tree, tmp_path / "c", anew=True)
    assert (compiled, ctypes.CDLL(str(anew)).one(), ctypes.CDLL(str(anew)).two()) == (1, 3, 2)
    reused, compiled = workshop.library(tree, tmp_path / "d")
    assert (compiled, ctypes.CDLL(str(reused)).one(), ctypes.CDLL(str(reused)).two()) == (0, 3, 22)
    (tree / "value.h").write_text("#define VALUE undeclared\n")
    with pytest.raises(CompileError, match="undeclared"):
        workshop.library(tree, tmp_path / "e")


def test_only_what_reads_an_edited_file_is_looked_at(tree: Path, tmp_path: Path) -> None:
    """And what the real build has no object of; several sources are compiled side by side."""
    workshop = Workshop("cpu", tmp_path / "home", 2)
    assert (workshop.reach({"cpu/deep.h"}), workshop.reach({"one.cpp", "cpu/two.cpp"}), workshop.reach({"x"})) == (
        1,
        2,
        0,
    )
    for name in ("one", "two"):
        source = tree / ("one.cpp" if name == "one" else "cpu/two.cpp")
        target = tree.parent / "real" / f"{name}.o"
        subprocess.run(["c++", "-c", "-fPIC", str(source), "-o", str(target)], check=True)
    (tree / "cpu" / "deep.h").write_text("#define DEEP 3\n")
    (tree / "cpu" / "two.cpp").write_text('extern "C" int two() { return 9; }\n')
    made, compiled = workshop.library(tree, tmp_path / "a", edited={"cpu/deep.h"})
    assert (compiled, ctypes.CDLL(str(made)).one(), ctypes.CDLL(str(made)).two()) == (1, 3, 2)
    made, compiled = workshop.library(tree, tmp_path / "b", edited={"cpu/deep.h", "cpu/two.cpp"})
    assert (compiled, ctypes.CDLL(str(made)).one(), ctypes.CDLL(str(made)).two()) == (1, 3, 9)
    (tree.parent / "real" / "two.o").unlink()
    assert workshop.library(tree, tmp_path / "c", edited={"one.cpp"})[1] == 0, "both are among the objects made here"


def test_faults_with_least_to_compile_come_first_and_controls_at_the_ends(tree: Path, tmp_path: Path) -> None:
    """The unedited engine runs longest, an edited control uses its objects."""
    workshop, began = Workshop("cpu", tmp_path / "home", 1), []

    def one(fault: Fault, *_: object) -> Result:
        began.append(fault.name)
        return Result(fault, Outcome("x: y"), 1.0)

    def fault(name: str, *files: str, group: str = "int4") -> Fault:
        return Fault(name, group, "", tuple(Edit(file, "a", "b") for file in files))

    faults = [fault("spaced", "one.cpp", group="controls"), fault("unedited", group="controls")]
    faults += [fault("small", "one.cpp"), fault("none", "x"), fault("large", "one.cpp", "cpu/two.cpp")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "one", one)
        patch.setattr(command.mutants_run, "serve", lambda: None)
        results = command.run_all(faults, workshop, [], {}, {}, 1, lambda text: None, lambda results: None)
    assert began == ["unedited", "none", "small", "large", "spaced"]
    assert [result.fault.name for result in results] == [fault.name for fault in faults]


def test_what_was_built_ahead_is_not_compiled_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "plant", functools.partial(catalogue.plant, csrc=tree))
    workshop, said = Workshop("cpu", tmp_path / "home", 2), []
    faults = [Fault("ends", "int4", "", (Edit("one.cpp", "return VALUE;", "return 7;"),))]
    assert command.build_only(faults, workshop, 2, said.append) == 0
    assert said[0].split() == ["[", "1/1]", "ends", "2", "compiled"], "the real build has no objects here"
    assert workshop.library(catalogue.plant(faults[0], tmp_path / "planted", tree), tmp_path / "a")[1] == 0
    faults.append(Fault("unfit", "int4", "", (Edit("one.cpp", "no such text", ""),)))
    faults.append(Fault("wrong", "int4", "", (Edit("one.cpp", "return VALUE;", "undeclared;"),)))
    assert command.build_only(faults, workshop, 2, said.append) == 3
    assert sorted(line.split()[2] for line in said if "DOES NOT BUILD" in line) == ["unfit", "wrong"]


def test_what_is_there_is_used_though_it_may_only_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only checkout: os.utime's error names no file, and nothing depends on it."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    first = Workshop("cpu", command.home(), 2)
    monkeypatch.setattr(os, "utime", refuse)
    again = Workshop("cpu", command.home(), 2)
    assert (again.folder, again.objects(catalogue.CSRC, edited=())[1]) == (first.folder, 0)


@pytest.mark.slow
def test_headers_are_read_ahead_where_the_real_build_does_so(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all workshops of these flags, and as text where the compiler does not take what was made of them."""
    monkeypatch.setattr(mutants_build, "STANDARD", ("string", "vector"))
    assert Workshop("cpu", tmp_path / "home").folder == tmp_path / "home" / "objects"
    ninja = tree.parent / "real" / "build.ninja"
    ninja.write_text(ninja.read_text().replace("-DLAST", "-DLAST -include ahead.h"))
    (tree / "one.cpp").write_text('extern "C" int one() { return static_cast<int>(std::vector<int>(3).size()); }\n')
    workshop = Workshop("cpu", tmp_path / "home")
    assert {path.name for path in workshop.folder.iterdir()} == {"ahead.h", "ahead.h.gch", "ahead.h.gch.d"}
    assert ctypes.CDLL(str(workshop.library(tree, tmp_path / "a")[0])).one() == 3
    (workshop.folder / "ahead.h").write_text("#error read as text\n")
    again = Workshop("cpu", tmp_path / "home")
    assert again.folder == workshop.folder
    assert again.library(tree, tmp_path / "b", anew=True)[1] == 0
    (tree / "one.cpp").write_text('extern "C" int one() { return static_cast<int>(std::string("four").size()); }\n')
    assert ctypes.CDLL(str(again.library(tree, tmp_path / "c")[0])).one() == 4
    (workshop.folder / "ahead.h.gch").write_bytes(b"of another compiler")
    (tree / "one.cpp").write_text("int five() { return 5; }\n")
    with pytest.raises(CompileError, match="read as text"):
        again.library(tree, tmp_path / "d")


@pytest.mark.slow
def test_a_control_with_the_bytes_of_the_unedited_engine_does_not_run_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "CSRC", tree)
    monkeypatch.setattr(command, "plant", functools.partial(catalogue.plant, csrc=tree))
    monkeypatch.setattr(command, "CSRC", tree)
    ran: list[str] = []

    def run(fault: Fault, *_: object) -> Outcome:
        ran.append(fault.name)
        return Outcome(ran=7)

    monkeypatch.setattr(command.mutants_run, "run", run)
    workshop = Workshop("cpu", tmp_path / "home")

    def outcome(name: str, group: str, replace: str, unedited_runs: bool) -> Outcome:
        fault = Fault(name, group, "", (Edit("one.cpp", "return VALUE;", replace),))
        return command.one(fault, workshop, [], {}, "", unedited_runs).outcome

    assert outcome("space", "controls", "return  VALUE ; /* value */", True) == Outcome(detail=command.SAME_BYTES)
    assert ran == []
    assert outcome("other_bytes", "controls", "return VALUE + 1;", True) == Outcome(ran=7)
    assert outcome("unedited_is_not_run", "controls", "return  VALUE;", False) == Outcome(ran=7)
    assert outcome("no_control", "int4", "return  VALUE;", True) == Outcome(ran=7)
    assert ran == ["other_bytes", "unedited_is_not_run", "no_control"]


def test_old_objects_and_leftovers_go_and_others_stay(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = Workshop("cpu", tmp_path / "home")
    workshop.library(tree, tmp_path / "a")
    (tmp_path / "home" / "planted" / "killed").mkdir()
    workshop.prune()
    assert len(list((tmp_path / "home" / "objects").iterdir())) == 2
    assert len(list((tmp_path / "home" / "planted").iterdir())) == 1
    monkeypatch.setattr(mutants_build, "UNUSED_SECONDS", -1.0)
    workshop.prune()
    assert list((tmp_path / "home" / "objects").iterdir()) == list((tmp_path / "home" / "planted").iterdir()) == []


def test_a_compiler_that_takes_too_long_ends_with_its_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on writing into a folder that is being removed."""
    monkeypatch.setattr(mutants_build, "COMPILE_SECONDS", 0.5)
    seconds = f"1{os.getpid()}.75"  # that no other process sleeps
    with pytest.raises(CompileError, match=r"took longer than 0\.5 s"):
        mutants_build.run(f"sleep {seconds}; true", tmp_path)
    assert processes.running(seconds) == []
