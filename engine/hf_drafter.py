"""A DFlash drafter's Hugging Face directory as the drafter of docs/model.md, beside the model that is imported.

Guarantees: as for the model (`engine.hf_config`, `engine.hf_tensors`): every field that changes the arithmetic is
expressed exactly or refused by name, one that nobody reads is refused unless it is known to have no effect, and every
tensor is read exactly once or is an error naming it. Layout: a Qwen3 config with ``block_size`` and ``dflash_config``
{``mask_token_id``, ``target_layer_ids``}; the layers' names are Qwen3's, beside ``fc``, ``hidden_norm`` and ``norm``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.convert import TO_F32, Piece
from engine.hf_config import INERT, HfConfig
from engine.hf_fields import Fields
from engine.safetensors_reader import CheckpointError, load_json, open_checkpoint
from refs.config import MOST_LAYERS, ModelConfig
from refs.drafter_config import TAPS, DrafterConfig

_INERT = INERT | {"max_position_embeddings", "max_window_layers", "tie_word_embeddings"}
"""``max_position_embeddings``: without YaRN it bounds nothing; with YaRN the original context is a field of its own.
The embedding and head are the model's, so there is nothing to tie."""
_NAMES = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class DrafterPlan:
    """What is added to a model's plan."""

    config: DrafterConfig
    mask_id: int
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    pieces: dict[str, list[Piece]]
    taps: bytes
    """The content of the tensor ``drafter.taps``."""
    unread: dict[str, Any]


