"""Source bytes into KDTR bytes, a block of rows at a time.

A conversion takes raw rows ``u8 [rows, in_bytes]`` and a `Scratch`, and returns the bytes to write: the raw rows
themselves or a view of the scratch, so nothing is allocated per block. Each is exact (docs/import.md), and raises
`BadValue` at a value the model must not hold. The INT4 layouts are stated in docs/model.md (ours) and
compressed-tensors' ``pack_quantized`` (theirs): element e of a row sits in nibble e, low nibble first, in both, so
packed words are copied as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.safetensors_reader import Source
from refs import quant

Bytes = npt.NDArray[np.uint8]

READ_BLOCK = 4 << 20  # long enough for the disk's full speed, and all buffers together stay near 100 MiB
QUANTISE_COPIES = 8  # quantising keeps about so many copies of its block


class BadValue(ValueError):
    """The element at flat index ``index`` of the block must not be there."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class Scratch:
    """Memory for converted rows and for masks over them."""

    def __init__(self, out_bytes: int) -> None:
        self._out = np.empty(out_bytes, np.uint8)
        self._mask = np.empty(out_bytes // 2, np.bool_)
        self._halves = np.zeros(out_bytes // 2, np.uint16)

    def out(self, size: int) -> Bytes:
        """``size`` bytes for a result."""
        return self._out[:size]

    def upper_halves(self, bits: npt.NDArray[np.uint16]) -> Bytes:
        """``bits`` as the upper halves of 32-bit words whose lower halves are 0."""
        words = self._halves[: 2 * bits.size]
        words[1::2] = bits  # the lower halves were never anything but 0
        return words.view(np.uint8)

    def mask(self, size: int) -> npt.NDArray[np.bool_]:
        """``size`` flags."""
        return self._mask[:size]


Convert = Callable[[Bytes, Scratch], Bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one source tensor, and how they become bytes of the output."""

    source: Source
    first_row: int
    rows: int
    in_bytes: int
    """A row's bytes in the source."""
    out_bytes: int
    """A row's bytes in the output."""
    convert: Convert
    copies: int = 1
    """How many times a block's bytes the conversion needs for itself."""

    def blocks(self) -> list[tuple[int, int]]:
        """(first row, rows) of each block, in order; its copies fit into READ_BLOCK, but it has at least one row."""
        step = max(1, READ_BLOCK // self.copies // self.in_bytes)
        end = self.first_row + self.rows
        return [(row, min(step, end - row)) for row in range(self.first_row, end, step)]


def _require_finite(values: npt.NDArray[np.float32], scratch: Scratch) -> None:
    finite = np.isfinite(values, out=scratch.mask(values.size))
    if not finite.all():
        index = int(np.argmin(finite))
        raise BadValue(index, f"{values[index]} is not finite")


def _require_finite_bf16(bits: npt.NDArray[np.uint16]) -> None:
    """By two maxima, which are cheap: an exponent of ones is the greatest there is among either sign's."""
    if not bits.size or (bits.view("<i2").max() < 0x7F80 and bits.max() < 0xFF80):
        return
    index = int(np.argmax((bits & 0x7F80) == 0x7F80))
    value = (bits[index : index + 1].astype(np.uint32) << 16).view(np.float32)[0]
    raise BadValue(index, f"{value} is not finite")


def f32_to_f32(raw: Bytes, scratch: Scratch) -> Bytes:
    """f32, unchanged; finite."""
    _require_finite(raw.reshape(-1).view("<f4"), scratch)
    return raw


def f16_to_f32(raw: Bytes, scratch: Scratch) -> Bytes:
    """Every f16 is an f32; finite."""
    values = raw.reshape(-1).view("<f2")
    out = scratch.out(4 * values.size).view("<f4")
    np.copyto(out, values)
    _require_finite(out, scratch)
    return out.view(np.uint8)


def bf16_to_f32(raw: Bytes, scratch: Scratch) -> Bytes:
    """A bf16 is the upper half of an f32; finite."""
    bits = raw.reshape(-1).view("<u2")
    _require_finite_bf16(bits)
    return scratch.upper_halves(bits)


def bf16_to_bf16(raw: Bytes, scratch: Scratch) -> Bytes:
    """bf16, unchanged; finite."""
    _require_finite_bf16(raw.reshape(-1).view("<u2"))
    return raw


def f32_to_bf16(raw: Bytes, scratch: Scratch) -> Bytes:
    """An f32 that is a bf16; another one is refused, because rounding it would change the weights."""
    _require_finite(raw.reshape(-1).view("<f4"), scratch)
    bits = raw.reshape(-1).view("<u4")
    low = np.flatnonzero(bits & 0xFFFF)
    if low.size:
        value = bits[low[0]].view("<f4")
        raise BadValue(int(low[0]), f"{value!r} is no bf16, and rounding it would change the weights")
    out = scratch.out(2 * bits.size).view("<u2")
    np.copyto(out, bits >> 16, casting="unsafe")
    return out.view(np.uint8)


def f16_to_bf16(raw: Bytes, scratch: Scratch) -> Bytes:
    """An f16 that is a bf16; see `f32_to_bf16`."""
    return f32_to_bf16(raw.reshape(-1).view("<f2").astype("<f4").view(np.uint8), scratch)


def copy(raw: Bytes, scratch: Scratch) -> Bytes:
    """Bytes that any value may have."""
    return raw


def pad_nibbles(k: int) -> Convert:
    """Rows of ``k`` packed elements, k no multiple of 32: filled up to a whole group with nibble 8 (q = 0)."""
    full = 16 * -(-k // 32)

    def convert(raw: Bytes, scratch: Scratch) -> Bytes:
        out = scratch.out(raw.shape[0] * full).reshape(raw.shape[0], full)
        used = (k + 1) // 2
        out[:, :used] = raw[:, :used]
        out[:, used:] = 0x88
        if k % 2:
            out[:, used - 1] = out[:, used - 1] & 0x0F | 0x80
        return out

    return convert


def quantise(k: int, part: str, to_f32: Convert) -> Convert:
    """Rows of ``k`` weights to INT4 by docs/model.md's rule; ``part`` is ``qw`` or ``sc``."""

    def convert(raw: Bytes, scratch: Scratch) -> Bytes:
        weights = to_f32(raw, scratch).reshape(-1).view("<f4").reshape(-1, k)
        q, scales = quant.quantise(weights)
        return quant.pack(q) if part == "qw" else scales.astype("<u2", copy=False).view(np.uint8)

    return convert


TO_F32: dict[str, Convert] = {"F32": f32_to_f32, "F16": f16_to_f32, "BF16": bf16_to_f32}
TO_BF16: dict[str, Convert] = {"BF16": bf16_to_bf16, "F32": f32_to_bf16, "F16": f16_to_bf16}
