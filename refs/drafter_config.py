"""A drafter's fields and the tensors they ask for (docs/model.md, Drafter). The one place that reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refs.config import MOST_LAYERS, ModelConfig, check_kinds, has_ramp, kinds_of
from refs.errors import ConfigError, MissingTensor
from refs.rope import Rotation, ramp_edges

PREFIX = "draft_"
"""Of the names of a drafter's fields in a KDTR file."""
TAPS = "drafter.taps"


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter's fields of docs/model.md without their prefix, checked, and the layers that it taps."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    rope_original_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_amplitude: float
    taps: tuple[int, ...]

    @staticmethod
    def of(fields: Mapping[str, Any], taps: Sequence[int], model: ModelConfig, file: str) -> DrafterConfig:
        """Check ``fields`` (without prefix) against the page; `ConfigError` names ``file`` and the field."""
        kinds = kinds_of(DrafterConfig)
        del kinds["taps"]
        check_kinds(fields, kinds, file, PREFIX)
        for name, kind in kinds.items():
            value = fields[name]
            if not (0 < value <= (MOST_LAYERS if name == "num_layers" else 2**31 - 1) if kind is int else value > 0):
                raise ConfigError(f"{file}: {PREFIX}{name}: {value} is not above 0 or too large")
        config = DrafterConfig(**dict(fields), taps=tuple(int(t) for t in taps))
        config._check_ranges(model, file)
        return config

    def _check_ranges(self, model: ModelConfig, file: str) -> None:
        betas = (self.rope_beta_fast, self.rope_beta_slow)
        ramps = self.rope_factor == 1 or all(has_ramp(self.rope_original_context, beta) for beta in betas)
        edges = ramp_edges(self.rotation()) if ramps and self.rope_factor > 1 and self.rope_theta > 1 else ()
        rules = (
            ("num_kv_heads", self.num_heads % self.num_kv_heads == 0, "does not divide num_heads"),
            ("head_dim", self.head_dim % 2 == 0, "odd, but RoPE rotates pairs"),
            ("block_size", self.block_size >= 2, "a block of the bonus alone drafts nothing"),
            ("rope_theta", self.rope_theta > 1, "not above 1"),
            ("rope_factor", self.rope_factor >= 1, "below 1"),
            ("rope_beta_fast", ramps, f"with rope_beta_slow {self.rope_beta_slow} gives YaRN's ramp no two edges"),
            ("rope_factor", all(abs(e - round(e)) > 1e-9 for e in edges), "a ramp edge is too near a whole number"),
        )
        for name, good, reason in rules:
            if not good:
                raise ConfigError(f"{file}: {PREFIX}{name}: {getattr(self, name)}: {reason}")
        if not self.taps or list(self.taps) != sorted(set(self.taps)):
            raise ConfigError(f"{file}: {TAPS}: {list(self.taps)} is empty or does not ascend")
        if not 0 <= self.taps[0] <= self.taps[-1] < model.num_layers:
            raise ConfigError(f"{file}: {TAPS}: {list(self.taps)} leaves the layers 0..{model.num_layers - 1}")
        if model.mask_id < 0:
            raise ConfigError(f"{file}: mask_id: {model.mask_id}: a drafter needs a mask token")

    def fields(self) -> dict[str, int | float]:
        """As the KDTR file holds them."""
        return {PREFIX + f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "taps"}

    def rotation(self) -> Rotation:
        """Of the queries and keys."""
        return Rotation(
            self.head_dim,
            self.rope_theta,
            self.rope_factor,
            self.rope_original_context,
            self.rope_beta_fast,
            self.rope_beta_slow,
            self.rope_amplitude,
        )

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every float32 tensor of the drafter and its shape."""
        d, f, w = model.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * w, self.num_kv_heads * w
        out: dict[str, tuple[int, ...]] = {"drafter.fc.w": (d, len(self.taps) * d)}
        out |= {"drafter.hidden_norm.w": (d,), "drafter.norm.w": (d,)}
        for layer in range(self.num_layers):
            at = f"drafter.layers.{layer}."
            out |= {at + "attn_norm.w": (d,), at + "mlp_norm.w": (d,)}
            out |= {at + "attn.q.w": (q, d), at + "attn.k.w": (kv, d), at + "attn.v.w": (kv, d)}
            out |= {at + "attn.o.w": (d, q), at + "attn.q_norm.w": (w,), at + "attn.k_norm.w": (w,)}
            out |= {at + "mlp.gate.w": (f, d), at + "mlp.up.w": (f, d), at + "mlp.down.w": (d, f)}
        return out


def split(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's fields: the model's own, and the drafter's without their prefix (none: there is no drafter)."""
    own = {name: value for name, value in fields.items() if not name.startswith(PREFIX)}
    return own, {name.removeprefix(PREFIX): value for name, value in fields.items() if name.startswith(PREFIX)}


def of_file(fields: Mapping[str, Any], tensors: Mapping[str, Any], model: ModelConfig, file: str) -> DrafterConfig:
    """The drafter of a file whose drafter fields (without prefix) are ``fields``."""
    taps = tensors.get(TAPS)
    if taps is None or taps.ndim != 1 or taps.dtype != np.dtype("<i4"):
        raise MissingTensor(f"{file}: {TAPS}: a drafter needs this tensor, i32 with one dimension")
    return DrafterConfig.of(fields, taps.tolist(), model, file)
