"""A ledger as its reader wants it, in plain values for HTML and Markdown: headline, heat maps, one view a cell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.cells import Cell, Check, Ledger, Verdict, exit_status
from harness.ledger import first_divergences
from harness.matrix import DECODERS, PRECISIONS, Point, parse
from harness.reports import charts, plots, trees
from harness.reports.against import percent

SYMBOLS = {Verdict.PASS: "✓", Verdict.NOT_RUN: "○"}
FAILED_SYMBOL = "✗"
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SHADES = (0.1, 0.25, 0.5, 0.75)  # the heat map's steps, as shares of what is allowed


def legal(text: str) -> str:
    """Without the control characters that error messages are full of and that neither HTML nor XML can hold."""
    return _FORBIDDEN.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def number(value: float) -> str:
    """Three digits; enough to compare by eye."""
    return f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``, or ``1.23 s``."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def closest(cell: Cell) -> Check | None:
    """The check that is nearest to its bound, or furthest beyond it."""
    bounded = [check for check in cell.checks if check.allowed > 0]
    return max(bounded, key=lambda c: math.inf if math.isnan(c.margin) else c.margin, default=None)


@dataclass(frozen=True)
class CellView:
    """One cell: its record, and what is drawn of it."""

    cell: Cell
    point: Point
    anchor: str
    symbol: str
    """A sign for the kind of verdict, since colour alone does not reach everybody."""
    css: str
    """``shade0`` .. ``shade4`` for a pass, ``fail``, ``absent``."""
    spoken: str
    """The same in words."""
    closest: Check | None
    logits: Check | None
    exact: tuple[Check, ...]
    """Checks that ask for a count of zero and got it."""
    others: tuple[Check, ...]
    """All other checks, in the order in which they decide the verdict."""
    charts: tuple[plots.Chart, ...]
    trees: tuple[trees.Drawing, ...]

    @property
    def passed(self) -> bool:
        return self.cell.verdict is Verdict.PASS

    @property
    def share(self) -> str:
        """The margin in percent, as the heat map shows it."""
        return f"{100 * self.cell.margin:.0f}"

    @property
    def short(self) -> str:
        """``FAIL_TREE`` as ``TREE``."""
        return self.cell.verdict.value.removeprefix("FAIL_").replace("_", " ")

    @property
    def accepted(self) -> float | None:
        """Rows committed by a DDTree round, on average."""
        rounds = self.cell.acceptance
        return sum(rounds) / len(rounds) if rounds else None


@dataclass(frozen=True)
class HeatMap:
    """Configs by columns of one device (and host); a cell that is not in the matrix is None."""

    caption: str
    groups: tuple[tuple[str, int], ...]
    """Precisions and how many columns each spans."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[CellView | None, ...]], ...]


@dataclass(frozen=True)
class View:
    """The whole of a ledger."""

    ledger: Ledger
    status: int
    headline: str
    cells: tuple[CellView, ...]
    maps: tuple[HeatMap, ...]
    charts: tuple[plots.Chart, ...]
    diverged: tuple[str, ...]
    """Of the cells that failed, a line a tap that is the first to be wrong."""

    @property
    def bad(self) -> tuple[CellView, ...]:
        return tuple(cell for cell in self.cells if not cell.passed)


def headline(ledger: Ledger) -> str:
    """How many of the expected cells passed, and of how many."""
    chosen = f" chosen by the filter “{ledger.filter}”" if ledger.filter else ""
    return f"{ledger.passed} of {ledger.wanted} expected cells{chosen} passed"


def _trees(cell: Cell) -> Iterable[trees.Drawing]:
    if cell.bad_round:
        bad = cell.bad_round
        yield trees.draw(bad.want, bad.got, f"Round {bad.round}, golden")
        yield trees.draw(bad.got, bad.want, f"Round {bad.round}, engine")


def _view(cell: Cell, per_host: bool) -> CellView:
    check = closest(cell)
    exact = tuple(c for c in cell.checks if c.allowed == 0 and c.ok)
    where = f" on {cell.host}" if per_host else ""
    if cell.verdict is Verdict.PASS:
        css = f"shade{sum(cell.margin > step for step in SHADES)}"
        spoken = f"passed, at {percent(cell.margin)} of what is allowed"
    else:
        css = "absent" if cell.verdict is Verdict.NOT_RUN else "fail"
        spoken = cell.detail or cell.verdict.value
    return CellView(
        cell=cell,
        point=parse(cell.id),
        anchor=f"cell-{cell.id}" + (f"-on-{cell.host}" if per_host else ""),
        symbol=SYMBOLS.get(cell.verdict, FAILED_SYMBOL),
        css=css,
        spoken=f"{cell.id}{where}: {spoken}",
        closest=check,
        logits=charts.logits(cell),
        exact=exact,
        others=tuple(c for c in cell.checks if c not in exact),
        charts=tuple(charts.of_cell(cell)),
        trees=tuple(_trees(cell)),
    )


def _place(view: CellView, per_host: bool) -> tuple[str, int, str]:
    return view.point.device, view.point.ranks, view.cell.host if per_host else ""


def _column(point: Point) -> tuple[int, int, str]:
    """Sorts as the axes do; within DDTree by drafter."""

    def order(axis: tuple[str, ...], value: str) -> int:
        return axis.index(value) if value in axis else len(axis)

    return order(PRECISIONS, point.precision), order(DECODERS, point.decoder), point.drafter


def _maps(views: list[CellView], per_host: bool) -> Iterable[HeatMap]:
    for place in sorted({_place(view, per_host) for view in views}):
        here = {
            (v.point.config, (v.point.precision, v.point.decoder, v.point.drafter)): v
            for v in views
            if _place(v, per_host) == place
        }
        points = sorted({_column(v.point): v.point for v in here.values()}.items())
        columns = [(p.precision, p.decoder, p.drafter) for _, p in points]
        precisions = list(dict.fromkeys(precision for precision, _, _ in columns))
        device, ranks, host = place
        caption = device + (f", {ranks} ranks" if ranks > 1 else "") + (f", on {host}" if host else "")
        yield HeatMap(
            caption=caption,
            groups=tuple((name, sum(column[0] == name for column in columns)) for name in precisions),
            columns=tuple(drafter or decoder for _, decoder, drafter in columns),
            rows=tuple(
                (config, tuple(here.get((config, column)) for column in columns))
                for config in sorted({config for config, _ in here})
            ),
        )


def view(ledger: Ledger) -> View:
    """Everything a reader sees of ``ledger``. Raises MatrixError for an id that is none."""
    views = [_view(cell, ledger.per_host) for cell in ledger.cells]
    return View(
        ledger=ledger,
        status=exit_status(ledger),
        headline=headline(ledger),
        cells=tuple(views),
        maps=tuple(_maps(views, ledger.per_host)),
        charts=tuple(charts.overview(ledger.cells)),
        diverged=tuple(first_divergences(ledger.cells)),
    )
