"""A Hugging Face ``config.json`` of the DeepSeek-V3 family, as the fields of docs/model.md.

Guarantees: every field that changes the arithmetic is either expressed exactly or refused by name; a field that nobody
here reads is refused as well, unless it is known to have no effect on inference, is null, or the caller names it as
ignorable.
Known shapes: ``deepseek_v3`` and ``kimi_k2`` at the top, or under ``text_config`` of ``kimi_k25`` (Kimi K2.5 and K2.6).

``inner_norm_eps``: transformers and the modelling code shipped with these checkpoints build the q_a and kv_a norms with
their class's default eps, 1e-6, whatever ``rms_norm_eps`` says; serving engines pass ``rms_norm_eps``. The importer
follows the former; ``--inner-norm-eps`` overrides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.hf_fields import Fields
from engine.hf_rope import read_rope
from engine.safetensors_reader import load_json

TEXT_TYPES = ("deepseek_v3", "kimi_k2")
NESTED_TYPES = ("kimi_k25",)
INNER_NORM_EPS = 1e-6

# Fields without effect on the logits of the text model at inference, by what they are about.
_INERT = {
    "names, versions, storage": "architectures auto_map model_type transformers_version torch_dtype dtype use_cache"
    " _name_or_path tokenizer_class",
    "training": "initializer_range attention_dropout aux_loss_alpha seq_aux output_router_logits router_aux_loss_coef",
    "parallelism; layers for multi-token prediction, which the importer leaves out": "ep_size pretraining_tp"
    " num_nextn_predict_layers num_mtp_layers",
    "tokens that the decoder neither chooses nor stops at by itself": "bos_token_id pad_token_id sep_token_id"
    " decoder_start_token_id image_token_id video_token_id vision_start_token_id vision_end_token_id"
    " media_placeholder_token_id ignore_index use_unified_vision_chunk video_placeholder",
    "the vision half": "vision_config projection_hidden_size projection_layer_norm_eps",
    "what transformers 4 wrote into every config": "add_cross_attention bad_words_ids begin_suppress_tokens"
    " chunk_size_feed_forward cross_attention_hidden_size diversity_penalty do_sample early_stopping"
    " encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id"
    " forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length"
    " no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states"
    " _attn_implementation _attn_implementation_autoset attn_implementation"
    " output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict"
    " return_dict_in_generate suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder"
    " top_k top_p torchscript typical_p use_bfloat16",
}
INERT = frozenset(name for names in _INERT.values() for name in names.split())


@dataclass(frozen=True)
class HfConfig:
    """What the importer needs to know of a config."""

    file: Path
    model_type: str
    fields: dict[str, int | float]
    """The model fields of docs/model.md, for the whole model."""
    quantization: Fields | None
    """compressed-tensors' ``quantization_config``, checked by `engine.hf_quantization`."""
    nested: bool
    """The text model is one part of the checkpoint, beside a vision tower."""
    tied: bool
    """``lm_head`` is the embedding."""
    has_mtp: bool
    unread: dict[str, Any] = field(default_factory=dict)
    """Fields nobody read because they have no effect."""
    notes: tuple[str, ...] = ()
    """What a user should know of a choice that was made."""


def read_config(
    directory: Path,
    *,
    inner_norm_eps: float | None = INNER_NORM_EPS,
    eos: int | None = None,
    context: int | None = None,
    ignore: frozenset[str] = frozenset(),
) -> HfConfig:
    """Read ``directory/config.json``.

    ``inner_norm_eps`` of ``None`` takes ``rms_norm_eps``; ``eos`` overrides the end token, ``context`` shortens the
    context; ``ignore`` names fields that may stay unread.

    Raises `CheckpointError` naming the field that is missing, malformed, unknown, or asks for arithmetic that
    docs/model.md does not have.
    """
    file = directory / "config.json"
    outer = Fields(file, load_json(file))
    outer_kind = kind = outer.get("model_type")
    nested = "text_config" in outer.values
    if nested and kind not in NESTED_TYPES:
        raise outer.fail("model_type", f"{kind!r} with a text_config is unknown, known are {', '.join(NESTED_TYPES)}")
    text = outer.inner("text_config") if nested else outer
    kind = text.get("model_type")
    if kind not in TEXT_TYPES:
        raise text.fail("model_type", f"{kind!r} is not supported, only {' and '.join(TEXT_TYPES)} are")
    fields = _sizes(text) | _routing(text)
    rope, rope_fields = read_rope(text, fields)
    if context is not None and not 1 <= context <= fields["max_context"]:
        raise text.fail("max_position_embeddings", f"--context {context} is not in 1..{fields['max_context']}")
    rms_norm_eps = _positive(text, "rms_norm_eps")
    fields |= rope_fields | {
        "max_context": context or fields["max_context"],
        "rms_norm_eps": rms_norm_eps,
        "inner_norm_eps": rms_norm_eps if inner_norm_eps is None else inner_norm_eps,
        "eos_id": _eos(outer, text, int(fields["vocab_size"]), eos),
        "mask_id": -1,
    }
    text.demand("hidden_act", ("silu", "swish"), "the experts and the dense layers use silu")
    text.demand("attention_bias", (False,), "the projections have no bias")
    text.demand("mlp_bias", (False,), "the projections have no bias")
    text.demand("rope_interleave", (True,), "RoPE rotates the pairs (2i, 2i+1)")
    quantization = _quantization(outer, text)
    tied = outer.flag("tie_word_embeddings", False) | text.flag("tie_word_embeddings", False)
    unread = _unread(outer, text, rope, ignore)
    has_mtp = bool(text.values.get("num_nextn_predict_layers") or text.values.get("num_mtp_layers"))
    packed = quantization if quantization.values else None
    notes = tuple(_end_token_notes(directory, outer, text, int(fields["eos_id"])) if eos is None else ())
    return HfConfig(file, outer_kind, fields, packed, nested, tied, has_mtp, unread, notes)