def plan_drafter(
    directory: Path, hf: HfConfig, model: ModelConfig, layers: Sequence[int], ignore: frozenset[str]
) -> DrafterPlan:
    """Check a drafter's directory against the model whose ``layers`` are kept. Raises `CheckpointError`, `RefError`."""
    file = directory / "config.json"
    fields = Fields(file, load_json(file))
    config, mask_id, unread = _config(fields, hf, model, layers, ignore)
    checkpoint = open_checkpoint(directory)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {TAPS: ("i32", (len(config.taps),))}
    pieces: dict[str, list[Piece]] = {}
    used = set()
    for name, shape in config.shapes(model).items():
        theirs = hf_name(name)
        source = checkpoint.source(theirs)
        used.add(theirs)
        if source.shape != shape:
            raise CheckpointError(source.path, theirs, f"shape {list(source.shape)}, the config asks for {list(shape)}")
        if source.dtype not in TO_F32:
            raise CheckpointError(source.path, theirs, f"{source.dtype}, must be one of {', '.join(TO_F32)}")
        rows, columns = int(np.prod(shape)) // shape[-1], shape[-1]
        tensors[name] = ("f32", shape)
        pieces[name] = [Piece(source, 0, rows, source.size // rows, 4 * columns, TO_F32[source.dtype])]
    for theirs in sorted(checkpoint.shards.keys() - used):
        raise CheckpointError(checkpoint.listing, theirs, "nothing in a DFlash drafter of this config has this name")
    return DrafterPlan(config, mask_id, tensors, pieces, np.array(config.taps, "<i4").tobytes(), unread)


def hf_name(tensor: str) -> str:
    """``drafter.layers.0.attn.q.w`` -> ``layers.0.self_attn.q_proj.weight``."""
    path = tensor.removeprefix("drafter.").removesuffix(".w")
    stem, _, last = path.rpartition(".")
    if stem.endswith((".attn", ".mlp")):
        last = last if last.endswith("norm") else f"{last}_proj"
        stem = f"{stem.removesuffix('.attn')}.self_attn" if stem.endswith(".attn") else stem
    return ".".join([*filter(None, [stem]), _NAMES.get(last, last), "weight"])


def _config(
    fields: Fields, hf: HfConfig, model: ModelConfig, layers: Sequence[int], ignore: frozenset[str]
) -> tuple[DrafterConfig, int, dict[str, Any]]:
    whole = int(hf.fields["num_layers"])
    fields.demand("model_type", ("qwen3",), "the drafter's layers are Qwen3's")
    fields.demand("hidden_size", (model.hidden_size,), f"the model's hidden size is {model.hidden_size}")
    fields.demand("vocab_size", (model.vocab_size,), f"the model's vocabulary has {model.vocab_size} tokens")
    fields.demand("num_target_layers", (whole,), f"the model has {whole} layers")
    fields.demand("hidden_act", ("silu", "swish"), "the drafter's MLP uses silu")
    fields.demand("attention_bias", (False,), "the projections have no bias")
    fields.demand("use_sliding_window", (False,), "every row sees the whole context")
    fields.demand("sliding_window", (None,), "every row sees the whole context")
    own = fields.inner("dflash_config")
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    kinds = fields.get("layer_types", ["full_attention"] * count)
    if kinds != ["full_attention"] * count:
        raise fields.fail("layer_types", f"{kinds}: every layer must be full_attention")
    mask_id = own.integer("mask_token_id", least=0)
    if mask_id >= model.vocab_size:
        raise own.fail("mask_token_id", f"{mask_id} is no token of a vocabulary of {model.vocab_size}")
    taps = own.get("target_layer_ids", default_taps(whole, count))
    if not isinstance(taps, list) or any(type(t) is not int or not 0 <= t < whole for t in taps):
        raise own.fail("target_layer_ids", f"{taps!r} is no list of layers 0..{whole - 1}")
    lost = [t for t in taps if t not in layers]
    if lost:
        raise own.fail("target_layer_ids", f"taps layers {lost}, which --layers leaves out")
    heads, hidden = fields.integer("num_attention_heads"), model.hidden_size
    values: dict[str, Any] = {
        "num_layers": count,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", hidden // heads),
        "intermediate_size": fields.integer("intermediate_size"),
        "block_size": fields.integer("block_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
    }
    rope, rope_values = _rope(fields, model)
    kept = [list(layers).index(t) for t in taps]
    config = DrafterConfig.of(values | rope_values, kept, dataclasses.replace(model, mask_id=mask_id), str(fields.file))
    unread: dict[str, Any] = {}
    for part in (fields, own, rope):
        harmless, others = part.unread(_INERT if part is fields else frozenset())
        unknown = {k: v for k, v in others.items() if k not in ignore}
        if unknown:
            listed = ", ".join(f"{k} = {v!r}" for k, v in sorted(unknown.items()))
            reason = f"unknown, and might change the arithmetic: {listed}. If it does not, add --ignore-field for it"
            raise fields.fail(min(unknown), reason)
        unread |= harmless | {k: v for k, v in others.items() if k in ignore}
    return config, mask_id, {f"drafter.{name}": value for name, value in unread.items()}


def default_taps(target: int, count: int) -> list[int]:
    """What DFlash taps where a config does not say: evenly from layer 1 to three before the end; one: the middle."""
    if count == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (count - 1)) for i in range(count)]


def _rope(fields: Fields, model: ModelConfig) -> tuple[Fields, dict[str, int | float]]:
    """The rope object, for its unread fields, and the drafter's rope fields, as transformers' Qwen3 reads them."""
    parts = [fields.inner(name) for name in ("rope_parameters", "rope_scaling")]
    given = [part for part in parts if part.values]
    if len(given) == 2 and given[0].values != given[1].values:
        raise fields.fail("rope_scaling", "differs from rope_parameters")
    rope = given[0] if given else Fields(fields.file, {}, "rope_parameters.")
    theta = Fields(fields.file, {"rope_theta": fields.get("rope_theta", rope.get("rope_theta"))}).number("rope_theta")
    if rope.get("rope_theta", theta) != theta:
        raise rope.fail("rope_theta", f"{rope.get('rope_theta')!r}, but {theta!r} beside it")
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.demand("type", (kind,), f"rope_type is {kind!r}")
    out: dict[str, int | float] = {
        "rope_theta": theta,
        "rope_factor": 1.0,
        "rope_original_context": model.max_context,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_amplitude": 1.0,
    }
    if kind == "default":
        return rope, out
    if kind != "yarn":
        raise rope.fail("rope_type", f"{kind!r} is not supported, only default and yarn are")
    factor = rope.number("factor")
    rope.demand("truncate", (True,), "YaRN's ramp begins and ends at whole pairs")
    amplitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if rope.get("mscale") is not None or rope.get("mscale_all_dim") is not None:
        m, every = rope.number("mscale"), rope.number("mscale_all_dim")
        if not (m > 0 and every > 0):
            raise rope.fail("mscale", f"{m} with mscale_all_dim {every}: implementations disagree on what that means")
        amplitude = (0.1 * m * math.log(factor) + 1.0) / (0.1 * every * math.log(factor) + 1.0) if factor > 1 else 1.0
    return rope, out | {
        "rope_factor": factor,
        "rope_original_context": rope.integer("original_max_position_embeddings"),
        "rope_beta_fast": rope.number("beta_fast", 32.0),
        "rope_beta_slow": rope.number("beta_slow", 1.0),
        "rope_amplitude": rope.number("attention_factor", amplitude),
    }
