"""A tree of files as it is described on the wire, and what may be said about one that cannot be made.

Paths are bytes: they cross the wire as JSON with the undecodable bytes escaped, whatever the locale of either side.
"""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import dataclass, field

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(Exception):
    """A request cannot be met; ``kind`` is ``disk``, ``damaged``, ``manifest`` or ``io``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def encode(path: str) -> bytes:
    """A path as JSON had it, as the system takes it."""
    return path.encode("utf-8", "surrogateescape")


def decode(path: bytes) -> str:
    """A path as the system has it, for JSON: bytes that are no UTF-8 are escaped."""
    return path.decode("utf-8", "surrogateescape")


def explain(error: OSError, workdir: bytes) -> StoreError:
    """An operating system's error with what its reader needs: a full disk's free space, the path."""
    name = error.filename
    where = decode(name) if isinstance(name, bytes) else str(name) if name else decode(workdir)
    if error.errno in _FULL:
        try:
            free = shutil.disk_usage(workdir).free
        except OSError:
            free = -1
        return StoreError("disk", f"{where}: {error.strerror}; {free} bytes are free under {decode(workdir)}")
    return StoreError("io", f"{where}: {error.strerror}")


@dataclass
class Tree:
    """What a tree is made of: files (path, mode, hash, size) and symbolic links (path, target)."""

    files: list[tuple[bytes, int, str, int]] = field(default_factory=list)
    links: list[tuple[bytes, bytes]] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        """Take in one piece of a manifest. Raises StoreError when it names what no tree may hold."""
        try:
            content = json.loads(piece)
            self.files += [(_safe(p), int(m) & 0o777, _digest(d), int(s)) for p, m, d, s in content["files"]]
            self.links += [(_safe(p), encode(t)) for p, t in content["links"]]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError("manifest", f"malformed piece of a manifest: {error}") from None

    def contents(self) -> dict[str, int]:
        """Sizes by hash, in the order in which they are sent."""
        return {digest: size for _, _, digest, size in self.files}


def _safe(path: str) -> bytes:
    name = encode(path)
    parts = name.split(b"/")
    if not name or b"\0" in name or any(part in (b"", b".", b"..") for part in parts) or parts[0] == b".git":
        raise StoreError("manifest", f"{path!r}: no path inside a tree")
    return name


def _digest(text: str) -> str:
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r} is no SHA-256")
    return text
