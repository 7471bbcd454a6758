"""What the far side takes for a tree, and how it says what its system refused."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.remote.farside.tree import StoreError, Tree, explain

DIGEST = "0123456789abcdef" * 4


def piece(**content: Any) -> bytes:
    return json.dumps({"files": [], "links": [], **content}).encode()


def test_pieces_add_up_and_equal_contents_are_one() -> None:
    tree = Tree()
    tree.add(piece(files=[["a", 0o4755, DIGEST, 3], ["b/.git/c", 0o600, "f" * 64, 0]]))
    tree.add(piece(files=[["not \udcff UTF-8", 0o644, DIGEST, 3]], links=[["...", "../out\udcff"]]))
    assert tree.files == [
        (b"a", 0o755, DIGEST, 3), (b"b/.git/c", 0o600, "f" * 64, 0), (b"not \xff UTF-8", 0o644, DIGEST, 3),
    ]  # fmt: skip
    assert tree.links == [(b"...", b"../out\xff")]
    assert list(tree.contents().items()) == [(DIGEST, 3), ("f" * 64, 0)]


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "a//b", "a/", ".", "..", "a/../../b", "a/..", "./a", "a\0b", ".git", ".git/hooks/x"]
)
def test_a_path_that_is_in_no_tree_is_refused(path: str) -> None:
    for content in ({"files": [[path, 0o644, DIGEST, 0]]}, {"links": [[path, "a"]]}):
        with pytest.raises(StoreError, match="no path inside a tree") as caught:
            Tree().add(piece(**content))
        assert caught.value.kind == "manifest"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{}",
        b"[]",
        b'{"files": 1, "links": []}',
        piece(files=[["a", 0o644, DIGEST]]),
        *(piece(files=[["a", 0o644, digest, 0]]) for digest in (DIGEST[1:], DIGEST + "0", DIGEST.upper())),
    ],
)
def test_what_is_no_piece_of_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="malformed piece of a manifest") as caught:
        Tree().add(data)
    assert caught.value.kind == "manifest"


def test_what_the_system_refused_is_said_with_its_place_and_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = str(tmp_path).encode()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    for number, kind, more in (
        (errno.ENOSPC, "disk", f"; 7 bytes are free under {tmp_path}"),
        (errno.EDQUOT, "disk", f"; 7 bytes are free under {tmp_path}"),
        (errno.EFBIG, "disk", f"; 7 bytes are free under {tmp_path}"),
        (errno.EACCES, "io", ""),
    ):
        for name, where in ((b"/a\xff", "/a\udcff"), ("/b", "/b"), (None, str(tmp_path))):
            said = explain(OSError(number, "why", name) if name else OSError(number, "why"), work)
            assert (said.kind, str(said)) == (kind, f"{where}: why{more}")
    monkeypatch.undo()
    gone = explain(OSError(errno.ENOSPC, "why"), b"/nowhere/at/all")
    assert str(gone).endswith("why; -1 bytes are free under /nowhere/at/all")
