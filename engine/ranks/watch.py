"""A rank's line to the process that supervises it: a beat a second, and last words.

The beat stops when the process is stopped, and also when a command is under way that has made no progress for
`STUCK` seconds. When the supervisor is gone, the line breaks and the rank ends: no rank outlives its job.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

BEAT = 1.0  # seconds
STUCK = 15.0  # seconds without an exchange or a round
SILENT = 8.0  # seconds without a beat after which a rank counts as hung
ADDRESS, KEY = "KDTREE_RANKS_ADDRESS", "KDTREE_RANKS_KEY"
"""Variables by which a rank finds its supervisor."""


class Watch:
    """The line of one rank. `progress` is to be called whenever something was done."""

    def __init__(self, rank: int) -> None:
        self._line = self.connect()
        self._sending = threading.Lock()
        self._since: float | None = None  # of the last progress in a command; None between commands
        self._send("hello", str(rank), str(os.getpid()))
        threading.Thread(target=self._beat, name="watch", daemon=True).start()

    @staticmethod
    def connect() -> Connection:
        """A connection to the supervisor."""
        return Client(os.environ[ADDRESS], "AF_UNIX", authkey=bytes.fromhex(os.environ[KEY]))

    def _send(self, *message: str) -> None:
        with self._sending:
            self._line.send(message)

    def _beat(self) -> None:
        try:
            while True:
                since = self._since
                if since is None or time.monotonic() - since < STUCK:
                    self._send("beat")
                if self._line.poll(BEAT):
                    self._line.recv()
        except (EOFError, OSError):
            os._exit(1)  # the main thread may be in native code that waits for another rank

    def progress(self) -> None:
        """Something was done."""
        if self._since is not None:
            self._since = time.monotonic()

    @contextlib.contextmanager
    def busy(self, patient: bool = False) -> Iterator[None]:
        """A command is under way; a ``patient`` one may take any time without progress."""
        self._since = None if patient else time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def words(self, kind: str, text: str) -> None:
        """Last words. ``kind``: ``diverged``, ``error``, ``waited`` if another rank let this one down, or ``done``."""
        with contextlib.suppress(OSError):
            self._send("words", kind, text)
