"""A case is compared with what its floor and its peers took in the same turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from harness.bench import ceilings, clock, ops, turns, work
from harness.bench.cases import Case, cases
from harness.bench.ceilings import Ceilings
from harness.bench.operands import Bench, Calls
from harness.bench.peers import Peer
from harness.protocol import EngineError

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
    rest = ["settles", "own", "floor", "peer"] * (turns.CPU_TURNS - 1)
    assert machine.said == ["own", "floor", "peer", *rest], "a peer's threads look on for work for a while"
    assert line.x_floor == pytest.approx(1.5), "each turn beside its own floor"
    assert (line.us, line.floor_us, line.peers) == (45.0, 20.0, {"one": 67.5})
    assert line.peer_errors == {"ill": "RuntimeError: no such operation"}
    assert line.by_turn == {"own": [*OWN], "floor": [*FLOOR], "one": [*PEER]}
    assert (line.turns, line.rest_s, line.card) == (5, 0.2, {})
    assert line.samples == 5 * turns.CPU_TURNS
    assert machine.asked == [ceilings.COLD * limits.cache_bytes] + [0.1 / turns.CPU_TURNS] * 2 * turns.CPU_TURNS


def test_a_peer_that_fails_in_a_later_turn_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def wall(calls: Any, seconds: float) -> clock.Timing:
        asked.append(seconds)
        if len(asked) > 1:
            raise RuntimeError("out of memory\nand more")
        return timing(1.0)

    monkeypatch.setattr(clock, "clock", lambda device: wall)
    monkeypatch.setattr(turns, "SETTLE", 0.0)
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
    assert line.cold == (size == ceilings.COLD * limits.cache_bytes)


@dataclass
class Card:
    """A GPU that is slower by what it has just done, and cools while nothing runs."""

    size: int = 1
    heat: float = 0.0
    """Per cent."""
    done: list[str] = field(default_factory=list)
    """What was measured, and seconds of rest."""
    device: str = "cuda"

    def works(self, name: str, us: float, seconds: float = 0.1) -> float:
        self.done.append(name)
        us *= 1 + self.heat / 100
        self.heat += 100 * seconds
        return us

    def sleep(self, seconds: float) -> None:
        self.done.append(f"{seconds:g}")
        self.heat = max(0.0, self.heat - 100 * seconds)

    def calls(self, case: Case, rotate: int) -> Calls:
        assert rotate == 256, "a quarter of what is free"
        self.heat = 10.0  # operands are drawn on the card
        return Calls([lambda: None], [[]], self.size, [])

    def without_tree(self, case: Case, made: Calls) -> dict[str, Any]:
        return {"no-tree": []} if case.op == "mla_attention" and case.M > 1 else {}

    def timed(self, calls: Any, seconds: float) -> clock.Timing:
        return timing(self.works("own" if calls else "no-tree", 40.0, seconds))

    def measure(self, monkeypatch: pytest.MonkeyPatch, case: Case, seconds: float) -> ops.Line:
        def gpu(calls: Any, part: float) -> clock.Timing:
            return timing(self.works("peer", 60.0, part))

        floors = iter([20.0, 24.0, 22.0])
        limits = Ceilings(1e12, {"f32": 1e13}, None, 1 << 16, lambda size: self.works("floor", next(floors)))
        monkeypatch.setattr(clock, "clock", lambda device: gpu)
        monkeypatch.setattr(ops, "free_bytes", lambda device: 1 << 10)
        monkeypatch.setattr(ops.time, "sleep", self.sleep)
        asked = iter([400.0, 500.0])
        monkeypatch.setattr(turns, "card", lambda: [1980 - 10 * self.heat, next(asked)])
        once = iter([[]])  # made in the first turn alone
        peers = [Peer("one", "", "", lambda case, copies: next(once)), Peer("none", "", "", lambda case, copies: None)]
        return ops.measure(cast(Bench, self), case, limits, peers, seconds)


def attention(keys: int, rows: int) -> Case:
    return Case("mla_attention", "k26", rows, T=keys, heads=64, rank=512, nope=128, rope=64, v=128, kind="bf16")


def test_a_hot_case_rests_before_every_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is measured on a cool card, ours and theirs alike, and after another one in every turn."""
    card = Card()
    line = card.measure(monkeypatch, attention(131072, 64), 0.9)
    first = ["own", "no-tree", "floor", "peer"]
    order = [*first, *first[::-1], "floor", "peer", "own", "no-tree"]
    assert card.done == [word for name in order for word in ("0.3", name)]
    assert line.by_turn == {"own": [40.0] * 3, "no-tree": [40.0] * 3, "floor": [20.0, 24.0, 22.0], "one": [60.0] * 3}
    assert (line.us, line.floor_us, line.x_floor) == (40.0, 22.0, 40.0 / 22.0)
    assert line.peers == {"no-tree": 40.0, "one": 60.0}
    assert (line.turns, line.rest_s, line.samples) == (3, 0.3, 15)
    assert line.card == {"before": [1980.0, 400.0], "after": [1980.0 - 300, 500.0]}
    assert " ".join(ops.text(line).split()).endswith("; 3 turns within 0.0 %; 1980 to 1680 MHz")


