"""Frames over a pair of byte streams, the same code at both ends.

A frame is one byte of kind, four bytes of length (big endian) and the payload. Sending is safe from several threads; a
frame is never torn by another one. Before the first frame the far side writes ``GREETING``, so that whatever a login
shell prints first can be told apart from it.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from typing import Any

GREETING = b"\0kdtree-agent 1\n"
MESSAGE, DATA, OUT, ERR, BEAT = b"J", b"D", b"O", b"E", b"H"
KINDS = frozenset((MESSAGE, DATA, OUT, ERR, BEAT))
CHUNK = 256 * 1024  # of file content per frame: large enough that Python's cost per frame vanishes
LARGEST = 64 * 1024 * 1024  # a length beyond this is a broken stream, not a frame

_HEADER = struct.Struct(">cI")


class WireError(Exception):
    """The stream holds something that is no frame."""


class Wire:
    """``read(n)`` gives 1 to n bytes, or ``b""`` at the end; ``write`` takes all it is given."""

    def __init__(self, read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
        self._read = read
        self._write = write
        self._lock = threading.Lock()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Send one frame."""
        with self._lock:
            self._write(_HEADER.pack(kind, len(payload)) + payload)

    def say(self, **message: Any) -> None:
        """Send a JSON object."""
        self.send(MESSAGE, json.dumps(message, separators=(",", ":")).encode("ascii"))

    def receive(self) -> tuple[bytes, bytes]:
        """The next frame. Raises EOFError when the stream ends, in the middle of a frame or not, and WireError."""
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if kind not in KINDS or length > LARGEST:
            raise WireError(f"frame of kind {kind!r} and length {length}")
        return kind, self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._read(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def parse(payload: bytes) -> dict[str, Any]:
    """The object in a MESSAGE frame. Raises WireError."""
    try:
        message = json.loads(payload)
    except ValueError as error:
        raise WireError(f"message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("message is not an object")
    return message
