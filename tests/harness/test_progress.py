"""Work that takes long says so, and nothing is said of what takes less."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import cast

import pytest

from harness import acceptance, bundles, progress, quality
from harness.progress import each, told
from harness.protocol import Session
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


def test_many_items_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr(progress, "tell", lines.append)
    took = []
    for item in each("abc", "decoding"):
        if item == "c":
            until(lambda: any("2 of 3 are done" in line for line in lines))
        took.append(item)
    assert took == [*"abc"]
    assert re.fullmatch(r"decoding: \d+\.\d s", lines[-1])


@pytest.mark.parametrize("command", [acceptance, quality])
def test_what_scores_held_out_text_counts_its_pieces(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []

    def counted(items: Sequence[object], what: str) -> Iterator[object]:
        told.append((len(items), what))
        return iter(())

    class Stop(Exception):
        pass

    def estimate(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(command, "each", counted)
    monkeypatch.setattr(command, "estimate", estimate)
    work = {
        acceptance: lambda: acceptance.measure(cast(Session, None), "fp32", [(0, [1]), (0, [2])], 8, 16, [7]),
        quality: lambda: quality.measure({}, [("a", bytes(quality.PIECE + 1))], 256, 0),
    }
    with pytest.raises(Stop):
        work[command]()
    assert told == [(2, "fp32: decoding" if command is acceptance else "scoring")]


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
