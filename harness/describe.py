"""A cell for its reader: what failed, where first, how far, and the line that runs it again. Imports nothing heavy."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from harness.cells import BadRound, Cell
from harness.matrix import is_large

WIDTH = 120
"""Columns of what is printed; a line to be copied, and a tree, may be longer."""


def filled(line: str, indent: str) -> str:
    """``line`` in lines of at most `WIDTH`, all but the first behind ``indent``; words are never broken."""
    return "\n".join(
        textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, drop_whitespace=True, break_long_words=False, break_on_hyphens=False
        )
    )


def counted(number: int, noun: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rerun_line(engine: str, id: str) -> str:
    """The line that runs one cell alone."""
    by = "" if engine == "csrc" else f" --engine {engine}"
    scale = " --scale" if any(map(is_large, id.split("-"))) else ""  # one of its parts is the config
    return f"nox -s test -- -k {id}{by}{scale}"


def describe(cell: Cell) -> str:
    """A failed cell for its reader: what, where first, how far, and how to see it again."""
    said = [cell.detail, *(f"also: {check.sentence}" for check in [c for c in cell.checks if not c.ok][1:7])]
    if cell.divergence:
        d = cell.divergence
        said.append(f"first divergence: {d.detail or d.tap}")
    lines = [f"{cell.id}: {cell.verdict.value}", *(filled(f"  {line}", "    ") for line in said)]
    if cell.bad_round:
        lines += _trees(cell.bad_round)
    lines += [f"  seed {cell.seed}, host {cell.host}, worker {cell.worker or 'main'}", f"  again: {cell.rerun}"]
    return "\n".join(lines)


SHOWN = 20
"""Rows of a tree that a message shows; the ledger and its page have all of them."""


def _trees(bad: BadRound) -> list[str]:
    """The round's two trees around the first row in which they differ; one line if they are the same tree."""
    got, want = bad.got, bad.want
    rows = list(zip(got.tokens, got.parents, strict=False)), list(zip(want.tokens, want.parents, strict=False))
    if rows[0] == rows[1]:
        return [f"  round {bad.round}: tree as golden: {_listed(got.tokens, got.parents, 0)}"]
    unlike = next((i for i, (a, b) in enumerate(zip(*rows, strict=False)) if a != b), min(map(len, rows)))
    first = max(0, unlike - SHOWN // 2) if max(map(len, rows)) > SHOWN else 0
    return [
        f"  round {bad.round}: {who:<6} {_listed(tree.tokens, tree.parents, first)} accepted {list(tree.accepted)}"
        for who, tree in (("got", got), ("golden", want))
    ]


def _listed(tokens: Sequence[int], parents: Sequence[int], first: int) -> str:
    last = min(first + SHOWN, len(tokens))
    part = f"rows {first} to {last - 1} of {len(tokens)}: " if last - first < len(tokens) else ""
    return f"{part}tokens {list(tokens[first:last])} parents {list(parents[first:last])}"
