"""The breaks that GPU tests have to notice: they fit the sources, leave no test out, and what passes is told of."""

from __future__ import annotations

import ast
import json
import tempfile
import threading
from pathlib import Path

import pytest

from harness.mutants.catalogue import Edit, Fault, edited
from tests.cuda import broken, pairs
from tests.cuda.broken import Break, breaks
from tests.cuda.conftest import NEED_A_GPU

UNBROKEN = {
    "test_backend.py::test_a_lost_context_is_named",
    "test_backend.py::test_debug_build_says_what_was_violated",
    "test_ranks.py::test_a_rank_allocates_what_is_planned",
    "test_ranks.py::test_a_rank_that_fails_ends_the_job_and_is_named_first",
    "test_ranks.py::test_exchanges_are_part_of_the_graph",
    "test_ranks.py::test_four_ranks_have_one_gpus_bits",
    "test_ranks.py::test_layers_of_k26_have_one_gpus_bits",
}
"""Tests that load the engine of the checkout in a process of their own: to break it, all of it is to be built anew."""


def functions() -> set[str]:
    found = set()
    for name in NEED_A_GPU:
        for node in ast.parse((broken.HERE / name).read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{name}::{node.name}")
    return found


def test_breaks_fit_the_sources_and_leave_no_test_out() -> None:
    named = set()
    for b in breaks():
        assert edited(b.fault), b.fault.says
        assert b.tests or b.pairs, b.fault.says
        assert set(b.pairs) <= set(pairs.shapes())
        named |= {test.partition("[")[0] for test in b.tests}
    assert named == functions() - UNBROKEN
    kinds = {"linear-int4", "linear-bf16", "experts-int4", "router-product", "router-choice", "mla-t1024", "mla-t4096"}
    shapes = {shape for b in breaks() for shape in b.pairs}
    assert all(any(shape.startswith(kind) for shape in shapes) for kind in kinds)


@pytest.mark.parametrize("entry", ["- {says: x, tests: [a]}", "- {fault: no_such_fault}", "- {fault: a, edits: []}"])
def test_an_entry_that_is_none_is_told_of(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "breaks.yaml"
    path.write_text(entry)
    with pytest.raises((ValueError, KeyError)):
        breaks(path)


class Workshop:
    """Builds nothing: a library that cannot be loaded."""

    places = threading.Semaphore(1)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def scratch(self, name: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix=name, dir=self.folder)

    def library(self, csrc: Path, target: Path, *, edited: set[str]) -> tuple[Path, int]:
        return target / "none.so", len(edited)


@pytest.mark.slow
def test_what_passes_and_what_is_not_there_has_not_noticed(tmp_path: Path) -> None:
    passes = "test_pairs.py::test_every_shape_of_the_table_is_among_them"
    fault = Fault("made_here", "breaks", "made for a test", (Edit("cuda/rows.cu", "tokens[m]", "tokens[0]"),))
    workshop = Workshop(tmp_path)
    found = broken.one(Break(fault, (passes,), ("router-choice",)), workshop)  # type: ignore[arg-type]
    assert found.how == {passes: broken.PASSES, "router-choice": broken.FAILS}
    assert "none.so" in found.said["router-choice"]
    assert not found.good
    gone = broken.one(Break(fault, ("test_pairs.py::test_gone",), ()), workshop)  # type: ignore[arg-type]
    assert gone.how == {"test_pairs.py::test_gone": broken.MISSING}
    assert not gone.good
    noticed = broken.one(Break(fault, (), ("router-choice",)), workshop)  # type: ignore[arg-type]
    assert noticed.good
    assert "made_here: made for a test" in broken.text(noticed)


@pytest.mark.slow
def test_tests_that_read_the_checkout_read_an_edited_copy(tmp_path: Path) -> None:
    """Such as this file, whose breaks do not fit there."""
    test = "test_broken.py::test_breaks_fit_the_sources_and_leave_no_test_out"
    fault = Fault("made_here", "breaks", "made for a test", (Edit("cuda/rows.cu", "tokens[m]", "tokens[0]"),))
    found = broken.one(Break(fault, (test,), (), checkout=True), Workshop(tmp_path))  # type: ignore[arg-type]
    assert found.how == {test: broken.FAILS}
    assert "is there 0 times instead of 1" in found.said[test]


def test_breaks_that_were_noticed_before_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this engine, and by what has to notice them today; the record has them in the list's order."""

    def made(name: str, *tests: str, find: str = "a") -> Break:
        return Break(Fault(name, "breaks", f"says {name}", (Edit("x", f"{name} {find}", "b"),)), tests, ())

    tried: list[str] = []

    def one(b: Break, workshop: object) -> broken.Noticed:
        tried.append(b.fault.name)
        return broken.Noticed(
            b.fault.name, b.fault.says, dict.fromkeys(b.tests, broken.FAILS), dict.fromkeys(b.tests, ""),
            edits=b.fault.digest,
        )  # fmt: skip

    class Unused:
        def __init__(self, *_: object) -> None:
            pass

        def reach(self, edited: set[str]) -> int:
            return 0

    monkeypatch.setattr(broken, "one", one)
    monkeypatch.setattr(broken, "Workshop", Unused)
    record, both = tmp_path / "broken.json", [made("a", "x"), made("b", "y")]
    assert broken.run(both[1:], 1, record, "e1") == broken.run(both, 1, record, "e1", broken.earlier(record, "e1")) == 0
    assert tried == ["b", "a"]
    assert [entry["name"] for entry in json.loads(record.read_text())] == ["a", "b"]
    assert broken.run([both[0], made("b", "other")], 1, record, "e1", broken.earlier(record, "e1")) == 0
    assert tried == ["b", "a", "b"]
    assert broken.run([made("a", "x", find="c")], 1, None, "e1", broken.earlier(record, "e1")) == 0
    assert tried == ["b", "a", "b", "a"], "other edits are another break"
    assert broken.earlier(record, "e2") == []
    assert broken.earlier(tmp_path / "none.json", "e1") == []
    unnoticed = {"name": "a", "says": "says a", "how": {"x": broken.PASSES}, "engine": "e1"}
    record.write_text(json.dumps([unnoticed]))
    assert broken.earlier(record, "e1") == []
