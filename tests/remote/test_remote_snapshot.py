"""A working tree as it would be sent, without a host: what is in it, how its list is cut, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from harness.remote import sync
from harness.remote.sync import File, Snapshot, SyncError, snapshot, working_tree
from tests.remote.support import git, write


def named(count: int) -> Snapshot:
    """Files and links in turn, their paths in order."""
    names = [f"{i:04}".encode() for i in range(count)]
    files = tuple(File(name, 0o644, f"digest of {name!r}", i) for i, name in enumerate(names) if i % 5)
    return Snapshot(Path("/"), files, tuple((name, b"to\xff" + name) for i, name in enumerate(names) if not i % 5))


def test_the_pieces_of_a_list_are_all_of_it_in_order() -> None:
    tree = named(1000)
    pieces = tree.pieces()
    assert {hashlib.sha256(piece).hexdigest() for piece in pieces.values()} == set(pieces)
    read = [json.loads(piece) for piece in pieces.values()]
    assert [tuple(one) for piece in read for one in piece["files"]] == [
        (file.path.decode(), file.mode, file.digest, file.size) for file in tree.files
    ]
    assert [(path.encode(), os.fsencode(to)) for piece in read for path, to in piece["links"]] == list(tree.links)
    last = [max(path for path, *_ in (*piece["files"], *piece["links"])) for piece in read]
    assert last == sorted(last)
    ends = [f"{i:04}" for i in range(1000) if hashlib.sha256(f"{i:04}".encode()).digest()[0] < 4]
    assert last == [*ends, "0999"]
    assert named(0).pieces() == {}


def test_a_change_moves_one_piece() -> None:
    tree = named(1000)
    pieces = set(tree.pieces())
    changed = [
        File(file.path, 0o755, file.digest, file.size) if i == 400 else file for i, file in enumerate(tree.files)
    ]
    assert len(set(Snapshot(tree.root, tuple(changed), tree.links).pieces()) - pieces) == 1
    without = tree.files[:400] + tree.files[401:]
    assert len(set(Snapshot(tree.root, without, tree.links).pieces()) - pieces) == 1


def test_equal_contents_are_sent_once_and_counted_as_often_as_they_are_there() -> None:
    files = tuple(File(name, 0o644, digest, 3) for name, digest in ((b"a", "x"), (b"b", "y"), (b"c", "x")))
    tree = Snapshot(Path("/"), files, ())
    assert [file.path for file in tree.contents()] == [b"a", b"b"]
    assert tree.size == 9


def test_modes_links_and_contents_are_the_files(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write(root, {"plain": b"x" * 3_000_000, "sub/run": b"", "sub/read": b"one"})
    (root / "sub" / "run").chmod(0o4755)
    (root / "sub" / "read").chmod(0o400)
    (root / "here").symlink_to(".")
    (root / "sub" / "to").symlink_to("../plain")
    paths = [b"here", b"plain", b"sub/read", b"sub/run", b"sub/to"]
    tree = snapshot(root, paths)
    assert tree.links == ((b"here", b"."), (b"sub/to", b"../plain"))
    assert [(file.path, file.mode, file.size) for file in tree.files] == [
        (b"plain", 0o644, 3_000_000), (b"sub/read", 0o400, 3), (b"sub/run", 0o755, 0),
    ]  # fmt: skip
    for file in tree.files:
        data = (root / os.fsdecode(file.path)).read_bytes()
        assert file.digest == hashlib.sha256(data).hexdigest()
        assert b"".join(tree.read(file)) == data


def test_what_changes_before_it_is_sent_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"one"})
    tree = snapshot(tmp_path, [b"a"])
    (file,) = tree.files
    for other in (b"two", b"on", b""):
        write(tmp_path, {"a": other})
        with pytest.raises(SyncError, match="a: changed while it was sent"):
            list(tree.read(file))
    write(tmp_path, {"a": b"one and more"})  # what was there when it was hashed is what is sent
    assert list(tree.read(file)) == [b"one"]
    (tmp_path / "a").unlink()
    with pytest.raises(SyncError, match="a: No such file or directory, while it was sent"):
        list(tree.read(file))


def test_what_is_neither_file_nor_link_within_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write(tmp_path, {"tree/a": b"", "tree2/secret": b""})
    (root / "beside").symlink_to("../tree2/secret")  # a folder whose name begins as the tree's
    os.mkfifo(root / "new\nline")
    for path, said in (
        (b"beside", r"beside: the link leads out of the tree, to \.\./tree2/secret"),
        (b"new\nline", r"'new\\nline': neither a file nor a link"),
        (b"gone", "gone: No such file or directory"),
    ):
        with pytest.raises(SyncError, match=said):
            snapshot(root, [b"a", path])


def test_a_tree_carries_what_stands_in_for_git(repo: Path) -> None:
    """In place of one that lies there, from a host that this tree was itself sent to."""
    write(repo, {".kdtree-source.json": "{}", "a.txt": "two\n"})
    tree = working_tree(repo)
    assert [file.path for file in tree.files] == sorted(file.path for file in tree.files)
    (made,) = (file for file in tree.files if file.path == b".kdtree-source.json")
    data = b"".join(tree.read(made))
    assert (made.mode, made.size, made.digest) == (0o644, len(data), hashlib.sha256(data).hexdigest())
    found = json.loads(data)
    assert len(found["commit"]) == 40
    assert "a.txt" in found["dirty"]
    git(repo, "rm", "-q", "--cached", "a.txt")
    assert b"a.txt" in sync.listed(repo), "untracked, and not ignored"
    (repo / "run.sh").unlink()
    assert b"run.sh" not in sync.listed(repo), "tracked, and not there"
    assert stat.S_ISLNK((repo / "link").lstat().st_mode)
    assert tree.links == ((b"link", b"src/b.py"),)


def test_wheels_are_the_files_that_end_so(tmp_path: Path) -> None:
    (tmp_path / "folder.whl").mkdir()
    write(tmp_path, {"note.txt": ""})
    with pytest.raises(SyncError, match="holds no wheel"):
        sync.wheels(tmp_path)
    write(tmp_path, {"b.whl": "b", "a.whl": "a"})
    assert [file.path for file in sync.wheels(tmp_path).files] == [b"a.whl", b"b.whl"]
