"""Find arrivals at a barrier ahead of the reads that they tell of, in the machine code of Hopper.

A warp that has read a slot of a ring in shared memory arrives at the barrier for which the thread that fills the ring
waits, and the copy engine writes there next. A read (``LDS``) gives its result later, and says so on a scoreboard; the
compiler puts the arrival ahead of the instruction that waits for the scoreboard, since what it computes touches no
memory. Then a slot is told free while it is still read: results are wrong only in a busy multiprocessor.

Guarantees: pure functions of what ``cuobjdump -sass`` prints, encodings included; every way through a kernel from a
read to the first instruction that waits for it is followed as in ``harness/machine_code.py``. Reads of less than eight
bytes a lane are of flags and the like and do not count, nor do arrivals that announce bytes to come: they are of the
thread that fills.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.machine_code import Instruction, following, kernels, reached

_READ = re.compile(r"(?:@!?U?P[T\d]\s+)?(?:LDS(?:\.U)?\.(?:64|128)|LDSM\.\S+)\s")
_ARRIVAL = re.compile(r"(?:@!?U?P[T\d]\s+)?SYNCS\.ARRIVE\.TRANS64\.A1T0\s")
NO_SCOREBOARD = 7


@dataclass(frozen=True)
class EarlyArrival:
    """An arrival that a read may still be under way at."""

    kernel: str
    arrival: Instruction
    read: Instruction

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.arrival.address:04x} {self.arrival.text} arrives while"
            f" {self.read.address:04x} {self.read.text} is under way: put reads_done() (barrier.cuh) before it"
        )


def scoreboard(instruction: Instruction) -> int:
    """The one, of six, on which an instruction says that its result is there; NO_SCOREBOARD if on none."""
    return instruction.control >> 5 & 7


def waits_for(instruction: Instruction) -> int:
    """The scoreboards that an instruction waits for before it is issued, a bit each."""
    return instruction.control >> 11 & 63


def _ahead_of(kernel: str, body: Sequence[Instruction], at: Mapping[int, int], read: int) -> set[EarlyArrival]:
    """The arrivals on the ways from one read to the waits for it."""
    board = 1 << scoreboard(body[read])

    def waited(index: int) -> bool:
        return bool(waits_for(body[index]) & board)

    ways = reached(following(body, read, at), lambda index: () if waited(index) else following(body, index, at))
    arrivals = (index for index in ways if _ARRIVAL.match(body[index].text) and not waited(index))
    return {EarlyArrival(kernel, body[index], body[read]) for index in arrivals}


def early_arrivals(sass: str) -> list[EarlyArrival]:
    """Every arrival ahead of the wait for a read, by kernel and address."""
    found: set[EarlyArrival] = set()
    for kernel, body in kernels(sass).items():
        at = {instruction.address: index for index, instruction in enumerate(body)}
        for index, instruction in enumerate(body):
            if _READ.match(instruction.text) and scoreboard(instruction) != NO_SCOREBOARD:
                found |= _ahead_of(kernel, body, at, index)
    return sorted(found, key=lambda early: (early.kernel, early.arrival.address, early.read.address))
