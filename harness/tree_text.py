"""A draft tree as lines of text: a node a line, children below their parent, accepted nodes marked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from harness.protocol import Round


def as_byte(token: int) -> str:
    """A byte as a quoted character, anything else as ``<id>``."""
    return json.dumps(chr(token)) if 32 <= token < 127 else {10: '"\\n"', 9: '"\\t"'}.get(token, f"<{token}>")


def lines(drawn: Round, name: Callable[[int], str] = str) -> list[str]:
    """The tree of one round. ``*`` before a node that was accepted; its row is the order in which it was drafted."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(drawn.parents):
        children.setdefault(int(parent), []).append(row)
    accepted = set(map(int, drawn.accepted))

    def walk(rows: Sequence[int], before: str) -> Iterator[str]:
        for i, row in enumerate(rows):
            last = i == len(rows) - 1
            mark = "*" if row in accepted else " "
            branch = "" if row == 0 else "`- " if last else "|- "
            yield f"{mark} {before}{branch}{name(int(drawn.tokens[row]))}"
            yield from walk(children.get(row, ()), before + ("" if row == 0 else "   " if last else "|  "))

    return list(walk([0], ""))


def busiest(rounds: Sequence[Round]) -> Round | None:
    """The first of the rounds that committed most; none if there is no tree."""
    return max(rounds, key=lambda r: len(r.accepted), default=None)
