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


OWN, FLOOR, PEER = (60.0, 30.0, 60.0, 30.0, 45.0), (40.0, 20.0, 40.0, 20.0, 20.0), (90.0, 45.0, 90.0, 45.0, 67.5)
"""Microseconds by turn, on a memory that changes: the floor is fast in the last one, when its turn comes."""


@dataclass
class Machine:
    """A memory that serves others, too."""

    device: str = "cpu"
    turn: int = -1
    said: list[str] = field(default_factory=list)

    def calls(self, case: Case, rotate: int) -> Calls:
        return Calls([lambda: None], [[]], 1, [])

    def timed(self, calls: Any, seconds: float) -> clock.Timing:
        self.turn += 1
        self.said.append("own")
        return timing(OWN[self.turn])

    def floor(self, size: int) -> float:
        self.said.append("floor")
        return FLOOR[self.turn]


def test_turns_follow_a_memory_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def wall(calls: Any, seconds: float) -> clock.Timing:
        machine.said.append("peer")
        return timing(PEER[machine.turn])

    def fails(case: Case, copies: int) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(clock, "clock", lambda device: wall)
    monkeypatch.setattr(ops, "SETTLE", 0.0)
    peers = [Peer("one", "", "", lambda case, copies: [lambda: None]), Peer("none", "", "", lambda case, copies: None)]
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, machine.floor)
    line = ops.measure(cast(Bench, machine), CASE, limits, [*peers, Peer("ill", "", "", fails)], 0.1)
    assert machine.said == ["own", "floor", "peer"] * ops.TURNS["cpu"]
    assert line.x_floor == pytest.approx(1.5), "each turn beside its own floor"
    assert (line.us, line.floor_us, line.peers) == (45.0, 20.0, {"one": 67.5})
    assert line.peer_errors == {"ill": "RuntimeError: no such operation"}
    assert line.samples == 5 * ops.TURNS["cpu"]
