"""Read, convert and write, block by block: some threads read and convert ahead of the one that sums and writes."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from engine.convert import BadValue, Piece, Scratch
from engine.direct_file import BLOCK
from engine.hf_tensors import Plan
from engine.kdtr_stream import KdtrStream
from engine.safetensors_reader import ITEM_BYTES, Checkpoint, CheckpointError
from refs import kdtr

READERS = 3  # threads: a disk is faster with several reads under way, and one may convert meanwhile
SLOTS = READERS + 2  # blocks in memory: the disk goes on reading while the writing waits for the disk


class Progress:
    """Bytes written so far: one line rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.total, self.out, self.count = total, out, 0
        self.start = self.last = time.monotonic()
        self.live = out.isatty()

    def add(self, count: int, name: str) -> None:
        """``count`` further bytes were written, of tensor ``name``."""
        self.count += count
        now = time.monotonic()
        if now - self.last >= (0.2 if self.live else 10):
            self.last = now
            speed = self.count / max(now - self.start, 1e-9)
            left = (self.total - self.count) / max(speed, 1)
            done = f"{self.count / 1e9:.2f} of {self.total / 1e9:.2f} GB"
            line = f"{done}, {speed / 1e6:.0f} MB/s, {left:.0f} s left: {name}"
            self.out.write(f"\r\033[K{line[:100]}" if self.live else f"{line}\n")
            self.out.flush()

    def close(self) -> None:
        """Leave the terminal's line."""
        if self.live:
            self.out.write("\r\033[K")
            self.out.flush()


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a piece, on their way into tensor ``entry``."""

    entry: kdtr.Entry
    piece: Piece
    row: int
    rows: int


def _blocks(plan: Plan, entries: Sequence[kdtr.Entry]) -> Iterator[_Block]:
    """All there is to read, in the order of the file to be written."""
    for entry in entries:
        for piece in plan.pieces.get(entry.name, ()):
            for row, rows in piece.blocks():
                yield _Block(entry, piece, row, rows)


class _Slot:
    """Memory for one block on its way."""

    def __init__(self, most_in: int, most_out: int) -> None:
        self.raw = memoryview(mmap.mmap(-1, most_in + BLOCK))
        self.scratch = Scratch(most_out)

    def load(self, checkpoint: Checkpoint, block: _Block) -> memoryview:
        """The block's bytes as the file will hold them; they stay valid until the slot is used again."""
        source, width = block.piece.source, block.piece.in_bytes
        offset = source.offset + block.row * width
        first = offset % BLOCK  # so that whole blocks of the disk come to lie at the beginnings of blocks of memory
        view = self.raw[first : first + block.rows * width]
        checkpoint.read(source.path, offset, view)
        return _convert(block.piece, block.row, view, self.scratch)


def _converted(
    checkpoint: Checkpoint, blocks: Iterator[_Block], slots: list[_Slot], readers: ThreadPoolExecutor
) -> Iterator[memoryview]:
    """Every block's bytes in order; they stay valid until the next is asked for."""
    free = list(slots)
    under_way: deque[tuple[_Slot, Future[memoryview]]] = deque()
    while True:
        while free and (block := next(blocks, None)) is not None:
            slot = free.pop()
            under_way.append((slot, readers.submit(slot.load, checkpoint, block)))
        if not under_way:
            return
        slot, data = under_way.popleft()
        yield data.result()
        free.append(slot)


def _convert(piece: Piece, first_row: int, view: memoryview, scratch: Scratch) -> memoryview:
    raw = np.frombuffer(view, np.uint8).reshape(-1, piece.in_bytes)
    try:
        return np.ascontiguousarray(piece.convert(raw, scratch)).reshape(-1).data
    except BadValue as bad:
        source = piece.source
        columns = piece.in_bytes // ITEM_BYTES[source.dtype]
        at = [first_row + bad.index // columns, bad.index % columns][-len(source.shape) :]
        raise CheckpointError(source.path, f"{source.name}{at}", bad.reason) from bad


def write_model(
    checkpoint: Checkpoint, plan: Plan, stream: KdtrStream, literals: dict[str, bytes], progress: Progress
) -> None:
    """Fill and finish ``stream`` (entered). Raises `CheckpointError` for a value the model must not hold, `OSError`."""
    pending = stream.pending()
    most_in = most_out = 0
    for block in _blocks(plan, pending):
        piece = block.piece
        most_in = max(most_in, block.rows * piece.in_bytes)
        most_out = max(most_out, block.rows * max(2 * piece.in_bytes, piece.out_bytes))
    slots = [_Slot(most_in, most_out) for _ in range(SLOTS)]
    progress.count = sum(e.size for e in stream.entries if e.name in stream.done)
    with ThreadPoolExecutor(READERS, "read") as readers:
        converted = _converted(checkpoint, _blocks(plan, pending), slots, readers)
        try:
            for entry in pending:
                stream.begin(entry)
                if entry.name in literals:
                    stream.write(memoryview(literals[entry.name]))
                left = entry.size if entry.name not in literals else 0
                while left:
                    data = next(converted)
                    stream.write(data)
                    progress.add(len(data), entry.name)
                    left -= len(data)
                stream.end()
        except BaseException:
            readers.shutdown(wait=False, cancel_futures=True)  # what was read ahead is of no use any more
            raise
    stream.finish()
