"""Work that takes long says so, and nothing is said of what takes less."""

from __future__ import annotations

import re

import pytest

from harness import bundles, progress
from harness.progress import told
from refs import generate
from tests.waiting import PATIENCE, until


def test_long_work_is_told_of_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    lines: list[str] = []
    with told("counting", lines.append, lambda: "3 of 4", first=0.02):
        until(lambda: len(lines) >= 3)
    assert lines[0] == "counting ..."
    assert re.fullmatch(r"counting \.\.\. 3 of 4, \d+ s", lines[1])
    assert re.fullmatch(r"counting: \d+\.\d s", lines[-1])


def test_short_work_is_not_told_of() -> None:
    lines: list[str] = []
    with told("counting", lines.append, first=PATIENCE):
        pass
    assert lines == []


def test_work_that_fails_is_no_success() -> None:
    lines: list[str] = []

    def work() -> None:
        with told("counting", lines.append, first=0.01):
            until(lambda: lines)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert re.fullmatch(r"counting: stopped after \d+\.\d s", lines[-1])


def test_a_bundle_that_takes_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of K2.6's sizes takes minutes."""
    lines: list[str] = []

    def slow(name: str, path: object) -> None:
        until(lambda: lines)
        raise generate.GenerateError("no attempt will do")

    monkeypatch.setattr(generate, "write", slow)
    monkeypatch.setattr(bundles, "EVERY", 0.02)
    with pytest.raises(bundles.BundleError, match="no attempt"):
        bundles._make(bundles.cache_folder(), "tiny", "", {}, lines.append)
    assert lines[0] == "bundles: tiny ..."
