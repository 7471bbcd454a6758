"""Find writes to registers that an asynchronous tensor core product still reads, in the machine code of Hopper.

A ``wgmma`` whose A operand is in registers (``HGMMA R24, R56, gdesc[...]``) reads them until a ``WARPGROUP.DEPBAR`` has
waited for its group. The compiler sees no use of them after the instruction and may give them to what comes next; then
results are wrong only where warpgroups compete for the tensor cores, which tests seldom make them do.

Guarantees: pure functions of what ``cuobjdump -sass`` prints; every way through a kernel from a product to the wait for
it is followed, branches by both ends. Not followed: jumps to an address in a register (``BRX``), and back from a
``RET``, for which the line after the ``CALL`` stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

State = TypeVar("State")

OPERAND_REGISTERS = 4
"""32-bit registers of an A operand: 64 rows of 32 bytes over 128 threads, whatever the type."""

MOST_GROUPS = 8
"""Groups that a wait can leave in flight are at most 7: beyond that many, states need not be told apart."""

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_CONTROL = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_PARTS = re.compile(r"(?:@(!?U?P[T\d])\s+)?([A-Z][A-Z0-9_.]*)\s*(.*)")
_PRODUCT = re.compile(r"[A-Z]GMMA\.\S+ R\d+, [-|~]?R(\d+)[^,]*, gdesc")
_WAIT = re.compile(r"(?:@U?PT )?WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_NO_RESULT = ("BAR", "CALL", "NANOSLEEP", "WARPSYNC")
"""Instructions whose first operand may be a register that they read."""


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    text: str
    """Without address, encoding and semicolon; a predicate stands before it."""
    control: int = 0
    """The upper 23 bits of its encoding, which say when it may be issued; 0 where no encoding is printed."""


@dataclass(frozen=True)
class Hazard:
    """A write to a register that a product in flight reads."""

    kernel: str
    write: Instruction
    product: Instruction

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.write.address:04x} {self.write.text} writes an operand of"
            f" {self.product.address:04x} {self.product.text} that is still in flight"
        )


def kernels(sass: str) -> dict[str, list[Instruction]]:
    """The instructions of every function that ``cuobjdump -sass`` prints."""
    found: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in sass.splitlines():
        if named := re.search(r"Function : (\S+)", line):
            body = found.setdefault(named.group(1), [])
        elif matched := _LINE.match(line):
            body.append(Instruction(int(matched.group(1), 16), matched.group(2)))
        elif (upper := _CONTROL.match(line)) and body:
            body[-1] = replace(body[-1], control=int(upper.group(1), 16) >> 41)
    return found


def operand(text: str) -> frozenset[int]:
    """The registers that an asynchronous product reads after it was issued; none if A lies in shared memory."""
    found = _PRODUCT.search(text)
    return frozenset(range(int(found.group(1)), int(found.group(1)) + OPERAND_REGISTERS)) if found else frozenset()


def _width(name: str) -> int:
    """How many registers the result of an instruction has."""
    head, *rest = name.split(".")
    width = 1
    if "128" in rest:
        width = 4
    elif head == "LDSM":
        width = next((int(part) for part in rest if part in ("2", "4")), 1)
    elif head in ("HMMA", "IMMA", "DMMA", "QMMA"):
        width = 4  # halves take two: none of them stands beside a wgmma here, and too many is the safe side
    elif "64" in rest or "WIDE" in rest or head in ("DADD", "DFMA", "DMUL", "LEPC", "GETLMEMBASE"):
        width = 2
    elif head == "CS2R":
        width = 1 if "32" in rest else 2
    elif head == "F2F":
        width = 2 if rest[:1] == ["F64"] else 1
    elif head in ("I2F", "FRND"):
        width = 2 if "F64" in rest else 1
    elif head == "F2I":
        width = 2 if "S64" in rest or "U64" in rest else 1
    return width


def written(text: str) -> frozenset[int]:
    """The registers that an instruction writes, if only under a predicate. Products' sums do not count: their order is
    that of the tensor core, which reads an operand before it starts the next product."""
    parts = _PARTS.match(text)
    if parts is None or parts.group(1) in ("!PT", "!UPT"):
        return frozenset()
    name = parts.group(2)
    head = name.split(".")[0]
    if head.endswith("GMMA") or head in _NO_RESULT:
        return frozenset()
    operands = [piece.strip() for piece in parts.group(3).split(",")]
    if re.fullmatch(r"P[T\d]", operands[0]) and not (head.endswith("SETP") or head == "FCHK"):
        operands = operands[1:]  # a predicate that is a result too, as of SHFL and ATOMG
    first = re.fullmatch(r"R(\d+)", operands[0]) if operands else None
    return frozenset(range(int(first.group(1)), int(first.group(1)) + _width(name))) if first else frozenset()


def following(body: Sequence[Instruction], index: int, at: Mapping[int, int]) -> list[int]:
    """Where control may go from an instruction."""
    parts = _PARTS.match(body[index].text)
    following = [index + 1] if index + 1 < len(body) else []
    if parts is None:
        return following
    predicate, name, operands = parts.groups()
    head = name.split(".")[0]
    always = predicate in (None, "PT", "UPT")
    if head in ("EXIT", "RET", "BRX", "JMX", "KILL"):
        return [] if always else following
    if head in ("BRA", "JMP", "CALL") or name == "WARPSYNC.COLLECTIVE":
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands)
        taken = [at[int(target.group(1), 16)]] if target and int(target.group(1), 16) in at else []
        # BRA.DIV, BRA.U.ANY and a branch with a predicate among its operands may fall through as well.
        ends = head in ("BRA", "JMP") and always and name in ("BRA", "JMP") and "," not in operands
        return taken if ends else taken + following
    return following


def reached(begun: Iterable[State], after: Callable[[State], Iterable[State]]) -> Iterator[State]:
    """Every state on the ways that begin so, once each, where ``after`` says which may follow one."""
    todo = list(begun)
    seen = set(todo)
    while todo:
        state = todo.pop()
        yield state
        for next_state in after(state):
            if next_state not in seen:
                seen.add(next_state)
                todo.append(next_state)


def _in_flight(kernel: str, body: Sequence[Instruction], at: Mapping[int, int], product: int) -> set[Hazard]:
    """The writes to one product's operand on the ways from it to the waits for it."""
    registers = operand(body[product].text)
    # A state is an instruction to come and how many groups have been closed since the product, its own among them.
    begun = [(index, int("gsb0" in body[product].text)) for index in following(body, product, at)]

    def after(state: tuple[int, int]) -> Iterable[tuple[int, int]]:
        index, groups = state
        text = body[index].text
        if (wait := _WAIT.match(text)) and groups > int(wait.group(1), 16):
            return ()  # of so many groups this one is older than those that may stay in flight
        if "GMMA" in text and "gsb0" in text:
            groups = min(groups + 1, MOST_GROUPS)
        return ((index, groups) for index in following(body, index, at))

    ways = (body[index] for index, _ in reached(begun, after))
    return {Hazard(kernel, instruction, body[product]) for instruction in ways if written(instruction.text) & registers}


def hazards(sass: str) -> list[Hazard]:
    """Every write to a register that a product in flight reads, by kernel and address."""
    found: set[Hazard] = set()
    for kernel, body in kernels(sass).items():
        at = {instruction.address: index for index, instruction in enumerate(body)}
        for index, instruction in enumerate(body):
            if operand(instruction.text):
                found |= _in_flight(kernel, body, at, index)
    return sorted(found, key=lambda hazard: (hazard.kernel, hazard.write.address, hazard.product.address))
