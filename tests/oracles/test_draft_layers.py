"""The drafter's layers are Qwen3's: transformers runs the block over a cache that holds the projected context."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3Model

from harness import bundles
from harness.golden import Golden
from refs import recipe


def _theirs(golden: Golden, name: str) -> Qwen3Model:
    """A Qwen3Model with the drafter's weights, in float64."""
    made = recipe.load(name)
    d = made.drafter
    assert d is not None
    scaling = None
    if d.rope_factor > 1:
        scaling = {
            "rope_type": "yarn",
            "factor": d.rope_factor,
            "original_max_position_embeddings": d.rope_original_context,
            "beta_fast": d.rope_beta_fast,
            "beta_slow": d.rope_beta_slow,
            "attention_factor": d.rope_amplitude,
        }
    config = Qwen3Config(
        vocab_size=made.model.vocab_size,
        hidden_size=made.model.hidden_size,
        intermediate_size=d.intermediate_size,
        num_hidden_layers=d.num_layers,
        num_attention_heads=d.num_heads,
        num_key_value_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        rms_norm_eps=d.rms_norm_eps,
        rope_parameters={"rope_theta": d.rope_theta, **(scaling or {"rope_type": "default"})},
        max_position_embeddings=made.model.max_context,
        attn_implementation="eager",
    )
    model = Qwen3Model(config).double().eval()
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    state = {"embed_tokens.weight": golden.file.tensor("embed.w"), "norm.weight": golden.file.tensor("drafter.norm.w")}
    for layer in range(d.num_layers):
        at = f"drafter.layers.{layer}."
        for ours in [n for n in golden.file.tensors if n.startswith(at)]:
            part, _, last = ours.removeprefix(at).removesuffix(".w").rpartition(".")
            inner = {"attn": "self_attn.", "mlp": "mlp.", "": ""}[part]
            last = names.get(last, last) if not part or last.endswith("norm") else f"{last}_proj"
            state[f"layers.{layer}.{inner}{last}.weight"] = golden.file.tensor(ours)
    model.load_state_dict({n: torch.from_numpy(np.array(t)).double() for n, t in state.items()})
    return model


@pytest.mark.parametrize("name", ["dflash", "dflash_one", "dflash_wide", "text"])
def test_draft_logits_are_those_of_qwen3_over_the_context(name: str) -> None:
    golden = Golden.open(bundles.ensure([name])[name], "fp32")
    made = recipe.load(name)
    d = made.drafter
    assert d is not None
    model = _theirs(golden, name)
    fc, norm, head = (
        torch.from_numpy(np.array(golden.file.tensor(n))).double()
        for n in ("drafter.fc.w", "drafter.hidden_norm.w", "lm_head.w")
    )
    rows = torch.from_numpy(np.concatenate([golden.taps[f"layers.{t}.out"] for t in d.taps], axis=1)) @ fc.T
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + d.rms_norm_eps) * norm
    at = 0
    for want, taken in zip(golden.draft_logits(), golden.rounds("dflash"), strict=True):
        n = len(golden.prompt) + at
        cache = DynamicCache()
        cos, sin = model.rotary_emb(rows[None], torch.arange(n)[None])
        with torch.no_grad():
            for i, layer in enumerate(model.layers):
                a = layer.self_attn
                k = a.k_norm(a.k_proj(rows[:n]).unflatten(-1, (-1, d.head_dim)).transpose(0, 1))[None]
                half = d.head_dim // 2
                turned = torch.cat([-k[..., half:], k[..., :half]], -1)
                v = a.v_proj(rows[:n]).unflatten(-1, (-1, d.head_dim)).transpose(0, 1)[None]
                cache.update(k * cos[:, None] + turned * sin[:, None], v, i)
            out = model(
                input_ids=torch.tensor([[golden.tokens[at]] + [made.model.mask_id] * (d.block_size - 1)]),
                position_ids=torch.arange(n, n + d.block_size)[None],
                attention_mask=torch.zeros(1, 1, d.block_size, n + d.block_size, dtype=torch.float64),
                past_key_values=cache,
                use_cache=True,
            )
        got = (out.last_hidden_state[0, 1:] @ head.T).numpy()
        # transformers computes cos and sin in float32: half of what a float32 engine may be off is ample
        assert np.abs(got[: len(want)] - want).max() < golden.tolerance("draft") / 2
        at += len(taken.accepted)
