"""The documents' tables of a bench's record: ``python -m harness.bench.tables [RECORD] [--write]``.

Prints every table of which this module knows the head line, made from the record of CUDA; ``--write`` puts them in
their places in the documents. So no figure in them is typed, and a test holds documents and record against each other.

Exit status 0 when the documents had, or have been given, the record's figures, 1 when they have others, 3 for a record
that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.bench.targets import FLOOR, US, is_held, ratio, wanted
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import ended
from harness.files import write_atomic
from harness.sources import ROOT

RECORD = ROOT / "docs" / "evidence" / "bench-cuda.json"
WIDTHS = (1, 4, 8, 16, 64)
HUMMING, INVARIANT = "humming", "humming-invariant"
ROUTED = "humming-experts", "humming-experts-invariant"
K7168, K2048 = "k26-linear-int4-bf16-k7168-n4096-m*", "k26-linear-int4-bf16-k2048-n7168-m*"
BLOCK, ROUTED_BLOCK = (f"k26-{name}-int4-bf16-k7168-n2048-e384-m*" for name in ("moe_block", "routed-moe_block"))
ATTENTION = "k26-mla_attention-bf16-t{}-h64-m*"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """``rows``: what a row is called, the cases that it shows as a shell pattern, and what they are compared with."""

    page: str
    head: str
    rows: tuple[tuple[str, str, str], ...]

    @property
    def targets(self) -> bool:
        """Whether it has two columns, held and missed, in place of one a width."""
        return self.head.endswith("| held | missed |")


TABLES = (
    Table(
        "docs/kernels.md",
        "| us (x the floor) | M=1 | 4 | 8 | 16 | 64 |",
        (
            ("INT4 K7168 N4096", K7168, FLOOR),
            ("INT4 K2048 N7168", K2048, FLOOR),
            ("experts, router to combine", BLOCK, FLOOR),
            ("the same without a shared expert", ROUTED_BLOCK, FLOOR),
            ("bf16 K7168 N4096", "k26-linear-bf16-k7168-n4096-m*", FLOOR),
            ("bf16 K2048 N7168", "k26-linear-bf16-k2048-n7168-m*", FLOOR),
            ("a step: one dense, three MoE layers", "step-int4-bf16-*-k26-m*", FLOOR),
        ),
    ),
    Table(
        "docs/kernels.md",
        "| humming, us (its time over ours) | M=1 | 4 | 8 | 16 | 64 |",
        (
            ("INT4 K7168, fastest mode", K7168, HUMMING),
            ("INT4 K7168, batch-invariant", K7168, INVARIANT),
            ("INT4 K2048, fastest mode", K2048, HUMMING),
            ("INT4 K2048, batch-invariant", K2048, INVARIANT),
            ("its two products of the experts", ROUTED_BLOCK, ROUTED[0]),
            ("the same, batch-invariant", ROUTED_BLOCK, ROUTED[1]),
        ),
    ),
    Table(
        "docs/kernels_mla.md",
        "| us (its time over ours) | M=1 | 4 | 8 | 16 | 64 |",
        tuple((f"T = {keys}", ATTENTION.format(keys), "flash-mla") for keys in (1024, 4096, 32768, 131072)),
    ),
    Table(
        "docs/kernels_mla.md",
        "| us (x the floor) | M=1 | 4 | 8 | 16 | 64 |",
        (
            ("`mla_prepare`", "k26-mla_prepare-bf16-*-m*", FLOOR),
            ("`mla_value`", "k26-mla_value-bf16-*-m*", FLOOR),
        ),
    ),
    Table(
        "docs/status.md",
        "  | | held | missed |",
        (
            ("INT4 K7168", K7168, FLOOR),
            ("the same, humming", K7168, HUMMING),
            ("the same, its batch-invariant mode", K7168, INVARIANT),
            ("INT4 K2048", K2048, FLOOR),
            ("the same, humming", K2048, HUMMING),
            ("the same, its batch-invariant mode", K2048, INVARIANT),
            ("experts' block", BLOCK, FLOOR),
            ("without a shared expert", ROUTED_BLOCK, FLOOR),
            ("the same, humming's two products", ROUTED_BLOCK, ROUTED[0]),
            ("the same, its batch-invariant mode", ROUTED_BLOCK, ROUTED[1]),
            *(
                (f"attention T={keys}, flash-mla", ATTENTION.format(keys), "flash-mla")
                for keys in (1024, 4096, 32768, 131072)
            ),
            *((f"attention T={keys}, no tree", ATTENTION.format(keys), "no-tree") for keys in (1024, 4096, 32768)),
            ("tree build, us", "k26-tree_build-*", US),
            ("accept, us", "k26-accept-*", US),
            ("commit, us", "k26-kv_commit-*", US),
            ("the step", "step-int4-bf16-*-k26-m*", FLOOR),
        ),
    ),
)


OTHERS = ("k26-router-e384-m*",)
"""Cases that documents tell of in words."""


def patterns() -> list[str]:
    """The cases that documents tell of, as ``kdtree bench --filter`` takes them."""
    return list(dict.fromkeys([*(pattern for table in TABLES for _, pattern, _ in table.rows), *OTHERS]))


def digits(value: float, at: float | None, against: str) -> str:
    """Two decimals, three where two would hide on which side of the limit the value is."""
    short = f"{value:.1f}" if against == US else f"{value:.2f}"
    if at is not None and is_held(float(short), at, against) != is_held(value, at, against):
        return f"{value:.3f}"
    return short


def _beside(line: Line, against: str) -> tuple[float | None, float | None]:
    """What is held against a target, None where it was not measured, and the target, None where there is none."""
    value = ratio(against, line["us"], line["x_floor"], line.get("peers", {}))
    return value, wanted(line["device"], line["case"], line["M"]).get(against)


def _cell(line: Line, against: str) -> str:
    value, at = _beside(line, against)
    if value is None:
        return ""
    us = line["peers"][against] if against.startswith(HUMMING) else line["us"]
    text = digits(value, at, against)
    text = f"**{text}**" if at is not None and is_held(value, at, against) else text
    return f"{us:.1f} ({text})" if us < 100 else f"{us:.0f} ({text})"


def _judged(lines: Sequence[Line], against: str, held: bool) -> str:
    """``VALUE (M), VALUE (M) of LIMIT; ...``, of those that hold their limit or of the others."""
    found: dict[float, list[str]] = {}
    for line in lines:
        value, at = _beside(line, against)
        if value is not None and at is not None and is_held(value, at, against) == held:
            found.setdefault(at, []).append(f"{digits(value, at, against)} ({line['M']})")
    return "; ".join(f"{', '.join(values)} of {at:g}" for at, values in found.items())


def made(table: Table, record: Mapping[str, Any]) -> list[str]:
    """The table's lines, head and rule first; a row of which nothing was measured is left out."""
    known = sorted([*record["cases"], *record["steps"]], key=lambda line: int(line["M"]))
    indent = " " * (len(table.head) - len(table.head.lstrip()))
    out = [table.head, f"{indent}|{'---|' * (table.head.count('|') - 1)}"]
    for name, pattern, against in table.rows:
        lines = [line for line in known if fnmatchcase(line["case"], pattern)]
        if table.targets:
            cells = [_judged(lines, against, held) for held in (True, False)]
        else:
            by_width = {line["M"]: _cell(line, against) for line in lines}
            cells = [by_width.get(m, "") for m in WIDTHS]
        if any(cells):
            out.append(f"{indent}| {name} |" + "".join(f" {cell} |" if cell else " |" for cell in cells))
    return out


