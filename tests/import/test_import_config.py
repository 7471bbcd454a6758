"""Every field of a model as a Hugging Face config states it, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hf_checkpoints import TINY

from engine.hf_config import read_config
from engine.hf_quantization import Packing
from engine.safetensors_reader import CheckpointError

FIELDS: dict[str, int | float] = {
    "hidden_size": 48,
    "num_layers": 4,
    "first_k_dense": 1,
    "intermediate_size": 20,
    "moe_intermediate_size": 36,
    "vocab_size": 30,
    "num_heads": 2,
    "max_context": 256,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 50000.0,
    "rope_original_context": 256,
    "rope_factor": 1.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_mscale": 1.0,
    "rope_mscale_all_dim": 1.0,
    "rms_norm_eps": 1e-5,
    "inner_norm_eps": 1e-6,
    "eos_id": 7,
    "mask_id": -1,
}
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
OF_YARN = {"rope_factor": 4.0, "rope_original_context": 64, "rope_mscale": 1.0, "rope_mscale_all_dim": 0.0}


def read(folder: Path, changes: dict[str, Any], **options: Any) -> Any:
    config = {name: value for name, value in {**TINY, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder, **options)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, {}),
        ({"rope_scaling": None, "eos_token_id": [9], "hidden_act": "swish"}, {"eos_id": 9}),
        ({"rope_scaling": {"rope_type": "default"}, "eos_token_id": None}, {"eos_id": -1}),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, {"rope_theta": 7.0}),
        ({"rope_theta": 2}, {"rope_theta": 2.0}),
        ({"first_k_dense_replace": 99}, {"first_k_dense": 4}),
        ({"first_k_dense_replace": 0, "n_shared_experts": ...}, {"first_k_dense": 0, "n_shared_experts": 0}),
        (
            {"norm_topk_prob": False, "n_group": 4, "topk_group": 2},
            {"norm_topk_prob": 0, "n_group": 4, "topk_group": 2},
        ),
        ({"norm_topk_prob": ..., "n_group": ..., "topk_group": ...}, {}),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 1.0}}, OF_YARN),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 1}}, OF_YARN),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "attention_factor": 1 + 0.1 * math.log(4)}}, OF_YARN),
        (
            {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}},
            {**OF_YARN, "rope_mscale": 0.7, "rope_mscale_all_dim": 0.5, "rope_beta_fast": 16.0, "rope_beta_slow": 2.0},
        ),
        (
            {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 1.0}},
            {**OF_YARN, "rope_mscale": 0.7, "rope_mscale_all_dim": 0.7},
        ),
        ({"rope_scaling": {**YARN, "factor": 1}}, {**OF_YARN, "rope_factor": 1.0}),
        (
            {"rope_scaling": {**YARN, "factor": 1.5, "attention_factor": 1 + 0.1 * math.log(1.5)}},
            {**OF_YARN, "rope_factor": 1.5},
        ),
    ],
)
def test_every_field_of_the_model(tmp_path: Path, config: dict[str, Any], fields: dict[str, int | float]) -> None:
    found = read(tmp_path, config)
    assert found.fields == {**FIELDS, **fields}
    assert {name: type(value) for name, value in found.fields.items()} == {
        name: type(value) for name, value in FIELDS.items()
    }
    assert (found.model_type, found.nested, found.tied, found.has_mtp) == ("deepseek_v3", False, False, False)
    assert found.quantization is None


def test_what_the_caller_chooses(tmp_path: Path) -> None:
    assert read(tmp_path, {}, inner_norm_eps=None).fields["inner_norm_eps"] == 1e-5
    assert read(tmp_path, {}, inner_norm_eps=3e-6).fields["inner_norm_eps"] == 3e-6
    short = read(tmp_path, {}, context=100).fields
    assert (short["max_context"], short["rope_original_context"]) == (100, 256), "the angles are the long model's"
    for eos in (0, 29, -1):
        assert read(tmp_path, {}, eos=eos).fields["eos_id"] == eos
    for options, said in (
        ({"context": 257}, r"--context 257 is not in 1\.\.256"),
        ({"context": 0}, r"--context 0 is not in 1\.\.256"),
        ({"eos": 30}, "30 is no token of a vocabulary of 30"),
        ({"eos": -2}, "-2 is no token of a vocabulary of 30"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read(tmp_path, {}, **options)
    assert read(tmp_path, {"mystery": 1}, ignore=frozenset({"mystery"})).unread["mystery"] == 1


def test_the_text_model_of_a_larger_one(tmp_path: Path) -> None:
    text = {**TINY, "model_type": "kimi_k2", "tie_word_embeddings": True, "num_nextn_predict_layers": 1}
    outer = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = read_config(tmp_path)
    assert found.fields == FIELDS
    assert (found.model_type, found.nested, found.tied, found.has_mtp) == ("kimi_k25", True, True, True)
    (note,) = found.notes
    assert "eos_token_id 5, 7 was taken" in note
    assert read_config(tmp_path, eos=7).notes == ()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert [note.split(" has ")[0] for note in read_config(tmp_path).notes] == [
        "the outer config",
        "generation_config.json",
    ]
    text["eos_token_id"] = None
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert read_config(tmp_path).fields["eos_id"] == 5


@pytest.mark.parametrize(
    ("targets", "ignore", "covered"),
    [
        ((), (), set()),
        (("Linear",), (), {"a.up_proj", "b.gate", "b.up_proj"}),
        (("Linear",), ("Linear",), set()),
        (("Linear",), ("b.gate",), {"a.up_proj", "b.up_proj"}),
        (("Linear",), ("gate",), {"a.up_proj", "b.gate", "b.up_proj"}),  # a name is a whole one
        (("Linear",), ("re:.*gate",), {"a.up_proj", "b.up_proj"}),
        (("Linear",), ("re:gate",), {"a.up_proj", "b.gate", "b.up_proj"}),  # a pattern begins where the name does
        (("Linear",), ("re:b",), {"a.up_proj"}),
        (("re:b",), (), {"b.gate", "b.up_proj"}),
        (("re:.*up_proj", "b.gate"), ("a.up_proj",), {"b.gate", "b.up_proj"}),
    ],
)
def test_which_modules_are_packed(targets: tuple[str, ...], ignore: tuple[str, ...], covered: set[str]) -> None:
    packing = Packing(targets, ignore)
    names = ("a.up_proj", "b.gate", "b.up_proj")
    assert {name for name in names if packing.covers(name)} == covered
    prefixed = {name for name in names if packing.covers(f"language_model.{name}", name)}
    assert prefixed == covered, "a module is known by either of its names"
