"""Rotary positions with YaRN (docs/model.md, RoPE; Peng et al. 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math

import numpy as np

from refs.config import ModelConfig
from refs.elementary import F64, F, cos, power, scalar_log, sin

PI = 3.141592653589793


def mscale(config: ModelConfig, s: float) -> float:
    """m(s): 0.1 s ln(factor) + 1 with YaRN, else 1."""
    return 0.1 * s * scalar_log(config.rope_factor) + 1.0 if config.rope_factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """What scores are multiplied by, in the direct and the absorbed form alike."""
    m = mscale(config, config.rope_mscale_all_dim)
    return m * m / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)


def ramp_edges(config: ModelConfig) -> tuple[float, float]:
    """dim(beta_fast) and dim(beta_slow), in dimensions of the rope part, before they are rounded to whole ones."""

    def dim(r: float) -> float:
        turns = config.rope_original_context / (2 * PI * r)
        return config.qk_rope_head_dim * scalar_log(turns) / (2 * scalar_log(config.rope_theta))

    return dim(config.rope_beta_fast), dim(config.rope_beta_slow)


def inv_freq(config: ModelConfig) -> F64:
    """Radians per position of each pair, [P/2]."""
    d, theta = config.qk_rope_head_dim, config.rope_theta
    i = np.arange(d // 2).astype(np.float64)
    extra: F64 = np.float64(1) / power(np.full(d // 2, theta), 2.0 * i / d).astype(np.float64)
    if config.rope_factor == 1:
        return extra

    low_edge, high_edge = ramp_edges(config)
    low = max(math.floor(low_edge), 0)
    high: float = min(math.ceil(high_edge), d - 1)
    if high == low:
        high += 0.001
    ramp = np.minimum(np.maximum((i - low) / (high - low), 0.0), 1.0)
    return extra / config.rope_factor * ramp + extra * (1.0 - ramp)


def cos_sin(config: ModelConfig, positions: int) -> F64:
    """[positions, P/2, 2]: cosine and sine, with YaRN's amplitude."""
    angles = np.arange(positions).astype(np.float64)[:, None] * inv_freq(config)
    amplitude = mscale(config, config.rope_mscale) / mscale(config, config.rope_mscale_all_dim)
    return np.stack([cos(angles), sin(angles)], axis=-1).astype(np.float64) * amplitude


def rotate(x: F, table: F) -> F:
    """Rotate the interleaved pairs of x [M, ..., P] by the rows table [M, P/2, 2]."""
    shape = (table.shape[0], *[1] * (x.ndim - 2), table.shape[1])
    c, s = table[..., 0].reshape(shape), table[..., 1].reshape(shape)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)
