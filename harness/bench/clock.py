"""Times as medians with their spread: by the wall clock on a CPU, from the device's own record on a GPU.

A GPU's operations run on the engine's private stream and their bindings wait for each call, so that neither torch's
events nor its graphs see them; the record (CUPTI, through torch's profiler) does, without the host's share. What is
timed there for peers and floors is timed the same way, so that ratios compare like with like.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]
FEWEST, MOST = 5, 400


class MeasureError(Exception):
    """A measurement gave nothing that means anything."""


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median of ``samples`` calls, its quartiles and the fastest."""

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


def busy(intervals: Sequence[tuple[float, float]]) -> float:
    """The time that at least one of the intervals covers: overlapping launches count once, gaps not at all."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def per_call(intervals: Sequence[tuple[float, float]], count: int) -> list[float]:
    """Busy time of each of ``count`` calls that all launched equally often; `MeasureError` if they did not."""
    if count < 1 or not intervals or len(intervals) % count:
        raise MeasureError(f"{len(intervals)} launches were recorded for {count} calls")
    ordered, each = sorted(intervals), len(intervals) // count
    return [busy(ordered[i : i + each]) for i in range(0, len(ordered), each)]


def gpu(calls: Sequence[Call], seconds: float) -> Timing:
    """As `wall`, kernel time alone: copies and fills around a call (its arguments, its guard zones) are left out."""
    import torch

    for call in calls:  # a first call may compile, or plan its launches
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    each = max(time.perf_counter() - begin, 1e-5)
    count = min(max(FEWEST, int(seconds / each)), MOST)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for i in range(count):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    spans = [
        (float(event.time_range.start), float(event.time_range.end))
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return summarise(per_call(spans, count))


def clock(device: str) -> Callable[[Sequence[Call], float], Timing]:
    """The clock of ``cpu`` or ``cuda``."""
    return gpu if device == "cuda" else wall
