"""Write a KDTR file tensor by tensor, so that a killed import goes on where it stopped.

Guarantees: the data go to a dot-file beside the target, and the target appears by rename with every byte on disk; a
journal beside it lists the tensors that are on disk with their CRCs, and is believed only if it was written for the
same file to be; two writers of one target exclude each other. Memory does not grow with the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from engine.direct_file import DirectFile
from refs import kdtr

try:  # the same sum with the processor's carry-less multiplication, 14 times as fast
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

FLUSH_BYTES = 256 << 20  # about what a crash of the machine may cost


class TargetBusy(OSError):
    """Another process is writing this target."""


class KdtrStream:
    """One file being written. ``tensors`` is ``{name: (dtype, shape)}``; ``identity`` names the sources, any bytes."""

    def __init__(
        self,
        target: Path,
        fields: dict[str, int | float],
        tensors: dict[str, tuple[str, tuple[int, ...]]],
        identity: bytes,
    ) -> None:
        self.target, self.fields = target, fields
        self.entries = kdtr.layout(tensors, len(fields), str(target))
        self.partial = target.with_name(f".{target.name}.partial")
        self.journal_path = target.with_name(f".{target.name}.journal")
        empty = kdtr.encode_head(fields, self.entries, str(target))
        self._key = hashlib.sha256(empty + identity).hexdigest()
        self.done: dict[str, int] = {}
        self._written: list[tuple[str, int]] = []  # since the last flush
        self._bytes = 0
        self._crc = 0
        self._at = 0

    @property
    def file_size(self) -> int:
        """Bytes of the finished file."""
        last = self.entries[-1]
        return last.offset + last.size

    def __enter__(self) -> KdtrStream:
        """Take the target, believe its journal if it fits, reserve the space. Raises `TargetBusy`, `OSError`."""
        self._journal: BinaryIO = open(self.journal_path, "a+b")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._journal.fileno()).st_ino != self.journal_path.stat().st_ino:
                raise FileNotFoundError("its writer finished and removed it in this moment")
        except OSError as error:
            self._journal.close()
            raise TargetBusy(f"{self.target}: another process is writing it (it holds {self.journal_path})") from error
        self._journal.seek(0)
        self.done = self._read_journal(self._journal.read())
        try:
            self._file = DirectFile(self.partial, self.file_size, keep=bool(self.done))
        except OSError:
            if not self.done:
                self.partial.unlink(missing_ok=True)
                self.journal_path.unlink()
            self._journal.close()
            raise
        if not self.done:
            self._journal.truncate(0)
            self._log({"key": self._key})
        self._flush: Future[None] | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unless `finish` was called: after an interrupt or a fault of the disk keep what is complete for the next
        attempt, after any other error leave nothing. The target's name stays as it was."""
        if self._journal.closed:
            return
        if isinstance(value, KeyboardInterrupt):
            self._checkpoint()
        self._file.close()
        if not isinstance(value, KeyboardInterrupt | OSError):
            self.partial.unlink()
            self.journal_path.unlink()
        self._journal.close()

    def _read_journal(self, data: bytes) -> dict[str, int]:
        """The tensors that are on disk; none if the journal is another file's. A torn last line is dropped."""
        lines = data.split(b"\n")[:-1]
        try:
            records = [json.loads(line) for line in lines]
            if not records or records[0] != {"key": self._key} or not self.partial.is_file():
                return {}
            if self.partial.stat().st_size != self.file_size:
                return {}
            names = {e.name for e in self.entries}
            return {r["tensor"]: int(r["crc"]) for r in records[1:] if r["tensor"] in names}
        except (ValueError, KeyError, TypeError):
            return {}

    def _log(self, *records: dict[str, Any]) -> None:
        self._journal.write(b"".join(json.dumps(r).encode() + b"\n" for r in records))
        self._journal.flush()

    def pending(self) -> list[kdtr.Entry]:
        """The tensors that are still to be written, in file order."""
        return [e for e in self.entries if e.name not in self.done]

    def begin(self, entry: kdtr.Entry) -> None:
        """The next `write` calls give this tensor's bytes in order."""
        self._entry, self._at, self._crc = entry, entry.offset, 0
        self._file.seek(entry.offset)

    def write(self, data: memoryview) -> None:
        """Append to the tensor begun last."""
        self._crc = crc32(data, self._crc)
        self._bytes += len(data)
        self._at += len(data)
        self._file.write(data)

    def end(self) -> None:
        """The tensor is complete; `ValueError` if its bytes are too few or too many."""
        entry = self._entry
        if self._at != entry.offset + entry.size:
            raise ValueError(f"{entry.name}: {self._at - entry.offset} bytes written, its shape needs {entry.size}")
        self._written.append((entry.name, self._crc))
        if self._bytes >= FLUSH_BYTES:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Hand what is complete to the disk, and to the journal once it is there; wait for the previous one only."""
        batch, self._written, self._bytes = self._written, [], 0

        def flush(handle: int) -> None:
            getattr(os, "fdatasync", os.fsync)(handle)  # macOS has the latter only
            self._log(*[{"tensor": name, "crc": crc} for name, crc in batch])

        if self._flush is not None:
            self._flush.result()
        self.done.update(batch)
        self._flush = self._file.after(flush)

    def finish(self) -> None:
        """Write the head, rename, and forget the journal. Raises `OSError` where the disk does."""
        self._checkpoint()
        if self._flush is not None:
            self._flush.result()
        missing = [e.name for e in self.entries if e.name not in self.done]
        if missing:
            raise ValueError(f"{self.target}: {missing[0]} was not written")
        entries = [replace(e, crc=self.done[e.name]) for e in self.entries]
        self._file.seek(0)
        self._file.write(memoryview(kdtr.encode_head(self.fields, entries, str(self.target))))
        self._file.after(os.fsync).result()
        self._file.close()
        os.replace(self.partial, self.target)
        self.journal_path.unlink()
        self._journal.close()
