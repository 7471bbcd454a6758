"""Share of the roofline per case as one SVG of horizontal bars; colours follow the reader's scheme."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

ROW, TOP, LABEL, BAR, WIDTH = 16, 34, 330, 400, 800  # units of the view box
STYLE = (
    "text{font:11px sans-serif;fill:#222}.bar{fill:#2c6fbb}.warm{fill:#9ab4cf}.grid{stroke:#ccc}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.bar{fill:#6aa6e8}.warm{fill:#41586f}.grid{stroke:#444}}"
)


def roofline(title: str, bars: Sequence[tuple[str, float, bool]]) -> str:
    """``bars`` are name, share (1 is the ceiling; longer bars are cut there) and whether the operands were cold."""
    height = TOP + ROW * len(bars) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        f'<text x="4" y="14">{escape(title)} (pale: operands in a cache)</text>',
    ]
    for tick in range(0, 101, 25):
        x = LABEL + BAR * tick // 100
        parts.append(f'<path class="grid" d="M{x} {TOP - 6}V{height - 18}"/>')
        parts.append(f'<text x="{x}" y="{height - 5}" text-anchor="middle">{tick} %</text>')
    for at, (name, share, cold) in enumerate(bars):
        y = TOP + ROW * at
        wide = BAR * min(max(share, 0.0), 1.0)
        parts.append(f'<text x="{LABEL - 6}" y="{y + 10}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="{"bar" if cold else "warm"}" x="{LABEL}" y="{y}" width="{wide:.1f}" height="12"/>')
        parts.append(f'<text x="{LABEL + wide + 5:.1f}" y="{y + 10}">{100 * share:.1f} %</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
