"""Cells shared between hosts of different speed: each takes a batch, comes back for more, and the slow come back less.

A batch is half of a host's fair share of what is left, by the speeds seen so far, so batches shrink towards the end and
all hosts finish together. What a host took and did not finish goes to the others; a host that finds nothing waits as
long as another might still give something back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

SHORTEST = 10.0  # seconds of work in a batch, if there is that much: starting one takes a few seconds


class Pool:
    """Cells that wait, are out with a host, or are done. Safe to use from one thread per host."""

    def __init__(self, cells: Sequence[str], hosts: Iterable[str], able: Callable[[str, str], bool]) -> None:
        """``able(host, cell)``: whether a host can run a cell. A single host takes all it can at once."""
        self._waiting = list(cells)
        self._out: dict[str, list[str]] = {host: [] for host in hosts}
        self._done: dict[str, int] = dict.fromkeys(self._out, 0)
        self._seconds: dict[str, float] = dict.fromkeys(self._out, 0.0)
        self._able = able
        self._alone = len(self._out) == 1
        self._changed = threading.Condition()
        self._stopped = False

    def take(self, host: str) -> list[str]:
        """The next batch for ``host``; empty when there will be nothing for it. Blocks while others might fail."""
        with self._changed:
            while not self._stopped:
                mine = [cell for cell in self._waiting if self._able(host, cell)]
                if mine:
                    batch = mine if self._alone else mine[: self._size(host, len(mine))]
                    taken = set(batch)
                    self._waiting = [cell for cell in self._waiting if cell not in taken]
                    self._out[host] = batch
                    return list(batch)
                if not any(self._able(host, cell) for other, out in self._out.items() if other != host for cell in out):
                    return []
                self._changed.wait()
        return []

    def _size(self, host: str, left: int) -> int:
        rates = {h: self._done[h] / self._seconds[h] for h in self._out if self._seconds[h] > 0 and self._done[h]}
        if host not in rates:
            return math.ceil(left / (4 * len(self._out)))  # small, to learn its speed
        typical = sum(rates.values()) / len(rates)
        total = sum(rates.get(h, typical) for h in self._out)
        return min(left, max(math.ceil(left * rates[host] / total / 2), math.ceil(rates[host] * SHORTEST)))

    def finish(self, host: str, done: Iterable[str], seconds: float) -> None:
        """``host`` has run ``done`` of its batch in ``seconds``; the rest of the batch waits again."""
        with self._changed:
            finished = set(done)
            self._done[host] += len(finished & set(self._out[host]))
            self._seconds[host] += seconds
            self._waiting = [cell for cell in self._out[host] if cell not in finished] + self._waiting
            self._out[host] = []
            self._changed.notify_all()

    def leave(self, host: str) -> list[str]:
        """``host`` takes no more; what it gives back."""
        with self._changed:
            returned = self._out.pop(host, [])
            self._waiting = returned + self._waiting
            self._changed.notify_all()
            return returned

    def stop(self) -> None:
        """Nobody gets anything any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def done(self) -> Mapping[str, int]:
        """Cells finished by host."""
        return dict(self._done)
