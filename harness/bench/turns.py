"""In how many turns a case, its floor and its peers are measured, in which order, and when the machine rests before.

A CPU's memory serves others too, who come and go. A GPU's clock falls where it comes to the card's power limit, and is
up again some tenths of a second later: what is measured right after a long hot run is up to a tenth slower.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.bench import work
from harness.bench.cases import Case

CPU_TURNS, GPU_TURNS = 5, 3
SETTLE = 0.2  # seconds until the threads of a CPU's peer, which look on for work for a while, sleep
REST = 0.3  # seconds in which a GPU's clock is up again
READ, MULTIPLY = 4e12, 8e14
"""Bytes and flops a second, about an H200's: what a case is expected to take must not hang on what was measured."""
HOT_US = 20.0
"""A call that is expected to take this long keeps the memory or the tensor cores busy enough for the power limit.

Shorter products' and attention's quartiles lay within 1.3 % of each other, these calls' up to 10 % apart."""
CARD_SECONDS = 0.5  # that nvidia-smi may take: it is asked twice a hot case
QUERY = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Plan:
    """How a case is measured."""

    turns: int
    rest_s: float
    """Seconds without work before a turn's first measurement."""
    each: bool = False
    """Whether the rest is before every measurement, and the order another one in every turn."""

    def order(self, names: Sequence[str], turn: int) -> list[str]:
        """As given, then backwards; then the same from halfway on, so that nobody always comes after the same one."""
        if not self.each:
            return list(names)
        at = turn // 2 * len(names) // ((self.turns + 1) // 2)
        turned = [*names[at:], *names[:at]]
        return turned[::-1] if turn % 2 else turned


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    timed: Callable[[], float]
    """Microseconds of a call, measured now."""
    ready: Callable[[], bool] = lambda: True
    """Asked in the first turn: whether it has something for the case."""
    guest: bool = False
    """Whether its fault is a line in the report and not the end of the case."""


def take(
    how: Plan, sides: Mapping[str, Side], rest: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """What each turn gave, by side, without those that had nothing or failed; and why a guest failed."""
    by_turn: dict[str, list[float]] = {name: [] for name in sides}
    errors: dict[str, str] = {}
    for turn in range(how.turns):
        for place, name in enumerate(how.order(list(by_turn), turn)):
            side = sides[name]
            try:
                if turn == 0 and not side.ready():
                    del by_turn[name]
                    continue
                if how.each or place == 0:
                    rest()
                by_turn[name].append(side.timed())
            except Exception as error:
                if not side.guest:
                    raise
                errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                del by_turn[name]
    return by_turn, errors


def expected_us(case: Case) -> float:
    """About what a call takes at an H200's ceilings, from sizes alone."""
    todo = work.of(case)
    return 1e6 * max(todo.bytes / READ, todo.flops / MULTIPLY)


def plan(device: str, case: Case, seconds: float) -> Plan:
    """For ``seconds`` of sampling, which a GPU's rest does not exceed: who only wants peers compiled does not wait."""
    if device == "cpu":
        return Plan(CPU_TURNS, SETTLE)
    hot = expected_us(case) >= HOT_US
    return Plan(GPU_TURNS, min(REST, seconds), each=hot)


def rest(device: str) -> None:
    """Let a GPU's clock come up again, where no `Plan` says when."""
    if device == "cuda":
        time.sleep(REST)


def card() -> list[float]:
    """The SM clock in MHz and the power in watts, a second's mean, of the GPU in use; empty where nobody says."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        said = subprocess.check_output([program, "-i", uuid, *QUERY], stderr=subprocess.DEVNULL, timeout=CARD_SECONDS)
        return [float(figure) for figure in said.split(b",")]
    except (OSError, subprocess.SubprocessError, ValueError):  # a figure beside the measurement, none of it
        return []
