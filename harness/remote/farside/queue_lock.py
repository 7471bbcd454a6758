"""One run at a time per box: a lock file that says who holds it.

The kernel releases the lock when its holder ends, however it ends; the text in the file is for those who wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from typing import Any

from harness.remote.farside.store import Lock
from harness.remote.farside.tree import encode


class BoxLock:
    """The lock in the file ``path``, which users of the box share."""

    def __init__(self, path: str) -> None:
        self._lock = Lock(os.path.expanduser(encode(path)), create=0o666)

    def acquire(
        self,
        me: dict[str, Any],
        patience: float,
        waiting: Callable[[dict[str, Any]], None],
        give_up: Callable[[], bool],
    ) -> bool:
        """Wait ``patience`` seconds at most, or until ``give_up()``; ``waiting(holder)`` is called for each holder."""
        deadline = time.monotonic() + patience
        told = None
        while not self._lock.take(fcntl.LOCK_EX):
            holder = self.holder()
            if holder != told:
                waiting(holder)
                told = holder
            if time.monotonic() > deadline or give_up():
                return False
            time.sleep(0.2)
        text = json.dumps(me).encode()
        os.pwrite(self._lock.fd, text, 0)
        os.ftruncate(self._lock.fd, len(text))
        return True

    def holder(self) -> dict[str, Any]:
        """What the present or last holder wrote; empty while it is being written."""
        try:
            content = json.loads(os.pread(self._lock.fd, 4096, 0))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def close(self) -> None:
        self._lock.close()


def held_by(path: str) -> dict[str, Any] | None:
    """Who holds the lock in ``path``, without taking or creating it; None if it is free."""
    try:
        fd = os.open(os.path.expanduser(encode(path)), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            content = json.loads(os.pread(fd, 4096, 0))
        except ValueError:
            content = {}
        return content if isinstance(content, dict) else {}
    finally:
        os.close(fd)
    return None
