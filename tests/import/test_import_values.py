"""What an import writes: every bit of every tensor, against values written down here or found without the importer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest

from engine.importer import DONE, REFUSED, main
from refs import kdtr
from refs.config import ModelConfig


def imported(directory: Path, *options: str) -> kdtr.Kdtr:
    """Import ``directory`` and read the result, every CRC checked and the tensors those that docs/model.md asks for."""
    target = directory / f"out{len(list(directory.glob('*.kdtr')))}.kdtr"
    assert main([str(directory), "-o", str(target), *options]) == DONE
    found = kdtr.read(target, verify=True)
    config = ModelConfig.of(found.fields, str(target))
    wanted: dict[str, Any] = {"meta.json": None}
    for precision in json.loads(bytes(found.tensor("meta.json")))["import"]["precisions"]:
        wanted |= config.stored(precision)
    assert found.tensors.keys() == wanted.keys()
    for name, entry in found.entries.items():
        assert name == "meta.json" or (entry.shape, entry.dtype) == wanted[name], name
    return found


def expected_name(layer: int, name: str) -> str:
    """Our name of a checkpoint's tensor, written down again."""
    table = {
        "input_layernorm": "attn_norm.w",
        "post_attention_layernorm": "mlp_norm.w",
        "self_attn.q_a_proj": "attn.q_a.w",
        "self_attn.q_a_layernorm": "attn.q_a_norm.w",
        "self_attn.q_b_proj": "attn.q_b.w",
        "self_attn.kv_a_proj_with_mqa": "attn.kv_a.w",
        "self_attn.kv_a_layernorm": "attn.kv_a_norm.w",
        "self_attn.kv_b_proj": "attn.kv_b.w",
        "self_attn.o_proj": "attn.o.w",
        "mlp.gate": "router.w",
        "mlp.gate_proj": "mlp.gate.w",
        "mlp.up_proj": "mlp.up.w",
        "mlp.down_proj": "mlp.down.w",
        "mlp.shared_experts.gate_proj": "shared.gate.w",
        "mlp.shared_experts.up_proj": "shared.up.w",
        "mlp.shared_experts.down_proj": "shared.down.w",
    }
    return f"layers.{layer}.{table[name]}"


def bits_as_f32(dtype: str, array: Any) -> Any:
    if dtype == "BF16":
        return np.frombuffer(b"".join(b"\0\0" + v.tobytes() for v in array.reshape(-1)), "<f4").reshape(array.shape)
    return array.astype("<f4")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shards", [0, 1, 5])
def test_every_float_arrives_unchanged(tmp_path: Path, dtype: str, shards: int) -> None:
    c = hf.config()
    tensors = hf.floats(c, dtype)
    found = imported(hf.write(tmp_path, c, tensors, shards))
    seen = {"meta.json"}
    for name, (kind, array) in tensors.items():
        want = bits_as_f32(kind, array)
        module = name.removesuffix(".weight").removeprefix("model.")
        if ".experts." in name:
            layer, expert, part = module.split(".")[1], int(module.split(".")[4]), module.split(".")[5]
            ours = f"layers.{layer}.experts.{part.removesuffix('_proj')}.w"
            got = found.tensor(ours)[expert]
        else:
            if module.startswith("layers."):
                _, layer, rest = module.split(".", 2)
                bias = rest.endswith("e_score_correction_bias")
                ours = f"layers.{layer}.router.bias" if bias else expected_name(int(layer), rest)
            else:
                ours = {"embed_tokens": "embed.w", "norm": "final_norm.w", "lm_head": "lm_head.w"}[module]
            got = found.tensor(ours)
        seen.add(ours)
        assert got.tobytes() == want.tobytes(), name
    assert seen == set(found.tensors)


