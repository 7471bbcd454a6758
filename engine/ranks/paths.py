"""A file's name for all hosts of a job: below the bundle folder it is the same file wherever each host keeps that."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "KDTREE_BUNDLES"
HEAD = 64  # bytes of a KDTR file whose checksum covers the tensor table, and by it every tensor


def portable(path: Path) -> str:
    """``path`` as the other hosts understand it."""
    full, folder = Path(path).absolute(), os.environ.get(FOLDER)
    if folder and full.is_relative_to(Path(folder).absolute()):
        return f"${FOLDER}/{full.relative_to(Path(folder).absolute())}"
    return str(full)


def here(name: str) -> Path:
    """What `portable` gave, on this host."""
    first, _, rest = name.partition("/")
    return Path(os.environ[FOLDER], rest) if first == f"${FOLDER}" else Path(name)


def fingerprint(path: Path) -> tuple[int, bytes]:
    """Size and head of a KDTR file, by which two copies are told apart; nothing of a file that is not there."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size, file.read(HEAD)
    except OSError:
        return 0, b""
