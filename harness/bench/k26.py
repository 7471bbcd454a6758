"""A model of Kimi K2.6's sizes with random weights, one dense and some MoE layers, as a KDTR file for timing alone.

Sizes are those of its public config. Matrices are one block of random numbers over and over, experts are stated by the
file and drawn where they are read: what comes from memory is as long and as little compressible as the real thing, and
what comes out means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

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


def write(target: Path, config: ModelConfig, say: Callable[[str], None], *, f32: bool = True) -> None:
    """A file of random matrices in bf16 and, unless ``f32`` is false, in f32, and of experts that the engine draws."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in config.shapes().items():
        if ".experts." in name:
            tensors[name.removesuffix("w") + "draw"] = ("i64", (5,))
            continue
        if f32 or len(shape) != 2:
            tensors[name] = ("f32", shape)
        if len(shape) == 2:
            tensors[name.removesuffix("w") + "bw"] = ("bf16", shape)
    rng = np.random.default_rng(26)
    with KdtrStream(target, config.fields(), tensors, b"random weights, for timing alone") as stream:
        for number, entry in enumerate(stream.pending()):
            stream.begin(entry)
            if entry.dtype == "i64":
                inner = config.moe_intermediate_size if ".down." in entry.name else config.hidden_size
                least = int(np.float32(2.0 ** round(math.log2(0.1 * inner**-0.5))).view(np.uint32)) >> 16
                stream.write(np.array([number, least, 0, 0, 0], np.int64).data.cast("B"))
            else:
                block = _block(entry.name, entry.shape, rng)
                data = (block.view(np.uint32) >> 16).astype(np.uint16) if entry.dtype == "bf16" else block
                raw = data.data.cast("B")
                for at in range(0, entry.size, len(raw)):
                    stream.write(raw[: min(len(raw), entry.size - at)])
            stream.end()
        stream.finish()
    say(f"{target}: {target.stat().st_size / 1e9:.1f} GB")


def _block(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """The numbers that a tensor repeats, scaled so that a forward stays finite."""
    if "norm" in name:
        return np.ones(BLOCK, np.float32)
    reach = 1.0 if len(shape) == 1 or name.startswith("embed") else float(shape[-1] ** -0.5)
    return rng.uniform(-reach, reach, BLOCK).astype(np.float32)


def requests(config: ModelConfig, widths: tuple[int, ...], block_size: int) -> dict[int, DecodeRequest]:
    """AR as width 1; for the others trees of random drafts, of which as good as nothing but the root is accepted."""
    rng = np.random.default_rng(1)
    prompt = tuple(rng.integers(0, config.vocab_size, PROMPT).tolist())
    draft = Draft(rng.standard_normal((TOKENS, config.vocab_size), np.float32), PROMPT + 1)
    found = {1: DecodeRequest(prompt, TOKENS)}
    for m in widths:
        found[m] = DecodeRequest(prompt, TOKENS, draft, block_size=block_size, budget=m - 1)
    return found
