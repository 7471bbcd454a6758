"""Lines from several hosts on one terminal: whole, in the order they come, each with its host's name.

What a host prints is shown, not obeyed: escape sequences other than colours are dropped, and colours too unless the
output is a terminal. Everything also goes to a log per host.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from harness.remote.farside.wire import ERR

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")
_LONGEST = 1 << 16  # bytes of a line that never ends


def clean(line: str, *, colours: bool) -> str:
    """A line that can do nothing to a terminal but be read."""
    line = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar, its last state
    line = _ESCAPE.sub(lambda m: m[0] if colours and _COLOUR.fullmatch(m[0]) else "", line)
    line = _CONTROL.sub("", line)
    return line if colours else line.replace("\x1b", "")


def put(stream: TextIO, text: str) -> None:
    """Write ``text`` at once. When nobody reads any more, the run goes on, and with it its logs and its exit status."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # else the interpreter's last flush fails and changes the exit status
        os.close(nowhere)


class Console:
    """Where the lines of all hosts meet. ``out`` and ``err`` may be the same stream."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._lock = threading.Lock()
        self.width = 0
        """Of the longest host name, so that the lines align."""

    def say(self, name: str, text: str) -> None:
        """A line of this program's own about a host."""
        self.show(name, f"[{text}]")

    def show(self, name: str, text: str) -> None:
        """A line that belongs to a host."""
        self._write(self._out, name, [text])

    def _write(self, stream: TextIO, name: str, lines: list[str]) -> None:
        colours = stream.isatty()
        with self._lock:
            put(stream, "".join(f"{name:<{self.width}} | {clean(line, colours=colours)}\n" for line in lines))

    def sink(self, name: str, log: Path) -> Callable[[bytes, bytes], None]:
        """A function for what ``name`` prints: pieces of two streams; ``(kind, b"")`` ends an unfinished line."""
        rest: dict[bytes, bytes] = {}
        log.parent.mkdir(parents=True, exist_ok=True)

        def take(kind: bytes, data: bytes) -> None:
            with log.open("ab") as file:
                file.write(data)
            lines = (rest.pop(kind, b"") + data).split(b"\n")
            if data and len(lines[-1]) < _LONGEST:
                rest[kind] = lines.pop()
            stream = self._err if kind == ERR else self._out
            self._write(stream, name, [line.decode("utf-8", "replace") for line in lines if line or data])

        return take
