"""Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011): four words for a counter and a key.

Integers alone, so the words are the same everywhere; a counter's words need no other counter's, so any part of what is
drawn can be drawn by itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Words = tuple[U64, U64, U64, U64]

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLY = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: int) -> Words:
    """The words of each counter: four arrays of numbers below 2^32, as broadcast as the counter's four.

    ``key``: 64 bits, its low half is the first of Philox's two key words.
    """
    given = np.broadcast_arrays(*(np.asarray(part, np.uint64) for part in counter))
    c0, c1, c2, c3 = (np.array(part, np.uint64) for part in given)
    spare = np.empty_like(c0)
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    for _ in range(10):
        np.multiply(c0, _MULTIPLY[0], out=c0)
        np.multiply(c2, _MULTIPLY[1], out=c2)
        np.right_shift(c2, _HALF, out=spare)
        spare ^= c1
        spare ^= np.uint64(k0)
        np.right_shift(c0, _HALF, out=c1)
        c1 ^= c3
        c1 ^= np.uint64(k1)
        c2 &= _MASK
        c0 &= _MASK
        c0, c1, c2, c3, spare = spare, c2, c1, c0, c3
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
