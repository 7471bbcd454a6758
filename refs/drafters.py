"""Recorded drafters: tables of draft logits made around the tokens that the target is known to emit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from refs.exact import Draws

F32 = npt.NDArray[np.float32]
LEAD = 12.0  # of the oracle over the rest: with 10^3 tokens a chain of ten still beats every sibling
NOISY_LEAD = 2.5  # enough that trees grow deep where the drafter is right


def _background(rows: int, vocab: int, draws: Draws, step: float) -> npt.NDArray[np.float64]:
    """Logits of standard deviation 2, at most 7; rounded to multiples of ``step`` to make ties."""
    table = draws.normal((rows, vocab), 2.0)
    return np.rint(table / step) * step if step else table


def oracle(tokens: Sequence[int], vocab: int, draws: Draws, step: float) -> F32:
    """The token is the one greatest of its row."""
    table = _background(len(tokens), vocab, draws, step)
    table[np.arange(len(tokens)), list(tokens)] = LEAD
    return table.astype(np.float32)


def noisy(tokens: Sequence[int], vocab: int, draws: Draws, step: float) -> F32:
    """Its row's token is in 11 of 20 rows the greatest, in 5 just below the third (or equal to it), in 4 the least."""
    table = _background(len(tokens), vocab, draws, step)
    for row, (token, case) in enumerate(zip(tokens, draws.below(20, len(tokens)).tolist(), strict=True)):
        best = np.sort(table[row], kind="stable")[::-1]
        third = best[min(2, vocab - 1)]
        if case < 11:
            table[row, token] = best[0] + (0.0 if step else NOISY_LEAD)
        elif case < 16:
            table[row, token] = third - (0.0 if step else 0.001953125)
        else:
            table[row, token] = best[-1] - 1.0
    return table.astype(np.float32)


def hostile(tokens: Sequence[int], vocab: int, draws: Draws, step: float) -> F32:
    """The token's logit is -inf, so that it is in no tree."""
    table = _background(len(tokens), vocab, draws, step)
    table[np.arange(len(tokens)), list(tokens)] = -np.inf
    return table.astype(np.float32)


DRAFTERS = {"oracle": oracle, "noisy": noisy, "hostile": hostile}
DFLASH = "dflash"
"""Not recorded: the bundle's own drafter drafts (`refs.dflash`)."""
