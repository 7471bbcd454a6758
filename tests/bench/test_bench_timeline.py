"""What a launch costs beside those that run with it, by hand-written traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.bench import timeline
from harness.cells import INFRASTRUCTURE


def event(name: str, begin: float, duration: float, cat: str = "kernel", grid: tuple[int, ...] = (4, 1, 1)) -> Any:
    return {"cat": cat, "name": name, "ts": begin, "dur": duration, "args": {"grid": list(grid)}}


LINEAR = "void kdtree::(anonymous namespace)::linear<kdtree::Shape<2, (bool)1>, 3>(kdtree::Params<float>, int)"
FOLD = "kdtree::cuda::fold_kernel(Fold)"
"""linear 0..10, fold begins inside it and ends at 14, the copy lies within fold; the second forward is 2 us slower."""
EVENTS = [
    event(FOLD, 6, 8),
    event(LINEAR, 0, 10),
    event("Memcpy DtoD", 11, 2, "gpu_memcpy", ()),
    event("cudaLaunchKernel", 0, 1, "cuda_runtime"),
    event(LINEAR, 20, 12),
    event(FOLD, 30, 6),
    event("Memcpy DtoD", 31, 2, "gpu_memcpy", ()),
]


def test_names_are_those_of_the_source() -> None:
    assert timeline.short(LINEAR) == "linear"
    assert timeline.short(FOLD) == "fold_kernel"
    assert timeline.short("Memcpy HtoD (Pageable -> Device)") == "Memcpy HtoD"


def test_costs_are_from_end_to_end_and_add_up() -> None:
    """What overlaps counts once: a copy under a longer kernel costs nothing, a gap counts for what comes behind it."""
    found = timeline.launches(EVENTS)
    assert [launch.name for launch in found] == ["linear", "fold_kernel", "Memcpy DtoD"] * 2
    one = timeline.lines(found[:3], 1)
    assert [(line.name, line.costs, line.lasts) for line in one] == [
        ("linear", 10, 10), ("fold_kernel", 4, 8), ("Memcpy DtoD", 0, 2),
    ]  # fmt: skip
    assert sum(line.costs for line in one) == 14
    assert [line.share for line in one] == [round(10 / 14, 4), round(4 / 14, 4), 0]
    both = timeline.lines(found, 1)
    assert sum(line.costs for line in both) == 10 + 4 + (32 - 14), "a linear behind nothing, and one behind a copy"


def test_only_what_every_forward_has_is_shown() -> None:
    both = timeline.lines(timeline.launches(EVENTS), 2)
    assert [(line.name, line.a_forward, line.costs) for line in both] == [("fold_kernel", 1, 4), ("Memcpy DtoD", 1, 0)]


def test_launches_of_another_grid_have_a_line_of_their_own() -> None:
    events = [
        event(FOLD, 0, 2),
        event(FOLD, 2, 3),
        event(FOLD, 5, 4, grid=(8, 1, 1)),
        event("Memset", 9, 1, "gpu_memset", ()),
    ]
    found = timeline.lines(timeline.launches(events), 1)
    assert [(line.name, line.grid, line.costs) for line in found] == [
        ("fold_kernel", (4, 1, 1), 2), ("fold_kernel", (4, 1, 1), 3), ("fold_kernel", (8, 1, 1), 4), ("Memset", (), 1),
    ]  # fmt: skip


def test_the_table_has_what_a_launch_lasts_before_what_it_costs() -> None:
    found = timeline.lines(timeline.launches(EVENTS[:2]), 1)
    head, _, row = timeline.table(16, found)
    assert head.startswith("M=16: launch ")
    assert row.split() == ["fold_kernel", "4x1x1", "1.00", "8.00", "4.00", "28.6%"]


def test_a_file_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.kdtr"
    bad.write_bytes(b"nothing")
    assert timeline.main(["--file", str(bad)]) == INFRASTRUCTURE
    assert "bad.kdtr" in capsys.readouterr().err
