"""Rotary positions with YaRN (docs/model.md, RoPE; Peng et al. 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from refs.config import ModelConfig
from refs.elementary import F64, F, cos, power, scalar_log, sin

PI = 3.141592653589793


@dataclass(frozen=True)
class Rotation:
    """What turns the pairs of a head's ``dim`` rotary dimensions; ``factor`` 1 is plain RoPE."""

    dim: int
    theta: float
    factor: float
    original: int
    """Positions of the context that YaRN stretches."""
    beta_fast: float
    beta_slow: float
    amplitude: float
    """That cos and sin are multiplied by."""


def mscale(config: ModelConfig, s: float) -> float:
    """m(s): 0.1 s ln(factor) + 1 with YaRN, else 1."""
    return 0.1 * s * scalar_log(config.rope_factor) + 1.0 if config.rope_factor > 1 else 1.0


def softmax_scale(config: ModelConfig) -> float:
    """What scores are multiplied by, in the direct and the absorbed form alike."""
    m = mscale(config, config.rope_mscale_all_dim)
    return m * m / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)


def rotation(config: ModelConfig) -> Rotation:
    """The target model's."""
    return Rotation(
        config.qk_rope_head_dim,
        config.rope_theta,
        config.rope_factor,
        config.rope_original_context,
        config.rope_beta_fast,
        config.rope_beta_slow,
        mscale(config, config.rope_mscale) / mscale(config, config.rope_mscale_all_dim),
    )


def ramp_edges(r: Rotation) -> tuple[float, float]:
    """dim(beta_fast) and dim(beta_slow), in dimensions of the rope part, before they are rounded to whole ones."""

    def dim(beta: float) -> float:
        turns = r.original / (2 * PI * beta)
        return r.dim * scalar_log(turns) / (2 * scalar_log(r.theta))

    return dim(r.beta_fast), dim(r.beta_slow)


def frequencies(r: Rotation) -> F64:
    """Radians per position of each pair, [dim/2]."""
    d = r.dim
    i = np.arange(d // 2).astype(np.float64)
    extra: F64 = np.float64(1) / power(np.full(d // 2, r.theta), 2.0 * i / d).astype(np.float64)
    if r.factor == 1:
        return extra

    low_edge, high_edge = ramp_edges(r)
    low = max(math.floor(low_edge), 0)
    high: float = min(math.ceil(high_edge), d - 1)
    if high == low:
        high += 0.001
    ramp = np.minimum(np.maximum((i - low) / (high - low), 0.0), 1.0)
    return extra / r.factor * ramp + extra * (1.0 - ramp)


def inv_freq(config: ModelConfig) -> F64:
    """Radians per position of each pair of the target model, [P/2]."""
    return frequencies(rotation(config))


def table(r: Rotation, positions: int) -> F64:
    """[positions, dim/2, 2]: cosine and sine, with the amplitude."""
    angles = np.arange(positions).astype(np.float64)[:, None] * frequencies(r)
    return np.stack([cos(angles), sin(angles)], axis=-1).astype(np.float64) * r.amplitude


def cos_sin(config: ModelConfig, positions: int) -> F64:
    """`table` of the target model, [positions, P/2, 2]."""
    return table(rotation(config), positions)


def rotate(x: F, table: F) -> F:
    """Rotate the interleaved pairs of x [M, ..., P] by the rows table [M, P/2, 2]."""
    shape = (table.shape[0], *[1] * (x.ndim - 2), table.shape[1])
    c, s = table[..., 0].reshape(shape), table[..., 1].reshape(shape)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)
