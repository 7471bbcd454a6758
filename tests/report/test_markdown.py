"""The Markdown summary, read back by a Markdown parser: tables keep their shape whatever a ledger's texts hold."""

from __future__ import annotations

import html
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import runs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.cells import Ledger, Verdict
from harness.reports.against import compare
from harness.reports.markdown import FAILURES_SHOWN, LIMIT, markdown
from harness.reports.view import view

markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed (extra: test)")


class Tables(HTMLParser):
    """Texts of every table's rows, and the tags that are no part of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


def rendered(text: str) -> Tables:
    tables = Tables()
    tables.feed(markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(text))
    return tables


def row(ledger: Ledger, id: str) -> list[str]:
    return next(row for row in rendered(markdown(view(ledger))).rows if len(row) == 5 and row[1] == id)


def test_a_failure_is_a_row_with_its_reason_and_its_line() -> None:
    assert row(runs.broken(), "int4-ar-tiny2-cpu")[2:] == [
        "FAIL_LOGITS",
        "logits.max_abs: 3 elements beyond 4e-06diverges first at layers.3.mla.q_rope [5, 2, 7]",
        "nox -s test -- -k int4-ar-tiny2-cpu",
    ]


def test_where_cells_diverge_first_stands_above_them() -> None:
    text = html.unescape(markdown(view(runs.broken())))
    assert "\n- first divergence: mla.q_rope in 1 cell of tiny2 (docs/trace.md" in text
    assert "first divergence" not in markdown(view(runs.run()))


def test_markup_in_a_ledger_stays_text() -> None:
    tables = rendered(markdown(view(runs.broken())))
    assert row(runs.broken(), "fp32-ar-ties-cpu")[3].startswith("DeviceError: <b>launch</b> failed | `x` ")
    assert not {"b", "script", "img", "a"} & tables.tags


@settings(max_examples=40)
@example("a | b ` c & <d> \\ [e](f) *g* #h @i $j$ ~k~ !l")
@given(st.text(min_size=1, max_size=60))
def test_no_text_breaks_the_table(text: str) -> None:
    ledger = runs.run({"tiny": ("oracle",)})
    cell = ledger.cells[0]
    bad = replace(cell, verdict=Verdict.ERROR, detail=text, rerun=text)
    ledger = replace(ledger, cells=(bad, *ledger.cells[1:]))
    found = [row for row in rendered(markdown(view(ledger))).rows if cell.id in row]
    assert [len(row) for row in found] == [5]
    assert found[0][2] == "ERROR"


def test_the_map_has_every_cell() -> None:
    ledger = runs.broken()
    rows = {row[0]: row[1:] for row in rendered(markdown(view(ledger))).rows if row[0] in ("Config", *runs.TABLE)}
    assert rows["Config"] == [
        f"{precision} {name}" for precision in ("fp32", "int4") for name in ("ar", "hostile", "noisy", "oracle")
    ]
    shown = [text for name in runs.TABLE for text in rows[name] if text]
    assert len(shown) == len(ledger.expected)
    assert sum(text.startswith("✅") for text in shown) == ledger.passed
    assert rows["tiny"][2] == "❌ TREE"
    assert rows["ties"][1] == ""


def test_what_changed_since_an_earlier_run() -> None:
    tables = rendered(markdown(view(runs.broken()), compare(runs.broken(), runs.run())))
    assert ["broken", "fp32-ddtree-tiny-noisy-cpu", "PASS", "FAIL_TREE"] in tables.rows


@pytest.mark.parametrize("detail", ["short", "| & < " * 400])
def test_it_fits_into_a_comment_even_if_everything_fails(detail: str) -> None:
    ledger = runs.run(runs.LARGE, devices=("cpu", "cuda"))
    cells = tuple(replace(cell, verdict=Verdict.ERROR, detail=detail) for cell in ledger.cells)
    text = markdown(view(replace(ledger, cells=cells, problems=(detail,) * 500)))
    assert len(text) < LIMIT + 200
    assert f"{len(cells) - FAILURES_SHOWN} more cells" in text or "more than a comment holds" in text


def test_an_infrastructure_problem_is_said_first() -> None:
    text = markdown(view(replace(runs.run(), problems=("no compiler",))))
    assert text.startswith("## ❌")
    assert "no compiler" in text
    assert "no cell was expected" in markdown(view(replace(runs.run(), expected=(), cells=())))


def test_green_is_said_as_plainly() -> None:
    text = markdown(view(runs.run()))
    assert text.startswith("## ✅ 20 of 20 expected cells passed")
    assert "What failed" not in text
