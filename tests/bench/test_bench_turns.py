"""A case is compared with what its floor and its peers took in the same turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from harness.bench import clock, ops
from harness.bench.cases import Case
from harness.bench.ceilings import Ceilings
from harness.bench.operands import Bench, Calls
from harness.bench.peers import Peer

CASE = Case("linear", "tiny", 1, 64, 128, kind="f32")


def timing(us: float) -> clock.Timing:
    return clock.Timing(us, us, us, us, 5)


@dataclass
class Machine:
    """A memory that is half as fast in every other turn."""

    device: str = "cpu"
    turn: int = -1
    said: list[str] = field(default_factory=list)

    def slowness(self) -> float:
        return 1.0 + self.turn % 2

    def calls(self, case: Case, rotate: int) -> Calls:
        return Calls([lambda: None], [[]], 1, [])

    def timed(self, calls: Any, seconds: float) -> clock.Timing:
        self.turn += 1
        self.said.append("own")
        return timing(30.0 * self.slowness())

    def floor(self, size: int) -> float:
        self.said.append("floor")
        return 20.0 * self.slowness()


def test_turns_follow_a_memory_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def wall(calls: Any, seconds: float) -> clock.Timing:
        machine.said.append("peer")
        return timing(45.0 * machine.slowness())

    def fails(case: Case, copies: int) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(clock, "clock", lambda device: wall)
    monkeypatch.setattr(ops, "SETTLE", 0.0)
    peers = [Peer("one", "", "", lambda case, copies: [lambda: None]), Peer("none", "", "", lambda case, copies: None)]
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, machine.floor)
    line = ops.measure(cast(Bench, machine), CASE, limits, [*peers, Peer("ill", "", "", fails)], 0.1)
    assert machine.said == ["own", "floor", "peer"] * ops.TURNS["cpu"]
    assert line.x_floor == pytest.approx(1.5), "each turn beside its own floor"
    assert line.peers == {"one": pytest.approx(1.5 * line.us)}
    assert line.peer_errors == {"ill": "RuntimeError: no such operation"}
    assert line.samples == 5 * ops.TURNS["cpu"]