def test_another_case_rests_before_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    line = card.measure(monkeypatch, attention(1024, 8), 0.4)
    assert card.done == 3 * ["0.3", "own", "no-tree", "floor", "peer"]
    assert line.by_turn["own"] == pytest.approx([40.0, 48.0, 56.0])  # this card does not cool in one rest
    assert (line.us, line.turns, line.rest_s) == (pytest.approx(48.0), 3, 0.3)
    assert line.card == {}
    assert "MHz" not in ops.text(line)


def test_the_median_is_over_turns_and_their_distance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([30.0, 50.0, 33.0])
    card = Card()
    monkeypatch.setattr(Card, "timed", lambda self, calls, part: timing(next(given) if calls else 45.0))
    line = card.measure(monkeypatch, attention(131072, 64), 0.9)
    assert (line.us, line.by_turn["own"], line.x_floor) == (33.0, [30.0, 50.0, 33.0], 1.5)
    assert "3 turns within 60.6 %" in " ".join(ops.text(line).split())


def test_who_wants_peers_compiled_alone_does_not_wait() -> None:
    how = turns.plan("cuda", attention(131072, 64), 0.001)
    assert (how.turns, how.rest_s) == (turns.GPU_TURNS, 0.001)


def test_which_cases_are_hot_is_told_from_their_sizes() -> None:
    hot = {case.name for case in cases("cuda") if turns.plan("cuda", case, 0.5).each}
    routed = [case for case in cases("cuda") if case.family.startswith("k26") and case.op == "moe_block"]
    assert {case.name for case in routed if case.kind == "int4-bf16"} < hot
    assert {attention(keys, m).name for keys in (32768, 131072) for m in (4, 8, 16, 64)} < hot
    assert not [name for name in hot if name.startswith(("tiny", "k26-linear-int4"))]
    assert all(turns.plan("cpu", case, 9.0) == turns.Plan(5, 0.2) for case in cases("cpu"))
    case = attention(32768, 64)
    assert turns.expected_us(case) == pytest.approx(1e6 * work.of(case).flops / 8e14)
    case = next(case for case in routed if case.M == 1)
    assert turns.expected_us(case) == pytest.approx(1e6 * work.of(case).bytes / 4e12)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_orders_are_those_of_pairs_there_and_back(count: int) -> None:
    how, names = turns.Plan(4, 0.3, each=True), [str(i) for i in range(count)]
    orders = [how.order(names, turn) for turn in range(4)]
    assert orders[0] == names
    assert orders[1] == names[::-1]
    assert orders[2] == [*names[count // 2 :], *names[: count // 2]]
    assert orders[3] == orders[2][::-1]
    assert turns.Plan(4, 0.3).order(names, 3) == names


def test_a_fault_of_ours_ends_the_case() -> None:
    def fails() -> float:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        turns.take(turns.Plan(1, 0.0), {"own": turns.Side(fails)}, lambda: None)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("echo '1965, 512.25'", [1965.0, 512.25]),
        ("echo '1965, [N/A]'", []),
        ("echo unknown; exit 9", []),
        ("echo 1965, 512; exit 9", []),
        ("/bin/sleep 2; echo 1965, 512", []),
    ],
)
def test_the_cards_state_is_what_nvidia_smi_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, found: list[float]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$2" = GPU-77 ] && [ "$3" = --query-gpu=clocks.sm,power.draw ] || exit 3\n{says}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="77"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert turns.card() == found
    program.unlink()
    assert turns.card() == []
