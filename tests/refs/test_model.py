"""The forward pass against a second one written plainly, its two forms against each other, and its rows' bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from small_models import Tensors, model, small

from refs import kdtr, quant
from refs.config import ModelConfig
from refs.errors import (
    ConfigError,
    ContextOverflow,
    MissingTensor,
    NonFiniteError,
    RefError,
    RequestError,
    TokenError,
)
from refs.model import Model
from refs.rope import cos_sin, inv_freq, mscale, rotate, softmax_scale

PROMPT = [3, 41, 7, 7, 0, 12, 47, 30, 2, 9]


def plain_rope(c: ModelConfig) -> tuple[Any, float]:
    """The angle a position of every pair, and the softmax's scale: YaRN where the factor is above 1."""
    p = c.qk_rope_head_dim
    i = np.arange(p // 2)
    extra = c.rope_theta ** (-2 * i / p)
    scale = (c.qk_nope_head_dim + p) ** -0.5
    if c.rope_factor <= 1:
        return extra, scale
    assert c.rope_mscale == c.rope_mscale_all_dim  # so that the amplitude is 1
    bounds = [
        p * math.log(c.rope_original_context / (2 * math.pi * r)) / (2 * math.log(c.rope_theta))
        for r in (c.rope_beta_fast, c.rope_beta_slow)
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), p - 1)
    ramp = np.clip((i - low) / (high - low if high != low else 0.001), 0, 1)
    scale *= (0.1 * c.rope_mscale_all_dim * math.log(c.rope_factor) + 1) ** 2
    return extra / c.rope_factor * ramp + extra * (1 - ramp), scale


def plain_choice(c: ModelConfig, biased: Any) -> list[int]:
    """The experts of one row, the best first and of equal ones the lowest."""
    allowed = list(range(c.n_routed_experts))
    if c.n_group > 1:
        size = c.n_routed_experts // c.n_group
        best = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(c.n_group)]
        kept = sorted(range(c.n_group), key=lambda g: (-best[g], g))[: c.topk_group]
        allowed = [e for e in allowed if e // size in kept]
    return sorted(allowed, key=lambda e: (-biased[e], e))[: c.num_experts_per_tok]


def plain_logits(c: ModelConfig, w: Tensors, tokens: list[int]) -> np.ndarray[Any, Any]:
    """docs/model.md once more: direct MLA, one row after the other, numpy's own `@`, exp and sums."""
    w = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in w.items()}
    n, heads = c.qk_nope_head_dim, c.num_heads

    def rms(x: Any, name: str, eps: float) -> Any:
        return x / np.sqrt(np.mean(x * x) + eps) * w[name]

    def silu(z: Any) -> Any:
        return z / (1 + np.exp(-z))

    def turn(v: Any, position: int) -> Any:
        pairs = v.reshape(-1, 2)
        z = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * position * frequencies)
        return np.stack([z.real, z.imag], axis=1).reshape(-1)

    frequencies, scale = plain_rope(c)
    keys: list[list[Any]] = [[] for _ in range(c.num_layers)]
    values: list[list[Any]] = [[] for _ in range(c.num_layers)]
    out = []
    for position, token in enumerate(tokens):
        x = w["embed.w"][token].copy()
        for layer in range(c.num_layers):
            at = f"layers.{layer}."
            a = rms(x, at + "attn_norm.w", c.rms_norm_eps)
            q = w[at + "attn.q_b.w"] @ rms(w[at + "attn.q_a.w"] @ a, at + "attn.q_a_norm.w", c.inner_norm_eps)
            kv = w[at + "attn.kv_a.w"] @ a
            latent = rms(kv[: c.kv_lora_rank], at + "attn.kv_a_norm.w", c.inner_norm_eps)
            k_rope = turn(kv[c.kv_lora_rank :], position)
            up = (w[at + "attn.kv_b.w"] @ latent).reshape(heads, -1)
            keys[layer].append([np.concatenate([up[h, :n], k_rope]) for h in range(heads)])
            values[layer].append(up[:, n:])
            o = []
            for h in range(heads):
                qh = q.reshape(heads, -1)[h]
                qh = np.concatenate([qh[:n], turn(qh[n:], position)])
                s = np.array([scale * (qh @ k[h]) for k in keys[layer]])
                s = np.exp(s - s.max())
                o.append(sum(si / s.sum() * v[h] for si, v in zip(s, values[layer], strict=True)))
            x = x + w[at + "attn.o.w"] @ np.concatenate(o)
            b = rms(x, at + "mlp_norm.w", c.rms_norm_eps)
            if layer < c.first_k_dense:
                hidden = silu(w[at + "mlp.gate.w"] @ b) * (w[at + "mlp.up.w"] @ b)
                x = x + w[at + "mlp.down.w"] @ hidden
                continue
            s = 1 / (1 + np.exp(-(w[at + "router.w"] @ b)))
            biased = s + w[at + "router.bias"]
            chosen = plain_choice(c, biased)
            total = sum(s[e] for e in chosen) if c.norm_topk_prob else 1.0
            for e in chosen:
                gate, rise, down = (w[at + f"experts.{part}.w"][e] for part in ("gate", "up", "down"))
                x = x + s[e] / total * c.routed_scaling_factor * (down @ (silu(gate @ b) * (rise @ b)))
            if c.n_shared_experts:
                hidden = silu(w[at + "shared.gate.w"] @ b) * (w[at + "shared.up.w"] @ b)
                x = x + w[at + "shared.down.w"] @ hidden
        out.append(w["lm_head.w"] @ rms(x, "final_norm.w", c.rms_norm_eps))
    return np.stack(out)


