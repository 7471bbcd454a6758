"""Two ledgers side by side: which cells broke, came nearer to their bounds, became slower, are missing or new.

Verdicts and margins compare anywhere, since the arithmetic is pinned. Times compare only where both runs name the same
CPU and GPUs, and over many cells rather than one: a cell of a small config takes milliseconds, and two runs of the same
code differ there by more than any bound worth having.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from harness.cells import Cell, Ledger, Verdict
from harness.matrix import parse

WORSE = 0.05  # of what is allowed: smaller moves of a margin are not worth a reader's time
SLOWER_RATIO, SLOWER_SECONDS = 1.5, 0.02  # one cell has to exceed both, because of the milliseconds above
TIMED = "decode"
HARDWARE = ("cpu", "gpus")

KINDS = ("broken", "worse", "slower", "missing", "mended", "better", "faster", "new")
"""What can have become of a cell, the most alarming first."""


@dataclass(frozen=True)
class Change:
    """One cell that is not what it was."""

    kind: str
    id: str
    host: str
    before: str
    after: str


@dataclass(frozen=True)
class Pace:
    """Times of a group of cells (precision, decoder, device, ranks): the median over the cells of new / old."""

    group: str
    ratio: float
    cells: int


@dataclass(frozen=True)
class Comparison:
    """``new`` against ``old``; ``changes`` in the order of ``KINDS``."""

    new: Ledger
    old: Ledger
    changes: tuple[Change, ...]
    paces: tuple[Pace, ...]
    untimed: str
    """Why no time could be compared, ``""`` if some could."""

    def of(self, *kinds: str) -> tuple[Change, ...]:
        """The changes of some kinds."""
        return tuple(change for change in self.changes if change.kind in kinds)


def percent(share: float) -> str:
    """A margin for a reader: ``43 %`` of what is allowed."""
    if math.isnan(share):
        return "NaN"
    return f"{100 * share:.0f} %" if share < 10 else "∞" if math.isinf(share) else f"{share:.3g} times"


def group(id: str) -> str:
    """The cells whose times or margins are looked at together: ``int4-ddtree-cuda``, ``int4-ddtree-cuda-x2``."""
    point = parse(id)
    ranks = [f"x{point.ranks}"] if point.ranks > 1 else []
    return "-".join([point.precision, point.decoder, point.device, *ranks])


def _hardware(environment: Mapping[str, str] | None) -> tuple[str, ...]:
    """Empty where the environment does not say what it runs on."""
    named = tuple((environment or {}).get(name, "") for name in HARDWARE)
    return named if any(named) else ()


def _matches(new: Ledger, old: Ledger) -> list[tuple[Cell, Cell | None]]:
    """Each cell of ``new`` with its counterpart: on the same host where ``old`` tells its hosts apart."""
    known = {(cell.id, cell.host if old.per_host else ""): cell for cell in old.cells}
    return [(cell, known.get((cell.id, cell.host if old.per_host else ""))) for cell in new.cells]


def _verdicts(now: Cell, then: Cell) -> Change | None:
    before, after = then.verdict.value, now.verdict.value
    if now.verdict is not Verdict.PASS:
        kind = "broken" if then.verdict is Verdict.PASS else ""
    elif then.verdict is not Verdict.PASS:
        kind = "mended"
    else:
        moved = now.margin - then.margin
        kind = "worse" if moved > WORSE else "better" if moved < -WORSE else ""
        before, after = percent(then.margin), percent(now.margin)
    return Change(kind, now.id, now.host, before, after) if kind else None


def _pace(now: Cell, then: Cell) -> Change | None:
    a, b = then.times[TIMED], now.times[TIMED]
    for kind, slow, fast in (("slower", b, a), ("faster", a, b)):
        if slow > SLOWER_RATIO * fast and slow - fast > SLOWER_SECONDS:
            return Change(kind, now.id, now.host, f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms")
    return None


def compare(new: Ledger, old: Ledger) -> Comparison:
    """Everything that changed. Cells on devices that ``new`` did not run on are left out."""
    changes: list[Change | None] = []
    ratios: dict[str, list[float]] = {}
    both_passed = same_hardware = False
    for now, then in _matches(new, old):
        if then is None:
            changes.append(Change("new", now.id, now.host, "", now.verdict.value))
            continue
        changes.append(_verdicts(now, then))
        if now.verdict is not Verdict.PASS or then.verdict is not Verdict.PASS:
            continue
        both_passed = True
        hardware = _hardware(new.environments.get(now.host))
        if not hardware or hardware != _hardware(old.environments.get(then.host)):
            continue
        same_hardware = True
        if now.times.get(TIMED, 0.0) > 0 and then.times.get(TIMED, 0.0) > 0:
            changes.append(_pace(now, then))
            ratios.setdefault(group(now.id), []).append(now.times[TIMED] / then.times[TIMED])
    devices = {parse(id).device for id in new.expected}
    gone = [id for id in old.expected if id not in set(new.expected) and parse(id).device in devices]
    changes += [Change("missing", id, "", "expected", "not in the matrix") for id in gone]
    untimed = ""
    if not both_passed:
        untimed = "no cell passed in both runs"
    elif not same_hardware:
        untimed = "no cell passed on the same CPU and GPUs in both runs"
    elif not ratios:
        untimed = f"no cell has a {TIMED} time in both runs"
    found = sorted((c for c in changes if c), key=lambda c: (KINDS.index(c.kind), c.id, c.host))
    paces = tuple(Pace(name, statistics.median(values), len(values)) for name, values in sorted(ratios.items()))
    return Comparison(new, old, tuple(found), paces, untimed)
