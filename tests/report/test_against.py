"""Two ledgers side by side: each kind of change is found, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import runs

from harness.cells import Cell, Ledger, Verdict
from harness.reports.against import compare, percent

ID = "fp32-ar-tiny-cpu"


def slower(cell: Cell, factor: float) -> Cell:
    return replace(cell, times={**cell.times, "decode": factor * cell.times["decode"]})


def nearer(cell: Cell, share: float) -> Cell:
    """``cell`` with its largest logit error at ``share`` of what is allowed."""
    checks = tuple(
        replace(check, value=share * check.allowed if check.name == "logits.max_abs" else 0.0) for check in cell.checks
    )
    return replace(cell, checks=checks)


def kinds(new: Ledger, old: Ledger) -> list[tuple[str, str]]:
    return [(change.kind, change.id) for change in compare(new, old).changes]


def test_a_run_against_itself_has_not_changed() -> None:
    comparison = compare(runs.run(), runs.run())
    assert comparison.changes == ()
    assert [pace.ratio for pace in comparison.paces] == [1.0] * 4
    assert sum(pace.cells for pace in comparison.paces) == len(runs.run().cells)
    assert comparison.untimed == ""


def test_a_cell_that_fails_broke_and_one_that_passes_again_was_mended() -> None:
    old = runs.run()
    bad = runs.failing(runs.find(old, ID), Verdict.FAIL_TOKENS, "tokens", 1, 0, "wrong")
    new = runs.change(old, ID, bad)
    assert kinds(new, old) == [("broken", ID)]
    assert compare(new, old).changes[0].after == "FAIL_TOKENS"
    assert kinds(old, new) == [("mended", ID)]
    assert kinds(new, new) == []


def test_a_cell_that_is_gone_from_the_run_broke() -> None:
    old = runs.run()
    assert kinds(runs.change(old, ID, None), old) == [("broken", ID)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0.30, 0.36, ["worse"]), (0.36, 0.30, ["better"]), (0.30, 0.34, []), (0.34, 0.30, [])],
)
def test_margins_count_from_five_points_on(before: float, after: float, expected: list[str]) -> None:
    base = runs.run()
    old = runs.change(base, ID, nearer(runs.find(base, ID), before))
    new = runs.change(base, ID, nearer(runs.find(base, ID), after))
    assert [kind for kind, _ in kinds(new, old)] == expected


def test_one_slow_cell_is_named_and_hardly_moves_its_group() -> None:
    old = runs.run()
    new = runs.change(old, ID, slower(runs.find(old, ID), 3.0))
    assert kinds(new, old) == [("slower", ID)]
    assert kinds(old, new) == [("faster", ID)]
    assert {pace.group: pace.ratio for pace in compare(new, old).paces}["fp32-ar-cpu"] == 1.0


def test_a_group_is_as_slow_as_its_median_cell() -> None:
    old = runs.run()
    new = replace(old, cells=tuple(slower(cell, 1.2) for cell in old.cells))
    assert all(pace.ratio == pytest.approx(1.2) for pace in compare(new, old).paces)


def test_milliseconds_that_moved_are_not_a_slow_cell() -> None:
    old = runs.run()
    cell = runs.find(old, ID)
    old = runs.change(old, ID, replace(cell, times={**cell.times, "decode": 0.001}))
    new = runs.change(old, ID, replace(cell, times={**cell.times, "decode": 0.003}))
    assert kinds(new, old) == []


@pytest.mark.parametrize("changed", [{"cpu": "Another CPU"}, {"gpus": "A GPU"}, {"cpu": ""}])
def test_times_on_other_hardware_are_not_compared(changed: dict[str, str]) -> None:
    old = runs.run()
    new = replace(old, environments={runs.HOST: {**runs.ENVIRONMENT, **changed}})
    comparison = compare(new, old)
    assert comparison.paces == ()
    assert "same CPU and GPUs" in comparison.untimed


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("times", [{}, {"decode": 0.0}, None])
def test_cells_that_failed_or_have_no_time_are_not_timed(side: int, times: dict[str, float] | None) -> None:
    """The others are; where there are none, it is said why no time was compared."""
    old = runs.run()
    cell = runs.find(old, ID)
    other = runs.failing(cell, Verdict.FAIL_TREE, "tree", 1, 0, "x") if times is None else replace(cell, times=times)
    sides = [old, old]
    sides[side] = runs.change(old, ID, replace(other, times={"decode": 99.0} if times is None else times))
    comparison = compare(*sides)
    assert sum(pace.cells for pace in comparison.paces) == len(old.cells) - 1
    assert {pace.ratio for pace in comparison.paces} == {1.0}
    assert comparison.untimed == ""
    one = replace(old, expected=(ID,), cells=(cell,))
    sides = [one, one]
    sides[side] = replace(one, cells=(other,))
    comparison = compare(*sides)
    assert comparison.paces == ()
    assert comparison.untimed == (
        "no cell passed in both runs" if times is None else "no cell has a decode time in both runs"
    )


@pytest.mark.parametrize(("before", "after", "told"), [(0.10, 0.16, True), (0.10, 0.14, False), (0.03, 0.049, False)])
def test_a_slow_cell_exceeds_half_as_much_again_and_20_ms(before: float, after: float, told: bool) -> None:
    old = runs.run()
    cell = runs.find(old, ID)
    one, two = (runs.change(old, ID, replace(cell, times={"decode": t})) for t in (before, after))
    assert kinds(two, one) == ([("slower", ID)] if told else [])
    assert kinds(one, two) == ([("faster", ID)] if told else [])


def test_machines_that_do_not_say_what_they_are_are_not_compared() -> None:
    nameless = replace(runs.run(), environments={runs.HOST: {"os": "Linux"}})
    assert compare(nameless, nameless).paces == ()


def test_cells_that_left_or_joined_the_matrix() -> None:
    small = {"tiny": runs.DRAFTERS, "ties": ("oracle",)}
    large = {**small, "tiny2": ("oracle",)}
    joined = {"fp32-ar-tiny2-cpu", "int4-ar-tiny2-cpu", "fp32-ddtree-tiny2-oracle-cpu", "int4-ddtree-tiny2-oracle-cpu"}
    assert set(kinds(runs.run(small), runs.run(large))) == {("missing", id) for id in joined}
    assert set(kinds(runs.run(large), runs.run(small))) == {("new", id) for id in joined}


def test_a_device_that_the_new_run_had_not_is_not_missing() -> None:
    both = runs.run(devices=("cpu", "cuda"))
    assert kinds(runs.run(), both) == []
    assert {kind for kind, _ in kinds(both, runs.run())} == {"new"}


def test_hosts_are_compared_with_themselves() -> None:
    old = runs.run(hosts=("a", "b"))
    bad = runs.failing(runs.passing(runs.expected(("cpu",), runs.TABLE)[0], "b"), Verdict.FAIL_TREE, "tree", 1, 0, "x")
    new = runs.change(old, bad.id, bad)
    (change,) = compare(new, old).changes
    assert (change.kind, change.id, change.host) == ("broken", bad.id, "b")
    assert compare(new, old).of("broken", "worse") == (change,)
    assert compare(new, old).of("worse") == ()


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.431, "43 %"), (9.99, "999 %"), (300.0, "300 times"), (float("inf"), "∞"), (float("nan"), "NaN")],
)
def test_shares_in_words(share: float, said: str) -> None:
    assert percent(share) == said
