"""Read, convert and write, block by block: the disk is read one block ahead of the conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import numpy as np

from engine.convert import BadValue, Piece, Scratch
from engine.hf_tensors import Plan
from engine.kdtr_stream import KdtrStream
from engine.safetensors_reader import ITEM_BYTES, Checkpoint, CheckpointError


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


def _blocks(
    checkpoint: Checkpoint, pieces: Sequence[Piece], buffers: Sequence[memoryview], reader: ThreadPoolExecutor
) -> Iterator[tuple[Piece, int, memoryview]]:
    """Every block of ``pieces`` in order, read one ahead into two alternating buffers."""
    steps = [(piece, row, rows) for piece in pieces for row, rows in piece.blocks()]

    def load(i: int) -> memoryview:
        piece, row, rows = steps[i]
        view = buffers[i % 2][: rows * piece.in_bytes]
        checkpoint.read(piece.source.path, piece.source.offset + row * piece.in_bytes, view)
        return view

    ahead = reader.submit(load, 0)
    for i, (piece, row, _) in enumerate(steps):
        view = ahead.result()
        if i + 1 < len(steps):
            ahead = reader.submit(load, i + 1)
        yield piece, row, view


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
    pieces = [p for e in stream.pending() for p in plan.pieces.get(e.name, ())]
    blocks = [(p, rows) for p in pieces for _, rows in p.blocks()]
    most_in = max((p.in_bytes * rows for p, rows in blocks), default=0)
    most_out = max((max(p.in_bytes * 2, p.out_bytes) * rows for p, rows in blocks), default=0)
    buffers = [memoryview(bytearray(most_in)) for _ in range(2)]
    scratch = Scratch(most_out)
    progress.count = sum(e.size for e in stream.entries if e.name in stream.done)
    with ThreadPoolExecutor(1, "read") as reader:
        for entry in stream.pending():
            stream.begin(entry)
            if entry.name in literals:
                stream.write(memoryview(literals[entry.name]))
            else:
                for piece, row, view in _blocks(checkpoint, plan.pieces[entry.name], buffers, reader):
                    data = _convert(piece, row, view, scratch)
                    stream.write(data)
                    progress.add(len(data), entry.name)
            stream.end()
    stream.finish()
