"""What starts next: a function of the stages, what became of each so far, and the seconds that are left.

Stages begin in their order. One that waits for another is overtaken by those behind it; one that waits for room, or for
quiet, is not. What runs beside the others needs no room. A stage that would not end in time does not begin (one that
keeps what it has done, not in a third of its time), nor does what prepares it, and a stage whose need has not passed
has no chance either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.evidence.stages import Stage

WAITING, RUNNING, PASSED, FAILED = "waiting", "running", "passed", "failed"
OUT_OF_TIME, INTERRUPTED, NOT_NEEDED = "out of time", "interrupted", "no longer needed"
NO_TIME, NOT_CHOSEN = "not started: no time left", "not chosen"


@dataclass(frozen=True)
class Decision:
    """``start``: in this order. ``dropped``: why a stage will not run. ``stop``: nothing waits for these any more."""

    start: tuple[str, ...]
    dropped: Mapping[str, str]
    stop: tuple[str, ...]
    quiet: bool
    """What runs beside is suspended."""


def decide(stages: Mapping[str, Stage], states: Mapping[str, str], left: float) -> Decision:
    """``states``: of every chosen stage, and of those that have passed before; what is not there is no obstacle."""
    states = dict(states)
    dropped: dict[str, str] = {}
    # What prepares comes last, as what is dropped has no turn that another would wait for.
    while gone := _gone(stages, states, left, prepares=False) or _gone(stages, states, left, prepares=True):
        dropped |= gone
        states |= gone
    running = [name for name in stages if states.get(name) == RUNNING]
    taken = sum(stages[name].share for name in running if not stages[name].beside)
    quiet, full = any(stages[name].quiet for name in running), False
    start = []
    for name in (name for name in stages if states.get(name) == WAITING):
        stage = stages[name]
        if any(states.get(other) in (WAITING, RUNNING) for other in stage.waits_for):
            continue
        if stage.beside:
            start.append(name)
        elif not full:
            full = quiet or taken + stage.share > 1
            if not full:
                start.append(name)
                taken, quiet = taken + stage.share, stage.quiet
    if quiet:
        start = [name for name in start if not stages[name].beside]
    stop = [name for name in running if stages[name].prepares and _unwanted(stages, states, name)]
    return Decision(tuple(start), dropped, tuple(stop), quiet)


def _dependents(stages: Mapping[str, Stage], states: Mapping[str, str], name: str) -> list[str]:
    """The chosen stages that wait for this one."""
    return [other for other in stages if other in states and name in stages[other].waits_for]


def _unwanted(stages: Mapping[str, Stage], states: Mapping[str, str], name: str) -> bool:
    """Whether stages were to wait for this one and none does any more."""
    dependents = _dependents(stages, states, name)
    return bool(dependents) and not any(states[other] == WAITING for other in dependents)


def _gone(stages: Mapping[str, Stage], states: Mapping[str, str], left: float, *, prepares: bool) -> dict[str, str]:
    """Why stages of one kind will not run, of those that will not."""
    kind = (name for name, stage in stages.items() if stage.prepares == prepares)
    return {name: why for name in kind if (why := _obstacle(stages, states, name, left))}


def _obstacle(stages: Mapping[str, Stage], states: Mapping[str, str], name: str, left: float) -> str:
    """Why a waiting stage will not run, or ``""``."""
    stage = stages[name]
    if states.get(name) != WAITING:
        return ""
    for need in stage.needs:
        if states.get(need, PASSED) not in (WAITING, RUNNING, PASSED):
            return NO_TIME if states[need] == NO_TIME else f"not started: {need} {states[need]}"
    if any(states.get(other) == NO_TIME for other in stage.waits_for):
        return NO_TIME
    if stage.prepares and _unwanted(stages, states, name):
        return NO_TIME
    return NO_TIME if _least(stages, states, name) > left else ""


def _least(stages: Mapping[str, Stage], states: Mapping[str, str], name: str) -> float:
    """Seconds from now until a stage has ended, or shown enough; of one that prepares, the first that waits for it.

    That one's turn comes after those before it, while which what measures suspends what prepares.
    """
    stage, order = stages[name], list(stages)
    ends = []
    for other in _dependents(stages, states, name):
        if stage.prepares and states[other] == WAITING:
            before = [stages[one] for one in order[: order.index(other)] if states.get(one) in (WAITING, RUNNING)]
            turn = sum(one.seconds * one.share for one in before if not (one.beside or one is stage))
            quiet = sum(one.seconds for one in before if one.quiet) if stage.beside else 0.0
            ends.append(max(turn, stage.seconds + quiet) + stages[other].least)
    return min(ends, default=stage.least)


def chosen(
    stages: Mapping[str, Stage], only: tuple[str, ...], skip: tuple[str, ...], passed: frozenset[str]
) -> set[str]:
    """What is to run: of ``only`` (empty: all) what is not skipped and has not ``passed`` before, and what prepares it.

    What prepares runs wherever something waits for it, and by itself where ``only`` names it.
    """
    wanted = {n for n, stage in stages.items() if n in only or not (only or stage.prepares)} - passed
    found, todo = set(), sorted(wanted - set(skip))
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [o for o in stages[name].waits_for if stages[o].prepares and o not in skip]
    return found
