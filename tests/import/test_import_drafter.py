"""A drafter's directory beside the model's: every value arrives, every mismatch is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest

from engine.hf_drafter import default_taps, hf_name
from engine.importer import DONE, REFUSED, USAGE, main
from refs import kdtr
from refs.decode import Request, decode
from refs.model import Model

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "dflash_config": {"mask_token_id": 29, "target_layer_ids": [0, 2, 3]},
    "num_target_layers": 4,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 22,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
Tensors = dict[str, hf.Tensor]


def tensors() -> Tensors:
    """Random bf16 values under the names of the layout, written out here."""
    d, q, kv, w, f = 48, 24, 12, 6, 22
    shapes: dict[str, tuple[int, ...]] = {"fc": (d, 3 * d), "hidden_norm": (d,), "norm": (d,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {at + "input_layernorm": (d,), at + "post_attention_layernorm": (d,)}
        shapes |= {at + "self_attn.q_proj": (q, d), at + "self_attn.k_proj": (kv, d), at + "self_attn.v_proj": (kv, d)}
        shapes |= {at + "self_attn.o_proj": (d, q), at + "self_attn.q_norm": (w,), at + "self_attn.k_norm": (w,)}
        shapes |= {at + "mlp.gate_proj": (f, d), at + "mlp.up_proj": (f, d), at + "mlp.down_proj": (d, f)}
    made: Tensors = {}
    for i, (name, shape) in enumerate(shapes.items()):
        values = np.random.default_rng(i).standard_normal(shape).astype(np.float32) * 0.3
        made[f"{name}.weight"] = "BF16", (values.view("<u4") >> 16).astype("<u2")
    return made


def run(tmp_path: Path, config: dict[str, Any], values: Tensors, *options: str) -> tuple[int, Path]:
    target = hf.write(tmp_path / "target", hf.config(), hf.floats(hf.config(), "BF16"))
    drafter = hf.write(tmp_path / "drafter", config, values)
    out = tmp_path / "out.kdtr"
    return main([str(target), "--drafter", str(drafter), "-o", str(out), *options]), out


def test_every_value_arrives_and_the_model_drafts_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(tmp_path, CONFIG, tensors(), "--json")
    assert status == DONE
    said = json.loads(capsys.readouterr().out)["config_fields_without_effect"]
    assert {"drafter.architectures", "drafter.max_position_embeddings", "drafter.torch_dtype"} <= said.keys()
    made = kdtr.read(out)
    assert made.fields["mask_id"] == 29
    assert {k: v for k, v in made.fields.items() if k.startswith("draft_")} == {
        "draft_num_layers": 2, "draft_num_heads": 4, "draft_num_kv_heads": 2, "draft_head_dim": 6,
        "draft_block_size": 4,
        "draft_intermediate_size": 22, "draft_rope_original_context": 256, "draft_rms_norm_eps": 1e-6,
        "draft_rope_theta": 10000.0, "draft_rope_factor": 1.0, "draft_rope_beta_fast": 32.0,
        "draft_rope_beta_slow": 1.0, "draft_rope_amplitude": 1.0,
    }  # fmt: skip
    assert made.tensor("drafter.taps").tolist() == [0, 2, 3]
    names = [n for n in made.tensors if n.startswith("drafter.") and n != "drafter.taps"]
    assert {hf_name(n) for n in names} == tensors().keys()
    for name in names:
        bits = tensors()[hf_name(name)][1].astype("<u4") << 16
        assert np.array_equal(made.tensor(name).view("<u4"), bits), name
    model = Model.open(out, "fp32")
    want = decode(model, Request([1, 2, 3], 10))
    got = decode(model, Request([1, 2, 3], 10, dflash=True, block_size=4, budget=6))
    assert got.tokens == want.tokens


def test_yarn_as_the_published_drafter_has_it(tmp_path: Path) -> None:
    """Without an mscale the amplitude is 1 + 0.1 ln(factor), where the target's is 1."""
    scaling = {**YARN, "original_max_position_embeddings": 4096}
    status, out = run(tmp_path, {**CONFIG, "rope_scaling": scaling, "rope_theta": 50000.0}, tensors())
    assert status == DONE
    fields = kdtr.read(out).fields
    assert fields["draft_rope_amplitude"] == pytest.approx(1.41589, abs=1e-5)
    assert (fields["draft_rope_factor"], fields["draft_rope_original_context"]) == (64.0, 4096)


