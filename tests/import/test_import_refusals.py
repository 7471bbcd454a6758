"""What an import refuses, each by the name of the tensor or field; nothing is left beside the target."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest

from engine.importer import REFUSED, USAGE, main
from engine.safetensors_reader import CheckpointError, read_header


def refused(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> str:
    """Import ``directory``, see it refused with nothing left behind, and return the message."""
    target = directory.parent / "out.kdtr"
    assert main([str(directory), "-o", str(target), *options]) == REFUSED
    left = {p.name for p in directory.parent.iterdir()} - {directory.name}
    assert left == set(), "a refused import left files"
    return capsys.readouterr().err.splitlines()[-1]


YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "deepseek_v32"}, "model_type", "not supported"),
    ({"model_type": ...}, "model_type", "not supported"),
    ({"q_lora_rank": None}, "q_lora_rank", "low-rank"),
    ({"hidden_size": ...}, "hidden_size", "missing"),
    ({"hidden_size": "48"}, "hidden_size", "no integer"),
    ({"hidden_size": 0}, "hidden_size", "at least 1"),
    ({"hidden_size": True}, "hidden_size", "no integer"),
    ({"hidden_size": 2**31}, "hidden_size", "2^31-1"),
    ({"hidden_size": 49}, "model.embed_tokens.weight", "[30, 49]"),
    ({"num_hidden_layers": 5}, "model.layers.4.", "no such tensor"),
    ({"num_hidden_layers": 2**31 - 1}, "num_layers", "65536"),
    ({"n_routed_experts": 2**31 - 1}, "n_routed_experts", "65536"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps", "no finite number"),
    ({"num_hidden_layers": 3}, "model.layers.3.", "3 layers"),
    ({"first_k_dense_replace": 2}, "model.layers.1.mlp", "no such tensor"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "not above 0"),
    ({"rms_norm_eps": ...}, "rms_norm_eps", "missing"),
    ({"routed_scaling_factor": ...}, "routed_scaling_factor", "missing"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor", "no finite number"),
    ({"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
    ({"topk_method": "group_limited_greedy"}, "topk_method", "biased score"),
    ({"hidden_act": "gelu"}, "hidden_act", "silu"),
    ({"attention_bias": True}, "attention_bias", "no bias"),
    ({"rope_interleave": False}, "rope_interleave", "pairs"),
    ({"moe_layer_freq": 2}, "moe_layer_freq", "experts"),
    ({"num_key_value_heads": 1}, "num_key_value_heads", "key per query head"),
    ({"qk_head_dim": 7}, "qk_head_dim", "qk_nope_head_dim"),
    ({"head_dim": 4}, "head_dim", "qk_rope_head_dim"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim", "odd"),
    ({"n_group": 3}, "n_group", "do not divide"),
    ({"n_group": 8}, "n_group", "at least 2"),
    ({"n_group": 4, "topk_group": 5}, "topk_group", "of 4 groups"),
    ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok", "fewer experts"),
    ({"rope_theta": ...}, "rope_theta", "missing"),
    ({"rope_theta": 1.0}, "rope_theta", "not above 1"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type", "linear"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.rope_type", "llama3"),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_scaling.type", "rope_type is 'default'"),
    ({"rope_scaling": YARN | {"factor": None}}, "rope_scaling.factor", "missing"),
    ({"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor", "below 1"),
    (
        {"rope_scaling": YARN | {"original_max_position_embeddings": None}},
        "original_max_position_embeddings",
        "missing",
    ),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 65}, "original_max_position_embeddings", "says 64"),
    ({"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate", "whole pairs"),
    ({"rope_scaling": YARN | {"mscale": None}}, "rope_scaling.mscale", "disagree"),
    ({"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": None}}, "rope_scaling.mscale", "disagree"),
    ({"rope_scaling": YARN | {"attention_factor": 1.1}}, "rope_scaling.attention_factor", "not supported"),
    ({"rope_scaling": YARN | {"beta_fast": -1}}, "rope_scaling.beta_fast", "not above 0"),
    ({"rope_scaling": YARN | {"beta_slow": 0}}, "rope_scaling.beta_slow", "not above 0"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor", "rotated"),
    ({"rope_scaling": YARN | {"short_factor": [1.0]}}, "rope_scaling.short_factor", "--ignore-field"),
    ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}}, "rope_scaling.factor", "rope_parameters"),
    ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta", "rope_parameters"),
    ({"rope_scaling": "yarn"}, "rope_scaling", "no object"),
    ({"eos_token_id": [1, 2]}, "eos_token_id", "--eos"),
    ({"eos_token_id": 30}, "eos_token_id", "vocabulary"),
    ({"use_qk_norm": True}, "use_qk_norm", "--ignore-field"),
    ({"sliding_window": 128}, "sliding_window", "--ignore-field"),
    ({"index_topk": 2048}, "index_topk", "--ignore-field"),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "quant_method", "bf16 first"),
    ({"quantization_config": hf.PACKED}, "mlp.experts.0.down_proj.weight", "says that this module is quantised"),
]


@pytest.mark.parametrize(("changes", "where", "reason"), CONFIGS, ids=[f"{i}-{c[1]}" for i, c in enumerate(CONFIGS)])
def test_configs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], where: str, reason: str
) -> None:
    directory = hf.write(tmp_path / "hf", hf.config(**changes), hf.floats(hf.config()))
    message = refused(capsys, directory)
    assert where in message, message
    assert reason in message, message


def test_an_unknown_field_can_be_declared_harmless(tmp_path: Path) -> None:
    directory = hf.write(tmp_path / "hf", hf.config(use_qk_norm=True), hf.floats(hf.config()))
    assert main([str(directory), "-o", str(tmp_path / "o.kdtr"), "--ignore-field", "use_qk_norm"]) == 0


def weights_field(name: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(hf.PACKED)
    changed["config_groups"]["group_0"]["weights"][name] = value  # type: ignore[index]
    return changed


def in_group(**changes: Any) -> dict[str, Any]:
    """A quantization_config whose group says more."""
    changed = copy.deepcopy(hf.PACKED)
    changed["config_groups"]["group_0"].update(changes)
    return changed


QUANTIZATION: list[tuple[dict[str, Any], str, str]] = [
    (weights_field("num_bits", 8), "num_bits", "4-bit"),
    (weights_field("group_size", 128), "group_size", "groups of 32"),
    (weights_field("group_size", None), "group_size", "missing"),
    (weights_field("symmetric", False), "symmetric", "zero points"),
    (weights_field("type", "float"), "type", "integer"),
    (weights_field("strategy", "channel"), "strategy", "along the input"),
    (weights_field("actorder", "group"), "actorder", "reordered"),
    (weights_field("dynamic", True), "dynamic", "stored"),
    (weights_field("rotation", "hadamard"), "rotation", "might change"),
    (hf.PACKED | {"format": "nvfp4-pack-quantized"}, "format", "pack-quantized"),
    (hf.PACKED | {"format": "float-quantized"}, "format", "bf16 first"),
    (hf.PACKED | {"quant_method": "gptq"}, "quant_method", "compressed-tensors"),
    (hf.PACKED | {"config_groups": {}}, "config_groups", "empty"),
    (hf.PACKED | {"mystery": 1}, "quantization_config.mystery", "might change the weights"),
    (in_group(mystery=1), "config_groups.group_0.mystery", "might change the weights"),
    (in_group(input_activations={"num_bits": 8}), "group_0.input_activations", "activations are not quantised"),
    (in_group(output_activations={"num_bits": 8}), "group_0.output_activations", "activations are not quantised"),
    (hf.PACKED | {"format": 4}, "format", "only pack-quantized"),
    (hf.PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", "not quantised"),
    (hf.PACKED | {"transform_config": {"a": 1}}, "transform_config", "as they are used"),
    (hf.PACKED | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format", "sparse"),
    (hf.PACKED | {"quantization_status": "frozen"}, "quantization_status", "packed"),
    (hf.PACKED | {"ignore": "lm_head"}, "ignore", "list"),
    (hf.PACKED | {"ignore": ["re:("]}, "ignore", "regular expression"),
    (hf.PACKED | {"ignore": []}, "self_attn", "says that this module is quantised"),
    (hf.PACKED | {"ignore": ["Linear"]}, "weight_packed", "left as it is"),
    (
        hf.PACKED | {"ignore": [*hf.PACKED["ignore"], "model.layers.3.mlp.experts.7.up_proj"]},
        "3.mlp.experts.7.up_proj",
        "left",
    ),
    (
        hf.PACKED | {"ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj"]},
        "lm_head",
        "quan",
    ),
]


@pytest.mark.parametrize(
    ("quantization", "where", "reason"), QUANTIZATION, ids=[str(i) for i in range(len(QUANTIZATION))]
)
def test_quantisation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: dict[str, Any], where: str, reason: str
) -> None:
    c = hf.config(quantization_config=quantization)
    message = refused(capsys, hf.write(tmp_path / "hf", c, hf.packed(c)))
    assert where in message, message
    assert reason in message, message


def test_packed_tensors_need_a_config_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, hf.write(tmp_path / "hf", hf.config(), hf.packed(hf.config())))
    assert "weight_packed" in message
    assert "no quantization_config" in message


EXPERT = "model.layers.2.mlp.experts.5.gate_proj.weight"
Change = Callable[[dict[str, hf.Tensor]], None]


def put(name: str, dtype: str, array: Any) -> Change:
    def change(tensors: dict[str, hf.Tensor]) -> None:
        tensors[name] = dtype, array

    return change


def drop(name: str) -> Change:
    def change(tensors: dict[str, hf.Tensor]) -> None:
        del tensors[name]

    return change


def poke(name: str, index: tuple[int, ...], value: Any) -> Change:
    def change(tensors: dict[str, hf.Tensor]) -> None:
        array = tensors[name][1].copy()
        array[index] = value
        tensors[name] = tensors[name][0], array

    return change


FLOAT_TENSORS: list[tuple[Change, str, str]] = [
    (drop("model.norm.weight"), "model.norm.weight", "no such tensor"),
    (drop("lm_head.weight"), "lm_head.weight", "tie_word_embeddings"),
    (drop("model.layers.3.mlp.gate.e_score_correction_bias"), "3.mlp.gate.e_score_correction_bias", "no such tensor"),
    (drop(EXPERT), EXPERT, "no such tensor"),
    (put(EXPERT, "F32", np.zeros((48, 36), np.float32)), EXPERT, "[36, 48]"),
    (put(EXPERT, "F8_E4M3", np.zeros((36, 48), np.uint8)), EXPERT, "bf16 first"),
    (put(EXPERT, "F64", np.zeros((36, 48))), EXPERT, "F64"),
    (put("model.layers.0.mlp.gate.weight", "F32", np.zeros(3, np.float32)), "layers.0.mlp.gate.weight", "account"),
    (put("model.layers.1.self_attn.o_proj.bias", "F32", np.zeros(48, np.float32)), "o_proj.bias", "account"),
    (put("model.layers.1.mlp.experts.8.up_proj.weight", "F32", np.zeros((36, 48), np.float32)), "experts.8", "account"),
    (put("transformer.wte", "F32", np.zeros(3, np.float32)), "transformer.wte", "this name"),
    (
        put("model.layers.1.self_attn.q_a_proj.weight_packed", "I32", np.zeros((6, 6), np.int32)),
        "q_a_proj",
        "routed experts",
    ),
    (poke("model.norm.weight", (5,), np.nan), "model.norm.weight[5]", "nan"),
    (poke("model.embed_tokens.weight", (29, 47), np.inf), "model.embed_tokens.weight[29, 47]", "inf"),
    (poke(EXPERT, (35, 0), -np.inf), f"{EXPERT}[35, 0]", "-inf"),
    (poke("model.layers.3.mlp.gate.weight", (6, 2), np.nan), "model.layers.3.mlp.gate.weight[6, 2]", "nan"),
]


@pytest.mark.parametrize(
    ("change", "where", "reason"), FLOAT_TENSORS, ids=[f"{i}-{c[1]}" for i, c in enumerate(FLOAT_TENSORS)]
)
def test_float_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, where: str, reason: str
) -> None:
    tensors = hf.floats(hf.config())
    change(tensors)
    message = refused(capsys, hf.write(tmp_path / "hf", hf.config(), tensors, 2))
    assert where in message, message
    assert reason in message, message


def test_quantising_refuses_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = hf.floats(hf.config())
    poke(EXPERT, (35, 1), np.inf)(tensors)
    assert f"{EXPERT}[35, 1]" in refused(capsys, hf.write(tmp_path / "hf", hf.config(), tensors), "--quantize", "int4")


PACKED_TENSORS: list[tuple[Change, str, str]] = [
    (drop(EXPERT + "_scale"), EXPERT + "_scale", "no such tensor"),
    (drop(EXPERT + "_shape"), EXPERT + "_shape", "no such tensor"),
    (put(EXPERT + "_shape", "I64", np.array([36, 47])), EXPERT + "_shape", "[36, 48]"),
    (put(EXPERT + "_shape", "F32", np.array([36, 48], np.float32)), EXPERT + "_shape", "I32 or I64"),
    (put(EXPERT + "_scale", "BF16", np.zeros((36, 1), np.uint16)), EXPERT + "_scale", "[36, 2]"),
    (put(EXPERT + "_packed", "I64", np.zeros((36, 6), np.int64)), EXPERT + "_packed", "I32"),
    (put(EXPERT + "_packed", "I32", np.zeros((36, 8), np.int32)), EXPERT + "_packed", "[36, 6]"),
    (put(EXPERT + "_zero_point", "I32", np.zeros((5, 2), np.int32)), EXPERT + "_zero_point", "account"),
    (put(EXPERT + "_g_idx", "I32", np.zeros(48, np.int32)), EXPERT + "_g_idx", "account"),
    (put(EXPERT, "BF16", np.zeros((36, 48), np.uint16)), EXPERT, "other experts are packed"),
    (poke(EXPERT + "_scale", (3, 1), 0x7F80), f"{EXPERT}_scale[3, 1]", "not finite"),
    (poke(EXPERT + "_scale", (35, 1), 0xFF80), f"{EXPERT}_scale[35, 1]", "-inf is not finite"),
    (poke(EXPERT + "_scale", (0, 0), 0xFFC1), f"{EXPERT}_scale[0, 0]", "not finite"),
    (put(EXPERT + "_scale", "F32", np.full((36, 2), 0.1, np.float32)), f"{EXPERT}_scale[0, 0]", "no bf16"),
]


@pytest.mark.parametrize(
    ("change", "where", "reason"), PACKED_TENSORS, ids=[f"{i}-{c[1]}" for i, c in enumerate(PACKED_TENSORS)]
)
def test_packed_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, where: str, reason: str
) -> None:
    c = hf.config(quantization_config=hf.PACKED)
    tensors = hf.packed(c)
    change(tensors)
    message = refused(capsys, hf.write(tmp_path / "hf", c, tensors, 2))
    assert where in message, message
    assert reason in message, message


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, ["--layers", "2-4"], "0..3"),
        ({}, ["--experts", "0-8"], "0..7"),
        ({}, ["--experts", "3"], "needs 2"),
        ({"n_group": 4}, ["--experts", "0-2"], "whole groups"),
        ({"n_group": 4, "topk_group": 4, "num_experts_per_tok": 5}, ["--experts", "0-3"], "needs 5"),
        ({}, ["--context", "257"], "1..256"),
        ({}, ["--eos", "30"], "vocabulary"),
        ({}, ["--inner-norm-eps", "0"], "inner_norm_eps"),
        ({}, ["--inner-norm-eps", "nan"], "inner_norm_eps"),
    ],
)
def test_slices_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], options: list[str], reason: str
) -> None:
    directory = hf.write(tmp_path / "hf", hf.config(**changes), hf.floats(hf.config()))
    assert reason in refused(capsys, directory, *options)


def test_packed_experts_are_not_quantised_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = hf.config(quantization_config=hf.PACKED)
    assert "INT4 already" in refused(capsys, hf.write(tmp_path / "hf", c, hf.packed(c)), "--quantize", "int4")


def test_a_tied_head_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = hf.floats(hf.config())
    message = refused(capsys, hf.write(tmp_path / "hf", hf.config(tie_word_embeddings=True), tensors))
    assert "lm_head.weight" in message
    assert "differs" in message


def test_outer_and_inner_quantisation_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c = hf.config(quantization_config=hf.PACKED)
    nested = {"model_type": "kimi_k25", "text_config": c, "quantization_config": hf.PACKED | {"ignore": []}}
    assert "differ" in refused(capsys, hf.write(tmp_path / "hf", nested, hf.packed(c)))


@pytest.mark.parametrize("text", ["", "3-1", "1,1", "2,1", "a", "1-", "-1", "0-3,2"])
def test_malformed_ranges_are_usage_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "-o", str(tmp_path / "o.kdtr"), f"--layers={text}"])
    assert stopped.value.code == USAGE


# --- files ---


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    data = hf.safetensors({"a": ("F32", np.arange(3, dtype=np.float32)), "b": ("I32", np.arange(2, dtype=np.int32))})
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    assert list(read_header(file)) == ["a", "b"]
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="extended"):
        read_header(file)


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HEADERS: list[tuple[Any, str, str]] = [
    (entry(dtype="F3"), "a", "unknown"),
    (entry(dtype=None), "a", "unknown"),
    (entry(dtype=["F32"]), "a", "unknown"),
    (entry(shape=[3]), "a", "needs 12"),
    (entry(shape=[-2]), "a", "no list of sizes"),
    (entry(shape=[2.0]), "a", "no list of sizes"),
    (entry(shape=[True, 2]), "a", "no list of sizes"),
    (entry(shape=[1 << 61, 1 << 61, 1 << 61]), "a", "needs"),
    (entry(shape=None), "a", "no list of sizes"),
    (entry(data_offsets=[8, 0]), "a", "begin and end"),
    (entry(data_offsets=[0]), "a", "begin and end"),
    (entry(data_offsets=[0, 8, 8]), "a", "begin and end"),
    (entry(data_offsets=[4, 12]), "a", "gap or overlap"),
    (entry() | {"b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "b", "gap or overlap"),
    (entry() | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "b", "gap or overlap"),
    ({"a": [1, 2]}, "a", "no object"),
    ([1], "JSON", "list"),
    ('{"a": 1, "a": 2}', "a", "twice"),
    ('{"a": ', "JSON", "malformed"),
    ("[" * 200_000, "JSON", "malformed"),
    ('{"a": ' + "9" * 5000 + "}", "", ""),
]


@pytest.mark.parametrize(("header", "where", "reason"), HEADERS, ids=[str(i) for i in range(len(HEADERS))])
def test_hostile_headers(tmp_path: Path, header: Any, where: str, reason: str) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError) as error:
        read_header(file)
    assert f"x.safetensors: {where}" in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 0xFFFFFFFFFFFFFFFF, 99_999_999, 101])
def test_a_header_length_asks_for_no_memory(tmp_path: Path, length: int) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", length) + bytes(100))
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(file)


def test_directories_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "hf"
    hf.write(directory, hf.config(), {})
    (directory / "model.safetensors").unlink()
    assert "no safetensors file is beside it" in refused(capsys, directory)
    (directory / "pytorch_model.bin").touch()
    assert "safe_serialization" in refused(capsys, directory)
    for name in ("a.safetensors", "b.safetensors"):
        (directory / name).touch()
    assert "fetch the index" in refused(capsys, directory)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"model.embed_tokens.weight": "../x.safetensors"}, "no name of a safetensors file"),
        ({"model.embed_tokens.weight": 3}, "no name of a safetensors file"),
        ({"model.embed_tokens.weight": "gone.safetensors"}, "cannot be read"),
        ({"model.embed_tokens.weight": "other.safetensors"}, "does not"),
        ({}, "empty"),
    ],
)
def test_indexes(tmp_path: Path, capsys: pytest.CaptureFixture[str], weight_map: dict[str, Any], reason: str) -> None:
    directory = hf.write(tmp_path / "hf", hf.config(), hf.floats(hf.config()), 2)
    (directory / "other.safetensors").write_bytes(hf.safetensors({"a": ("I32", np.zeros(1, np.int32))}))
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    hf.write_index(directory, index | weight_map if weight_map else {})
    assert reason in refused(capsys, directory)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", '{"model_type": "kimi_k2", "model_type": "deepseek_v3"}'])
def test_broken_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    directory = hf.write(tmp_path / "hf", {}, {})
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused(capsys, directory)


def test_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = hf.write(tmp_path / "hf", {}, {})
    (directory / "config.json").unlink()
    assert "config.json" in refused(capsys, directory)
