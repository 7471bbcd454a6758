"""Random DeepSeek-V3 configurations, one per index, the same on every machine and Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

COUNT = 200
MAX_CONTEXT = 160


@dataclass(frozen=True)
class Case:
    """A configuration, how its checkpoint is written, and what is asked of it."""

    index: int
    config: dict[str, Any]
    """Arguments of DeepseekV3Config."""
    layout: str
    """``deepseek_v3``: as transformers 5 writes it; ``kimi_k2``: config in transformers 4's spelling; ``kimi_k25``:
    nested, names under ``language_model.``, a vision tower beside it."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``."""
    shard_bytes: int
    """Largest shard; 0: one file."""
    gain: float
    """Standard deviation of the matrices is gain / sqrt(inputs)."""
    prompt: tuple[int, ...]
    new_tokens: int


def case(index: int) -> Case:
    """The configuration of ``index``."""
    r = random.Random(f"oracle {index}")
    groups = r.choice([1, 1, 1, 2, 3, 4, 8])
    per_group = r.randint(2, 9)
    topk_group = r.randint(1, groups)
    layers = r.randint(1, 4)
    vocab = r.randint(11, 300)
    config: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": r.randint(7, 72),
        "intermediate_size": r.randint(1, 90),
        "moe_intermediate_size": r.randint(1, 70),
        "num_hidden_layers": layers,
        "num_attention_heads": (heads := r.randint(1, 5)),
        "num_key_value_heads": heads,
        "n_shared_experts": r.choice([0, 1, 1, 1, 2, 3]),
        "n_routed_experts": groups * per_group,
        "routed_scaling_factor": r.choice([1.0, 2.5, 2.827, r.uniform(0.3, 3)]),
        "q_lora_rank": r.randint(1, 48),
        "kv_lora_rank": r.randint(1, 48),
        "qk_rope_head_dim": 2 * r.randint(1, 10),
        "qk_nope_head_dim": r.randint(1, 24),
        "v_head_dim": r.randint(1, 24),
        "n_group": groups,
        "topk_group": topk_group,
        "num_experts_per_tok": r.randint(1, min(8, topk_group * per_group)),
        "first_k_dense_replace": r.choice([0, 1, 1, r.randint(0, layers), layers]),
        "norm_topk_prob": r.random() < 0.7,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-3]),
        "rope_parameters": _rope(r),
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": r.random() < 0.1,
    }
    return Case(
        index=index,
        config=config,
        layout=r.choice(["deepseek_v3", "deepseek_v3", "kimi_k2", "kimi_k25"]),
        dtype=r.choice(["float32", "float32", "bfloat16", "float16"]),
        shard_bytes=r.choice([0, 0, 20_000]),
        gain=r.uniform(0.7, 1.5),
        prompt=tuple(r.randrange(vocab) for _ in range(r.choice([1, 2, r.randint(3, 40), r.randint(41, 140)]))),
        new_tokens=8,
    )


def _rope(r: random.Random) -> dict[str, Any]:
    theta = float(r.choice([10.0, 10_000.0, 50_000.0, 1e6]))
    if r.random() < 0.35:
        return {"rope_type": "default", "rope_theta": theta}
    mscale = r.choice(
        [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 1.0}, {"mscale": 1.0}, {}]
    )
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": r.choice([1.5, 4.0, 40.0, 64.0]),
        "original_max_position_embeddings": r.choice([8, 16, 32, 64, 128]),
        "beta_fast": r.choice([1, 4, 32]),
        "beta_slow": 1,
        **mscale,
    }
