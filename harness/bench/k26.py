"""A model of Kimi K2.6's sizes with random weights, one dense and some MoE layers, as a KDTR file for timing alone.

Sizes are those of its public config. Weights are one block of random numbers over and over: what is read from memory
is as long and as little compressible as the real thing, and what comes out means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kdtr_stream import KdtrStream
from harness.protocol import DecodeRequest, Draft
from refs.config import ModelConfig

LAYERS = 4  # one dense, three MoE
BLOCK = 4 << 20  # numbers; a matrix's rows differ because no row is as long
PROMPT, TOKENS = 8, 12
FIELDS: dict[str, int | float] = {
    "hidden_size": 7168, "num_layers": LAYERS, "first_k_dense": 1, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "vocab_size": 163840, "num_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": 1,
    "rope_original_context": 4096, "max_context": 4096, "eos_id": -1, "mask_id": -1, "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5, "inner_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_factor": 64.0, "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0,
}  # fmt: skip


def model(**changes: int) -> ModelConfig:
    """K2.6's sizes with ``changes``, such as fewer experts. Raises ConfigError."""
    return ModelConfig.of({**FIELDS, **changes}, "k26")


def size(config: ModelConfig) -> int:
    """Bytes of its INT4 file, the head not counted."""
    width = {"f32": 4, "bf16": 2, "u8": 1}
    return sum(int(np.prod(shape, dtype=np.int64)) * width[kind] for shape, kind in config.stored("int4").values())


def _block(name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> npt.NDArray[Any]:
    """The numbers that a tensor repeats, scaled so that a forward stays finite."""
    if dtype == "u8":
        return rng.integers(0, 256, BLOCK, np.uint8)
    reach = 1.0 if len(shape) == 1 or name == "embed.w" else float(shape[-1] ** -0.5)
    if dtype == "bf16":  # of groups of 32: q is at most 8
        return np.full(BLOCK, np.float32(float((32 * shape[-1]) ** -0.5) / 8).view(np.uint32) >> 16, np.uint16)
    return np.ones(BLOCK, np.float32) if "norm" in name else rng.uniform(-reach, reach, BLOCK).astype(np.float32)


def write(target: Path, config: ModelConfig, say: Callable[[str], None]) -> None:
    """The INT4 file at ``target``. Raises OSError, where the disk has no room for it among them."""
    stored = {name: (kind, shape) for name, (shape, kind) in config.stored("int4").items()}
    rng = np.random.default_rng(26)
    with KdtrStream(target, config.fields(), stored, b"random weights, for timing alone") as stream:
        for entry in stream.pending():
            say(f"k26: writing {entry.name}, {entry.size / 1e6:.0f} MB")
            block = _block(entry.name, entry.shape, entry.dtype, rng).data.cast("B")
            stream.begin(entry)
            for at in range(0, entry.size, len(block)):
                stream.write(block[: min(len(block), entry.size - at)])
            stream.end()
        stream.finish()


def requests(config: ModelConfig, widths: tuple[int, ...], block_size: int) -> dict[int, DecodeRequest]:
    """AR as width 1; for the others trees of random drafts, of which as good as nothing but the root is accepted."""
    rng = np.random.default_rng(1)
    prompt = tuple(rng.integers(0, config.vocab_size, PROMPT).tolist())
    draft = Draft(rng.standard_normal((TOKENS, config.vocab_size), np.float32), PROMPT + 1)
    found = {1: DecodeRequest(prompt, TOKENS)}
    for m in widths:
        found[m] = DecodeRequest(prompt, TOKENS, draft, block_size=block_size, budget=m - 1)
    return found
