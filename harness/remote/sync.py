"""What is sent to a host: the working tree as it is, uncommitted changes included, each content known by its hash.

Only what git tracks or does not ignore is taken. A manifest is cut into pieces at paths chosen by their hash, so a
change moves one piece and not the whole list. Files keep their permission bits; a symbolic link that leads out of the
tree is refused, and so is whatever cannot be sent faithfully.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import sources
from harness.remote.farside.tree import decode
from harness.remote.farside.wire import CHUNK

_CUT = 4  # of 256: a piece of a manifest holds 64 entries on average


class SyncError(Exception):
    """The working tree cannot be sent as it is."""


@dataclass(frozen=True)
class File:
    """A regular file of the tree; ``data`` holds it if it is made here and lies on no disk."""

    path: bytes
    mode: int
    digest: str
    size: int
    data: bytes | None = None


@dataclass(frozen=True)
class Snapshot:
    """A tree at one moment: ``files`` and ``links`` (path, target) sorted by path."""

    root: Path
    files: tuple[File, ...]
    links: tuple[tuple[bytes, bytes], ...]

    def contents(self) -> list[File]:
        """One file for each content, in the order of the manifest."""
        found: dict[str, File] = {}
        for file in self.files:
            found.setdefault(file.digest, file)
        return list(found.values())

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def pieces(self) -> dict[str, bytes]:
        """The manifest: pieces by their hash, in order."""
        found: dict[str, bytes] = {}
        files: list[tuple[str, int, str, int]] = []
        links: list[tuple[str, str]] = []

        def close() -> None:
            if files or links:
                piece = json.dumps({"files": files, "links": links}, separators=(",", ":")).encode("ascii")
                found[hashlib.sha256(piece).hexdigest()] = piece
                files.clear()
                links.clear()

        entries: list[tuple[bytes, File | bytes]] = [(file.path, file) for file in self.files]
        entries += self.links
        for path, entry in sorted(entries, key=lambda pair: pair[0]):
            if isinstance(entry, File):
                files.append((decode(path), entry.mode, entry.digest, entry.size))
            else:
                links.append((decode(path), decode(entry)))
            if hashlib.sha256(path).digest()[0] < _CUT:
                close()
        close()
        return found

    def read(self, file: File) -> Iterator[bytes]:
        """The content of ``file``, in chunks. Raises SyncError if it is no longer what its hash says."""
        hashing = hashlib.sha256()
        left = file.size
        try:
            if file.data is not None:
                yield file.data
                return
            with open(os.path.join(os.fsencode(self.root), file.path), "rb") as source:
                while left and (chunk := source.read(min(CHUNK, left))):
                    hashing.update(chunk)
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise SyncError(f"{_name(file.path)}: {error.strerror}, while it was sent") from None
        if left or hashing.hexdigest() != file.digest:
            raise SyncError(f"{_name(file.path)}: changed while it was sent; run again when nothing writes to the tree")


def _name(path: bytes) -> str:
    """A path for messages: on one line whatever it holds."""
    text = os.fsdecode(path)
    return text if text.isprintable() else ascii(text)


def listed(root: Path) -> list[bytes]:
    """Paths below ``root`` that git tracks or does not ignore, and that exist. Raises SyncError."""
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, env=sources.git_environment(), capture_output=True, check=False)
    except OSError as error:
        raise SyncError(f"git: {error.strerror}; what is sent is what git tracks or does not ignore") from None
    if done.returncode:
        raise SyncError(f"{root}: {done.stderr.decode('utf-8', 'replace').strip()}")
    paths = {path for path in done.stdout.split(b"\0") if path}
    return sorted(path for path in paths if os.path.lexists(os.path.join(os.fsencode(root), path)))


def snapshot(root: Path, paths: Sequence[bytes]) -> Snapshot:
    """Hash ``paths`` below ``root``. Raises SyncError naming the path that cannot be sent."""
    base = os.fsencode(root)
    real = os.path.realpath(base)
    files, links = [], []
    for path in paths:
        full = os.path.join(base, path)
        try:
            status = os.lstat(full)
            if stat.S_ISLNK(status.st_mode):
                links.append((path, _inside(real, base, path)))
            elif stat.S_ISREG(status.st_mode):
                files.append(_file(full, path, stat.S_IMODE(status.st_mode) & 0o777))
            elif stat.S_ISDIR(status.st_mode):
                raise SyncError(f"{_name(path)}: a repository inside this one is not sent; add it to .gitignore")
            else:
                raise SyncError(f"{_name(path)}: neither a file nor a link; add it to .gitignore")
        except OSError as error:
            raise SyncError(f"{_name(path)}: {error.strerror}") from None
    return Snapshot(root, tuple(files), tuple(links))


def _file(full: bytes, path: bytes, mode: int) -> File:
    hashing = hashlib.sha256()
    size = 0
    with open(full, "rb") as source:
        while chunk := source.read(1 << 20):
            hashing.update(chunk)
            size += len(chunk)
    return File(path, mode, hashing.hexdigest(), size)


def _inside(real: bytes, base: bytes, path: bytes) -> bytes:
    """The target of a link that stays inside the tree, followed through every other link on its way."""
    target = os.readlink(os.path.join(base, path))
    end = os.path.realpath(os.path.join(base, path))
    if target.startswith(b"/") or not (end == real or end.startswith(real + b"/")):
        raise SyncError(
            f"{_name(path)}: the link leads out of the tree, to {_name(target)}; "
            "make it relative to a place inside, or add it to .gitignore"
        )
    return target


def working_tree(root: Path) -> Snapshot:
    """The working tree with ``.kdtree-source.json``, which stands in for git where there is none. Raises SyncError."""
    carried = sources.SOURCE_FILE.encode()
    tree = snapshot(root, [path for path in listed(root) if path != carried])
    known = sources.describe(root)
    data = json.dumps({"commit": known.commit, "dirty": list(known.dirty)}).encode("ascii")
    made = File(carried, 0o644, hashlib.sha256(data).hexdigest(), len(data), data)
    return Snapshot(root, tuple(sorted((*tree.files, made), key=lambda file: file.path)), tree.links)


def wheels(folder: Path) -> Snapshot:
    """The wheels in ``folder``. Raises SyncError when there is none."""
    paths = sorted(os.fsencode(path.name) for path in folder.glob("*.whl") if path.is_file())
    if not paths:
        raise SyncError(f"{folder}: holds no wheel (*.whl); make some with: pip download --dest {folder} NAME")
    return snapshot(folder, paths)
