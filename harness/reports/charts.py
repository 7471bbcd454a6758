"""What is plotted of a ledger: errors per step and per layer against what is allowed, rows committed per round."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from harness.cells import Cell, Check
from harness.matrix import parse
from harness.reports.against import percent
from harness.reports.plots import Chart, Series, chart

_LAYER = re.compile(r"(?:^|\.)(embed|layers\.(\d+)\.out)\.max_abs$")


def logits(cell: Cell) -> Check | None:
    """The check of the greatest logit error, whose bound the steps share."""
    return next((check for check in cell.checks if check.name == "logits.max_abs"), None)


def layer_errors(cell: Cell) -> tuple[list[str], list[Check]]:
    """Names and checks of the residual stream: ``embed``, then ``0``, ``1``, ... for the layers."""
    found = [(match, check) for check in cell.checks if (match := _LAYER.search(check.name))]
    return [match.group(2) or "embed" for match, _ in found], [check for _, check in found]


def _worst(values: Sequence[float]) -> tuple[int, float]:
    return max(enumerate(values), key=lambda item: _rank(item[1]))


def _rank(value: float) -> float:
    """NaN is as bad as can be."""
    return math.inf if math.isnan(value) else value


def of_cell(cell: Cell) -> Iterable[Chart]:
    """The charts of one cell; none where the cell has no such numbers."""
    if cell.step_errors:
        step, worst = _worst(cell.step_errors)
        check = logits(cell)
        bound = check.allowed if check else None
        allowed = f", allowed {bound:.3g}" if bound is not None else ""
        said = f"{len(cell.step_errors)} steps, largest {worst:.3g} at step {step}{allowed}"
        series = [Series("engine", cell.step_errors)]
        yield chart("Logit error per step", said, series, log=True, bound=bound, x_label="step")
    names, checks = layer_errors(cell)
    if checks:
        at, worst = _worst([check.margin for check in checks])
        said = f"{len(checks)} taps, nearest to its bound at {names[at]}: {percent(worst)} of what is allowed"
        series = [
            Series("engine", [check.value for check in checks]),
            Series("allowed", [check.allowed for check in checks]),
        ]
        yield chart("Error per layer", said, series, log=True, x_label="layer", x_names=names)
    if cell.acceptance:
        mean = sum(cell.acceptance) / len(cell.acceptance)
        said = f"{len(cell.acceptance)} rounds, {mean:.2f} rows on average: {', '.join(map(str, cell.acceptance))}"
        series = [Series("engine", [float(rows) for rows in cell.acceptance])]
        yield chart("Rows committed per round", said, series, x_label="round")


def overview(cells: Sequence[Cell]) -> Iterable[Chart]:
    """Per precision, one line a cell as shares of what is allowed, the worst one drawn strong; then acceptance."""
    points = {cell.id: parse(cell.id) for cell in cells}
    for precision in dict.fromkeys(point.precision for point in points.values()):
        mine = [cell for cell in cells if points[cell.id].precision == precision]
        steps = [(cell.id, _shares(cell)) for cell in mine]
        layers = [(cell.id, [check.margin for check in layer_errors(cell)[1]]) for cell in mine]
        taps = max((layer_errors(cell)[0] for cell in mine), key=len)
        for what, x_label, names, lines in (
            ("Logit error per step", "step", (), steps),
            ("Error per layer", "layer", taps, layers),
        ):
            ranked = sorted((line for line in lines if line[1]), key=lambda line: _rank(_worst(line[1])[1]))
            if not ranked:
                continue
            name, values = ranked[-1]
            at, worst = _worst(values)
            where = names[at] if names else at
            said = f"{len(ranked)} cells; nearest to its bound: {name} with {percent(worst)} at {x_label} {where}"
            series = [*(Series(id, shares, faint=True) for id, shares in ranked[:-1]), Series(name, values)]
            title = f"{what}, {precision}, as a share of what is allowed"
            yield chart(title, said, series, log=True, bound=1.0, x_label=x_label, x_names=names)
    by_drafter: dict[str, list[tuple[int, ...]]] = {}
    for cell in cells:
        if cell.acceptance:
            by_drafter.setdefault(points[cell.id].drafter, []).append(cell.acceptance)
    if by_drafter:
        series = [Series(drafter, _means(runs)) for drafter, runs in sorted(by_drafter.items())]
        means = (f"{name} {sum(map(sum, runs)) / sum(map(len, runs)):.2f}" for name, runs in sorted(by_drafter.items()))
        title = "Rows committed per round, mean over the cells of each drafter"
        yield chart(title, f"mean rows per round: {', '.join(means)}", series, x_label="round")


def _shares(cell: Cell) -> list[float]:
    check = logits(cell)
    return [error / check.allowed for error in cell.step_errors] if check and check.allowed > 0 else []


def _means(runs: list[tuple[int, ...]]) -> list[float]:
    """Per round, over the runs that were that long."""
    longest = max(map(len, runs))
    at = [[run[i] for run in runs if i < len(run)] for i in range(longest)]
    return [sum(values) / len(values) for values in at]
