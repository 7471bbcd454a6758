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
    size: int = 1
    """Bytes of a call's operands."""
    turn: int = -1
    said: list[str] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    """Seconds, of every time, and the bytes that operands were to exceed."""

    def calls(self, case: Case, rotate: int) -> Calls:
        self.asked.append(rotate)
        return Calls([lambda: None], [[]], self.size, [])

    def without_tree(self, case: Case, made: Calls) -> dict[str, Any]:
        return {"no-tree": []} if case.op == "mla_attention" else {}

    def timed(self, calls: Any, seconds: float) -> clock.Timing:
        self.asked.append(seconds)
        if not calls:
            self.said.append("no-tree")
            return timing(OWN[self.turn] / 2)
        self.turn += 1
        self.said.append("own")
        return timing(OWN[self.turn])

    def floor(self, size: int) -> float:
        self.said.append("floor")
        return FLOOR[self.turn]


def test_turns_follow_a_memory_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def wall(calls: Any, seconds: float) -> clock.Timing:
        machine.asked.append(seconds)
        machine.said.append("peer")
        return timing(PEER[machine.turn])

    def fails(case: Case, copies: int) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(clock, "clock", lambda device: wall)
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: machine.said.append("settles"))
    peers = [Peer("one", "", "", lambda case, copies: [lambda: None]), Peer("none", "", "", lambda case, copies: None)]
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, machine.floor)
    line = ops.measure(cast(Bench, machine), CASE, limits, [*peers, Peer("ill", "", "", fails)], 0.1)
    rest = ["settles", "own", "floor", "peer"] * (ops.TURNS["cpu"] - 1)
    assert machine.said == ["own", "floor", "peer", *rest], "a peer's threads look on for work for a while"
    assert line.x_floor == pytest.approx(1.5), "each turn beside its own floor"
    assert (line.us, line.floor_us, line.peers) == (45.0, 20.0, {"one": 67.5})
    assert line.peer_errors == {"ill": "RuntimeError: no such operation"}
    assert line.samples == 5 * ops.TURNS["cpu"]
    assert machine.asked == [ops.COLD * limits.cache_bytes] + [0.1 / ops.TURNS["cpu"]] * 2 * ops.TURNS["cpu"]


def test_a_peer_that_fails_in_a_later_turn_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def wall(calls: Any, seconds: float) -> clock.Timing:
        asked.append(seconds)
        if len(asked) > 1:
            raise RuntimeError("out of memory\nand more")
        return timing(1.0)

    monkeypatch.setattr(clock, "clock", lambda device: wall)
    monkeypatch.setattr(ops, "SETTLE", 0.0)
    machine = Machine()
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, machine.floor)
    line = ops.measure(cast(Bench, machine), CASE, limits, [Peer("p", "", "", lambda case, copies: [])], 0.1)
    assert (line.peers, line.peer_errors, len(asked)) == ({}, {"p": "RuntimeError: out of memory"}, 2)


@pytest.mark.parametrize(("kind", "peak"), [("f32", 1e9), ("int4", 1e9), ("bf16", 2e9), ("int4-bf16", 2e9)])
@pytest.mark.parametrize("size", [1 << 18, (1 << 18) - 1])
def test_the_roofline_is_of_what_is_multiplied_and_cold_is_beyond_the_cache(
    monkeypatch: pytest.MonkeyPatch, kind: str, peak: float, size: int
) -> None:
    machine = Machine(size=size)
    monkeypatch.setattr(ops.time, "sleep", pytest.fail)  # without a peer there is nothing to wait for
    limits = Ceilings(1e12, {"f32": 1e9, "bf16": 2e9}, None, 1 << 16, machine.floor)
    line = ops.measure(cast(Bench, machine), Case("linear", "tiny", 1, 64, 128, kind=kind), limits, [], 0.1)
    assert line.roofline == pytest.approx(1e6 * 2 * 64 * 128 / peak / 45.0)
    assert line.cold == (size == ops.COLD * limits.cache_bytes)


def test_a_trees_attention_takes_turns_with_the_same_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "free_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(ops.time, "sleep", pytest.fail)
    monkeypatch.setattr(clock, "clock", lambda device: lambda calls, seconds: timing(1.0))
    machine = Machine("cuda")
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, machine.floor)
    case = Case("mla_attention", "tiny", 8, T=64, heads=4, rank=32, nope=16, rope=8, v=16)
    line = ops.measure(cast(Bench, machine), case, limits, [Peer("p", "", "", lambda case, copies: [])], 0.1)
    assert machine.said == ["own", "no-tree", "floor"] * ops.TREE_TURNS
    assert machine.asked == [256] + [0.1 / ops.TREE_TURNS] * 2 * ops.TREE_TURNS, "a quarter of what is free"
    assert (line.us, line.peers) == (45.0, {"no-tree": 22.5, "p": 1.0})
