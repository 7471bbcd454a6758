"""``kdtree bench ops``: every operation at every chosen shape, beside its roofline, its floor and its peers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.bench import clock, targets, turns, work
from harness.bench.cases import Case
from harness.bench.ceilings import COLD, Ceilings
from harness.bench.operands import Bench, Calls
from harness.bench.peers import Peer
from harness.describe import filled
from harness.protocol import EngineError

Say = Callable[[str], None]
SHARE_OF_MEMORY = 0.25  # of what is free, for the operands of one case
OWN, FLOOR = "own", "floor"
"""In a line's ``by_turn``, beside peers' names."""


@dataclass(frozen=True)
class Line:
    """One case's figures. Times in microseconds."""

    case: str
    op: str
    M: int
    K: int
    N: int
    T: int
    device: str
    us: float
    q1: float
    q3: float
    fastest: float
    samples: int
    bytes: int
    flops: int
    floor_us: float
    x_floor: float
    roofline: float
    """Share of the roofline: 1 would be the ceilings themselves."""
    cold: bool
    """Whether the operands exceeded four times the last cache."""
    peers: dict[str, float]
    turns: int
    rest_s: float
    """Seconds without work before a turn, before each measurement of several turns on a GPU."""
    by_turn: dict[str, list[float]]
    """Microseconds that each turn gave: ``own``, ``floor`` and peers."""
    card: dict[str, list[float]] = field(default_factory=dict)
    """``before`` and ``after`` a hot case's measurements: a GPU's SM clock in MHz and its power in watts."""
    peer_errors: dict[str, str] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def free_bytes(device: str) -> int:
    """Memory that is free on the device."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure(bench: Bench, case: Case, limits: Ceilings, present: Sequence[Peer], seconds: float) -> Line:
    """Time one case and whoever else can do it, as `turns.plan` says. Raises EngineError, MeasureError."""
    timer = clock.clock(bench.device)
    rotate = min(COLD * limits.cache_bytes, int(SHARE_OF_MEMORY * free_bytes(bench.device)))
    made = bench.calls(case, rotate)
    how = turns.plan(bench.device, case, seconds)
    served: dict[str, Sequence[clock.Call]] = {}
    own: list[clock.Timing] = []
    card: dict[str, list[float]] = {}

    def ours() -> float:
        own.append(bench.timed(made.calls, seconds / how.turns))
        return own[-1].us

    def twin(calls: Sequence[clock.Call]) -> turns.Side:
        return turns.Side(lambda: bench.timed(calls, seconds / how.turns).us)

    def guest(peer: Peer) -> turns.Side:
        def ready() -> bool:
            if (calls := peer.serve(case, len(made.calls))) is not None:
                served[peer.name] = calls
            return calls is not None

        return turns.Side(lambda: timer(served[peer.name], seconds / how.turns).us, ready, guest=True)

    def rest() -> None:
        if served or bench.device == "cuda":
            time.sleep(how.rest_s)
        if how.each and not card:
            card["before"] = turns.card()

    sides = {OWN: turns.Side(ours)}  # first: it draws the experts whose bytes the floor reads
    if bench.device == "cuda":
        sides |= {name: twin(calls) for name, calls in bench.without_tree(case, made).items()}
    sides[FLOOR] = turns.Side(lambda: limits.floor_us(work.of(case, made.distinct()).bytes))
    sides |= {peer.name: guest(peer) for peer in present}
    by_turn, errors = turns.take(how, sides, rest)
    if how.each:
        card["after"] = turns.card()
    return _line(bench.device, case, limits, made, how, own, by_turn, errors, card)


def _line(
    device: str, case: Case, limits: Ceilings, made: Calls, how: turns.Plan, own: Sequence[clock.Timing],
    by_turn: dict[str, list[float]], errors: dict[str, str], card: dict[str, list[float]],
) -> Line:  # fmt: skip
    """The figures of what was measured."""
    timing = clock.pooled(own)
    times = {name: statistics.median(us) for name, us in by_turn.items() if name not in (OWN, FLOOR)}
    floors, todo = by_turn[FLOOR], work.of(case, made.distinct())
    kind = "bf16" if case.kind.endswith("bf16") else "f32"  # what is multiplied, whatever is stored
    x_floor = statistics.median(t.us / f for t, f in zip(own, floors, strict=True))
    rotated = len(made.calls) * made.bytes_each  # also with fewer samples: making the copies touched every one
    return Line(
        case=case.name,
        op=case.op,
        M=case.M,
        K=case.K,
        N=case.N,
        T=case.T,
        device=device,
        us=timing.us,
        q1=timing.q1,
        q3=timing.q3,
        fastest=timing.fastest,
        samples=timing.samples,
        bytes=todo.bytes,
        flops=todo.flops,
        floor_us=statistics.median(floors),
        x_floor=x_floor,
        roofline=limits.roofline_us(todo.bytes, todo.flops, kind) / timing.us,
        cold=rotated >= COLD * limits.cache_bytes,
        peers=times,
        turns=how.turns,
        rest_s=how.rest_s,
        by_turn=by_turn,
        card={when: figures for when, figures in card.items() if figures},
        peer_errors=errors,
        targets=targets.verdicts(device, case.name, case.M, timing.us, x_floor, times),
    )


def _state(line: Line) -> list[str]:
    """How far a case's turns lay apart, and what became of the GPU's clock."""
    own = line.by_turn[OWN]
    said = [f"{line.turns} turns within {100 * (max(own) - min(own)) / line.us:.1f} %"] if line.turns > 1 else []
    clocks = [f"{line.card[when][0]:.0f}" for when in ("before", "after") if when in line.card]
    return [*said, f"{' to '.join(clocks)} MHz"] if clocks else said


def text(line: Line) -> str:
    """The line for a reader: what it took, and behind an indent what that is to be compared with."""
    peers = [f"{name} {us / line.us:.2f}x" for name, us in line.peers.items()]
    peers += [f"{name} failed: {why}" for name, why in line.peer_errors.items()]
    goals = [f"target {goal}: {how}" for goal, how in line.targets.items()]
    time = f"{line.case:<52} {line.us:>10.1f} us [{line.q1:.1f}, {line.q3:.1f}]  {line.x_floor:.2f}x the floor"
    work = f"{line.bytes / 1e6:.3f} MB, {line.flops / 1e9:.4f} GFLOP, {100 * line.roofline:.1f} % of the roofline"
    compared = "; ".join([work, *([] if line.cold else ["warm"]), *peers, *goals, *_state(line)])
    return f"{time}\n{filled(f'    {compared}', '    ')}"


def run(
    device: str, chosen: Sequence[Case], limits: Ceilings, present: Sequence[Peer], seconds: float, say: Say,
    keep: Callable[[Line], None] = lambda line: None,
) -> tuple[list[Line], dict[str, str]]:  # fmt: skip
    """Every case in turn; the lines, and why a case has none. ``keep`` gets each line as it is measured."""
    lines: list[Line] = []
    failed: dict[str, str] = {}
    with Bench(device) as bench:
        for at, case in enumerate(chosen, 1):
            try:
                line = measure(bench, case, limits, present, seconds)
            except (EngineError, clock.MeasureError, MemoryError) as error:
                failed[case.name] = f"{type(error).__name__}: {error}"
                say(f"[{at}/{len(chosen)}] {case.name}: {failed[case.name]}")
                continue
            lines.append(line)
            keep(line)
            say(f"[{at}/{len(chosen)}] {text(line)}")
    return lines, failed
