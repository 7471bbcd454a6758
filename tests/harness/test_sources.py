"""Which commit a tree is of: its own repository's, what it carries, or none; never one of a repository around it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.sources import ROOT, SOURCE_FILE, describe, misfit


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


def test_a_repository_without_a_commit_is_of_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("x")
    assert (describe(tmp_path).commit, describe(tmp_path).dirty) == ("", ())


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


def test_hashes_are_of_paths_and_contents_and_of_nothing_else(tmp_path: Path) -> None:
    """What a gate compares: a byte, a name or a file more in a folder is another hash of that folder alone."""
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    (tmp_path / "csrc" / "cpu" / "b.h").write_bytes(b"22")
    (tmp_path / "csrc" / "a.h").write_bytes(b"1")
    (tmp_path / "refs").mkdir()
    first = describe(tmp_path)
    assert first.engine == hashlib.sha256(b"csrc/a.h\0001\0001csrc/cpu/b.h\0002\00022").hexdigest()
    assert (first.lock, first.harness) == ("", hashlib.sha256().hexdigest())
    for hidden in (
        "csrc/.b.swp",
        "csrc/__pycache__/b.pyc",
        "engine/.cache/x",
        "harness/kdtree.egg-info/PKG",
        "docs/x.md",
    ):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_bytes(b"x")
    os.utime(tmp_path / "csrc" / "a.h", (0, 0))
    assert describe(tmp_path) == first
    seen = {first.engine}
    (tmp_path / "csrc" / "a.h").write_bytes(b"2")
    seen.add(describe(tmp_path).engine)
    (tmp_path / "csrc" / "a.h").rename(tmp_path / "csrc" / "c.h")
    seen.add(describe(tmp_path).engine)
    (tmp_path / "engine" / "c.py").write_bytes(b"")
    seen.add(describe(tmp_path).engine)
    assert len(seen) == 4
    assert describe(tmp_path).harness == first.harness
    for folder in ("harness", "refs", "tests"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "x.py").write_bytes(b"")
        assert describe(tmp_path).harness not in seen
        seen.add(describe(tmp_path).harness)
    (tmp_path / "refs" / "bundles.lock").write_bytes(b"{}")
    assert describe(tmp_path).lock == hashlib.sha256(b"{}").hexdigest()


def test_no_two_files_of_tests_have_one_name() -> None:
    """Whoever asks pytest for the folders of both gets an error for the second."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_a_carried_file_is_believed_beside_git_while_its_hashes_hold(outer: Path) -> None:
    """A tree that travels may arrive in a repository that is still at an older commit."""
    (outer / "csrc").mkdir()
    (outer / "csrc" / "a.h").write_text("1")
    known = describe(outer)
    hashes = {"engine": known.engine, "lock": known.lock, "harness": known.harness}
    (outer / SOURCE_FILE).write_text(json.dumps({"commit": "c0ffee", "dirty": ["b"], "hashes": hashes}))
    assert (describe(outer).commit, describe(outer).dirty) == ("c0ffee", ("b",))
    assert misfit(describe(outer), outer) == ""
    (outer / "csrc" / "a.h").write_text("2")
    assert describe(outer).commit == known.commit
    assert "names commit c0ffee, but its hashes are not those" in misfit(describe(outer), outer)
    (outer / "csrc" / "a.h").write_text("1")
    (outer / SOURCE_FILE).write_text(json.dumps({"commit": "c0ffee", "dirty": ["b"]}))
    assert describe(outer).commit == known.commit


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "{}", '{"commit": "c0ffee"}', '{"commit": "c0ffee", "dirty": 1}']
)
def test_a_carried_file_that_is_none_is_as_if_it_were_not_there(outer: Path, text: str) -> None:
    """Empty it is while a shell lets ``python -m harness.sources`` write it."""
    tree = outer / "elsewhere"
    tree.mkdir()
    known = describe(outer).commit
    assert known
    for folder, commit in ((outer, known), (tree, "")):
        (folder / SOURCE_FILE).write_text(text)
        assert describe(folder).commit == commit
