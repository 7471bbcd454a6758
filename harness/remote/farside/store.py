"""Files by their SHA-256, and the runs' own directories made from them.

    WORKDIR/store/ab/cdef...     contents, each under its hash
    WORKDIR/incoming/            contents and trees not yet whole
    WORKDIR/runs/RUN/tree        a run's copy of the sender's working tree; also wheels, site, record.json
    WORKDIR/cache                what runs share: builds and bundles, each keyed by content
    WORKDIR/store.lock           shared while a tree is sent, exclusive while the store is pruned

Guarantees: a name in the store or under ``runs`` is complete (it appears by rename); every byte of a tree was hashed on
this machine while it was copied; a tree holds copies, so a run that writes into it harms no other run; what a killed
run leaves in ``incoming`` goes with the next prune; a run that is still alive is never pruned.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness.remote.farside.tree import StoreError, Tree, decode, encode

_STEP = 1 << 20
PATIENCE = 60.0  # seconds for another run that prunes


class Lock:
    """An advisory lock on a file, released at the latest when the process ends."""

    def __init__(self, path: bytes, *, create: int = 0o600) -> None:
        try:
            # Without O_CREAT first: Linux' protected_regular refuses to "create" another user's file in /tmp.
            self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            try:
                self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, create)
                os.fchmod(self.fd, create)  # the umask has no say in who may queue
            except FileExistsError:
                self.fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)

    def take(self, how: int) -> bool:
        """Try once: LOCK_SH or LOCK_EX."""
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self.fd)


class Store:
    """The directory of one user on one host."""

    def __init__(self, workdir: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(encode(workdir)))
        self.mine = f"{os.getpid()}-{secrets.token_hex(4)}"  # hosts that share a home directory may share pids

    def path(self, *parts: str) -> bytes:
        return os.path.join(self.root, *map(encode, parts))

    def open(self) -> None:
        """Make the directories."""
        os.makedirs(self.root, 0o700, exist_ok=True)
        for name in ("store", "incoming", "runs", "cache"):
            os.makedirs(self.path(name), exist_ok=True)

    def sharing(self) -> Lock:
        """Hold off pruning until the lock is closed. Raises StoreError where another run prunes all the while."""
        lock = Lock(self.path("store.lock"))
        deadline = time.monotonic() + PATIENCE
        while not lock.take(fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise StoreError(
                    "io", f"{decode(self.path('store.lock'))}: another run has pruned for {PATIENCE:.0f} s"
                )
            time.sleep(0.1)
        return lock

    def blob(self, digest: str) -> bytes:
        return self.path("store", digest[:2], digest[2:])

    def has(self, digest: str, size: int) -> bool:
        try:
            return os.stat(self.blob(digest)).st_size == size
        except OSError:
            return False

    def read(self, digest: str) -> bytes | None:
        """A content that is in the store and whole."""
        try:
            with open(self.blob(digest), "rb") as file:
                data = file.read()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def put(self, digest: str, size: int, chunks: Callable[[int], Iterator[bytes]]) -> bool:
        """Store ``size`` bytes from ``chunks(size)``; False if they are not the content that was promised."""
        temporary = self.path("incoming", f"{self.mine}-{digest}")
        hashing = hashlib.sha256()
        try:
            with open(temporary, "wb") as file:
                for chunk in chunks(size):
                    hashing.update(chunk)
                    file.write(chunk)
            if hashing.hexdigest() != digest:
                os.unlink(temporary)
                return False
            os.makedirs(os.path.dirname(self.blob(digest)), exist_ok=True)
            os.replace(temporary, self.blob(digest))
        except OSError:
            _remove(temporary)
            raise
        return True

    def missing(self, tree: Tree) -> list[int]:
        """Positions in ``tree.contents()`` of what is not here."""
        return [i for i, (digest, size) in enumerate(tree.contents().items()) if not self.has(digest, size)]

    def lay_out(self, tree: Tree, run: str, part: str) -> list[str]:
        """Make ``runs/RUN/PART`` from the store; hashes that turned out damaged (then nothing was made)."""
        staged = self.path("incoming", f"{self.mine}-{run}-{part}")
        damaged: list[str] = []
        try:
            made: set[bytes] = set()
            os.makedirs(staged)
            for path, mode, digest, _ in tree.files:
                target = os.path.join(staged, path)
                _parent(target, made)
                if not self._copy(digest, target, mode):
                    _remove(self.blob(digest))
                    damaged.append(digest)
            for path, link in tree.links:
                target = os.path.join(staged, path)
                _parent(target, made)
                os.symlink(link, target)
            if not damaged:
                os.replace(staged, self.path("runs", run, part))
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return damaged

    def _copy(self, digest: str, target: bytes, mode: int) -> bool:
        hashing = hashlib.sha256()
        blob = self.blob(digest)
        if not os.path.exists(blob):
            return False
        with open(blob, "rb") as source, open(target, "xb") as file:
            while chunk := source.read(_STEP):
                hashing.update(chunk)
                file.write(chunk)
            os.fchmod(file.fileno(), mode)
        return hashing.hexdigest() == digest

    def begin(self, run: str, record: dict[str, Any]) -> Lock:
        """Make ``runs/RUN``; whoever holds the lock that is returned keeps it from being pruned."""
        os.makedirs(self.path("runs", run), exist_ok=True)
        lock = Lock(self.path("runs", run, "alive"))
        lock.take(fcntl.LOCK_SH)
        self.note(run, record)
        return lock

    def note(self, run: str, record: dict[str, Any]) -> None:
        """Store what is known about a run: who started it, and the pieces of its manifests."""
        temporary = self.path("incoming", f"{self.mine}-{run}.json")
        with open(temporary, "w", encoding="ascii") as file:
            json.dump(record, file)
        os.replace(temporary, self.path("runs", run, "record.json"))

    def prune(self, keep: int) -> dict[str, int]:
        """Remove all but the last ``keep`` ended runs and contents no run needs; nothing while a tree is arriving."""
        removed = {"runs": 0, "contents": 0, "bytes": 0}
        lock = Lock(self.path("store.lock"))
        try:
            if not lock.take(fcntl.LOCK_EX):
                return removed
            for _, name in sorted(self._ended(), reverse=True)[keep:]:
                shutil.rmtree(self.path("runs", name), ignore_errors=True)
                removed["runs"] += 1
            for entry in os.scandir(self.path("incoming")):
                shutil.rmtree(entry.path, ignore_errors=True) if entry.is_dir(follow_symlinks=False) else _remove(
                    entry.path
                )
            used = self._used()
            for folder in os.scandir(self.path("store")):
                for entry in os.scandir(folder.path):
                    if decode(folder.name + entry.name) not in used:
                        removed["contents"] += 1
                        removed["bytes"] += entry.stat().st_size
                        _remove(entry.path)
        finally:
            lock.close()
        return removed

    def _ended(self) -> Iterator[tuple[int, str]]:
        """Runs nobody holds, with when they began by this machine's clock: run ids carry their senders' clocks."""
        for name in os.listdir(self.path("runs")):
            path = os.path.join(self.path("runs"), name, b"alive")
            try:
                began = os.stat(path).st_mtime_ns
            except OSError:
                yield 0, decode(name)  # it died while it was made
                continue
            alive = Lock(path)
            if alive.take(fcntl.LOCK_EX):
                yield began, decode(name)
            alive.close()

    def _used(self) -> set[str]:
        used: set[str] = set()
        for name in os.listdir(self.path("runs")):
            try:
                with open(os.path.join(self.path("runs"), name, b"record.json"), encoding="ascii") as file:
                    pieces = [p for part in json.load(file)["parts"].values() for p in part]
            except (OSError, ValueError, KeyError):
                continue
            tree = Tree()
            for piece in pieces:
                used.add(piece)
                if (data := self.read(piece)) is not None:
                    tree.add(data)
            used.update(tree.contents())
        return used


def _parent(path: bytes, made: set[bytes]) -> None:
    folder = os.path.dirname(path)
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)


def _remove(path: bytes) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