VARIANTS: list[tuple[tuple[str, Any], ...]] = [
    (),
    (("n_group", 4), ("topk_group", 2), ("num_experts_per_tok", 3)),
    (("norm_topk_prob", 0), ("n_shared_experts", 0), ("rope_factor", 1.0)),
    (("n_shared_experts", 2), ("first_k_dense", 0), ("rope_original_context", 4), ("rope_factor", 40.0)),
    (("first_k_dense", 2), ("num_heads", 3), ("q_lora_rank", 7), ("v_head_dim", 5), ("hidden_size", 33)),
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_logits_are_those_of_a_plain_second_model(changes: Any) -> None:
    made, tensors = small(**dict(changes))
    want = plain_logits(made.model, tensors, PROMPT)
    got = model(changes=changes).prefill(PROMPT)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("changes", VARIANTS)
def test_direct_and_absorbed_form_agree(changes: Any) -> None:
    tokens = (PROMPT * 14)[:130]  # three chunks of keys
    absorbed = model(changes=changes).prefill(tokens)
    direct = model(changes=changes, absorbed=False).prefill(tokens)
    np.testing.assert_allclose(direct, absorbed, rtol=0, atol=1e-12)
    assert (direct != absorbed).any()  # else one of the two was not taken


def test_int4_is_the_plain_model_with_dequantised_experts() -> None:
    made, tensors = small()
    replaced = dict(tensors)
    for name, shape in made.model.shapes().items():
        if ".experts." in name:
            stem = name.removesuffix("w")
            replaced[name] = quant.dequantise(tensors[stem + "qw"], tensors[stem + "sc"], shape[-1])
    want = plain_logits(made.model, replaced, PROMPT)
    np.testing.assert_allclose(model("int4").prefill(PROMPT), want, rtol=0, atol=1e-12)
    assert np.abs(model("fp32").prefill(PROMPT) - want).max() > 0.01


def random_tree(rng: np.random.Generator, rows: int, vocab: int) -> tuple[list[int], list[int]]:
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, rows))]
    return rng.integers(0, vocab, rows).tolist(), parents


