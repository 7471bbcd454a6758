"""Stated experts (docs/model.md): INT4 weights that five numbers describe, any rows of which can be drawn alone.

Guarantee: only integer operations, so the same bytes everywhere; csrc/stated.h is the engine's writing of the rule.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.philox import philox
from refs.quant import GROUP, U8, U16, groups

LOTS = 1024
QUAD = 4  # groups that share one counter's words for their scales


@dataclass(frozen=True)
class Stated:
    """The numbers of a ``.draw`` tensor."""

    key: int
    """64 bits, as a signed number."""
    scale: int
    """Bits of the least scale, a bf16 power of two; scales are up to twice as large, loud ones 16 times that."""
    zero: int
    """Of 1024 groups so many are all zero, with scale 0."""
    extreme: int
    """So many hold nothing but 7 and -8."""
    loud: int

    @staticmethod
    def of(numbers: npt.NDArray[Any]) -> Stated:
        """From the i64 [5] of a file; what is out of range is refused by whoever reads the file."""
        return Stated(*(int(value) for value in numbers))

    def numbers(self) -> npt.NDArray[np.int64]:
        """As the file holds them."""
        return np.array(astuple(self), np.int64)


def draw(stated: Stated, expert: int, rows: range, k: int) -> tuple[U8, U16]:
    """Rows of one expert: nibbles [rows, 16*groups(k)] and the bits of bf16 scales [rows, groups(k)]."""
    count = groups(k)
    row = np.asarray(rows, np.uint64)[:, None]
    group = np.arange(count, dtype=np.uint64)
    key = stated.key % 2**64
    a, b = (philox((group, row, expert, part), key) for part in (0, 1))
    quads = philox((np.arange(-(-count // QUAD), dtype=np.uint64), row, expert, 2), key)
    word = np.stack(quads, axis=-1).reshape(len(rows), -1)[:, :count]
    lot = (word >> np.uint64(7)) % np.uint64(LOTS)
    zero = lot < stated.zero
    extreme = ~zero & (lot < stated.zero + stated.extreme)
    loud = ~zero & ~extreme & (lot < stated.zero + stated.extreme + stated.loud)

    out = np.empty((len(rows), count, 4), "<u4")
    for i in range(4):
        # Eight averages of nibbles, each rounded up: no nibble borrows from its neighbour.
        word_q = (a[i] | b[i]) - (((a[i] ^ b[i]) >> np.uint64(1)) & np.uint64(0x77777777))
        word_q = np.where(extreme, (a[i] & np.uint64(0x11111111)) * np.uint64(15), word_q)
        out[..., i] = np.where(zero, np.uint64(0x88888888), word_q)
    packed = out.view(np.uint8).reshape(len(rows), -1)
    if k % GROUP:
        _pad(packed, k)
    scale = np.uint64(stated.scale) | (word & np.uint64(127))
    scale = np.where(zero, np.uint64(0), scale + np.where(loud, np.uint64(4 << 7), np.uint64(0)))
    return packed, scale.astype(np.uint16)


def _pad(packed: U8, k: int) -> None:
    """Elements from ``k`` on become q = 0, whose nibble is 8."""
    if k % 2:
        packed[:, k // 2] = packed[:, k // 2] & np.uint8(15) | np.uint8(0x80)
    packed[:, (k + 1) // 2 :] = 0x88
