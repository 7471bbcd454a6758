"""A file filled in order, past the page cache.

On Linux whole blocks go to the disk by O_DIRECT, behind the caller's back in one thread: writing through the page cache
of a virtual machine took 12 times the processor time and ran at a sixth of the speed (170 against 1000 MB/s), and it
pushes out of memory what other processes read. Parts of blocks go through the cache; everything does on file systems
without O_DIRECT. After a write that failed nothing further is done to the file, so that nothing is called complete that
is not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

BLOCK = 4096  # offsets, lengths and addresses of direct writes are multiples of the disk's blocks, which are no larger
STAGE = 8 << 20  # bytes handed to the disk at a time
STAGES = 4  # one is filled while the others wait for the disk


class DirectFile:
    """One file of ``size`` bytes, its space reserved; ``keep`` leaves what it holds. Raises `OSError`, also later for
    writes that failed behind the caller's back."""

    def __init__(self, path: Path, size: int, *, keep: bool) -> None:
        self._file: BinaryIO = open(path, "r+b" if keep else "w+b", buffering=0)  # noqa: SIM115 (close() closes it)
        self._direct = -1
        try:
            _reserve(self._file, size, path)
            if hasattr(os, "O_DIRECT"):
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._file.close()
                raise
        self._stages = [mmap.mmap(-1, STAGE) for _ in range(STAGES)]  # mappings begin at a page, so at a block
        self._busy: list[Future[None] | None] = [None] * STAGES
        self._current = 0
        self._at = 0
        self._first = self._fill = 0  # the current stage's bytes that wait, for file offset _at
        self._thread = ThreadPoolExecutor(1, "write")
        self._failure: OSError | None = None

    def seek(self, offset: int) -> None:
        """The next `write` begins at ``offset``."""
        self._hand_over()
        self._at = offset
        self._first = self._fill = offset % BLOCK

    def write(self, data: memoryview) -> None:
        """Append after what was written last."""
        while data:
            count = min(len(data), STAGE - self._fill)
            busy, self._busy[self._current] = self._busy[self._current], None
            if busy is not None:
                busy.result()
            self._stages[self._current][self._fill : self._fill + count] = data[:count]
            self._fill += count
            data = data[count:]
            if self._fill == STAGE:
                self._hand_over()

    def after(self, job: Callable[[int], None]) -> Future[None]:
        """Run ``job`` with a handle of the file once all writes so far are done; not at all if one of them failed."""
        self._hand_over()
        return self._thread.submit(self._unless_failed, job, self._file.fileno())

    def close(self) -> None:
        """Wait for the writes and close; may be called twice."""
        self._thread.shutdown(wait=True)
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1
        self._file.close()

    def _hand_over(self) -> None:
        first, fill, at = self._first, self._fill, self._at
        if fill > first:
            stage = memoryview(self._stages[self._current])[first:fill]
            self._busy[self._current] = self._thread.submit(self._unless_failed, self._put, stage, at)
            self._current = (self._current + 1) % STAGES
            self._at = at + fill - first
        self._first = self._fill = 0

    def _unless_failed(self, job: Callable[..., None], *arguments: Any) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            job(*arguments)
        except OSError as error:
            self._failure = error
            raise

    def _put(self, data: memoryview, at: int) -> None:
        """Whole blocks directly, the parts of blocks before and after them through the cache."""
        head = min(len(data), -at % BLOCK)
        body = (len(data) - head) // BLOCK * BLOCK if self._direct >= 0 else 0
        self._put_cached(data[:head], at)
        done = 0
        if body:
            try:
                done = os.pwrite(self._direct, data[head : head + body], at + head)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise  # EINVAL: this disk wants larger blocks
        self._put_cached(data[head + done :], at + head + done)

    def _put_cached(self, data: memoryview, at: int) -> None:
        while data:
            put = os.pwrite(self._file.fileno(), data, at)
            data, at = data[put:], at + put


def _reserve(file: BinaryIO, size: int, path: Path) -> None:
    """Give ``file`` its size, and its blocks where the file system can, so that a disk too small is known at once."""
    missing = size - 512 * os.fstat(file.fileno()).st_blocks
    free = shutil.disk_usage(path.parent).free
    if missing > free:
        reason = f"it needs {missing / 1e9:.3f} GB more, the disk has {free / 1e9:.3f}"
        raise OSError(errno.ENOSPC, reason, os.fspath(path))
    file.truncate(size)
    if sys.platform == "linux":
        # not os.posix_fallocate, which writes to every block where the file system cannot reserve them
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if fallocate(file.fileno(), 0, 0, size) and ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
