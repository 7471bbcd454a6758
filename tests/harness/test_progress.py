"""Work that takes long says so, and nothing is said of what takes less."""

from __future__ import annotations

import time

import pytest

from harness import bundles, progress
from harness.progress import told
from refs import generate


def wait_for(lines: list[str], count: int) -> None:
    end = time.monotonic() + 5
    while len(lines) < count and time.monotonic() < end:
        time.sleep(0.005)


def test_long_work_is_told_of_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    lines: list[str] = []
    with told("counting", lines.append, lambda: "3 of 4", first=0.02):
        wait_for(lines, 3)
    assert lines[0] == "counting ..."
    assert lines[1] == "counting ... 3 of 4, 0 s"
    assert lines[-1].startswith("counting: 0.")


def test_short_work_is_not_told_of() -> None:
    lines: list[str] = []
    with told("counting", lines.append):
        pass
    assert lines == []


def test_work_that_fails_is_no_success() -> None:
    lines: list[str] = []

    def work() -> None:
        with told("counting", lines.append, first=0.01):
            wait_for(lines, 1)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert lines[-1].startswith("counting: stopped after 0.")


def test_a_bundle_that_takes_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of K2.6's sizes takes minutes."""
    lines: list[str] = []

    def slow(name: str, path: object) -> None:
        wait_for(lines, 1)
        raise generate.GenerateError("no attempt will do")

    monkeypatch.setattr(generate, "write", slow)
    monkeypatch.setattr(bundles, "EVERY", 0.02)
    with pytest.raises(bundles.BundleError, match="no attempt"):
        bundles._make(bundles.cache_folder(), "tiny", "", {}, lines.append)
    assert lines[0] == "bundles: tiny ..."
