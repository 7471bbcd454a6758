"""The choice of a token from a row of logits (docs/model.md, Argmax and Sampling).

A draw is keyed by seed, position and token, not by the step, so draft trees and AR sample the same tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refs.elementary import F64, F, log
from refs.errors import NonFiniteError

U32 = npt.NDArray[np.uint32]


def philox4x32(counter: U32, key: U32) -> U32:
    """Philox-4x32-10 (Salmon et al. 2011): counters [..., 4] under key [2] -> words [..., 4]."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ np.uint64(k0), b & mask, (a >> shift) ^ c[3] ^ np.uint64(k1), a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=-1).astype(np.uint32)


def gumbel(vocab: int, position: int, seed: int) -> F64:
    """The noise [vocab] of the row at ``position``: -ln(-ln u), u = (word + 0.5) / 2^32."""
    counter = np.zeros((vocab, 4), np.uint32)
    counter[:, 0] = np.arange(vocab)
    counter[:, 1] = position
    key = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
    u = (philox4x32(counter, key)[:, 0].astype(np.float64) + 0.5) * 2.0**-32
    return (-log(-log(u))).astype(np.float64)


def scores(logits: F, position: int, temperature: float, seed: int) -> F64:
    """What the choice maximises, [V]: the logits, or the logits at a temperature plus Gumbel noise."""
    row = logits.astype(np.float64)
    if temperature == 0:
        return row
    return row / temperature + gumbel(row.size, position, seed)


def choose(logits: F, position: int, temperature: float, seed: int) -> int:
    """The token after the row at ``position``; ties go to the lowest id; a logit that is not finite is an error."""
    if not np.isfinite(logits).all():
        raise NonFiniteError(f"a logit of the row at position {position} is not finite")
    return int(np.argmax(scores(logits, position, temperature, seed)))
