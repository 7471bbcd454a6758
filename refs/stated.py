"""Stated experts (docs/model.md): INT4 weights that five numbers describe, any rows of which can be drawn alone.

Guarantee: only integer operations, so the same bytes everywhere; csrc/stated.h is the engine's writing of the rule.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.errors import ConfigError
from refs.philox import U64, philox
from refs.quant import GROUP, U8, U16, groups

Flags = npt.NDArray[np.bool_]
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
    def of(numbers: npt.NDArray[Any], where: str = "stated experts") -> Stated:
        """From the i64 [5] of a file; `ConfigError` naming ``where`` and the number that is out of range."""
        made = Stated(*(int(value) for value in numbers))
        if not 1 << 7 <= made.scale <= 249 << 7 or made.scale % 128:
            raise ConfigError(f"{where}[1]: {made.scale}: not the bits of a bf16 power of two from 2^-126 to 2^122")
        room = LOTS
        for i, share in enumerate((made.zero, made.extreme, made.loud), 2):
            if not 0 <= share <= room:
                raise ConfigError(f"{where}[{i}]: {share}: shares are not negative and at most {LOTS} in all")
            room -= share
        return made

    def numbers(self) -> npt.NDArray[np.int64]:
        """As the file holds them."""
        return np.array(astuple(self), np.int64)


def draw(stated: Stated, expert: int, rows: range, k: int) -> tuple[U8, U16]:
    """Rows of one expert: nibbles [rows, 16*groups(k)] and the bits of bf16 scales [rows, groups(k)]."""
    return draw_nibbles(stated, expert, rows, k), draw_scales(stated, expert, rows, k)


def draw_nibbles(stated: Stated, expert: int, rows: range, k: int) -> U8:
    """As `draw`, the nibbles alone."""
    row, group = np.asarray(rows, np.uint64)[:, None], np.arange(groups(k), dtype=np.uint64)
    a, b = (philox((group, row, expert, part), stated.key % 2**64) for part in (0, 1))
    zero, extreme, _ = _kinds(stated, _own_words(stated, expert, rows, k))
    out = np.empty((*zero.shape, 4), "<u4")
    for i in range(4):
        # Eight averages of nibbles, each rounded up: no nibble borrows from its neighbour.
        nibbles = (a[i] | b[i]) - (((a[i] ^ b[i]) >> np.uint64(1)) & np.uint64(0x77777777))
        nibbles[extreme] = (a[i][extreme] & np.uint64(0x11111111)) * np.uint64(15)
        nibbles[zero] = 0x88888888
        out[..., i] = nibbles
    packed = out.view(np.uint8).reshape(len(rows), -1)
    if k % GROUP:
        _pad(packed, k)
    return packed


def draw_scales(stated: Stated, expert: int, rows: range, k: int) -> U16:
    """As `draw`, the scales alone, which cost a ninth."""
    word = _own_words(stated, expert, rows, k)
    zero, _, loud = _kinds(stated, word)
    scale = np.uint64(stated.scale) | (word & np.uint64(127))
    scale[loud] += np.uint64(4 << 7)
    scale[zero] = 0
    return scale.astype(np.uint16)


def _own_words(stated: Stated, expert: int, rows: range, k: int) -> U64:
    """Each group's word for its scale and kind, [rows, groups(k)]."""
    count, row = groups(k), np.asarray(rows, np.uint64)[:, None]
    quads = philox((np.arange(-(-count // QUAD), dtype=np.uint64), row, expert, 2), stated.key % 2**64)
    return np.stack(quads, axis=-1).reshape(len(rows), -1)[:, :count]


def _kinds(stated: Stated, word: U64) -> tuple[Flags, Flags, Flags]:
    """Which groups are zero, extreme and loud."""
    lot = (word >> np.uint64(7)) % np.uint64(LOTS)
    ends = stated.zero, stated.zero + stated.extreme, stated.zero + stated.extreme + stated.loud
    return lot < ends[0], (lot >= ends[0]) & (lot < ends[1]), (lot >= ends[1]) & (lot < ends[2])


def _pad(packed: U8, k: int) -> None:
    """Elements from ``k`` on become q = 0, whose nibble is 8."""
    if k % 2:
        packed[:, k // 2] = packed[:, k // 2] & np.uint8(15) | np.uint8(0x80)
    packed[:, (k + 1) // 2 :] = 0x88
