"""The page as text: complete, self-contained, escaped, light and quick. ``test_browser.py`` opens it."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import runs

from harness.cells import Ledger, Verdict
from harness.reports.against import compare
from harness.reports.html import OPEN_FAILURES, page
from harness.reports.view import view

VOID = {"meta", "link", "input", "br", "path", "polyline", "circle", "rect", "line"}


class Page(HTMLParser):
    """Ids, targets of links, and whatever could make a request; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.urls: list[str] = []
        self.handlers: list[str] = []
        self.tags: Counter[str] = Counter()
        self.texts: list[str] = []
        self.policy = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        self.ids.update([values["id"]] if "id" in values else [])
        self.links += [values["href"]] if tag == "a" else []
        self.urls += [values[name] for name in ("src", "srcset", "data", "action", "poster") if name in values]
        self.urls += [values["href"]] if tag != "a" and "href" in values else []
        self.handlers += [name for name in values if name.startswith("on")] + (["style"] if "style" in values else [])
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(ledger: Ledger) -> Page:
    return Page(page(view(ledger), compare(ledger, runs.run())))


@pytest.mark.parametrize(
    "ledger", [runs.run(), runs.broken(), runs.run(hosts=("a", "b"))], ids=["green", "red", "hosts"]
)
def test_every_link_ends_somewhere_and_no_id_is_used_twice(ledger: Ledger) -> None:
    parsed = shown(ledger)
    assert [name for name, count in parsed.ids.items() if count > 1] == []
    assert [link for link in parsed.links if link.removeprefix("#") not in parsed.ids] == []


def test_every_cell_has_its_place_in_the_map_in_the_table_and_in_detail() -> None:
    ledger = runs.broken()
    parsed = shown(ledger)
    for id in ledger.expected:
        assert parsed.ids[f"cell-{id}"] == 1
        assert parsed.links.count(f"#cell-{id}") == 2
    lines = [cell.rerun for cell in ledger.cells if cell.rerun]
    assert all(parsed.texts.count(line) == 2 for line in lines)


def test_nothing_can_be_fetched_and_no_script_can_be_brought_in() -> None:
    text = page(view(runs.broken()))
    parsed = Page(text)
    assert parsed.urls == ["data:,"]
    assert parsed.handlers == []
    assert parsed.tags["script"] == 1
    assert parsed.policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in parsed.policy
    assert not re.search(r"(@import|url\()", text)


HOSTILE = "</style></script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}\x00\x1b]0;x\x07"


def test_texts_of_a_ledger_are_text() -> None:
    ledger = runs.broken()
    cells = tuple(
        replace(cell, detail=HOSTILE, rerun=HOSTILE, host=HOSTILE, worker=HOSTILE, kernels={HOSTILE: 1})
        for cell in ledger.cells
    )
    ledger = replace(
        ledger,
        cells=cells,
        environments={HOSTILE: {HOSTILE: HOSTILE}},
        problems=(HOSTILE,),
        notes=(HOSTILE,),
        command=HOSTILE,
        engine=HOSTILE,
        filter=HOSTILE,
    )
    text = page(view(ledger), compare(ledger, ledger))
    parsed = Page(text)
    assert parsed.tags["script"] == 1
    assert parsed.tags["img"] == 0
    assert "49" not in re.findall(r"&gt;(\d+)", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)


def test_a_page_of_the_whole_matrix_is_light_and_made_in_less_than_a_second() -> None:
    ledger = runs.run(runs.LARGE)
    start = time.process_time()  # not the wall's, which others share
    text = page(view(ledger))
    seconds = time.process_time() - start
    assert len(ledger.cells) == 152
    assert len(text.encode()) < 2_000_000
    assert seconds < 1


def test_where_everything_fails_the_first_few_are_unfolded() -> None:
    ledger = runs.run()
    cells = tuple(replace(cell, verdict=Verdict.ERROR, detail="x") for cell in ledger.cells)
    parsed = Page(page(view(replace(ledger, cells=cells))))
    assert parsed.tags["article"] == OPEN_FAILURES
    assert parsed.tags["details"] == len(cells) - OPEN_FAILURES


@pytest.mark.parametrize(
    ("ledger", "says"),
    [
        (runs.run(), "Every expected cell passed."),
        (runs.broken(), "At least one cell failed."),
        (runs.change(runs.run(), "fp32-ar-tiny-cpu", None), "an expected cell did not run"),
        (replace(runs.run(), problems=("no compiler",)), "configuration or infrastructure failed"),
        (replace(runs.run(), expected=(), cells=()), "configuration or infrastructure failed"),
    ],
)
def test_the_outcome_is_the_first_thing_said(ledger: Ledger, says: str) -> None:
    text = page(view(ledger))
    assert says in text
    assert (">✓</span>" in text[: text.index("</h1>")]) == (says == "Every expected cell passed.")


def test_where_cells_diverge_first_is_said_at_the_top() -> None:
    text = page(view(runs.broken()))
    said = text.index("first divergence: mla.q_rope in 1 cell of tiny2")
    assert text.index("<h1>") < said < text.index("</header>")


def test_a_broken_round_is_drawn_twice_and_told_as_a_table() -> None:
    parsed = shown(runs.broken())
    titles = [text for text in parsed.texts if text.startswith("row ")]
    assert "row 2, token 99, depth 1, not in the other tree" in titles
    assert "row 2, token 12, depth 1, not in the other tree" in titles
    assert "row 3, token 21, depth 2, accepted" in titles
    assert "≠99" in parsed.texts
