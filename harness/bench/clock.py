"""Times as medians with their spread: by the wall clock on a CPU, by events around a graph's replay on a GPU.

On a GPU the calls of a case follow each other in one graph, the engine's through its bindings' sequences (they run on
its own stream), peers' and floors' through torch's: the time of a call is the replay's over their number, gaps between
launches included, the host's share not. What is compared is timed the same way.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
FEWEST, MOST = 5, 400  # samples
NODES, SPAN = 40, 2000.0  # calls of a replay, or their microseconds: what starts the graph must not show


class MeasureError(Exception):
    """A measurement gave nothing that means anything."""


@dataclass(frozen=True)
class Timing:
    """The median of ``samples`` calls, its quartiles and the fastest: microseconds, in `project` seconds."""

    us: float
    q1: float
    q3: float
    fastest: float
    samples: int


def summarise(samples: Sequence[float]) -> Timing:
    """`MeasureError` without samples."""
    if not samples:
        raise MeasureError("no samples")
    if len(samples) < 2:
        return Timing(samples[0], samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, q1, q3, min(samples), len(samples))


def pooled(timings: Sequence[Timing]) -> Timing:
    """Of several turns: medians of what each gave, the fastest of all, all samples. `MeasureError` without any."""
    if not timings:
        raise MeasureError("no samples")
    us, q1, q3 = (statistics.median(values) for values in zip(*((t.us, t.q1, t.q3) for t in timings), strict=True))
    return Timing(us, q1, q3, min(t.fastest for t in timings), sum(t.samples for t in timings))


def wall(calls: Sequence[Call], seconds: float) -> Timing:
    """Each call in turn, round and round, for about ``seconds`` and at least FEWEST times, after one to warm up."""
    calls[0]()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < FEWEST or (time.perf_counter() < end and len(samples) < MOST):
        call = calls[(len(samples) + 1) % len(calls)]
        begin = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return summarise(samples)


def in_turn(calls: Sequence[Call], each: float) -> list[Call]:
    """The calls of a replay: every one, and round and round up to NODES or SPAN if one takes ``each`` microseconds."""
    count = max(len(calls), min(NODES, math.ceil(SPAN / max(each, 1e-3))))
    return [calls[i % len(calls)] for i in range(count)]


def replays(replay: Callable[[], float], count: int, seconds: float) -> Timing:
    """``replay`` runs ``count`` calls and gives their microseconds; one to warm up, then at least FEWEST samples."""
    replay()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < FEWEST or (time.perf_counter() < end and len(samples) < MOST):
        samples.append(replay() / count)
    return summarise(samples)


def between_events(run: Call, stream: Any = None) -> Callable[[], float]:
    """A replay for `replays`: ``run`` between two events on a torch stream (default: the current one), microseconds."""
    import torch

    on = stream or torch.cuda.current_stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        begin.record(on)
        run()
        end.record(on)
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    return replay


def gpu(calls: Sequence[Call], seconds: float) -> Timing:
    """Calls of torch, or of whatever launches on its current stream, as one graph."""
    import torch

    for call in calls:  # a first call may compile, or plan its launches
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    noted = in_turn(calls, between_events(calls[0])())
    with torch.cuda.graph(graph):
        for call in noted:
            call()
    return replays(between_events(graph.replay), len(noted), seconds)


def clock(device: str) -> Callable[[Sequence[Call], float], Timing]:
    """The clock of peers and ceilings on ``cpu`` or ``cuda``; of the engine's calls see `harness.bench.operands`."""
    return gpu if device == "cuda" else wall