@pytest.mark.parametrize("pack", [False, True])
def test_bf16_matrices_stay_as_they_are(tmp_path: Path, pack: bool) -> None:
    c = hf.config(hidden_size=64, moe_intermediate_size=32, quantization_config=hf.PACKED) if pack else hf.config()
    source = hf.write(tmp_path / "hf", c, hf.packed(c) if pack else hf.floats(c, "BF16"), 3)
    wide, target = imported(source), tmp_path / "narrow.kdtr"
    assert main([str(source), "-o", str(target), "--matrices", "bf16"]) == DONE
    narrow = kdtr.read(target, verify=True)
    said = json.loads(bytes(narrow.tensor("meta.json")))["import"]["precisions"]
    assert said == (["int4-bf16"] if pack else ["bf16"])
    matrices = {
        name.removesuffix("w") for name, array in wide.tensors.items() if array.ndim > 1 and name.endswith(".w")
    }
    assert len(matrices) > 20
    assert set(narrow.tensors) == {
        f"{m}bw" if (m := name.removesuffix("w")) in matrices else name for name in wide.tensors
    }
    for name, array in wide.tensors.items():
        stem = name.removesuffix("w")
        if stem in matrices:
            upper = array.view(np.uint32) >> 16
            assert narrow.entries[stem + "bw"].dtype == "bf16"
            np.testing.assert_array_equal(narrow.tensor(stem + "bw"), upper.astype(np.uint16), err_msg=name)
        elif name != "meta.json":
            np.testing.assert_array_equal(narrow.tensor(name), array, err_msg=name)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_wider_matrices_are_taken_when_they_are_bf16(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    c = hf.config()
    tensors = {name: (kind, np.ones_like(array)) for name, (kind, array) in hf.floats(c, dtype).items()}
    source, target = hf.write(tmp_path / "hf", c, tensors), tmp_path / "out.kdtr"
    assert main([str(source), "-o", str(target), "--matrices", "bf16"]) == DONE
    assert (kdtr.read(target).tensor("embed.bw") == 0x3F80).all()
    target.unlink()
    tensors["model.layers.1.mlp.gate.weight"][1][3, 5] = 1 + 2.0**-9
    source = hf.write(tmp_path / "hf", c, tensors)
    assert main([str(source), "-o", str(target), "--matrices", "bf16"]) == REFUSED
    assert "model.layers.1.mlp.gate.weight[3, 5]: " in (said := capsys.readouterr().err)
    assert "is no bf16, and rounding it would change the weights" in said
    assert not target.exists()


def test_known_bits(tmp_path: Path) -> None:
    """bf16 0x3fc0 is 1.5, 0xc2f7 is -123.5, 0x0001 is 2^-133; f16 0x3555 is 0.333251953125, 0x0001 is 2^-24."""
    c = hf.config()
    tensors = hf.floats(c, "BF16")
    norm = np.full(48, 0x3F80, np.uint16)
    norm[:3] = 0x3FC0, 0xC2F7, 0x0001
    tensors["model.norm.weight"] = "BF16", norm
    half = np.full(48, 0x3C00, np.uint16)
    half[:2] = 0x3555, 0x0001
    tensors["model.layers.0.input_layernorm.weight"] = "F16", half.view(np.float16)
    found = imported(hf.write(tmp_path, c, tensors))
    assert found.tensor("final_norm.w")[:4].tolist() == [1.5, -123.5, 2.0**-133, 1.0]
    assert found.tensor("layers.0.attn_norm.w")[:3].tolist() == [0.333251953125, 2.0**-24, 1.0]


def test_packed_nibbles_arrive_as_they_are(tmp_path: Path) -> None:
    """Element e of a row is nibble e, low first, offset by 8: [-8,-7,-1,0,1,2,6,7] is the word 0xfea98710."""
    c = hf.config(hidden_size=64, moe_intermediate_size=32, quantization_config=hf.PACKED)
    tensors = hf.packed(c)
    name = "model.layers.2.mlp.experts.5.gate_proj.weight"
    words = tensors[f"{name}_packed"][1].copy()
    words[1, 3] = np.array([0xFEA98710], "<u4").view("<i4")[0]
    tensors[f"{name}_packed"] = "I32", words
    scales = tensors[f"{name}_scale"][1].copy()
    scales[1] = 0x3C00, 0x0000
    tensors[f"{name}_scale"] = "BF16", scales
    found = imported(hf.write(tmp_path, c, tensors, 3))
    assert found.tensor("layers.2.experts.gate.qw")[5, 1, 12:16].tolist() == [0x10, 0x87, 0xA9, 0xFE]
    assert found.tensor("layers.2.experts.gate.sc")[5, 1].tolist() == [0x3C00, 0]
    for layer in (1, 2, 3):
        for part in ("gate", "up", "down"):
            for e in range(8):
                at = f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
                assert (
                    found.tensor(f"layers.{layer}.experts.{part}.qw")[e].tobytes()
                    == tensors[at + "_packed"][1].tobytes()
                )
                assert (
                    found.tensor(f"layers.{layer}.experts.{part}.sc")[e].tobytes()
                    == tensors[at + "_scale"][1].tobytes()
                )


@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 31, 33, 36, 40, 63])
def test_rows_of_any_length_are_padded_to_whole_groups(tmp_path: Path, k: int) -> None:
    """K no multiple of 32: what the last group lacks is nibble 8, whatever the checkpoint's words hold there."""
    c = hf.config(moe_intermediate_size=k, num_hidden_layers=2, quantization_config=hf.PACKED)
    tensors = hf.packed(c)
    for name in list(tensors):
        if name.endswith("down_proj.weight_packed") and k % 8:
            words = tensors[name][1].view("<u4").copy()
            words[:, -1] |= np.uint32(0xFFFFFFFF << 4 * (k % 8) & 0xFFFFFFFF)  # junk in the unused nibbles
            tensors[name] = "I32", words.view("<i4")
    found = imported(hf.write(tmp_path, c, tensors))
    got = found.tensor("layers.1.experts.down.qw")
    words = tensors["model.layers.1.mlp.experts.4.down_proj.weight_packed"][1].view("<u4")
    for row in (0, 1, 47):
        nibbles = [(int(got[4, row, j // 2]) >> 4 * (j % 2)) & 15 for j in range(32 * -(-k // 32))]
        assert nibbles[:k] == [(int(words[row, j // 8]) >> 4 * (j % 8)) & 15 for j in range(k)]
        assert nibbles[k:] == [8] * (len(nibbles) - k)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_wider_scales_are_taken_when_they_are_bf16(tmp_path: Path, dtype: str) -> None:
    c = hf.config(num_hidden_layers=2, quantization_config=hf.PACKED)
    tensors = hf.packed(c)
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    values = np.array([0.5, -0.0078125, 0.0, 1.9921875], np.float32)
    scales = np.resize(values, (36, 2))
    tensors[name] = dtype, scales.astype(hf.NUMPY[dtype])
    found = imported(hf.write(tmp_path, c, tensors))
    want = np.resize(np.array([0x3F00, 0xBC00, 0x0000, 0x3FFF], np.uint16), (36, 2))
    assert np.array_equal(found.tensor("layers.1.experts.up.sc")[3], want)


def test_quantise_on_import(tmp_path: Path) -> None:
    """scale = bf16(amax/7.5), ties to even: amax 7.5 makes the scale 1; an all-zero group has scale 0 and nibble 8."""
    c = hf.config(num_hidden_layers=2)
    tensors = hf.floats(c)
    name = "model.layers.1.mlp.experts.6.gate_proj.weight"
    w = np.zeros((36, 48), np.float32)
    w[2, :8] = 7.5, -7.5, 0.5, 1.5, -2.5, 7.0, -7.49, 3.49
    tensors[name] = "F32", w
    directory = hf.write(tmp_path, c, tensors)
    found = imported(directory, "--quantize", "int4")
    assert found.tensor("layers.1.experts.gate.sc")[6, 2].tolist() == [0x3F80, 0]
    nibbles = found.tensor("layers.1.experts.gate.qw")[6, 2]
    assert nibbles[:4].tolist() == [0x0F, 0xA8, 0xF6, 0xB1]  # 7, -8 (-7.5 rounds to even), 0, 2, -2, 7, -7, 3
    assert nibbles[4:].tolist() == [0x88] * 28
    both = imported(directory, "--quantize", "both")
    assert both.tensor("layers.1.experts.gate.w")[6].tobytes() == w.tobytes()
    for part in ("gate", "up", "down"):
        for kind in ("qw", "sc"):
            at = f"layers.1.experts.{part}.{kind}"
            assert both.tensor(at).tobytes() == found.tensor(at).tobytes()


def test_kimi_k25_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``language_model.`` before every name, the text model's config nested, a vision tower beside it."""
    plain = hf.config(model_type="kimi_k2", quantization_config=hf.PACKED)
    tensors = hf.packed(plain)
    want = imported(hf.write(tmp_path / "plain", plain, tensors))
    nested = {
        "model_type": "kimi_k25",
        "text_config": plain,
        "vision_config": {"hidden_size": 9},
        "media_placeholder_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 8,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    vision: dict[str, hf.Tensor] = {
        "vision_tower.blocks.0.wo.weight": ("BF16", np.zeros((3, 3), np.uint16)),
        "mm_projector.linear_1.weight": ("BF16", np.zeros((3, 3), np.uint16)),
    }
    got = imported(hf.write(tmp_path / "nested", nested, vision | hf.renamed(tensors, "language_model."), 2))
    assert "the outer config has eos_token_id 8, 7 was taken" in capsys.readouterr().err
    assert got.fields == want.fields
    for name in set(want.tensors) - {"meta.json"}:
        assert got.tensor(name).tobytes() == want.tensor(name).tobytes()
    report = json.loads(bytes(got.tensor("meta.json")))["import"]
    assert report["tensors_left_out"] == {"outside the text model": 2}
    assert "vision_config" in report["config_fields_without_effect"]


def test_tied_embeddings(tmp_path: Path) -> None:
    c = hf.config(tie_word_embeddings=True)
    tensors = hf.floats(c)
    found = imported(hf.write(tmp_path / "absent", c, hf.without(tensors, ["lm_head.weight"])))
    assert found.tensor("lm_head.w").tobytes() == found.tensor("embed.w").tobytes()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    imported(hf.write(tmp_path / "equal", c, tensors))


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    whole = hf.config(num_nextn_predict_layers=1)
    tensors = hf.floats(whole)
    extra = {
        "model.layers.4.eh_proj.weight": tensors["model.embed_tokens.weight"],
        "model.layers.4.mlp.gate.weight": tensors["model.layers.1.mlp.gate.weight"],
        "model.layers.2.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"],
    }
    found = imported(hf.write(tmp_path, whole, tensors | extra))
    report = json.loads(bytes(found.tensor("meta.json")))["import"]
    assert report["tensors_left_out"] == {
        "RoPE frequencies, which follow from the config": 1,
        "layers for multi-token prediction": 2,
    }


@pytest.mark.parametrize(
    ("layers", "experts"),
    [("0-1", "0-3"), ("1-3", "4-7"), ("3", "0-1,4,6-7"), ("0,2", "3,5"), ("3", "3,5"), ("0,2", "0-1,4,6-7")],
)
@pytest.mark.parametrize("pack", [False, True])
def test_slices_are_rows_of_the_whole(tmp_path: Path, layers: str, experts: str, pack: bool) -> None:
    c = hf.config(quantization_config=hf.PACKED) if pack else hf.config()
    directory = hf.write(tmp_path, c, hf.packed(c) if pack else hf.floats(c), 4)
    whole, part = imported(directory), imported(directory, "--layers", layers, "--experts", experts)

    def ids(text: str) -> list[int]:
        spans = [tuple(map(int, p.split("-"))) for p in text.split(",")]
        return [i for span in spans for i in range(span[0], span[-1] + 1)]

    assert part.fields["num_layers"] == len(ids(layers))
    assert part.fields["first_k_dense"] == int(0 in ids(layers))
    assert part.fields["n_routed_experts"] == len(ids(experts))
    for name in part.tensors:
        if name == "meta.json":
            continue
        source = name
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            source = f"layers.{ids(layers)[int(layer)]}.{rest}"
        want = whole.tensor(source)
        if ".experts." in name or ".router." in name:
            want = want[ids(experts)]
        assert part.tensor(name).tobytes() == want.tobytes(), name


@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group"), [("0-7", 4, 2), ("2-5", 2, 2), ("0-1,6-7", 2, 2), ("4-5", 1, 1)]
)
def test_slices_keep_whole_groups(tmp_path: Path, experts: str, n_group: int, topk_group: int) -> None:
    c = hf.config(n_group=4, topk_group=2)
    found = imported(hf.write(tmp_path, c, hf.floats(c)), "--experts", experts)
    assert (found.fields["n_group"], found.fields["topk_group"]) == (n_group, topk_group)


def test_a_slice_needs_only_its_shards(tmp_path: Path) -> None:
    c = hf.config()
    tensors = hf.floats(c)
    first = {k: v for k, v in tensors.items() if not k.startswith(("model.layers.2", "model.layers.3"))}
    hf.write(tmp_path, c, first)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    hf.write_index(tmp_path, {k: "a.safetensors" if k in first else "not-downloaded.safetensors" for k in tensors})
    assert imported(tmp_path, "--layers", "0-1").fields["num_layers"] == 2


def test_shared_experts_of_no_size(tmp_path: Path) -> None:
    """transformers writes them when n_shared_experts is 0."""
    c = hf.config(n_shared_experts=0)
    empty: dict[str, hf.Tensor] = {
        f"model.layers.1.mlp.shared_experts.{p}_proj.weight": ("F32", np.zeros((0, 48), np.float32))
        for p in ("gate", "up")
    }
    found = imported(hf.write(tmp_path, c, hf.floats(c) | empty))
    assert not [n for n in found.tensors if ".shared." in n]


def test_same_bytes_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another directory, in other blocks, in other shards."""
    c = hf.config(n_group=2)
    tensors = hf.floats(c, "BF16")
    one = hf.write(tmp_path / "one", c, tensors)
    two = hf.write(tmp_path / "two", c, dict(reversed(list(tensors.items()))), 3)
    target = [tmp_path / "one.kdtr", tmp_path / "two.kdtr"]
    assert main([str(one), "-o", str(target[0])]) == DONE
    monkeypatch.setattr("engine.convert.READ_BLOCK", 200)
    assert main([str(two), "-o", str(target[1])]) == DONE
    assert target[0].read_bytes() == target[1].read_bytes()
