"""``kdtree test``: the matrix under pytest, with the documented exit statuses alone; ``kdtree matrix``: its cells."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness import plain_json
from harness.cells import DEVICES, FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.cli import ENGINE_HELP, EXIT_STATUSES, Parser, positive
from harness.sources import ROOT

MATRIX = "tests/test_matrix.py"


def _workers(text: str) -> str:
    """As ``type=`` of ``-n``: ``auto``, ``logical`` or a number from 0 on, as pytest-xdist takes it."""
    if text not in ("auto", "logical") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a whole number from 0 on")
    return text


def test(argv: Sequence[str]) -> int:
    """``kdtree test``: pytest on the matrix, with the design's exit statuses alone."""
    parser = Parser(
        prog="kdtree test",
        description="Run the validation matrix, or the cells that -k chooses, and write reports/<run id>/ledger.json. "
        "Options that are not listed here go to pytest.",
        epilog="examples:\n  kdtree test -k int4-ddtree-tiny-oracle-cpu\n  kdtree test -k 'tiny and not int4' -n 2\n"
        f"  kdtree test --engine reference --device cpu\n\n{EXIT_STATUSES}",
    )
    parser.add_argument("-k", metavar="ID", default="", help="a cell's id, or an expression as pytest takes it")
    parser.add_argument(
        "-n", metavar="WORKERS", type=_workers, default="auto", help="parallel workers (default: auto; 0: none)"
    )
    parser.add_argument("--engine", default="csrc", help=ENGINE_HELP)
    parser.add_argument(
        "--device", action="append", default=[], choices=DEVICES, help="default: cpu, and cuda where usable; repeatable"
    )
    parser.add_argument(
        "--require-device", action="append", default=[], choices=DEVICES, help="beside the default ones, or fail (3)"
    )
    parser.add_argument(
        "--ranks", metavar="N", action="append", type=positive, default=[], help="cells of N ranks alone; repeatable"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where the ledger goes (default: reports/<run id>)")
    parser.add_argument(
        "--cell-timeout", metavar="SECONDS", type=float, help="one cell may take (default: 120; with --scale 900)"
    )
    parser.add_argument("--scale", action="store_true", help="with the configs of real sizes (docs/bundles.md)")
    options, rest = parser.parse_known_args(argv)
    for before, word in zip(["", *rest], rest, strict=False):
        if word.startswith(f"{MATRIX}::"):  # cells by their node ids, which a host is sent: too many for an expression
            continue
        if not word.startswith("-") and not before.startswith("-"):  # else it may be the value of an option of pytest's
            parser.error(f"{word!r} is no option; -k {word} chooses cells, and nox -s test -- FILE runs other tests")
    if not (ROOT / MATRIX).is_file():
        where = f"no {MATRIX} under {ROOT}: the matrix runs from a checkout, not from an installed package"
        print(f"kdtree test: {where}", file=sys.stderr)
        return INFRASTRUCTURE
    from harness.doctor import lacking

    for name in lacking():  # pytest would say so in a traceback
        raise ModuleNotFoundError(name=name)
    import pytest

    arguments = [str(ROOT / MATRIX), "--rootdir", str(ROOT), "-n", options.n]
    arguments += ["--engine", options.engine, *(["-k", options.k] if options.k else [])]
    arguments += [item for device in options.device for item in ("--device", device)]
    arguments += [item for device in options.require_device for item in ("--require-device", device)]
    arguments += [item for count in options.ranks for item in ("--ranks", str(count))]
    arguments += ["--run-dir", options.run_dir] if options.run_dir else []
    arguments += ["--cell-timeout", str(options.cell_timeout)] if options.cell_timeout is not None else []
    arguments += ["--scale"] if options.scale else []
    status = int(pytest.main([*arguments, *rest]))
    return status if status in (PASSED, FAILED, INCOMPLETE) else INFRASTRUCTURE


def matrix(argv: Sequence[str]) -> int:
    """``kdtree matrix``: the expected cells."""
    parser = Parser(
        prog="kdtree matrix",
        description="The cells that a run expects, computed from the axes and refs/configs.",
        epilog="examples:\n  kdtree matrix --list\n  kdtree matrix --list -k 'tiny2 and ddtree' --device cuda\n\n"
        f"exit status: {PASSED} listed, {INFRASTRUCTURE} no cell is chosen, or wrong arguments",
    )
    parser.add_argument("--list", action="store_true", help="one id a line (the default)")
    parser.add_json("a list of objects with the id and the axes")
    parser.add_argument("-k", metavar="EXPR", default="", help="only the cells that this chooses")
    parser.add_argument("--device", action="append", choices=DEVICES, help="default: cpu; repeatable")
    parser.add_argument("--ranks", metavar="N", action="append", type=int, help="cells of N ranks alone; repeatable")
    parser.add_argument("--scale", action="store_true", help="with the configs of real sizes")
    options = parser.parse_args(argv)
    from dataclasses import asdict

    from harness.filters import select
    from harness.matrix import MatrixError, of_run

    try:
        points = of_run(options.device or ["cpu"], ranks=options.ranks or (), scale=options.scale)
        points = select(points, options.k) if options.k else points
    except MatrixError as error:
        print(f"kdtree matrix: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    plain_json.give([{"id": point.id, **asdict(point)} for point in points], options.json)
    if options.json != plain_json.PRINTED:
        print("\n".join(point.id for point in points))
    return PASSED
