"""The hand-made part of the corpus: an empty file, a file of every type, and two models of the least possible size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refs import kdtr

CORPUS = Path(__file__).with_name("corpus")

INTS = {
    "hidden_size": 2, "num_layers": 1, "first_k_dense": 0, "intermediate_size": 1, "moe_intermediate_size": 1,
    "vocab_size": 3, "num_heads": 1, "q_lora_rank": 1, "kv_lora_rank": 2, "qk_nope_head_dim": 1, "qk_rope_head_dim": 2,
    "v_head_dim": 1, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": 1, "rope_original_context": 4, "max_context": 8, "eos_id": -1, "mask_id": -1,
}  # fmt: skip
FLOATS = {
    "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5, "inner_norm_eps": 1e-6, "rope_theta": 100.0, "rope_factor": 2.0,
    "rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0,
}  # fmt: skip


def model(dense: bool) -> bytes:
    """A valid file of one layer; sizes as `INTS`."""
    one = {"attn_norm.w": (2,), "mlp_norm.w": (2,), "attn.q_a.w": (1, 2), "attn.q_a_norm.w": (1,), "attn.q_b.w": (3, 1),
           "attn.kv_a.w": (4, 2), "attn.kv_a_norm.w": (2,), "attn.kv_b.w": (2, 2), "attn.o.w": (2, 1)}  # fmt: skip
    mlp: dict[str, tuple[int, ...]] = {"mlp.gate.w": (1, 2), "mlp.up.w": (1, 2), "mlp.down.w": (2, 1)}
    moe: dict[str, tuple[int, ...]] = {
        "router.w": (2, 2), "router.bias": (2,), "experts.gate.w": (2, 1, 2), "experts.up.w": (2, 1, 2),
        "experts.down.w": (2, 2, 1), "shared.gate.w": (1, 2), "shared.up.w": (1, 2), "shared.down.w": (2, 1),
    }  # fmt: skip
    shapes = {"embed.w": (3, 2), "final_norm.w": (2,), "lm_head.w": (3, 2)}
    shapes |= {f"layers.0.{name}": shape for name, shape in {**one, **(mlp if dense else moe)}.items()}
    tensors: dict[str, npt.NDArray[Any]] = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    if not dense:
        for name, rows in (("gate", 1), ("up", 1), ("down", 2)):
            tensors[f"layers.0.experts.{name}.qw"] = np.full((2, rows, 16), 0x88, np.uint8)
            tensors[f"layers.0.experts.{name}.sc"] = np.full((2, rows, 1), 0x3F80, np.uint16)
    return kdtr.encode({**INTS, "first_k_dense": int(dense), **FLOATS}, tensors)


def seeds() -> dict[str, bytes]:
    """File contents by name."""
    types = {f"t{i}": np.ones(i + 1, t) for i, t in enumerate(("<f8", "<f4", "<u2", "<i4", "<i8", "|u1"))}
    return {
        "seed-empty": kdtr.encode({}, {}),
        "seed-types": kdtr.encode({"a": 1, "b": 0.5}, {**types, "deep": np.ones((1, 2, 3, 4), np.uint8)}),
        "seed-dense": model(dense=True),
        "seed-moe": model(dense=False),
    }


if __name__ == "__main__":
    for name, data in seeds().items():
        (CORPUS / name).write_bytes(data)