@pytest.mark.parametrize(("dtype", "summation"), [(np.float64, "tree"), (np.float32, "strided")])
@pytest.mark.parametrize("start", [1, 10, 63, 100])
def test_a_rows_bits_do_not_depend_on_how_it_was_computed(dtype: Any, summation: str, start: int) -> None:
    """Alone, in a prefill, in pieces, in trees of any shape: the same bytes, and the same cache after a commit."""
    rng = np.random.default_rng(start)
    tokens, parents = random_tree(rng, 24, 48)
    prompt = rng.integers(0, 48, start).tolist()
    verified = model(dtype=dtype, summation=summation)
    verified.prefill(prompt)
    logits = verified.verify(tokens, parents)
    for row in (0, 7, 15, 23) if start < 63 else (7, 23):  # long prompts take time
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        line = [*prompt, *(tokens[r] for r in path)]
        stepped = model(dtype=dtype, summation=summation)
        cut = max(1, start - 5)
        stepped.prefill(line[:cut])
        for token in line[cut:]:
            last = stepped.step(token)
        assert last.tobytes() == logits[row].tobytes()
        assert model(dtype=dtype, summation=summation).prefill(line)[-1].tobytes() == last.tobytes()
        verified.reset()
        verified.prefill(prompt)
        verified.verify(tokens, parents)
        verified.commit(path)
        assert verified.length == stepped.length == len(line)
        for layer in range(2):
            for a, b in zip(verified.cache(layer), stepped.cache(layer), strict=True):
                assert a.shape[0] == len(line)
                assert a.tobytes() == b.tobytes()
        assert verified.step(5).tobytes() == stepped.step(5).tobytes()


def test_taps_are_the_operations_of_the_prefill() -> None:
    made, _ = small()
    c, m = made.model, model()
    taps = m.taps(PROMPT, operations=True)
    assert taps["logits"].tobytes() == model().prefill(PROMPT).tobytes()
    n = len(PROMPT)
    widths = {
        "embed": c.hidden_size,
        "layers.0.out": c.hidden_size,
        "layers.0.mla.q_a": c.q_lora_rank,
        "layers.0.mla.kv": c.kv_lora_rank + c.qk_rope_head_dim,
        "layers.0.mla.q": c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "layers.0.mla.q_lat": c.num_heads * c.kv_lora_rank,
        "layers.0.mla.q_rope": c.num_heads * c.qk_rope_head_dim,
        "layers.0.mla.latent": c.kv_lora_rank,
        "layers.0.mla.k_rope": c.qk_rope_head_dim,
        "layers.0.mla.o_lat": c.num_heads * c.kv_lora_rank,
        "layers.0.mla.o": c.num_heads * c.v_head_dim,
        "layers.0.mla.out": c.hidden_size,
        "layers.0.mlp.act": c.intermediate_size,
        "layers.1.moe.router_logits": c.n_routed_experts,
        "layers.1.moe.ids": c.num_experts_per_tok,
        "layers.1.moe.weights": c.num_experts_per_tok,
        "layers.1.moe.act": c.num_experts_per_tok * c.moe_intermediate_size,
        "layers.1.moe.shared_act": c.n_shared_experts * c.moe_intermediate_size,
    }
    for name, width in widths.items():
        assert taps[name].shape == (n, width), name
    assert not any("layers.1.mlp" in name or "layers.0.moe" in name for name in taps)
    assert set(model().taps(PROMPT)) == {"embed", "layers.0.out", "layers.1.out", "logits"}
    np.testing.assert_array_equal(taps["layers.1.mla.latent"], m.cache(1)[0])
    np.testing.assert_array_equal(taps["layers.1.mla.k_rope"], m.cache(1)[1])
    m.prefill([1])
    assert m.length == n + 1


def kimi(**changes: Any) -> ModelConfig:
    """Kimi K2.6's sizes where they bear on positions."""
    made, _ = small()
    values = {
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 50000.0,
        "rope_factor": 64.0,
        "rope_original_context": 4096,
        **changes,
    }
    return ModelConfig.of(made.model.fields() | values, "kimi")


