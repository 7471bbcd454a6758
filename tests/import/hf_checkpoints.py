"""Hugging Face checkpoints made for tests, written byte by byte without the importer or a safetensors library."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Tensor = tuple[str, Any]  # safetensors dtype, array of the bits

NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "I32": "<i4", "I64": "<i8", "F8_E4M3": "|u1"}

TINY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 20,
    "moe_intermediate_size": 36,
    "vocab_size": 30,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A config in transformers 4's spelling."""

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}
"""The quantization_config of the Kimi K2 INT4 checkpoints."""


def config(**changes: Any) -> dict[str, Any]:
    """`TINY` with changes; a value of ``...`` removes the field."""
    merged = TINY | changes
    return {k: v for k, v in merged.items() if v is not ...}


def shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The float tensors of a DeepSeek-V3 checkpoint as transformers names them, experts one by one."""
    d, h, rq, r = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c["vocab_size"], d),
    }

    def mlp(at: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{at}gate_proj.weight": (inner, d),
            f"{at}up_proj.weight": (inner, d),
            f"{at}down_proj.weight": (d, inner),
        }

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        out |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        out |= {at + "self_attn.q_a_proj.weight": (rq, d), at + "self_attn.q_a_layernorm.weight": (rq,)}
        out |= {at + "self_attn.q_b_proj.weight": (h * (nope + rope), rq)}
        out |= {at + "self_attn.kv_a_proj_with_mqa.weight": (r + rope, d), at + "self_attn.kv_a_layernorm.weight": (r,)}
        out |= {at + "self_attn.kv_b_proj.weight": (h * (nope + v), r), at + "self_attn.o_proj.weight": (d, h * v)}
        if layer < c["first_k_dense_replace"]:
            out |= mlp(at + "mlp.", c["intermediate_size"])
            continue
        out |= {at + "mlp.gate.weight": (c["n_routed_experts"], d)}
        out |= {at + "mlp.gate.e_score_correction_bias": (c["n_routed_experts"],)}
        for e in range(c["n_routed_experts"]):
            out |= mlp(f"{at}mlp.experts.{e}.", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            out |= mlp(f"{at}mlp.shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])
    return out


def floats(c: Mapping[str, Any], dtype: str = "F32", seed: int = 0) -> dict[str, Tensor]:
    """Random finite tensors of ``dtype``, a different stream for each."""
    out: dict[str, Tensor] = {}
    for i, (name, shape) in enumerate(shapes(c).items()):
        values = np.random.default_rng((seed, i)).standard_normal(shape, np.float32)
        if dtype == "BF16":
            out[name] = dtype, (values.view("<u4") >> 16).astype("<u2")
        else:
            out[name] = dtype, values.astype(NUMPY[dtype])
    return out


def packed(c: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """bf16 tensors, the experts as compressed-tensors packs them: 8 nibbles a word, the first lowest; unused ones 0."""
    out: dict[str, Tensor] = {}
    for i, (name, tensor) in enumerate(floats(c, "BF16", seed).items()):
        if ".experts." not in name:
            out[name] = tensor
            continue
        n, k = tensor[1].shape
        rng = np.random.default_rng((seed, i, 1))
        nibbles = np.zeros((n, -(-k // 8) * 8), np.uint32)
        nibbles[:, :k] = rng.integers(0, 16, (n, k))
        words = sum(nibbles[:, j::8] << np.uint32(4 * j) for j in range(8))
        out[f"{name}_packed"] = "I32", words.astype("<u4").view("<i4")
        out[f"{name}_scale"] = "BF16", rng.integers(0x3C00, 0x3F00, (n, -(-k // 32))).astype("<u2")
        out[f"{name}_shape"] = "I64", np.array([n, k], "<i8")
    return out


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).astype(NUMPY[dtype], copy=False).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 0) -> Path:
    """A checkpoint: one file, or ``shards`` of them with an index, the tensors dealt out in turn."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if not shards:
        (directory / "model.safetensors").write_bytes(safetensors(tensors))
        return directory
    weight_map: dict[str, str] = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        (directory / file).write_bytes(safetensors(part))
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    """The index of a sharded checkpoint."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def renamed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The same tensors with ``prefix`` before their names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors but ``names``."""
    return {k: v for k, v in tensors.items() if k not in set(names)}
