"""The choice of a token from a row of logits (docs/model.md, Argmax and Sampling).

A draw is keyed by seed, position and token, not by the step, so draft trees and AR sample the same tokens.
"""

from __future__ import annotations

import numpy as np

from refs.elementary import F64, F, log
from refs.errors import NonFiniteError
from refs.philox import philox


def gumbel(vocab: int, position: int, seed: int) -> F64:
    """The noise [vocab] of the row at ``position``: -ln(-ln u), u = (word + 0.5) / 2^32."""
    words = philox((np.arange(vocab), position, 0, 0), seed)[0]
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
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
