"""A cell for its reader: what failed, where first, how far, and the line that runs it again. Imports nothing heavy."""

from __future__ import annotations

from harness.cells import Cell
from harness.matrix import is_large


def rerun_line(engine: str, id: str) -> str:
    """The line that runs one cell alone."""
    by = "" if engine == "csrc" else f" --engine {engine}"
    scale = " --scale" if any(map(is_large, id.split("-"))) else ""  # one of its parts is the config
    return f"nox -s test -- -k {id}{by}{scale}"


def describe(cell: Cell) -> str:
    """A failed cell for its reader: what, where first, how far, and how to see it again."""
    lines = [f"{cell.id}: {cell.verdict.value}", f"  {cell.detail}"]
    lines += [f"  also: {check.sentence}" for check in [c for c in cell.checks if not c.ok][1:7]]
    if cell.divergence:
        d = cell.divergence
        lines.append(f"  first divergence: {d.detail or d.tap}")
    if cell.bad_round:
        b = cell.bad_round
        lines.append(f"  round {b.round}: got    tokens {list(b.got.tokens)} parents {list(b.got.parents)}")
        lines[-1] += f" accepted {list(b.got.accepted)}"
        lines.append(f"  round {b.round}: golden tokens {list(b.want.tokens)} parents {list(b.want.parents)}")
        lines[-1] += f" accepted {list(b.want.accepted)}"
    lines += [f"  seed {cell.seed}, host {cell.host}, worker {cell.worker or 'main'}", f"  again: {cell.rerun}"]
    return "\n".join(lines)
