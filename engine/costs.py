"""What a forward of n rows costs on this machine, measured once, so that a tree grows only while it pays.

A draft tree's next node is worth its row only as long as (expected tokens of a forward) / (cost of the forward) rises
(CaDDTree, arXiv 2606.01813). `docs/model.md`, Cut, states the rule that the engine applies to every tree of a request
that has ``costs``; here they come from. The output does not depend on them: it is AR's whatever the tree.

Costs are times of whole rounds, drafter included, at a few widths, the fastest of several runs; between them they are
interpolated, and never fall. They are kept in ``costs/`` of the build cache under everything that they depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.build import cache_folder
from harness.files import write_atomic
from harness.protocol import DecodeRequest, RequestError, Session

LIMIT = 63
"""Nodes of the largest tree that ``auto`` considers."""
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS = 32  # of a decode that is timed: a few rounds where much is accepted
RUNS = 3
UNPAYABLE = 1e30  # a cost at which no tree ends


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a round by the rows of its forward, ascending; the first width is 1."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def by_nodes(self, budget: int) -> tuple[float, ...]:
        """[budget + 1]: seconds with 0, 1, ... nodes; beyond the widest that was measured the last slope goes on."""
        seconds = np.maximum.accumulate(self.seconds)
        wanted = np.arange(1, budget + 2)
        found = np.interp(wanted, self.rows, seconds)
        if len(self.rows) > 1:
            slope = (seconds[-1] - seconds[-2]) / (self.rows[-1] - self.rows[-2])
            found = found + np.maximum(wanted - self.rows[-1], 0) * slope
        return tuple(float(value) for value in found)


def measure(session: Session, request: DecodeRequest, budget: int) -> StepCosts:
    """Time rounds of ``request`` whose trees are cut to each of WIDTHS rows. Raises EngineError.

    The tree is built for ``budget`` nodes and cut, as in the runs that the costs are for, so that what a wider launch
    costs whatever is in it is in every figure.
    """
    widths = [width for width in WIDTHS if width <= budget + 1]
    if widths[-1] != budget + 1:
        widths.append(budget + 1)
    best: dict[int, float] = {}
    for run in range(RUNS + 1):  # the first one warms caches, graphs and threads
        for width in widths:
            costs = [UNPAYABLE] * (budget + 1)
            costs[width - 1] = 1.0
            asked = replace(request, max_tokens=TOKENS, budget=budget, costs=costs, temperature=0.0, record=True)
            done = session.decode(asked)
            timed = zip(done.round_seconds, done.rounds, strict=True)
            full = [seconds for seconds, r in timed if len(r.tokens) == width]
            if run and full:  # a tree cannot always be as large, at the end of a text for one
                best[width] = min(best.get(width, full[0]), *full)
    widths = [width for width in widths if width in best]
    if not widths or widths[0] != 1:
        raise RequestError("no round could be timed: is max_tokens 0, or the context full?")
    return StepCosts(tuple(widths), tuple(best[width] for width in widths))


def kept(identity: Mapping[str, str], make: Callable[[], StepCosts], folder: Path | None = None) -> StepCosts:
    """What ``make`` measured when it was first asked for under ``identity``; an unreadable file is measured again."""
    home = folder or cache_folder() / "costs"
    key = json.dumps(dict(identity), sort_keys=True)
    path = home / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    try:
        stored = json.loads(path.read_text("utf-8"))
        return StepCosts(tuple(map(int, stored["rows"])), tuple(map(float, stored["seconds"])))
    except (OSError, ValueError, KeyError, TypeError):
        made = make()
        content = {"identity": dict(identity), "rows": made.rows, "seconds": made.seconds}
        with contextlib.suppress(OSError):  # a cache that this user may only read: measured again the next time
            write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())
        return made


def auto(session: Session, request: DecodeRequest, identity: Mapping[str, str], limit: int = LIMIT) -> DecodeRequest:
    """``request`` with a budget of ``limit`` and the costs by which its trees are cut.

    ``session`` is opened for at least ``limit + 1`` rows; measuring resets it. Raises EngineError.
    """
    if request.draft is None:
        raise RequestError("budget auto: AR has no tree; name a drafter")
    asked = {
        **identity,
        "budget": str(limit),
        "drafter": type(request.draft).__name__,
        "block": str(request.block_size),
    }
    context = 1 << (len(request.prompt) + request.max_tokens - 1).bit_length()  # attention's share grows with it
    found = kept({**asked, "context": str(context)}, lambda: measure(session, request, limit))
    return replace(request, budget=limit, costs=found.by_nodes(limit))


def identity(library: Path, device: str, file: Path, precision: str, ranks: int) -> dict[str, str]:
    """What costs depend on: the machine, the build, the model and how it is run."""
    from harness.environment import cpu

    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
    else:
        threads = os.environ.get("KDTREE_THREADS") or os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())
        name = f"{cpu()[0]}, {threads} threads, {os.environ.get('KDTREE_ISA', 'best')}"
    with open(file, "rb") as opened:
        head = opened.read(64)  # the size of the file and the checksum over the checksums of everything in it
    return {
        "device": name,
        "engine": library.parent.name,
        "model": hashlib.sha256(head).hexdigest(),
        "precision": precision,
        "ranks": str(ranks),
    }


def summary(costs: Sequence[float]) -> str:
    """A few of the costs, relative to the first."""
    shown = [n for n in (1, 3, 7, 15, 31, 63, 127) if n < len(costs)]
    return ", ".join(f"{n + 1} rows {costs[n] / costs[0]:.2f}" for n in shown)
