"""``kdtree bench ops``: every operation at every chosen shape, beside its roofline, its floor and its peers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.bench import clock, targets, work
from harness.bench.cases import Case
from harness.bench.ceilings import Ceilings
from harness.bench.operands import Bench
from harness.bench.peers import Peer
from harness.protocol import EngineError

Say = Callable[[str], None]
COLD = 4  # times the last cache that operands rotate over
TURNS = {"cpu": 5, "cuda": 1}
"""A case, its floor and its peers take turns, so many: a CPU's memory serves others too, who come and go."""
TREE_TURNS = 4
"""Of attention on a GPU, whose clock falls where it comes to the card's power limit: two per cent are looked for."""
SETTLE = 0.2  # seconds until the threads of a peer, which look on for work for a while, sleep
SHARE_OF_MEMORY = 0.25  # of what is free, for the operands of one case


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
    """Time one case and whoever else can do it, in TURNS. Raises EngineError, MeasureError."""
    timer = clock.clock(bench.device)
    rotate = min(COLD * limits.cache_bytes, int(SHARE_OF_MEMORY * free_bytes(bench.device)))
    made = bench.calls(case, rotate)
    copies = len(made.calls)
    bare = bench.without_tree(case, made) if bench.device == "cuda" else {}
    turns = TREE_TURNS if bare else TURNS[bench.device]
    rotated = copies * made.bytes_each  # also with fewer samples: making the copies touched every one
    served: dict[str, Sequence[clock.Call]] = {}
    own: list[clock.Timing] = []
    floors: list[float] = []
    of_peers: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for turn in range(turns):
        if served and bench.device == "cpu":
            time.sleep(SETTLE)
        own.append(bench.timed(made.calls, seconds / turns))
        for name, twin in bare.items():
            of_peers.setdefault(name, []).append(bench.timed(twin, seconds / turns).us)
        todo = work.of(case, made.distinct())
        floors.append(limits.floor_us(todo.bytes))
        for peer in present:
            try:
                if turn == 0 and (calls := peer.serve(case, copies)) is not None:
                    served[peer.name] = calls
                if peer.name in served and peer.name not in errors:
                    of_peers.setdefault(peer.name, []).append(timer(served[peer.name], seconds / turns).us)
            except Exception as error:  # a peer's fault is a line in the report and not the end of it
                errors[peer.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    timing = clock.pooled(own)
    times = {name: statistics.median(us) for name, us in of_peers.items() if name not in errors}
    kind = "bf16" if case.kind.endswith("bf16") else "f32"  # what is multiplied, whatever is stored
    floor, x_floor = statistics.median(floors), statistics.median(t.us / f for t, f in zip(own, floors, strict=True))
    return Line(
        case=case.name,
        op=case.op,
        M=case.M,
        K=case.K,
        N=case.N,
        T=case.T,
        device=bench.device,
        us=timing.us,
        q1=timing.q1,
        q3=timing.q3,
        fastest=timing.fastest,
        samples=timing.samples,
        bytes=todo.bytes,
        flops=todo.flops,
        floor_us=floor,
        x_floor=x_floor,
        roofline=limits.roofline_us(todo.bytes, todo.flops, kind) / timing.us,
        cold=rotated >= COLD * limits.cache_bytes,
        peers=times,
        peer_errors=errors,
        targets=targets.verdicts(bench.device, case.name, case.M, timing.us, x_floor, times),
    )


def text(line: Line) -> str:
    """The line for a reader."""
    peers = [f"{name} {us / line.us:.2f}x" for name, us in line.peers.items()]
    peers += [f"{name} failed: {why}" for name, why in line.peer_errors.items()]
    goals = [f"target {goal}: {how}" for goal, how in line.targets.items()]
    figures = (
        f"{line.case:<44} {line.us:>10.1f} us [{line.q1:.1f}, {line.q3:.1f}]  {line.bytes / 1e6:>9.3f} MB"
        f" {line.flops / 1e9:>9.4f} GFLOP  {100 * line.roofline:>5.1f} % of the roofline"
        f"  {line.x_floor:.2f}x the floor{'' if line.cold else '  warm'}"
    )
    return "  ".join([figures, *peers, *goals])


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
