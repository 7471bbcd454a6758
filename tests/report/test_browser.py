"""The pages in headless Chromium: nothing fetched, nothing complained about, every cell there, usable by everybody.

Needs Chromium and the packages playwright and axe-playwright-python (extra ``test``). Where one is missing the tests
skip by name; with KDTREE_REQUIRE_BROWSER=1, as in CI, they fail instead. KDTREE_SCREENSHOTS names a folder
for pictures of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import runs

from harness.ledger import write
from harness.reports.against import compare
from harness.reports.history import load
from harness.reports.html import history_page, page
from harness.reports.view import view
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--disable-gpu", "--disable-background-networking", "--no-first-run"]
SIZES = {"desk": (1280, 900), "phone": (360, 780)}
SCHEMES = ("light", "dark")
SERIOUS = ("serious", "critical")


def missing() -> str:
    """What these tests lack, ``""`` if nothing."""
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser: none of {', '.join(BROWSERS)} is on PATH (Debian: apt-get install chromium)"
    for package in ("playwright", "axe_playwright_python"):
        try:
            __import__(package)
        except ImportError:
            return f"the package {package} is not installed (extra: test)"
    return ""


@dataclass
class Opened:
    """A page in the browser, and what it did on the way."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    lack = missing()
    if lack and os.environ.get("KDTREE_REQUIRE_BROWSER"):
        pytest.fail(f"KDTREE_REQUIRE_BROWSER is set: {lack}", pytrace=False)
    if lack:
        pytest.skip(lack)
    from playwright.sync_api import sync_playwright

    path = next(found for found in map(shutil.which, BROWSERS) if found)
    with sync_playwright() as driver:
        # the sandbox needs user namespaces, which containers and root do not have; the pages are our own
        launched = driver.chromium.launch(
            executable_path=path, args=ARGUMENTS, chromium_sandbox=False, timeout=1000 * PATIENCE
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages under test, as files."""
    folder = tmp_path_factory.mktemp("pages")
    broken, large = runs.broken(), runs.run(runs.LARGE)
    for day, ledger in enumerate((runs.run(), broken, runs.run()), 1):
        run_dir = folder / "runs" / f"203001{day:02}T000000Z-abcdef"
        run_dir.mkdir(parents=True)
        write(replace(ledger, run_id=run_dir.name, started=f"2030-01-{day:02}T00:00:00Z"), run_dir)
    texts = {
        "broken": page(view(broken), compare(broken, runs.run())),
        "large": page(view(large)),
        "history": history_page(load(folder / "runs")),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, "utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def opened(browser: Any, path: Path, scheme: str = "light", size: str = "desk") -> Opened:
    width, height = SIZES[size]
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    context.set_default_timeout(1000 * PATIENCE)
    result = Opened(context.new_page())
    result.page.on("request", lambda request: result.requests.append(request.url))
    result.page.on("console", lambda message: result.complaints.append(message.text))
    result.page.on("pageerror", lambda error: result.complaints.append(str(error)))
    result.page.goto(path.as_uri())
    return result


@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [
        ("broken", "light", "desk"),
        ("broken", "dark", "phone"),
        ("history", "dark", "desk"),
        ("history", "light", "phone"),
    ],
)
def test_a_page_is_quiet_readable_and_accessible(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, size: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    shown = opened(browser, pages[name], scheme, size)
    assert shown.requests == [pages[name].as_uri()]
    assert shown.complaints == []
    assert shown.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    pictures = os.environ.get("KDTREE_SCREENSHOTS")
    if pictures:
        shown.page.screenshot(path=Path(pictures) / f"{name}-{scheme}-{size}.png", full_page=True)
    shown.page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    found = Axe().run(shown.page).response["violations"]
    grave = [v for v in found if v["impact"] in SERIOUS]
    assert [(v["id"], v["nodes"][0]["html"], v["nodes"][0]["failureSummary"]) for v in grave] == []
    shown.page.context.close()


def test_axe_would_find_something(browser: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    path = tmp_path / "bad.html"
    path.write_text('<html><body><img src="data:,"><p style="color:#ccc;background:#fff">faint</p></body></html>')
    shown = opened(browser, path)
    found = {v["id"] for v in Axe().run(shown.page).response["violations"] if v["impact"] in SERIOUS}
    assert {"image-alt", "color-contrast", "html-has-lang"} <= found
    shown.page.context.close()


def test_every_cell_is_there_and_the_map_leads_to_it(browser: Any, pages: dict[str, Path]) -> None:
    shown = opened(browser, pages["large"])
    ids = list(runs.run(runs.LARGE).expected)
    assert shown.page.eval_on_selector_all("#table tbody th", "all => all.map(th => th.textContent)") == ids
    assert shown.page.locator(".map a").count() == len(ids)
    target = shown.page.locator("#cell-int4-ddtree-config_18-oracle-cpu")
    assert not target.is_visible()
    link = shown.page.locator('.map a[href="#cell-int4-ddtree-config_18-oracle-cpu"]')
    link.focus()
    shown.page.keyboard.press("Enter")
    target.wait_for(state="visible")
    assert target.locator("code.line").text_content() == "nox -s test -- -k int4-ddtree-config_18-oracle-cpu"
    shown.page.context.close()


def test_the_table_filters_and_sorts(browser: Any, pages: dict[str, Path]) -> None:
    shown = opened(browser, pages["broken"])
    rows = "#table tbody tr:not([hidden]) th"
    names = "all => all.map(th => th.textContent)"
    shown.page.fill("input[type=search]", "INT4 tiny2")
    found = shown.page.eval_on_selector_all(rows, names)
    assert found == [id for id in runs.broken().expected if "int4" in id and "tiny2" in id]
    shown.page.check("input[type=checkbox]")
    assert shown.page.eval_on_selector_all(rows, names) == ["int4-ar-tiny2-cpu", "int4-ddtree-tiny2-oracle-cpu"]
    assert shown.page.text_content("output") == "2 of 20 shown"
    shown.page.fill("input[type=search]", "")
    shown.page.uncheck("input[type=checkbox]")
    shown.page.click("#table th button:has-text('Margin')")
    margins = [cell.margin for cell in sorted(runs.broken().cells, key=lambda cell: cell.margin)]
    seen = shown.page.eval_on_selector_all("#table td[data-label='Margin, %']", "all => all.map(td => td.dataset.v)")
    assert [float(value) for value in seen] == margins
    assert shown.page.get_attribute("#table th:has-text('Margin')", "aria-sort") == "ascending"
    shown.page.click("#table th button:has-text('Margin')")
    assert shown.page.eval_on_selector_all(rows, names)[0] == "int4-ar-tiny2-cpu"
    shown.page.context.close()


def test_the_two_schemes_differ(browser: Any, pages: dict[str, Path]) -> None:
    backgrounds = []
    for scheme in SCHEMES:
        shown = opened(browser, pages["broken"], scheme)
        backgrounds.append(shown.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        shown.page.context.close()
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(16, 21, 27)"]


def test_the_map_can_be_read_without_colours(browser: Any, pages: dict[str, Path]) -> None:
    shown = opened(browser, pages["broken"])
    texts = {
        str(href).removeprefix("#cell-"): str(text)
        for href, text in shown.page.eval_on_selector_all(
            ".map a", "all => all.map(a => [a.getAttribute('href'), a.textContent])"
        )
    }
    for cell in runs.broken().cells:
        assert ("✗" in texts[cell.id] or "○" in texts[cell.id]) == (cell.verdict.value != "PASS")
        assert cell.verdict.value != "PASS" or texts[cell.id] == f"{100 * cell.margin:.0f}"
    shown.page.context.close()
