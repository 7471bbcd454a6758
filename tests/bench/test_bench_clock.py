"""Medians, spreads and the union of launches against brute force."""

from __future__ import annotations

import random

import pytest

from harness.bench import clock


def test_a_summary_is_the_median_with_its_quartiles() -> None:
    assert clock.summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == clock.Timing(3.0, 2.0, 4.0, 1.0, 5)
    assert clock.summarise([7.0]) == clock.Timing(7.0, 7.0, 7.0, 7.0, 1)
    with pytest.raises(clock.MeasureError, match="no samples"):
        clock.summarise([])


def test_busy_time_is_the_union_of_the_intervals() -> None:
    rng = random.Random(3)
    for _ in range(200):
        spans = [(a, a + rng.randrange(0, 9)) for a in (rng.randrange(40) for _ in range(rng.randrange(1, 7)))]
        covered = {t for a, b in spans for t in range(a, b)}
        assert clock.busy([(float(a), float(b)) for a, b in spans]) == len(covered), spans


def test_launches_are_dealt_out_to_calls_in_order() -> None:
    spans = [(10.0, 12.0), (0.0, 1.0), (1.5, 2.0), (11.0, 15.0)]
    assert clock.per_call(spans, 2) == [1.5, 5.0]
    for count in (0, 3):
        with pytest.raises(clock.MeasureError, match="4 launches"):
            clock.per_call(spans, count)
    with pytest.raises(clock.MeasureError, match="0 launches"):
        clock.per_call([], 2)


def test_calls_take_turns() -> None:
    seen: list[int] = []
    timing = clock.wall([lambda i=i: seen.append(i) for i in range(3)], 1e-9)  # type: ignore[misc]
    assert timing.samples == clock.FEWEST
    assert seen == [0, 1, 2, 0, 1, 2], "the first is to warm up"


def test_the_fewest_samples_are_taken_however_short_the_time() -> None:
    assert clock.wall([lambda: None], 1e-9).samples == clock.FEWEST
    assert clock.wall([lambda: None], 5.0).samples == clock.MOST
