"""Softmax attention over cached keys (docs/model.md, What every engine owes).

A row walks its own keys in logical order in chunks of 64, so its result does not depend on other rows. A key that is
not there has weight 0, and adding an exact 0 changes no bit, so rows of different length may share an array.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from refs.elementary import F, exp
from refs.exact import BLOCK, Summation, product

CHUNK = 64
Index = npt.NDArray[np.int64]


def attend(
    q: F,
    q_rope: F,
    k: F,
    v: F,
    k_rope: F,
    keys: Index,
    scale: float,
    summation: Summation,
    held: Callable[[F], F] = lambda x: x,
) -> F:
    """softmax(scale * (q.k + q_rope.k_rope)) v for M rows and H heads -> [M, H, width of v].

    q [M, H, W] and q_rope [M, H, P]; k and v are [slots, width] (absorbed: shared by the heads) or [slots, H, width];
    k_rope [slots, P]; keys [M, whole chunks]: the slots each row sees in order, -1 where there is none. ``held`` is
    what a product reads of the weights exp(score - greatest); their sum is of the unrounded.
    """
    m, heads, width = q.shape
    out = np.empty((m, heads, v.shape[-1]), q.dtype)
    block = max(1, BLOCK // (heads * max(width, v.shape[-1]) * CHUNK))
    for r in range(0, m, block):
        rows = slice(r, r + block)
        there = (keys[rows] >= 0).T[:, :, None]
        seen = np.maximum(keys[rows], 0).T  # [T, m]; slot 0, which every row sees, stands in for an absent key
        chunks = [seen[t : t + CHUNK] for t in range(0, seen.shape[0], CHUNK)]
        scores = np.concatenate(
            [_dot(q[rows], k[slots], summation) + _dot(q_rope[rows], k_rope[slots], summation) for slots in chunks]
        )
        scores = np.where(there, scores * q.dtype.type(scale), q.dtype.type(-np.inf))  # [T, m, H]
        p = exp(scores - scores.max(axis=0))
        total = np.zeros(p.shape[1:], q.dtype)
        acc = np.zeros((*p.shape[1:], v.shape[-1]), q.dtype)
        for i, slots in enumerate(chunks):
            part = p[i * CHUNK : (i + 1) * CHUNK]
            acc = acc + summation(product(held(part)[..., None], _per_head(v[slots])))
            total = total + summation(part.copy())
        out[rows] = acc / total[..., None]
    return out


def _per_head(x: F) -> F:
    """[t, m, width] or [t, m, H, width] -> [t, m, 1 or H, width]."""
    return x if x.ndim == 4 else x[:, :, None]


def _dot(q: F, k: F, summation: Summation) -> F:
    """q [m, H, W] with the keys of each row, [t, m, W] or [t, m, H, W] -> [t, m, H]."""
    by_element = np.ascontiguousarray(q.transpose(2, 0, 1))[:, None]
    return summation(product(by_element, _per_head(k).transpose(3, 0, 1, 2))).copy()
