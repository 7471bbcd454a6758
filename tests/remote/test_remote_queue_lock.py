"""The lock of a box, in a folder of this machine: one holder, whose name those who wait see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.remote.farside import queue_lock
from harness.remote.farside.queue_lock import BoxLock, held_by


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each look at the box's lock slept; a second passes each time."""
    slept: list[float] = []
    monkeypatch.setattr(queue_lock, "time", SimpleNamespace(monotonic=lambda: float(len(slept)), sleep=slept.append))
    return slept


def test_a_box_has_one_holder_whose_name_all_others_see(tmp_path: Path, clock: list[float]) -> None:
    path = str(tmp_path / "lock")
    heard: list[dict[str, Any]] = []
    assert held_by(path) is None
    assert not Path(path).exists(), "to look makes nothing"
    first, second = BoxLock(path), BoxLock(path)
    assert first.acquire({"user": "a", "purpose": "a long word"}, 0, heard.append, lambda: False)
    assert held_by(path) == {"user": "a", "purpose": "a long word"}
    assert not second.acquire({"user": "b"}, 3, heard.append, lambda: False)
    assert heard == [{"user": "a", "purpose": "a long word"}], "told once a holder"
    assert len(clock) == 4
    assert held_by(path) == {"user": "a", "purpose": "a long word"}
    first.close()
    assert held_by(path) is None
    assert second.acquire({"user": "b"}, 0, heard.append, lambda: False)
    assert (second.holder(), held_by(path)) == ({"user": "b"}, {"user": "b"})
    second.close()


def test_who_waits_for_a_box_may_give_up_and_sees_a_new_holder(tmp_path: Path, clock: list[float]) -> None:
    path = str(tmp_path / "lock")
    heard: list[dict[str, Any]] = []
    first, second = BoxLock(path), BoxLock(path)
    assert first.acquire({"user": "a"}, 0, heard.append, lambda: False)

    def give_up() -> bool:
        Path(path).write_text(["{", "[1]", '{"user": "c"}', '{"user": "c"}'][min(len(clock), 3)])
        return len(clock) == 5

    assert not second.acquire({"user": "b"}, 100, heard.append, give_up)
    assert heard == [{"user": "a"}, {}, {"user": "c"}], "half written is nobody yet, and so is what is no record"
    assert len(clock) == 5
    Path(path).write_text("{")
    assert held_by(path) == {}
    Path(path).write_text("[1]")
    assert held_by(path) == {}
    first.close()
    assert second.acquire({"user": "b"}, 0, heard.append, lambda: False)
    assert held_by(path) == {"user": "b"}
    second.close()


def test_a_lock_behind_a_link_is_nobodys(tmp_path: Path) -> None:
    """In a folder that all may write to, a link could name any file."""
    real = BoxLock(str(tmp_path / "lock"))
    assert real.acquire({"user": "a"}, 0, print, lambda: False)
    (tmp_path / "link").symlink_to("lock")
    assert held_by(str(tmp_path / "link")) is None
    with pytest.raises(OSError, match="symbolic links"):
        BoxLock(str(tmp_path / "link"))
    real.close()
