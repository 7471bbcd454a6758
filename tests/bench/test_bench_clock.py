"""Medians, spreads, and the shares of a replay."""

from __future__ import annotations

import pytest

from harness.bench import clock


def test_a_summary_is_the_median_with_its_quartiles() -> None:
    assert clock.summarise([5.0, 1.0, 2.0, 4.0, 3.0]) == clock.Timing(3.0, 2.0, 4.0, 1.0, 5)
    assert clock.summarise([1.0, 3.0]) == clock.Timing(2.0, 1.5, 2.5, 1.0, 2)
    assert clock.summarise([7.0]) == clock.Timing(7.0, 7.0, 7.0, 7.0, 1)
    with pytest.raises(clock.MeasureError, match="no samples"):
        clock.summarise([])


def test_each_device_has_its_clock() -> None:
    assert (clock.clock("cpu"), clock.clock("cuda")) == (clock.wall, clock.gpu)


def test_turns_are_pooled_by_their_medians() -> None:
    turns = [clock.Timing(us, us - 1, us + 1, us - 2, 5) for us in (10.0, 30.0, 12.0)]
    assert clock.pooled(turns) == clock.Timing(12.0, 11.0, 13.0, 8.0, 15)
    with pytest.raises(clock.MeasureError, match="no samples"):
        clock.pooled([])


def test_a_call_of_a_replay_takes_its_share() -> None:
    given = iter([50.0, *(float(t) for t in range(100, 200, 10))])
    timing = clock.replays(lambda: next(given), 10, 1e-9)
    assert timing == clock.Timing(12.0, 11.0, 13.0, 10.0, clock.FEWEST), "the first replay is to warm up"


class Time:
    """Microseconds that pass when a call says so."""

    def __init__(self) -> None:
        self.us = 5_000_000

    def perf_counter(self) -> float:
        return self.us / 1e6

    def perf_counter_ns(self) -> int:
        return self.us * 1000

    def call(self, us: int) -> float:
        self.us += us
        return float(us)


def test_times_are_microseconds_and_as_many_as_seconds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(clock, "time", time)
    each = clock.wall([lambda: time.call(7), lambda: time.call(9)], 80e-6)
    assert each == clock.Timing(8.0, 7.0, 9.0, 7.0, 10)
    assert clock.replays(lambda: time.call(70), 10, 700e-6) == clock.Timing(7.0, 7.0, 7.0, 7.0, 10)
    assert clock.replays(lambda: time.call(1), 1, 1.0).samples == clock.MOST
    assert clock.replays(lambda: time.call(1), 1, 1e-9).samples == clock.FEWEST


def test_a_replay_holds_every_call_and_enough_of_them() -> None:
    calls = [(lambda i=i: i) for i in range(3)]  # type: ignore[misc]
    turns = clock.in_turn(calls, 5.0)
    assert len(turns) == clock.NODES
    assert [t() for t in turns[:7]] == [0, 1, 2, 0, 1, 2, 0]
    assert len(clock.in_turn(calls * 100, 5.0)) == 300
    assert len(clock.in_turn(calls, clock.SPAN / 7)) == 7
    assert len(clock.in_turn(calls, 1e9)) == 3


def test_calls_take_turns() -> None:
    seen: list[int] = []
    timing = clock.wall([lambda i=i: seen.append(i) for i in range(3)], 1e-9)  # type: ignore[misc]
    assert timing.samples == clock.FEWEST
    assert seen == [0, 1, 2, 0, 1, 2], "the first is to warm up"


def test_the_fewest_samples_are_taken_however_short_the_time() -> None:
    assert clock.wall([lambda: None], 1e-9).samples == clock.FEWEST
    assert clock.wall([lambda: None], 5.0).samples == clock.MOST
