"""Which commit a tree is of: its own repository's, what it carries, or none; never one of a repository around it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from harness.sources import ROOT, SOURCE_FILE, describe


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    """A repository with one file of its own."""
    git(tmp_path, "init", "-q")
    (tmp_path / "notes").write_text("x")
    git(tmp_path, "add", "notes")
    git(tmp_path, "commit", "-q", "-m", "notes")
    return tmp_path


def test_a_tree_unpacked_in_somebody_s_repository_is_of_no_commit(outer: Path) -> None:
    tree = outer / "kdtree engine"
    tree.mkdir()
    (tree / "file").write_text("x")
    assert (describe(tree).commit, describe(tree).dirty) == ("", ())
    (tree / SOURCE_FILE).write_text(json.dumps({"commit": "c0ffee", "dirty": ["b"]}))
    assert (describe(tree).commit, describe(tree).dirty) == ("c0ffee", ("b",))


def test_a_tree_that_a_larger_repository_holds_is_of_its_commit(outer: Path) -> None:
    tree = outer / "engine"
    tree.mkdir()
    (tree / "file").write_text("x")
    git(outer, "add", "engine")
    git(outer, "commit", "-q", "-m", "engine")
    assert describe(tree).commit == git(outer, "rev-parse", "HEAD").strip()


def test_a_hook_s_variables_name_no_other_repository(outer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that a hook calls, and these tests, mean the folder they name."""
    commit = git(outer, "rev-parse", "HEAD").strip()
    (outer / "other").mkdir()
    git(outer / "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(outer / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(outer / "other" / "index"))
    assert (describe(outer).commit, describe(outer).dirty) == (commit, ("other/",))


def test_a_worktree_is_of_its_own_commit(outer: Path) -> None:
    git(outer, "worktree", "add", "-q", "-b", "side", str(outer / "side"))
    (outer / "side" / "new").write_text("x")
    assert describe(outer / "side").commit == git(outer, "rev-parse", "side").strip()
    assert describe(outer / "side").dirty == ("new",)


def test_no_two_files_of_tests_have_one_name() -> None:
    """Whoever asks pytest for the folders of both gets an error for the second."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []
