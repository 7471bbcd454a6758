"""The DFlash drafter in PyTorch (Chen et al., arXiv 2602.06036): a block of tokens in one pass from the target's taps.

It has no embedding and no head: it takes the target's. Context keys and values come from the target's hidden states at
committed positions, block keys and values from the block; the two share their projections.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.corpus import MASK
from training.target import Mlp, Norm, linear

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
    "num_target_layers": 6,
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 480,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of x [B, H, T, d] by tables [B, 1, T, d/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from context and block; not causal."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, self.width = c["hidden_size"], c["head_dim"]
        self.heads, self.groups = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = linear(d, self.heads * self.width)
        self.k_proj, self.v_proj = (linear(d, self.groups * self.width) for _ in range(2))
        self.o_proj = linear(self.heads * self.width, d, 0.4)
        self.q_norm, self.k_norm = Norm(self.width, c["rms_norm_eps"]), Norm(self.width, c["rms_norm_eps"])

    def forward(self, block: Tensor, context: Tensor, tables: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        b, n, _ = block.shape
        cos_q, sin_q, cos_k, sin_k = tables
        both = torch.cat([context, block], 1)
        q = self.q_norm(self.q_proj(block).view(b, n, self.heads, self.width)).transpose(1, 2)
        k = self.k_norm(self.k_proj(both).view(b, -1, self.groups, self.width)).transpose(1, 2)
        v = self.v_proj(both).view(b, -1, self.groups, self.width).transpose(1, 2)
        query, key = rotate_half(q, cos_q, sin_q).to(v.dtype), rotate_half(k, cos_k, sin_k).to(v.dtype)
        repeat = self.heads // self.groups
        key, v = key.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(query, key, v, attn_mask=mask)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(b, n, -1))
        return mixed


class DraftLayer(nn.Module):
    """A Qwen3 layer whose attention also sees the context; the context does not pass its input norm."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        d, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, eps), Norm(d, eps)
        self.self_attn = DraftAttention(c)
        self.mlp = Mlp(d, c["intermediate_size"], 0.4)

    def forward(self, x: Tensor, context: Tensor, tables: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, tables, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The layers, the projection of the taps, and the norms."""

    def __init__(self, config: dict[str, Any] = CONFIG) -> None:
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.config, self.taps = config, tuple(config["dflash_config"]["target_layer_ids"])
        self.block: int = config["block_size"]
        self.fc, self.hidden_norm = linear(len(self.taps) * d, d), Norm(d, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(d, eps)
        half = config["head_dim"] // 2
        inverse = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        self.register_buffer("inverse", inverse.float(), persistent=False)

    def forward(self, features: Tensor, bonus: Tensor, starts: Tensor, embed: Tensor, head: Tensor) -> Tensor:
        """Draft logits [B, A, block, V] for A blocks in each sequence; row 0 of a block means nothing.

        features [B, S, taps*D]: the target's, at positions 0..S-1; bonus and starts [B, A]: each block's first token
        and its position, whose context is the features before it; embed, head [V, D]: the target's.
        """
        b, s, _ = features.shape
        a, n = starts.shape[1], self.block
        ids = torch.full((b, a, n), MASK, device=bonus.device)
        ids[..., 0] = bonus
        positions = (starts[..., None] + torch.arange(n, device=starts.device)).view(b, a * n)
        past = torch.arange(s, device=starts.device).expand(b, s)
        owner = torch.arange(a, device=starts.device).repeat_interleave(n)
        sees_past = past[:, None] < starts.repeat_interleave(n, 1)[..., None]
        mask = torch.cat([sees_past, (owner[:, None] == owner).expand(b, -1, -1)], -1)[:, None]
        angle_q = positions[:, None, :, None] * self.inverse
        angle_k = torch.cat([past, positions], 1)[:, None, :, None] * self.inverse
        tables = (angle_q.cos(), angle_q.sin(), angle_k.cos(), angle_k.sin())
        context = self.hidden_norm(self.fc(features))
        x = F.embedding(ids.view(b, a * n), embed)
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        logits: Tensor = F.linear(self.norm(x), head).float()
        return logits.view(b, a, n, -1)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the checkpoint, in bf16."""
        return {name: value.detach().cpu().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