def test_yarn_of_the_public_model() -> None:
    """The numbers of the public checkpoint: scale 192^-0.5 * 1.41589^2; pairs 0..8 kept, 20..31 divided by 64."""
    assert softmax_scale(kimi()) == pytest.approx(0.1446796, abs=5e-8)
    assert mscale(kimi(), 1.0) == pytest.approx(1.41589, abs=1e-5)
    assert softmax_scale(kimi(rope_factor=1.0)) == pytest.approx(192**-0.5)
    plain = 50000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = inv_freq(kimi()) / plain
    np.testing.assert_allclose(ratio[:9], 1.0, rtol=1e-14)
    np.testing.assert_allclose(ratio[20:], 1 / 64, rtol=1e-14)
    assert (np.diff(ratio[8:21]) < 0).all()
    np.testing.assert_allclose(inv_freq(kimi(rope_factor=1.0)), plain, rtol=1e-14)
    assert cos_sin(kimi(), 1)[0, 0].tolist() == [1.0, 0.0]
    louder = cos_sin(kimi(rope_mscale_all_dim=0.5), 1)
    assert louder[0, 0, 0] == pytest.approx(1.41589 / 1.207944, abs=1e-5)


def test_rotation_is_that_of_interleaved_pairs() -> None:
    x = np.arange(1.0, 9.0).reshape(1, 8)
    table = cos_sin(kimi(qk_rope_head_dim=8), 8)[7:]
    angle = 7 * inv_freq(kimi(qk_rope_head_dim=8))
    z = (x[0, 0::2] + 1j * x[0, 1::2]) * np.exp(1j * angle)
    got = rotate(x, table)[0]
    np.testing.assert_allclose(got[0::2], z.real, rtol=1e-14)
    np.testing.assert_allclose(got[1::2], z.imag, rtol=1e-14)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: m.prefill([]), RequestError, "at least one"),
        (lambda m: m.prefill([48]), TokenError, "token 48 of row 0"),
        (lambda m: m.prefill([-1]), TokenError, "token -1"),
        (lambda m: m.verify([1, 2], [-1]), RequestError, "2 tokens with 1 parents"),
        (lambda m: m.verify([1, 2], [-1, 1]), RequestError, "parent 1 of row 1"),
        (lambda m: m.verify([1, 2], [0, 0]), RequestError, "parent 0 of row 0"),
        (lambda m: m.verify([1, 2], [-1, -1]), RequestError, "parent -1 of row 1"),
        (lambda m: m.commit([0]), RequestError, "row 0 of the last verify"),
        (lambda m: (m.verify([1, 2, 3], [-1, 0, 0]), m.commit([0, 1, 2])), RequestError, "row 2 is not a child"),
        (lambda m: (m.verify([1, 2, 3], [-1, 0, 0]), m.commit([0, 3])), RequestError, "leaves its rows"),
        (lambda m: (m.verify([1, 2, 3], [-1, 0, 0]), m.commit([1])), RequestError, "does not start"),
        (lambda m: (m.verify([1, 2, 3], [-1, 0, 0]), m.commit([])), RequestError, "does not start"),
        (lambda m: m.prefill([1] * 250), ContextOverflow, "context of 256"),
        (lambda m: m.verify([1] * 8, range(-1, 7)) is None or m.prefill([1] * 247), ContextOverflow, "position 256"),
        (lambda m: m.cache(2), RequestError, "layer 2"),
    ],
)
def test_bad_requests_are_named_and_the_next_call_works(call: Any, error: type[RefError], match: str) -> None:
    m = model()
    m.prefill(PROMPT)
    with pytest.raises(error, match=match):
        call(m)
    assert m.length == len(PROMPT)
    assert m.step(5).tobytes() == model().prefill([*PROMPT, 5])[-1].tobytes()


def test_the_context_can_be_filled_to_its_last_row() -> None:
    m = model(context=4)
    m.prefill([1, 2, 3])
    m.step(4)
    with pytest.raises(ContextOverflow, match="position 4 does not fit a context of 4"):
        m.step(5)
    for bad in (0, 257):
        with pytest.raises(RequestError, match="context"):
            model(context=bad)
    with pytest.raises(RequestError, match="precision"):
        model("fp16")


