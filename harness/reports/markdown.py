"""A ledger as Markdown, for a pull request and for ``$GITHUB_STEP_SUMMARY``.

It fits into a comment (65,536 characters): what does not is counted and left to the HTML report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.cells import INFRASTRUCTURE, PASSED, Verdict
from harness.reports.against import Comparison, percent
from harness.reports.view import CellView, HeatMap, View, legal, milliseconds, number

FAILURES_SHOWN, CHANGES_SHOWN, PROBLEMS_SHOWN = 40, 40, 20
LONGEST = 300  # characters of one detail
LIMIT = 65_000  # characters of the whole
MARKS = {"shade": "✅", "fail": "❌", "absent": "⬜"}


def _text(value: str) -> str:
    """On one line, and nothing in it is markup."""
    line = " ".join(legal(value).split())
    line = line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
    return re.sub(r"([\\`*_{}\[\]<>|~#&@$!])", lambda match: f"&#{ord(match.group())};", line)


def _code(value: str) -> str:
    """As code in a table: neither a pipe nor a backtick ends it."""
    line = " ".join(legal(value).split())
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        line = line.replace(sign, entity)
    return f"<code>{line}</code>"


def _where(view: CellView, per_host: bool) -> str:
    return _code(view.cell.id) + (f" on {_text(view.cell.host)}" if per_host and view.cell.host else "")


def _failures(view: View) -> Iterable[str]:
    yield "| | Cell | Verdict | First thing wrong | Run it again |"
    yield "|---|---|---|---|---|"
    for bad in view.bad[:FAILURES_SHOWN]:
        cell = bad.cell
        detail = _text(cell.detail)
        if cell.divergence:
            at = ", ".join(map(str, cell.divergence.index))
            detail += f"<br>diverges first at {_code(f'{cell.divergence.tap} [{at}]')}"
        where = _where(bad, view.ledger.per_host)
        again = _code(cell.rerun) if cell.rerun else ""
        yield f"| {MARKS[bad.css]} | {where} | {cell.verdict.value} | {detail} | {again} |"
    if len(view.bad) > FAILURES_SHOWN:
        yield f"\n{len(view.bad) - FAILURES_SHOWN} more cells did not pass; the HTML report has them all."


def _mark(cell: CellView | None) -> str:
    if cell is None:
        return ""
    if cell.cell.verdict is Verdict.PASS:
        return f"{MARKS['shade']} {cell.share}"
    return f"{MARKS[cell.css]} {_text(cell.short)}"


def _map(map: HeatMap) -> Iterable[str]:
    groups = [name for name, span in map.groups for _ in range(span)]
    heads = " | ".join(f"{group} {column}" for group, column in zip(groups, map.columns, strict=True))
    yield f"\n**{_text(map.caption)}**\n"
    yield f"| Config | {heads} |"
    yield "|---" * (len(map.columns) + 1) + "|"
    for config, cells in map.rows:
        yield f"| {_code(config)} | {' | '.join(_mark(cell) for cell in cells)} |"


def _changes(comparison: Comparison) -> Iterable[str]:
    yield f"\n### Against {_text(comparison.old.run_id)}\n"
    commit = comparison.old.sources.commit[:12] or "an unknown commit"
    yield f"The earlier run judged {_code(commit)}.\n"
    if comparison.changes:
        yield "| | Cell | Before | After |"
        yield "|---|---|---|---|"
        for change in comparison.changes[:CHANGES_SHOWN]:
            yield f"| {change.kind} | {_code(change.id)} | {_text(change.before)} | {_text(change.after)} |"
        if len(comparison.changes) > CHANGES_SHOWN:
            yield f"\n{len(comparison.changes) - CHANGES_SHOWN} more changes; the HTML report has them all."
    else:
        yield "No cell changed."
    if comparison.paces:
        paces = (f"{pace.group} {pace.ratio:.2f}" for pace in comparison.paces)
        yield f"\nDecode time, new / old, median over the cells: {', '.join(paces)}."
    if comparison.untimed:
        yield f"\nTimes were not compared: {_text(comparison.untimed)}."


def _shortened(lines: list[str]) -> str:
    """Whole lines only, so that no table and no entity is cut in two."""
    kept, length = [], 0
    for line in lines:
        length += len(line) + 1
        if length > LIMIT:
            break
        kept.append(line)
    return "\n".join([*kept, "", "There is more than a comment holds; the HTML report has it all."]) + "\n"


def markdown(view: View, comparison: Comparison | None = None) -> str:
    """The whole summary."""
    ledger = view.ledger
    mark = "✅" if view.status == PASSED else "❌"
    lines = [f"## {mark} {_text(view.headline)}", ""]
    commit = ledger.sources.commit[:12] or "unknown commit"
    dirty = f", {len(ledger.sources.dirty)} files differ from it" if ledger.sources.dirty else ""
    hosts = ", ".join(sorted(ledger.environments)) or "no host"
    lines.append(
        f"Run {_code(ledger.run_id)} of engine {_code(ledger.engine)} at {_code(commit)}{dirty}, on {_text(hosts)}."
    )
    if view.status == INFRASTRUCTURE:
        lines += ["", "**This run judges nothing:**", ""]
        lines += [f"- {_text(problem)}" for problem in ledger.problems[:PROBLEMS_SHOWN] or ("no cell was expected",)]
    lines += [f"\n> {_text(note)}" for note in ledger.notes]
    if view.bad:
        lines += ["", "### What failed", "", *(f"- {_text(line)}" for line in view.diverged), ""]
        lines += _failures(view)
    if comparison:
        lines += _changes(comparison)
    maps = [line for map in view.maps for line in _map(map)]
    tail = ["", "<details><summary>Margins: the worst error of each cell, in % of what is allowed</summary>", *maps]
    tail += ["", "</details>"]
    passing = [cell for cell in view.cells if cell.passed and cell.closest]
    if passing:
        worst = max(passing, key=lambda cell: cell.cell.margin)
        check = worst.closest
        if check:
            lines.append(
                f"\nClosest to its bound: {_code(worst.cell.id)}, {_code(check.name)} {number(check.value)} of "
                f"{number(check.allowed)} allowed ({percent(check.margin)})."
            )
    total = sum(cell.cell.times.get("total", 0.0) for cell in view.cells)
    lines.append(f"\nAll cells together took {milliseconds(total)}.")
    whole = "\n".join([*lines, *tail]) + "\n"
    return whole if len(whole) <= LIMIT else _shortened(lines)
