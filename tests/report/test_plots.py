"""Charts: values land where arithmetic by hand puts them, and what is no number is shown as such."""

from __future__ import annotations

import itertools
import math

import pytest

from harness.reports.plots import BOTTOM, DECADES, LEFT, RIGHT, TOP, Series, chart

NAN, INF = float("nan"), float("inf")


def points(path: str) -> list[tuple[float, float]]:
    return [tuple(map(float, point.split(","))) for point in path.split()]  # type: ignore[misc]


def test_linear_values_stand_at_their_share_of_the_height() -> None:
    c = chart("t", "s", [Series("a", [0.0, 2.0, 4.0])])
    (path,) = c.lines[0].paths
    assert points(path) == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, TOP)]
    assert [text for _, text in c.y_ticks] == ["0", "1", "2", "3", "4"]
    assert [text for _, text in c.x_ticks] == ["0", "1", "2"]


def test_a_decade_is_as_high_as_any_other_on_a_logarithmic_axis() -> None:
    c = chart("t", "s", [Series("a", [1e-8, 1e-7, 1e-6])], log=True, bound=1e-4)
    heights = [y for _, y in points(c.lines[0].paths[0])]
    assert heights[0] == BOTTOM
    assert heights[0] - heights[1] == pytest.approx((BOTTOM - TOP) / 4, abs=0.1)
    assert heights[1] - heights[2] == pytest.approx((BOTTOM - TOP) / 4, abs=0.1)
    assert c.bound == TOP
    assert [text for _, text in c.y_ticks] == ["1e-4", "1e-5", "1e-6", "1e-7", "1e-8"]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values", [[], [0.0], [0.0, 0.0], [5.0], [1e-300, 1e300], [NAN], [INF, -INF, NAN], [None, None], [-1.0, 1.0]]
)
def test_everything_is_drawn_inside_the_frame(values: list[float | None], log: bool) -> None:
    c = chart("t", "s", [Series("a", values)], log=log, bound=1e-6)
    for line in c.lines:
        drawn = [p for path in line.paths for p in points(path)] + list(line.dots)
        assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in drawn)
        assert all(LEFT <= x <= RIGHT for x in line.lost)
        assert len(line.lost) == sum(v is not None and not math.isfinite(v) for v in values)
    assert all(TOP <= y <= BOTTOM for y, _ in c.y_ticks)
    assert len(c.y_ticks) <= DECADES


def test_a_gap_splits_a_line_and_a_lone_value_keeps_its_dot() -> None:
    c = chart("t", "s", [Series("a", [1.0, 2.0, None, 3.0, NAN, 4.0, 5.0])])
    line = c.lines[0]
    assert [len(points(path)) for path in line.paths] == [2, 2]
    assert len(line.dots) == 5
    assert len(line.lost) == 1
    assert line.lost[0] == pytest.approx(LEFT + (RIGHT - LEFT) * 4 / 6, abs=0.1)
    faint = chart("t", "s", [Series("a", [1.0, 2.0, None, 3.0], faint=True)]).lines[0]
    assert len(faint.dots) == 1


def test_a_short_series_is_not_stretched_to_a_long_one() -> None:
    c = chart("t", "s", [Series("long", [1.0] * 5), Series("short", [1.0, 1.0])])
    assert points(c.lines[1].paths[0])[1][0] == points(c.lines[0].paths[0])[1][0]


def test_positions_can_have_names() -> None:
    c = chart("t", "s", [Series("a", [1.0, 2.0, 3.0])], x_names=["embed", "0", "1"])
    assert [text for _, text in c.x_ticks] == ["embed", "0", "1"]


@pytest.mark.parametrize("count", [1, 2, 7, 25, 300, 4096])
def test_ticks_stay_few_and_apart(count: int) -> None:
    c = chart("t", "s", [Series("a", [float(i) for i in range(count)])])
    places = [x for x, _ in c.x_ticks]
    assert 1 <= len(places) <= 7
    assert all(b - a > 30 for a, b in itertools.pairwise(places))
