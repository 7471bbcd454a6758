"""Random operands of single operations, and what float64 makes of RMSNorm."""

from __future__ import annotations

import numpy as np
from engine_ops import F32, Array


def draw(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape).astype(np.float32)


def packed(q: Array, k: int) -> Array:
    """Nibbles by the words of docs/model.md: offset binary, element 2j low and 2j+1 high, padded with 8."""
    n, groups = q.shape[0], -(-k // 32)
    codes = np.full((n, groups * 32), 8, np.uint8)
    codes[:, :k] = q + 8
    return codes[:, 0::2] | codes[:, 1::2] << 4


def int4(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array, Array]:
    """Nibbles, bf16 bits of the scales, and the exact weights in float64. Some groups are all zero, some hold -8."""
    groups = -(-k // 32)
    q = rng.integers(-8, 8, (n, k)).astype(np.int8)
    scale = (draw(rng, n, groups).view(np.uint32) >> 16).astype(np.uint16)
    scale[rng.random((n, groups)) < 0.1] = 0
    exact = (scale.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return packed(q, k), scale, q * np.repeat(exact, 32, axis=1)[:, :k]


def normed(x: F32, w: F32, eps: float) -> Array:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * w)
