"""The text model in PyTorch: DeepSeek-V3's architecture (docs/model.md), its attention in the direct form.

The experts' matrices of a layer are stacked, and every expert is computed for every row: at these sizes that is three
large products instead of many small ones. `tensors` and `load` speak the Hugging Face names.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.corpus import END, VOCAB

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": 160,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "intermediate_size": 320,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 1024,
    "bos_token_id": END,
    "eos_token_id": END,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
INNER_EPS = 1e-6  # of the q_a and kv_a norms, as transformers builds them
GROUP = 32


def widened(x: Tensor) -> Tensor:
    """bf16 as float32; wider types as they are."""
    return x.float() if x.dtype == torch.bfloat16 else x


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, at least in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = widened(x)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


def linear(k: int, n: int, gain: float = 1.0) -> nn.Linear:
    """[n, k] without bias, normal with deviation gain/sqrt(k)."""
    layer = nn.Linear(k, n, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(k))
    return layer


def yarn_inverse_frequencies(c: dict[str, Any]) -> Tensor:
    """[P/2] radians per position (docs/model.md, RoPE)."""
    d, theta, y = c["qk_rope_head_dim"], c["rope_theta"], c["rope_scaling"]
    i = torch.arange(d // 2, dtype=torch.float64)
    extra = theta ** (-2 * i / d)

    def dim(turns: float) -> float:
        length = y["original_max_position_embeddings"]
        return float(d * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta)))

    low, high = max(math.floor(dim(y["beta_fast"])), 0), min(math.ceil(dim(y["beta_slow"])), d - 1)
    ramp = ((i - low) / max(high - low, 0.001)).clamp(0, 1)
    return extra / y["factor"] * ramp + extra * (1 - ramp)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of x [..., T, P] by tables [T, P/2]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Attention(nn.Module):
    """MLA, direct form. Equal cos/sin amplitudes of 1, because mscale and mscale_all_dim are equal."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.v = (
            c[f] for f in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        self.rank, d, rq = c["kv_lora_rank"], c["hidden_size"], c["q_lora_rank"]
        self.q_a_proj, self.q_a_layernorm = linear(d, rq), Norm(rq, INNER_EPS)
        self.q_b_proj = linear(rq, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(d, self.rank + self.rope), Norm(self.rank, INNER_EPS)
        self.kv_b_proj = linear(self.rank, self.heads * (self.nope + self.v))
        self.o_proj = linear(self.heads * self.v, d, 1 / math.sqrt(2 * c["num_hidden_layers"]))
        m = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1
        self.scale = m * m / math.sqrt(self.nope + self.rope)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, self.heads, -1).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], -1)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        shared = rotate(k_rope[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        query = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1).to(v.dtype)
        key = torch.cat([k_nope, shared], -1).to(v.dtype)
        value = F.pad(v, (0, self.nope + self.rope - self.v))  # one width for all three lets the fused kernel run
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        mixed: Tensor = self.o_proj(out[..., : self.v].transpose(1, 2).reshape(b, t, -1))
        return mixed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, d: int, inner: int, gain: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(d, inner), linear(d, inner), linear(inner, d, gain)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def fake_int4(w: Tensor) -> Tensor:
    """w rounded as docs/model.md quantises, groups of 32 along the last axis; the gradient passes unchanged."""
    grouped = w.detach().unflatten(-1, (-1, GROUP))
    scale = (grouped.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16).to(w.dtype).clamp_min(1e-30)
    rounded = ((grouped / scale).round().clamp(-8, 7) * scale).flatten(-2)
    return w + (rounded - w.detach())


class Moe(nn.Module):
    """Sigmoid router with a bias for choosing only, k of E experts, and the shared one."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, e, i, gain = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"], 0.3
        self.k, self.scaling = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.router = linear(d, e)
        self.register_buffer("bias", torch.zeros(e))
        self.gate = nn.Parameter(torch.randn(e, i, d) / math.sqrt(d))
        self.up = nn.Parameter(torch.randn(e, i, d) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(e, d, i) * gain / math.sqrt(i))
        self.shared_experts = Mlp(d, c["n_shared_experts"] * i, gain)
        self.int4 = False
        self.load: Tensor | None = None
        """Rows per expert [E] of the last forward in training."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            s = torch.sigmoid(F.linear(widened(x), self.router.weight))
        ids = (s + self.bias).topk(self.k, -1).indices
        chosen = s.gather(-1, ids)
        weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.scaling
        combine = torch.zeros_like(s).scatter(-1, ids, weights)
        if self.training:
            self.load = torch.zeros_like(self.bias).scatter_add_(
                0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=s.dtype)
            )
        gate, up, down = (fake_int4(w) if self.int4 else w for w in (self.gate, self.up, self.down))
        act = F.silu(F.linear(x, gate.flatten(0, 1))) * F.linear(x, up.flatten(0, 1))
        weighted = act.unflatten(-1, gate.shape[:2]) * combine[..., None]
        out: Tensor = F.linear(weighted.flatten(-2), down.transpose(0, 1).flatten(1)) + self.shared_experts(x)
        return out

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of experts with fewer rows than the mean, lower that of the others, by ``rate``."""
        if self.load is not None:
            self.bias += rate * torch.sign(self.load.mean() - self.load)


class Layer(nn.Module):
    """Attention and MLP or experts, each on the residual stream."""

    def __init__(self, c: dict[str, Any], index: int, dropout: float) -> None:
        super().__init__()
        d, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attn = Attention(c)
        dense = index < c["first_k_dense_replace"]
        self.mlp: Mlp | Moe = Mlp(d, c["intermediate_size"], 0.3) if dense else Moe(c)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


class Target(nn.Module):
    """The whole model."""

    def __init__(self, config: dict[str, Any] = CONFIG, dropout: float = 0.0) -> None:
        super().__init__()
        d = config["hidden_size"]
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], d)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(config, i, dropout) for i in range(config["num_hidden_layers"]))
        self.norm = Norm(d, config["rms_norm_eps"])
        self.lm_head = linear(d, config["vocab_size"], 0.5)
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(config["max_position_embeddings"])[:, None] * yarn_inverse_frequencies(config)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """ids [B, T] -> logits [B, T, V], at least float32, and the outputs of the layers ``taps`` [B, T, n*D]."""
        t = ids.shape[1]
        x = self.dropout(self.embed_tokens(ids))
        cos, sin = self.cos[:t].to(x.dtype), self.sin[:t].to(x.dtype)
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin)
            if i in taps:
                kept.append(x)
        logits = widened(self.lm_head(self.norm(x)))
        return logits, torch.cat(kept, -1) if taps else None

    def experts(self) -> list[Moe]:
        """The layers' MoE blocks."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]

    def use_int4(self, on: bool) -> None:
        """Compute with the experts rounded to INT4, or not."""
        for moe in self.experts():
            moe.int4 = on

    def tensors(self) -> dict[str, Tensor]:
        """By Hugging Face name: bf16, the router's bias f32."""
        out: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            for hf, tensor in _hf(name, value):
                out[hf] = tensor.float() if hf.endswith("_bias") else tensor.to(torch.bfloat16)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in out.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave. `KeyError` names a tensor that is not there."""
        state = self.state_dict()
        for name, value in state.items():
            found = [tensors[hf].to(value) for hf, _ in _hf(name, value)]
            state[name] = torch.stack(found) if _is_stacked(name) else found[0]
        self.load_state_dict(state)


def _is_stacked(name: str) -> bool:
    return name.endswith((".mlp.gate", ".mlp.up", ".mlp.down"))


def _hf(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """One of our tensors as those of the Hugging Face layout."""
    if name == "lm_head.weight":
        return [(name, value)]
    if _is_stacked(name):
        stem, _, part = name.rpartition(".")
        return [(f"model.{stem}.experts.{e}.{part}_proj.weight", value[e]) for e in range(len(value))]
    renamed = name.replace("mlp.router.weight", "mlp.gate.weight").replace(
        "mlp.bias", "mlp.gate.e_score_correction_bias"
    )
    return [("model." + renamed, value)]


def open_target(folder: Path) -> Target:
    """The model that ``folder`` holds in the Hugging Face layout, in float32."""
    from safetensors.torch import load_file

    model = Target(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model.load(load_file(folder / "model.safetensors"))
    return model.eval()