def _quantization(outer: Fields, text: Fields) -> Fields:
    """The one ``quantization_config``, wherever it stands."""
    inner = text.inner("quantization_config")
    if outer is text or not (own := outer.inner("quantization_config")).values:
        return inner
    if inner.values and inner.values != own.values:
        raise own.fail("quant_method", "the outer and the text model's quantization_config differ")
    return own


def _unread(outer: Fields, text: Fields, rope: Fields, ignore: frozenset[str]) -> dict[str, Any]:
    """The fields that nobody read and that have no effect; raises for one that might have."""
    unread: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    parts = [(outer, INERT), (rope, frozenset[str]())] + ([(text, INERT)] if text is not outer else [])
    for part, inert in parts:
        harmless, others = part.unread(inert)
        unread |= harmless | {k: v for k, v in others.items() if k in ignore}
        unknown |= {k: v for k, v in others.items() if k not in ignore}
    if unknown:
        listed = ", ".join(f"{k} = {v!r}" for k, v in sorted(unknown.items()))
        reason = f"unknown, and might change the arithmetic: {listed}. If it does not, add --ignore-field for it"
        raise text.fail(min(unknown).removeprefix(text.prefix), reason)
    return unread


def _positive(fields: Fields, name: str) -> float:
    value = fields.number(name)
    if value <= 0:
        raise fields.fail(name, f"{value!r} is not above 0")
    return value


def _sizes(text: Fields) -> dict[str, int | float]:
    if text.get("q_lora_rank") is None:
        raise text.fail("q_lora_rank", "null or missing: a query without its low-rank step is not supported")
    out: dict[str, int | float] = {
        "hidden_size": text.integer("hidden_size"),
        "num_layers": text.integer("num_hidden_layers"),
        "first_k_dense": text.integer("first_k_dense_replace", least=0),
        "intermediate_size": text.integer("intermediate_size"),
        "moe_intermediate_size": text.integer("moe_intermediate_size"),
        "vocab_size": text.integer("vocab_size"),
        "num_heads": text.integer("num_attention_heads"),
        "max_context": text.integer("max_position_embeddings"),
    }
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        out[name] = text.integer(name)
    if out["first_k_dense"] > out["num_layers"]:
        out["first_k_dense"] = out["num_layers"]  # "all layers are dense" is often written as a large number
    rope, nope = int(out["qk_rope_head_dim"]), int(out["qk_nope_head_dim"])
    if rope % 2:
        raise text.fail("qk_rope_head_dim", f"{rope} is odd, RoPE rotates pairs")
    text.demand("num_key_value_heads", (out["num_heads"],), "latent attention has one key per query head")
    text.demand("qk_head_dim", (nope + rope,), "it is qk_nope_head_dim + qk_rope_head_dim")
    text.demand("head_dim", (rope,), "here it is qk_rope_head_dim, the part of a head that RoPE rotates")
    return out


def _routing(text: Fields) -> dict[str, int | float]:
    text.demand("scoring_func", ("sigmoid",), "the router's scores are sigmoids")
    text.demand("topk_method", ("noaux_tc",), "experts are chosen by biased score, group by group")
    text.demand("moe_layer_freq", (1,), "every layer after the dense ones has experts")
    out: dict[str, int | float] = {
        "n_routed_experts": text.integer("n_routed_experts"),
        "n_shared_experts": text.integer("n_shared_experts", 0, least=0),
        "num_experts_per_tok": text.integer("num_experts_per_tok"),
        "n_group": text.integer("n_group", 1),
        "topk_group": text.integer("topk_group", 1),
        "norm_topk_prob": int(text.flag("norm_topk_prob", True)),
        "routed_scaling_factor": text.number("routed_scaling_factor"),
    }
    e, groups = int(out["n_routed_experts"]), int(out["n_group"])
    if e % groups or (groups > 1 and e // groups < 2):
        raise text.fail("n_group", f"{groups} groups do not divide {e} experts into groups of at least 2")
    if out["topk_group"] > groups:
        raise text.fail("topk_group", f"{out['topk_group']} of {groups} groups")
    if out["num_experts_per_tok"] > out["topk_group"] * (e // groups):
        raise text.fail("num_experts_per_tok", f"{out['num_experts_per_tok']}, the kept groups have fewer experts")
    return out


def _eos(outer: Fields, text: Fields, vocab: int, override: int | None) -> int:
    outer_value, text_value = outer.get("eos_token_id"), text.get("eos_token_id")
    where = outer if text_value is None else text
    value: Any = (outer_value if text_value is None else text_value) if override is None else override
    if isinstance(value, list):
        if len(value) != 1:
            raise where.fail("eos_token_id", f"{value}: the engine stops at one token, choose it with --eos")
        value = value[0]
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < vocab:
        raise where.fail("eos_token_id", f"{value!r} is no token of a vocabulary of {vocab}")
    return value


def _end_token_notes(directory: Path, outer: Fields, text: Fields, chosen: int) -> Iterator[str]:
    """Where another end token stands than the one that was taken."""
    generation = directory / "generation_config.json"
    said = [("the outer config", outer.get("eos_token_id"))] if outer is not text else []
    if generation.is_file():
        said.append((generation.name, load_json(generation).get("eos_token_id")))
    for where, value in said:
        if value is not None and value not in (chosen, [chosen]):
            yield f"{where} has eos_token_id {value}, {chosen} was taken; --eos chooses another"
