"""Faults that do not compile are found many at a time and named one by one; those of the catalogue all compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import environment
from harness.mutants import syntax
from harness.mutants.catalogue import Edit, Fault, load
from harness.mutants.command import home
from harness.mutants.syntax import Checker, Hunk, batches, broken, hunks, merged

SOURCES = {
    "value.h": "// how much\ninline int value() { return 1; }\n// end\n",
    "one.cpp": '#include "value.h"\n\nint first() { return value(); }\n\nint second() { return 2; }\n\n'
    "int third() { return 3; }\n",
    "cpu/two.cpp": '#include "../value.h"\nint fourth() { return value(); }\n',
    "orphan.h": "int nobody();\n",
}


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text(text)
    return tmp_path / "csrc"


@pytest.fixture
def checker(csrc: Path) -> Checker:
    def command(source: str, out: str) -> str:
        return f"c++ -std=c++17 -fsyntax-only {source}"

    return Checker({Path("one.cpp"): command, Path("cpu/two.cpp"): command}, csrc.parent / "kept", csrc)


def fault(name: str, file: str, find: str, replace: str) -> Fault:
    return Fault(name, "int4", "made for a test", (Edit(file, find, replace),))


APART = [
    fault("in_first", "one.cpp", "return value()", "return value() + 1"),
    fault("in_second", "one.cpp", "return 2", "return 22"),
    fault("in_third", "one.cpp", "return 3", "return 33"),
    fault("in_header", "value.h", "return 1", "return 0"),
]


def test_faults_that_lie_apart_are_planted_together(csrc: Path) -> None:
    changes = {f.name: hunks(f, csrc) for f in APART}
    assert changes["in_second"] == {"one.cpp": [Hunk(4, 5, ("int second() { return 22; }\n",))]}
    assert batches(changes) == [["in_first", "in_second", "in_third", "in_header"]]
    texts = merged(csrc, list(changes.values()))
    assert texts["value.h"] == SOURCES["value.h"].replace("return 1", "return 0")
    wanted = SOURCES["one.cpp"].replace("value();", "value() + 1;").replace("return 2", "return 22")
    assert texts["one.cpp"] == wanted.replace("return 3", "return 33")


def test_faults_of_the_same_or_touching_lines_are_not(csrc: Path) -> None:
    faults = [
        fault("in_second", "one.cpp", "return 2", "return 22"),
        fault("same_line", "one.cpp", "int second()", "long second()"),
        fault("next_line", "one.cpp", "int third()", "\nint third()"),
        fault("line_before", "one.cpp", "\n\nint third", "int other();\n\nint third"),
    ]
    changes = {f.name: hunks(f, csrc) for f in faults}
    made = batches(changes)
    assert sorted(name for batch in made for name in batch) == sorted(changes)
    assert made[0][0] == "in_second"
    assert "same_line" in made[1]
    assert all({"next_line", "line_before"} - set(batch) for batch in made)
    for batch in made:
        together = merged(csrc, [changes[name] for name in batch])["one.cpp"]
        alone = SOURCES["one.cpp"]
        for one in faults:
            if one.name in batch:
                alone = alone.replace(one.edits[0].find, one.edits[0].replace)
        assert together == alone


def test_a_fault_alone_is_planted_as_the_catalogue_plants_it() -> None:
    for one in load():
        assert merged(syntax.CSRC, [hunks(one)]) == syntax.edited(one)


def test_what_does_not_compile_is_named_and_nothing_else(
    checker: Checker, csrc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [
        fault("bad_in_second", "one.cpp", "{ return 2", "{ return undeclared_there"),
        fault("bad_in_header", "value.h", "// end", "int wrong = undeclared_in_header;"),
        fault("bad_edit", "one.cpp", "return 4", "return 5"),
        fault("unread", "orphan.h", "nobody", "somebody"),
    ]
    said: list[str] = []
    found = broken([*APART, *bad, Fault("control", "controls", "", ())], checker, said.append)
    assert sorted(found) == sorted(f.name for f in bad)
    assert found["bad_in_second"].startswith("one.cpp:5:")
    assert "undeclared_there" in found["bad_in_second"]
    assert "undeclared_in_header" in found["bad_in_header"]
    assert "'return 4' is there 0 times" in found["bad_edit"]
    assert "no source" in found["unread"]
    assert any("one.cpp" in line and "bad_in_header" in line for line in said)
    assert (csrc / "one.cpp").read_text() == SOURCES["one.cpp"]


def test_what_passed_is_not_compiled_again(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken(APART, checker, lambda _: None) == {}

    def refuse(command: str, folder: Path) -> None:
        raise AssertionError(command)

    monkeypatch.setattr(syntax, "run", refuse)
    assert broken(APART, checker, lambda _: None) == {}
    with pytest.raises(AssertionError, match=r"one\.cpp"):
        broken(APART[:2], checker, lambda _: None)


def test_faults_that_only_disturb_each_other_are_not_accused(checker: Checker) -> None:
    twice = [
        fault("declares", "one.cpp", "int first()", "int extra = 1;\nint first()"),
        fault("declares_too", "one.cpp", "int third()", "int extra = 2;\nint third()"),
    ]
    assert batches({f.name: hunks(f, checker.csrc) for f in twice}) == [["declares", "declares_too"]]
    assert broken([*twice, *APART], checker, lambda _: None) == {}


@pytest.mark.slow
def test_every_fault_of_the_cpu_compiles() -> None:
    faults = [one for one in load() if one.device == "cpu"]
    assert broken(faults, syntax.checker("cpu", home()), print) == {}


if environment.nvcc()[0]:  # `nox -s nvcc` checks all CUDA faults; here, that its checker can say no

    @pytest.mark.slow
    def test_cuda_faults_that_do_not_compile_are_named() -> None:
        faults = [
            fault("on_the_host", "cuda/ranks.cu", "if (a.max_rows <= 0) return;", "if (a.no_such_rows <= 0) return;"),
            fault("on_the_device", "cuda/ranks.cu", "checksum_term(data[i], i)", "checksum_term(data[i])"),
            fault("fine", "cuda/ranks.cu", "unsigned long long sum = 0;", "unsigned long long sum = 1;"),
        ]
        found = broken(faults, syntax.checker("cuda", home()), print)
        assert sorted(found) == ["on_the_device", "on_the_host"]
        assert "no_such_rows" in found["on_the_host"]
