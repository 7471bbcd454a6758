"""Engines by name, as installed packages register them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import engines


def test_two_packages_with_one_engine_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, target in (("one", "one:create"), ("two", "two:create")):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kdtree.engines]\nmine = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        engines.UnknownEngine, match=r"'mine' is registered as (one|two):create and as (two|one):create"
    ):
        engines.registered()


def test_an_engine_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kdtree.engines]\nmine = not_there:create\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(engines.UnknownEngine, match="engine 'mine': not_there:create cannot be loaded"):
        engines.create("mine", "cpu")


@pytest.mark.parametrize("made", [None, RuntimeError("x")])
def test_what_is_no_engine_is_told_before_any_cell(made: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.OWN, "mine", "types:SimpleNamespace")
    monkeypatch.setattr("types.SimpleNamespace", lambda device: made)
    kind = type(made).__name__
    with pytest.raises(
        engines.UnknownEngine, match=f"'mine': .* made a {kind} without name, device, load, kernels: it"
    ):
        engines.create("mine", "cpu")