@pytest.mark.parametrize("name", ["layers.1.router.bias", "layers.1.router.w", "lm_head.w", "embed.w"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_an_error_not_a_choice(name: str, value: float) -> None:
    made, tensors = small()
    broken = tensors[name].copy()
    broken.reshape(-1)[:] = value
    m = Model(made.model.fields(), {**tensors, name: broken}, "fp32")
    with pytest.raises(NonFiniteError), np.errstate(all="ignore"):
        m.prefill(PROMPT)
    assert m.length == 0


def test_a_failed_step_leaves_nothing_behind() -> None:
    """Its rows cannot be committed, and what it wrote into the cache reaches no later row."""
    made, tensors = small()
    embed = tensors["embed.w"].copy()
    embed[5] = np.nan
    m = Model(made.model.fields(), {**tensors, "embed.w": embed}, "fp32")
    m.prefill(PROMPT)
    m.verify([1, 2], [-1, 0])
    with pytest.raises(NonFiniteError), np.errstate(all="ignore"):
        m.verify([5] * 40, range(-1, 39))
    with pytest.raises(RequestError, match="last verify"):
        m.commit([0])
    assert m.step(4).tobytes() == model().prefill([*PROMPT, 4])[-1].tobytes()


def test_scores_far_beyond_the_range_of_exp() -> None:
    made, tensors = small()
    name = "layers.1.attn.q_b.w"
    loud = {**tensors, name: tensors[name] * np.float32(3000)}
    want = plain_logits(made.model, loud, PROMPT)
    for dtype, tolerance in ((np.float64, 1e-9), (np.float32, 1e-2)):
        got = Model(made.model.fields(), loud, "fp32", dtype).prefill(PROMPT)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def test_fields_and_tensors_are_checked(tmp_path: Any) -> None:
    made, tensors = small()
    path = tmp_path / "m.kdtr"
    fields = made.model.fields()
    kdtr.write(path, fields, tensors)
    assert Model.open(path, "int4").prefill(PROMPT).tobytes() == model("int4").prefill(PROMPT).tobytes()
    kdtr.write(path, fields, {k: v for k, v in tensors.items() if not k.endswith("experts.up.qw")})
    with pytest.raises(MissingTensor, match=r"m\.kdtr: layers\.1\.experts\.up\.qw: precision int4"):
        Model.open(path, "int4")
    Model.open(path, "fp32")
    for bad in (tensors["embed.w"][:, 1:], tensors["embed.w"].astype(np.float64)):
        with pytest.raises(MissingTensor, match=r"embed\.w: is .* must be f32 \(48, 64\)"):
            Model(fields, {**tensors, "embed.w": bad}, "fp32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"surprise": 1}, "surprise: unknown"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": 64.0}, "hidden_size: 64.0 is not an integer"),
        ({"norm_topk_prob": True}, "norm_topk_prob: True is not an integer"),
        ({"rope_theta": 10000}, "rope_theta: 10000 is not a finite float"),
        ({"rope_theta": math.nan}, "rope_theta: nan is not"),
        ({"rope_theta": 1.0}, "not above 1"),
        ({"rope_factor": 0.5}, "below 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0"),
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"vocab_size": 10**400}, "vocab_size"),
        ({"num_layers": 2**16 + 1}, r"num_layers: 65537 is not in 1\.\.65536"),
        ({"first_k_dense": 3}, "more than num_layers"),
        ({"qk_rope_head_dim": 7}, "odd"),
        ({"norm_topk_prob": 2}, "neither 0 nor 1"),
        ({"n_group": 3}, "does not divide"),
        ({"n_group": 16}, "fewer than 2"),
        ({"topk_group": 2}, "topk_group: 2"),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 5}, "more than are kept"),
        ({"eos_id": 48}, "outside the vocabulary"),
        ({"eos_id": -2}, "eos_id: -2"),
        ({"mask_id": 48}, "outside the vocabulary"),
    ],
)
def test_each_field_rule_has_its_message(changes: dict[str, Any], match: str) -> None:
    made, _ = small()
    fields = {k: v for k, v in (made.model.fields() | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=match) as caught:
        ModelConfig.of(fields, "some.kdtr")
    assert str(caught.value).startswith("some.kdtr: ")