def differing(record: Mapping[str, Any], write: bool) -> Iterator[tuple[Table, list[str], list[str]]]:
    """Each table of which a document has other lines than the record gives: (table, had, wanted).

    Raises ValueError naming the page that has no table with that head.
    """
    for table in TABLES:
        path = ROOT / table.page
        lines = path.read_text("utf-8").split("\n")
        if table.head not in lines:
            raise ValueError(f"{table.page}: no table begins with {table.head!r}")
        begin = lines.index(table.head)
        end = next(i for i in range(begin, len(lines)) if not lines[i].lstrip().startswith("|"))
        wanted = made(table, record)
        if lines[begin:end] != wanted:
            yield table, lines[begin:end], wanted
            if write:
                write_atomic(path, "\n".join([*lines[:begin], *wanted, *lines[end:]]).encode())


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.tables", description=__doc__)
    parser.add_argument("record", type=Path, nargs="?", default=RECORD, help="default: docs/evidence/bench-cuda.json")
    parser.add_argument("--write", action="store_true", help="put the tables in their places in the documents")
    options = parser.parse_args(argv)
    try:
        record = json.loads(options.record.read_text("utf-8"))
        for table in TABLES:
            print(f"{table.page}\n" + "\n".join(made(table, record)) + "\n")
        other = [table.page for table, _, _ in differing(record, options.write)]
    except BrokenPipeError:
        raise  # no fault of the record's
    except (OSError, ValueError, KeyError) as error:
        print(f"{parser.prog}: {options.record}: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    verb = "written" if options.write else "has other figures; --write"
    for page in dict.fromkeys(other):
        print(f"{page}: {verb}")
    return PASSED if options.write or not other else FAILED


if __name__ == "__main__":
    sys.exit(ended("python -m harness.bench.tables", lambda: main(sys.argv[1:])))