def test_taps_follow_the_kept_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "dflash_config": {"mask_token_id": 29, "target_layer_ids": [0, 2, 3]}}
    status, _ = run(tmp_path, config, tensors(), "--layers", "0,2")
    assert status == REFUSED
    assert "dflash_config.target_layer_ids: taps layers [3], which --layers leaves out" in capsys.readouterr().err
    status, out = run(tmp_path, config, tensors(), "--layers", "0,2-3")
    assert status == DONE
    assert kdtr.read(out).tensor("drafter.taps").tolist() == [0, 1, 2]


def test_default_taps() -> None:
    """The published drafter of 61 layers with 6 of its own names these."""
    assert default_taps(61, 6) == [1, 12, 24, 35, 47, 58]
    assert default_taps(61, 1) == [30]


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type: 'llama' is not supported"),
    ({"hidden_size": 32}, "hidden_size: 32 is not supported: the model's hidden size is 48"),
    ({"num_target_layers": 5}, "num_target_layers: 5 is not supported: the model has 4 layers"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"block_size": 1}, "draft_block_size: 1"),
    ({"block_size": None}, "block_size: missing"),
    ({"num_key_value_heads": 3}, "draft_num_kv_heads: 3: does not divide"),
    ({"rms_norm_eps": 0.0}, "draft_rms_norm_eps"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: 'linear' is not supported"),
    ({"rope_scaling": {**YARN, "mscale": 1.0}}, "rope_scaling.mscale_all_dim: missing"),
    ({"dflash_config": {"target_layer_ids": [0]}}, "dflash_config.mask_token_id: missing"),
    ({"dflash_config": {"mask_token_id": 30, "target_layer_ids": [0]}}, "dflash_config.mask_token_id: 30"),
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [4]}}, "dflash_config.target_layer_ids"),
    ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2, 0, 3]}}, "drafter.taps: [2, 0, 3]"),
    ({"dflash_config": {**CONFIG["dflash_config"], "causal": True}}, "dflash_config.causal = True"),
    ({"logit_softcap": 3.0}, "logit_softcap: unknown, and might change the arithmetic"),
    ({"head_dim": 8}, "layers.0.self_attn.q_proj.weight: shape [24, 48], the config asks for [32, 48]"),
    ({"num_hidden_layers": 3}, "layers.2."),
    ({"num_hidden_layers": 2**61}, "num_hidden_layers"),
    ({"rope_scaling": {**YARN, "beta_fast": 1e-320}}, "draft_rope_beta_fast"),
]


@pytest.mark.parametrize(("change", "message"), CONFIGS, ids=[m for _, m in CONFIGS])
def test_configs_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    status, out = run(tmp_path, {k: v for k, v in {**CONFIG, **change}.items() if v is not None}, tensors())
    assert status == REFUSED
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


def _drop(values: Tensors) -> None:
    del values["layers.1.self_attn.k_norm.weight"]


def _add(values: Tensors) -> None:
    values["layers.0.self_attn.q_proj.bias"] = values["norm.weight"]


def _reshape(values: Tensors) -> None:
    kind, bits = values["fc.weight"]
    values["fc.weight"] = kind, bits[:, :96]


def _nan(values: Tensors) -> None:
    values["hidden_norm.weight"][1][5] = 0x7FC0


def _type(values: Tensors) -> None:
    values["norm.weight"] = "I32", np.zeros(48, "<i4")


TENSORS: list[tuple[Callable[[Tensors], None], str]] = [
    (_drop, "layers.1.self_attn.k_norm.weight: the checkpoint has no such tensor"),
    (_add, "layers.0.self_attn.q_proj.bias: nothing in a DFlash drafter"),
    (_reshape, "fc.weight: shape [48, 96], the config asks for [48, 144]"),
    (_nan, "hidden_norm.weight[5]: nan is not finite"),
    (_type, "norm.weight: I32, must be one of"),
]


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=[m for _, m in TENSORS])
def test_tensors_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Tensors], None], message: str
) -> None:
    values = tensors()
    change(values)
    status, out = run(tmp_path, CONFIG, values)
    assert status == REFUSED
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


def test_an_unknown_field_may_be_ignored_and_a_missing_directory_is_said(tmp_path: Path) -> None:
    status, out = run(tmp_path, {**CONFIG, "colour": "red"}, tensors(), "--ignore-field", "colour")
    assert status == DONE
    assert main([str(tmp_path / "target"), "--drafter", str(tmp_path / "nowhere"), "-o", str(out), "--force"]) == USAGE
