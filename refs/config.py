"""A model's fields and the tensors they ask for (docs/model.md, Fields and Tensors). The one place that reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refs.elementary import scalar_log
from refs.errors import ConfigError
from refs.quant import GROUP, groups

F32_PRECISIONS = ("fp32", "int4")
BF16_PRECISIONS = ("bf16", "int4-bf16")
"""Of which activations are rounded as docs/model.md, bf16, says."""
PRECISIONS = F32_PRECISIONS + BF16_PRECISIONS

MOST_LAYERS = MOST_EXPERTS = 1 << 16
"""A file has no room for the tensors of more layers; so whatever is as long as these counts stays short."""

Kinds = dict[str, type[int] | type[float]]


def kinds_of(fields_of: type[Any]) -> Kinds:
    """What each field of a dataclass of sizes holds: int, or float for everything else."""
    return {f.name: int if f.type in (int, "int") else float for f in dataclasses.fields(fields_of)}


def check_kinds(fields: Mapping[str, Any], kinds: Kinds, file: str, prefix: str = "") -> None:
    """`ConfigError` naming ``file`` and the field unless ``fields`` are exactly those, of these kinds and finite.

    ``prefix`` goes before a field's name in the message.
    """
    for name in fields:
        if name not in kinds:
            raise ConfigError(f"{file}: {prefix}{name}: unknown field; known are {', '.join(sorted(kinds))}")
    for name, kind in kinds.items():
        if name not in fields:
            raise ConfigError(f"{file}: {prefix}{name}: missing")
        value = fields[name]
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            what = "an integer" if kind is int else "a finite float (written with a point)"
            raise ConfigError(f"{file}: {prefix}{name}: {value!r} is not {what}")


def has_ramp(original: int, beta: float) -> bool:
    """Whether YaRN's ramp has an edge at ``beta``, which is a logarithm of the turns in the ``original`` context."""
    return beta > 0 and 0 < original / (2 * math.pi * beta) < math.inf


