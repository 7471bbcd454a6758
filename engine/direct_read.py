"""Reading a file past the page cache.

On Linux whole blocks are read by O_DIRECT where their place in memory allows it, and come to the caller without the
kernel's copy: a plain cold read of a virtual machine's disk ran at 270 MB/s beside other work where this reached 660,
and it pushes nothing out of memory that other processes read. Parts of blocks, and file systems without O_DIRECT, go
through the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from engine.direct_file import BLOCK


class DirectRead:
    """One file, for several threads at once. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self._plain = os.open(path, os.O_RDONLY)
        self._direct = -1
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)  # ends of blocks: what lies around is not wanted
        if hasattr(os, "O_DIRECT"):
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:  # this file system has no such thing
                self._direct = -1

    def read(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` from byte ``offset``; the bytes that the file does not have.

        Fast where ``target`` lies as far behind a block's beginning in memory as ``offset`` does in the file.
        """
        head = min(len(target), -offset % BLOCK)
        body = (len(target) - head) // BLOCK * BLOCK
        if body and self._direct >= 0 and _address(target[head:]) % BLOCK == 0:
            missing = self._read_plain(offset, target[:head])
            done = 0 if missing else self._read_direct(offset + head, target[head : head + body])
            return missing or self._read_plain(offset + head + done, target[head + done :])
        return self._read_plain(offset, target)

    def _read_direct(self, offset: int, target: memoryview) -> int:
        """Bytes read, whole blocks; fewer at the file's end, or where the disk wants larger blocks."""
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._direct, [target[done:]], offset + done)
            except OSError:  # EINVAL: larger blocks; a disk's fault is met again, and reported, by the plain read
                break
            done += got // BLOCK * BLOCK
            if got < BLOCK or got % BLOCK:
                break
        return done

    def _read_plain(self, offset: int, target: memoryview) -> int:
        while target:
            got = os.preadv(self._plain, [target], offset)
            if got == 0:
                break
            target, offset = target[got:], offset + got
        return len(target)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._plain)
        if self._direct >= 0:
            os.close(self._direct)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
