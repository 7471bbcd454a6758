"""Tests wait as long as a busy machine needs."""

from __future__ import annotations

import re

import pytest

from harness.sources import ROOT
from tests import waiting

# A second or more in figures, for the end of a thread, a process or a queue; less is a try and no wait.
OWN = re.compile(
    r"\.(join|wait|communicate|get)\((timeout=)?[1-9][0-9.]*\)|\brun\(.*timeout=[0-9.]+[,)]|monotonic\(\) \+ [0-9]"
)


def test_what_comes_is_waited_for_and_what_does_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    assert waiting.until(lambda: asked.append(1) or len(asked) == 3) > 0
    monkeypatch.setattr(waiting, "PATIENCE", 0.1)
    with pytest.raises(AssertionError, match="not within"):
        waiting.until(lambda: False)


def test_nobody_has_less_patience() -> None:
    """A limit of a test's own is either longer than needed or, on some machine some day, too short."""
    short = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if OWN.search(line)
    ]
    assert short == [], "wait with tests/waiting.py"
