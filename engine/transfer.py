"""Read, convert and write, block by block: the disk is read one block ahead of the conversion."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from engine.convert import BadValue, Piece, Scratch
from engine.hf_tensors import Plan
from engine.kdtr_stream import KdtrStream
from engine.safetensors_reader import ITEM_BYTES, Checkpoint, CheckpointError
from refs import kdtr

READ_AHEAD = 3  # blocks; the disk goes on reading while a conversion waits for the disk to write


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


def _loaded(
    checkpoint: Checkpoint, blocks: Iterator[_Block], size: int, reader: ThreadPoolExecutor
) -> Iterator[tuple[_Block, memoryview]]:
    """The bytes of every block, none longer than ``size``, read ahead; they stay valid until the next is asked for."""

    def load(block: _Block, buffer: memoryview) -> memoryview:
        source, width = block.piece.source, block.piece.in_bytes
        view = buffer[: block.rows * width]
        checkpoint.read(source.path, source.offset + block.row * width, view)
        return view

    free = [memoryview(bytearray(size)) for _ in range(READ_AHEAD + 1)]
    reading: deque[tuple[_Block, memoryview, Future[memoryview]]] = deque()
    while True:
        while free and (block := next(blocks, None)) is not None:
            buffer = free.pop()
            reading.append((block, buffer, reader.submit(load, block, buffer)))
        if not reading:
            return
        block, buffer, view = reading.popleft()
        yield block, view.result()
        free.append(buffer)


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
    scratch = Scratch(most_out)
    progress.count = sum(e.size for e in stream.entries if e.name in stream.done)
    with ThreadPoolExecutor(1, "read") as reader:
        loaded = _loaded(checkpoint, _blocks(plan, pending), most_in, reader)
        for entry in pending:
            stream.begin(entry)
            if entry.name in literals:
                stream.write(memoryview(literals[entry.name]))
            left = entry.size if entry.name not in literals else 0
            while left:
                block, view = next(loaded)
                data = _convert(block.piece, block.row, view, scratch)
                stream.write(data)
                progress.add(len(data), entry.name)
                left -= len(data)
            stream.end()
    stream.finish()
