"""Whether this machine's memory has room for the large configs of a run, asked before anything is made or loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from harness.matrix import Point, is_large

REST_BYTES = 1 << 30  # a worker's own: torch, activations, cache, a step's rows
MAKING_BYTES = 7 << 30  # of the large bundles, two at a time: measured 4.8 and 2.0 GiB, mapped files included


class TooLittleMemory(Exception):
    """The message has the figures and the remedy."""


def available() -> int:
    """Bytes that a new process may take, the control group's limit counted in; 0 if the system does not say."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    if not found and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    group = Path("/sys/fs/cgroup")
    limit = _lines(group / "memory.max")
    if limit and limit[0].isdigit():
        reclaimable = [
            int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")
        ]
        found.append(int(limit[0]) - int(_lines(group / "memory.current")[0]) + sum(reclaimable))
    return min(found, default=0)


def session_bytes(config: str, device: str) -> int:
    """Host memory that a session of a config takes: on the CPU its weights, mapped or drawn."""
    from refs import recipe  # numpy: for runs alone

    found = recipe.load(config)
    if device != "cpu":
        return REST_BYTES
    width = {"f32": 4, "bf16": 2, "u8": 1}
    stored = (found.model.stored(precision).values() for precision in found.precisions)
    return REST_BYTES + max(sum(math.prod(shape) * width[kind] for shape, kind in tensors) for tensors in stored)


def check(points: Iterable[Point], free: int | None = None) -> None:
    """`TooLittleMemory` if the large configs among ``points``, two of which a worker may hold at once, do not fit."""
    needs = {(p.config, p.device): session_bytes(p.config, p.device) for p in points if is_large(p.config)}
    if not needs:
        return
    need = max(MAKING_BYTES, sum(sorted(needs.values())[-2:]))
    have = available() if free is None else free
    if have and need > have:
        largest = max(needs, key=lambda key: needs[key])[0]
        raise TooLittleMemory(
            f"the large configs need {need / 2**30:.1f} GiB of host memory at once, {have / 2**30:.1f} GiB are free; "
            f"end what holds it, run them one by one (-k {largest}), or leave --scale out"
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