@dataclass(frozen=True)
class ModelConfig:
    """The fields of docs/model.md, checked."""

    hidden_size: int
    num_layers: int
    first_k_dense: int
    intermediate_size: int
    moe_intermediate_size: int
    vocab_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: int
    rope_original_context: int
    max_context: int
    eos_id: int
    mask_id: int
    routed_scaling_factor: float
    rms_norm_eps: float
    inner_norm_eps: float
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_mscale: float
    rope_mscale_all_dim: float

    @staticmethod
    def of(fields: Mapping[str, Any], file: str) -> ModelConfig:
        """Check ``fields`` against the page; `ConfigError` names ``file`` and the field."""
        check_kinds(fields, kinds_of(ModelConfig), file)
        config = ModelConfig(**dict(fields))
        config._check_ranges(file)
        return config

    def _check_ranges(self, file: str) -> None:
        zero_allowed = ("first_k_dense", "n_shared_experts", "norm_topk_prob")
        most = {"num_layers": MOST_LAYERS, "n_routed_experts": MOST_EXPERTS}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            low = 0 if f.name in zero_allowed else -1 if f.name in ("eos_id", "mask_id") else 1
            if isinstance(value, int) and not low <= value <= most.get(f.name, 2**31 - 1):
                raise ConfigError(f"{file}: {f.name}: {value} is not in {low}..{most.get(f.name, '2^31-1')}")
        per_group = self.n_routed_experts // self.n_group
        yarn, original = self.rope_factor > 1, self.rope_original_context
        amplitude = 0.1 * self.rope_mscale_all_dim * scalar_log(self.rope_factor) + 1 if yarn else 1.0
        rules = (
            ("first_k_dense", self.first_k_dense <= self.num_layers, "more than num_layers"),
            ("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "odd, but RoPE rotates pairs"),
            ("norm_topk_prob", self.norm_topk_prob <= 1, "neither 0 nor 1"),
            ("n_group", self.n_routed_experts % self.n_group == 0, "does not divide n_routed_experts"),
            ("n_group", self.n_group == 1 or per_group >= 2, "leaves groups of fewer than 2 experts"),
            ("topk_group", self.topk_group <= self.n_group, "more than n_group"),
            ("num_experts_per_tok", self.num_experts_per_tok <= self.topk_group * per_group, "more than are kept"),
            ("eos_id", self.eos_id < self.vocab_size, "outside the vocabulary"),
            ("mask_id", self.mask_id < self.vocab_size, "outside the vocabulary"),
            ("rms_norm_eps", self.rms_norm_eps > 0, "not above 0"),
            ("inner_norm_eps", self.inner_norm_eps > 0, "not above 0"),
            ("rope_theta", self.rope_theta > 1, "not above 1"),
            ("rope_factor", self.rope_factor >= 1, "below 1"),
            ("rope_beta_fast", not yarn or has_ramp(original, self.rope_beta_fast), "gives YaRN's ramp no edge"),
            ("rope_beta_slow", not yarn or has_ramp(original, self.rope_beta_slow), "gives YaRN's ramp no edge"),
            ("rope_mscale_all_dim", amplitude > 0, "makes the attention scale vanish"),
        )
        for name, good, reason in rules:
            if not good:
                raise ConfigError(f"{file}: {name}: {getattr(self, name)}: {reason}")

    def fields(self) -> dict[str, int | float]:
        """As the KDTR file holds them."""
        return dataclasses.asdict(self)

    def is_dense(self, layer: int) -> bool:
        """Whether ``layer`` has one MLP in place of experts."""
        return layer < self.first_k_dense

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every float32 tensor and its shape, the experts as ``.w``."""
        d, v, h, r = self.hidden_size, self.vocab_size, self.num_heads, self.kv_lora_rank
        nope, rope, vh, rq = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.q_lora_rank
        e, i, s = self.n_routed_experts, self.moe_intermediate_size, self.n_shared_experts * self.moe_intermediate_size
        out: dict[str, tuple[int, ...]] = {"embed.w": (v, d), "lm_head.w": (v, d), "final_norm.w": (d,)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            out |= {at + "attn_norm.w": (d,), at + "mlp_norm.w": (d,)}
            out |= {at + "attn.q_a.w": (rq, d), at + "attn.q_a_norm.w": (rq,)}
            out |= {at + "attn.q_b.w": (h * (nope + rope), rq), at + "attn.kv_a.w": (r + rope, d)}
            out |= {at + "attn.kv_a_norm.w": (r,), at + "attn.kv_b.w": (h * (nope + vh), r)}
            out |= {at + "attn.o.w": (d, h * vh)}
            if self.is_dense(layer):
                f = self.intermediate_size
                out |= {at + "mlp.gate.w": (f, d), at + "mlp.up.w": (f, d), at + "mlp.down.w": (d, f)}
                continue
            out |= {at + "router.w": (e, d), at + "router.bias": (e,)}
            out |= {at + f"experts.{p}.w": (e, d, i) if p == "down" else (e, i, d) for p in ("gate", "up", "down")}
            if s:
                out |= {at + "shared.gate.w": (s, d), at + "shared.up.w": (s, d), at + "shared.down.w": (d, s)}
        return out

    def stored(self, precision: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Every tensor that ``precision`` needs with its shape and KDTR type."""
        out: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, shape in self.shapes().items():
            if precision.startswith("int4") and ".experts." in name:
                g = groups(shape[-1])
                out[name.removesuffix("w") + "qw"] = ((*shape[:-1], g * GROUP // 2), "u8")
                out[name.removesuffix("w") + "sc"] = ((*shape[:-1], g), "bf16")
            elif precision in BF16_PRECISIONS and len(shape) > 1:
                out[name.removesuffix("w") + "bw"] = (shape, "bf16")
            else:
                out[name] = (shape, "f32")
        return out
