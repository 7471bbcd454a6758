"""Which rank a failed job is to blame on, and what its report says: that rank's log first."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.ranks.watch import SILENT

LOG_LINES = 40
OUTPUT = "torchrun.log"
"""Of a job's folder: what torchrun itself printed."""


@dataclass
class Rank:
    """What is known of one rank of this host."""

    number: int
    pid: int
    heard: float = field(default_factory=time.monotonic)
    words: tuple[str, str] | None = None
    silent: bool = False
    left: float | None = None
    """When its line broke, monotonic seconds."""

    @property
    def gone(self) -> bool:
        return self.left is not None

    @property
    def done(self) -> bool:
        """It was told to end, and did."""
        return self.words is not None and self.words[0] == "done"

    @property
    def in_trouble(self) -> bool:
        return not self.done and (self.gone or self.silent or self.words is not None)


def blame(ranks: Iterable[Rank], folder: Path, status: int | None) -> tuple[str, list[int]]:
    """The first line of the verdict, and the ranks by guilt; ``status`` is torchrun's, if it has ended.

    Of several that died without a word the one is to blame whose end torchrun tells of: when it sees one end, it ends
    the others. Before it has told, the one that left first, as seen here: on a busy machine that may be another.
    """

    def ending(rank: Rank) -> str:
        return _ending(folder, rank.pid)

    known = sorted(ranks, key=lambda rank: rank.number)
    kinds: list[tuple[str, list[Rank]]] = [
        ("diverged", [r for r in known if r.words and r.words[0] == "diverged"]),
        ("hung", [r for r in known if r.silent]),
        ("died", sorted((r for r in known if r.gone and not r.words), key=lambda r: (not ending(r), r.left or 0.0))),
        ("failed", [r for r in known if r.words and r.words[0] == "error"]),
        ("waited", [r for r in known if r.words and r.words[0] == "waited"]),
    ]
    order = [rank.number for _, some in kinds for rank in some]
    for kind, some in kinds:
        if not some:
            continue
        rank = some[0]
        said = rank.words[1] if rank.words else ""
        text = {
            "hung": f"was not heard of for {SILENT:.0f} s (pid {rank.pid}): stopped, or stuck",
            "died": f"died{ending(rank)} (pid {rank.pid})",
            "waited": f"lost the others: {said}",
        }.get(kind, f"{kind}: {said}")
        return f"rank {rank.number} {text}", order
    return f"torchrun ended with status {status} before every rank had come", order


def told(ranks: Iterable[Rank], folder: Path) -> bool:
    """Whether torchrun has said of everyone who died without a word how."""
    return all(_ending(folder, rank.pid) for rank in ranks if rank.gone and not rank.words)


def _ending(folder: Path, pid: int) -> str:
    """How torchrun says that a process ended."""
    found = re.search(rf"exitcode\s*:?\s*(-?\d+)[^\n]*?pid:\s*{pid}\b", (folder / OUTPUT).read_text("utf-8", "replace"))
    if not found:
        return ""
    code = int(found[1])
    return f" of {signal.Signals(-code).name}" if code < 0 else f" with status {code}"


def report(line: str, order: Sequence[int], numbers: Sequence[int], first: int, folder: Path) -> str:
    """The verdict's first line, then the ranks' logs, those in ``order`` first; ``first`` is this host's first rank."""
    parts = [line]
    for number in [*order, *(n for n in numbers if n not in order)]:
        files = sorted(folder.glob(f"*/attempt_0/{number - first}/std*.log"), reverse=True)
        said = [text for file in files for text in _tail(file)] or ["(nothing)"]
        parts += [f"  log of rank {number}:", *(f"    {text}" for text in said)]
    parts += ["  torchrun:", *(f"    {text}" for text in _tail(folder / OUTPUT))]
    return "\n".join([*parts, f"  all of it: {folder}"])


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
