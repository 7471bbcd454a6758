"""One self-contained HTML page from a ledger, or from many: styles, script and plots are inside, nothing is fetched.

A content security policy in the page forbids every request and every script but its own, so that a ledger from
elsewhere can neither phone home nor run code, whatever its texts hold. Colours follow the reader's scheme.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.reports.against import Comparison, percent
from harness.reports.history import History
from harness.reports.view import View, legal, milliseconds, number

TEMPLATES = Path(__file__).with_name("templates")
OPEN_FAILURES = 12  # shown unfolded; where everything fails, the first few say why
OUTCOMES = {
    PASSED: "Every expected cell passed.",
    FAILED: "At least one cell failed.",
    INCOMPLETE: "The run is incomplete: an expected cell did not run.",
    INFRASTRUCTURE: "The run judges nothing: configuration or infrastructure failed.",
}
SIGNS = {
    "broken": "✗",
    "worse": "▲",
    "slower": "▲",
    "missing": "?",
    "mended": "✓",
    "better": "▼",
    "faster": "▼",
    "new": "+",
}


def _clean(value: Any) -> Any:
    """Of whatever is put into a page."""
    return legal(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.globals.update(number=number, percent=percent, milliseconds=milliseconds)
    return environment


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _render(template: str, **values: Any) -> str:
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("style.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # the files are ours; everything else that enters the page is escaped
    trusted = {"style": Markup(style), "script": Markup(script)}
    return _environment().get_template(template).render(policy=policy, **trusted, **values)


def page(view: View, comparison: Comparison | None = None) -> str:
    """The report of one run."""
    environments = view.ledger.environments.values()
    return _render(
        "page.html.jinja",
        view=view,
        comparison=comparison,
        outcome=OUTCOMES[view.status],
        signs=SIGNS,
        open_failures=OPEN_FAILURES,
        several_hosts=len(view.ledger.environments) > 1,
        facts_named=list(dict.fromkeys(name for values in environments for name in values)),
    )


def history_page(history: History, folder: str = ".") -> str:
    """Margins, times and acceptance over runs; ``folder`` leads from the page to the folder of the runs."""
    return _render("history.html.jinja", history=history, folder=folder)
