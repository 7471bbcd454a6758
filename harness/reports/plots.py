"""Where the lines, ticks and labels of a chart go: numbers only, drawn as inline SVG by ``templates/draw.html.jinja``.

A plot library was weighed: a page holds some 300 charts and has to be written in less than a second at the end of each
run. Matplotlib takes 0.5 s to import and 55 ms a chart, pygal 4 ms and 20 kB a chart; these take 0.1 ms and 1 kB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 52, 350, 12, 138  # of the plotting area, in the units of the view box
DECADES = 12  # float32 noise and float64 goldens lie no further apart; smaller values are drawn at the bottom
STYLES = 6  # line styles that the page tells apart by colour and dashes
DOTTED = 32  # longer lines are drawn without a dot at each value


@dataclass(frozen=True)
class Series:
    """One line. None leaves a gap; NaN and infinities are drawn as crosses at the top."""

    label: str
    values: Sequence[float | None]
    faint: bool = False


@dataclass(frozen=True)
class Line:
    """A series in the units of the view box."""

    label: str
    style: int
    faint: bool
    paths: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    lost: tuple[float, ...]
    """Where values are that are no finite number."""


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn; ``summary`` says in words what it shows."""

    title: str
    summary: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    bound: float | None


def _steps(top: float, count: int) -> list[float]:
    """Round numbers 0, step, 2 step, ... that reach ``top`` in at most ``count`` steps."""
    raw = (top or 1.0) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil((top or 1.0) / step - 1e-9) + 1)]


def _linear(values: list[float]) -> tuple[float, float, list[tuple[float, str]]]:
    ticks = _steps(max([0.0, *values]), 4)
    return 0.0, ticks[-1], [(tick, f"{tick:g}") for tick in ticks]


def _logarithmic(values: list[float]) -> tuple[float, float, list[tuple[float, str]]]:
    positive = [value for value in values if value > 0] or [1.0]
    high = math.ceil(math.log10(max(positive)) - 1e-9)
    low = max(min(math.floor(math.log10(min(positive)) + 1e-9), high - 1), high - DECADES)
    stride = math.ceil((high - low) / 4)
    ticks = [(float(e), "1" if e == 0 else f"1e{e}") for e in range(high, low - 1, -stride)]
    return float(low), float(high), ticks


def _x(position: int, count: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * (position / (count - 1) if count > 1 else 0.5), 1)


def _line(series: Series, style: int, low: float, high: float, log: bool) -> Line:
    paths: list[list[str]] = [[]]
    dots: list[tuple[float, float]] = []
    lost: list[float] = []
    for i, value in enumerate(series.values):
        x = _x(i, len(series.values))
        if value is None or not math.isfinite(value):
            paths.append([])
            if value is not None:
                lost.append(x)
            continue
        y = round(_y(value, low, high, log), 1)
        paths[-1].append(f"{x:g},{y:g}")
        dots.append((x, y))
    drawn = tuple(" ".join(path) for path in paths if len(path) > 1)
    if series.faint or len(dots) > DOTTED:
        alone = {path[0] for path in paths if len(path) == 1}
        dots = [dot for dot in dots if f"{dot[0]:g},{dot[1]:g}" in alone]
    return Line(series.label, style, series.faint, drawn, tuple(dots), tuple(lost))


def _y(value: float, low: float, high: float, log: bool) -> float:
    scaled = (math.log10(value) if value > 0 else low) if log else value
    share = min(max((scaled - low) / (high - low), 0.0), 1.0)
    return BOTTOM - (BOTTOM - TOP) * share


def chart(
    title: str,
    summary: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    bound: float | None = None,
    x_label: str = "",
    x_names: Sequence[str] = (),
) -> Chart:
    """Lines over positions 0, 1, ...; ``x_names`` name the positions where numbers would not.

    All series share one length: the positions of a shorter one are not stretched to the others'.
    """
    count = max([len(s.values) for s in series], default=0)
    padded = [Series(s.label, [*s.values, *[None] * (count - len(s.values))], s.faint) for s in series]
    seen = [v for s in padded for v in s.values if v is not None and math.isfinite(v)]
    low, high, ticks = (_logarithmic if log else _linear)([*seen, *([] if bound is None else [bound])])
    stride = max(1, math.ceil(_steps(max(count - 1, 1), 6)[1]))
    names = x_names or [str(i) for i in range(count)]
    return Chart(
        title=title,
        summary=summary,
        x_label=x_label,
        lines=tuple(_line(s, i % STYLES, low, high, log) for i, s in enumerate(padded)),
        x_ticks=tuple((_x(i, count), names[i]) for i in range(0, count, stride)),
        y_ticks=tuple((round(_y(10.0**v if log else v, low, high, log), 1), text) for v, text in ticks),
        bound=None if bound is None else round(_y(bound, low, high, log), 1),
    )
