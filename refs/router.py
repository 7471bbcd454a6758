"""The choice of experts (docs/model.md, Router)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refs.config import ModelConfig
from refs.elementary import F
from refs.errors import NonFiniteError
from refs.exact import Summation, sigmoid, sum_last, top_k, tree_sum


def group_scores(config: ModelConfig, biased: F) -> F:
    """Biased scores [M, E] -> [M, n_group]: the sum of each group's two best."""
    grouped = biased.reshape(-1, config.n_group, config.n_routed_experts // config.n_group)
    best = np.take_along_axis(grouped, top_k(grouped, 2), axis=-1)
    return best[..., 0] + best[..., 1]


def open_experts(config: ModelConfig, biased: F) -> F:
    """Biased scores [M, E] with -inf for the experts whose group is not kept."""
    if config.n_group == 1:
        return biased
    kept = top_k(group_scores(config, biased), config.topk_group)
    is_open = np.zeros((biased.shape[0], config.n_group), bool)
    np.put_along_axis(is_open, kept, True, axis=1)
    spread = np.repeat(is_open, config.n_routed_experts // config.n_group, axis=1)
    return np.where(spread, biased, biased.dtype.type(-np.inf))


def route(
    config: ModelConfig, logits: F, bias: F, layer: int = 0, summation: Summation = tree_sum
) -> tuple[npt.NDArray[np.int64], F]:
    """Router logits [M, E] and bias [E] -> expert ids [M, k] in the order of choice, and their weights [M, k]."""
    t = logits.dtype.type
    s = sigmoid(logits)
    biased = s + bias
    if not (np.isfinite(logits).all() and np.isfinite(biased).all()):
        raise NonFiniteError(f"a router score of layer {layer} is NaN or infinite")
    ids = top_k(open_experts(config, biased), config.num_experts_per_tok)
    weights = np.take_along_axis(s, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / (sum_last(weights, summation) + t(1e-20))[:, None]
    return ids, weights * t(config.routed_scaling_factor)
