"""Configurations and tensors that do not fit: the error names file, field and reason before anything runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import Bundle, changed

import engine
from harness import protocol
from harness.bundles import ensure
from harness.protocol import EngineError
from refs import kdtr

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"colour": 3}, "colour: unknown field"),
    ({"hidden_size": None}, "hidden_size: missing"),
    ({"rope_theta": None}, "rope_theta: missing"),
    ({"hidden_size": 64.0}, "hidden_size: is an f64, must be an i64"),
    ({"rope_theta": 10000}, "rope_theta: is an i64, must be an f64"),
    ({"hidden_size": 0}, "hidden_size: 0 is not in 1.."),
    ({"num_layers": -1}, "num_layers: -1 is not in"),
    ({"vocab_size": 2**40}, "vocab_size: 1099511627776 is not in"),
    ({"first_k_dense": 7}, "first_k_dense: 7 exceeds num_layers 6"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim: 7 is odd"),
    ({"n_group": 3}, "n_group: 3 does not divide n_routed_experts 16"),
    ({"n_group": 16}, "n_group: 16 groups of one expert"),
    ({"n_group": 4, "topk_group": 5}, "topk_group: 5 exceeds n_group 4"),
    ({"n_group": 8, "topk_group": 1}, "num_experts_per_tok: 4 exceeds the experts of topk_group groups"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok: 17 exceeds"),
    ({"norm_topk_prob": 2}, "norm_topk_prob: 2 is not in 0..1"),
    ({"n_shared_experts": -1}, "n_shared_experts: -1"),
    ({"eos_id": 512}, "eos_id: 512 lies outside vocab_size 512"),
    ({"eos_id": -2}, "eos_id: -2 is not in -1.."),
    ({"mask_id": 512}, "mask_id: 512 lies outside"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps: must be above 0"),
    ({"inner_norm_eps": -1e-6}, "inner_norm_eps: must be above 0"),
    ({"rope_theta": 1.0}, "rope_theta: must be above 1"),
    ({"rope_factor": 0.5}, "rope_factor: must be at least 1"),
    ({"rope_beta_fast": 0.0}, "rope_beta_fast: gives YaRN's ramp no edge"),
    ({"num_heads": 2**30}, "num_heads: 1073741824 * 24 exceeds 2^31-1"),
    ({"n_shared_experts": 2**30}, "n_shared_experts: 32 * 1073741824 exceeds"),
    ({"moe_intermediate_size": 2**29}, "num_experts_per_tok: 536870912 * 5 exceeds 2^31-1"),
    ({"moe_intermediate_size": 2**28}, "n_routed_experts: 268435456 * 16 exceeds"),
    ({"hidden_size": 2**27}, "n_routed_experts: 134217728 * 16 exceeds"),
    ({"intermediate_size": 2**30}, "intermediate_size: 1073741824 * 2 exceeds"),
    ({"q_lora_rank": 2**31 - 2}, "q_lora_rank: 2147483686 * 1 exceeds"),
]


@pytest.mark.parametrize(("fields", "text"), FIELDS, ids=[next(iter(f)) + str(i) for i, (f, _) in enumerate(FIELDS)])
def test_bad_fields(tiny: Path, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    path = changed(tiny, tmp_path / "bad.kdtr", fields=fields)
    with pytest.raises(protocol.ConfigError) as caught:
        engine.create("cpu").load(path, "fp32")
    assert str(caught.value).startswith(f"{path}: {text}")


def bare(bundle: Path, target: Path) -> Path:
    """A copy without goldens and drafts, which no load reads: a tenth as long to write again for every tensor."""
    others = [name for name in kdtr.read(bundle).tensors if name.startswith(("golden.", "draft."))]
    return changed(bundle, target, tensors=dict.fromkeys(others))


def test_every_field_is_required(tiny: Path, tmp_path: Path) -> None:
    model = bare(tiny, tmp_path / "bare.kdtr")
    for name in kdtr.read(model).fields:
        path = changed(model, tmp_path / "bad.kdtr", fields={name: None})
        with pytest.raises(protocol.ConfigError, match=f": {name}: missing"):
            engine.create("cpu").load(path, "fp32")


def weights_of(tiny: Path, precision: str) -> list[str]:
    """By the words of docs/model.md, Precisions."""

    def read(name: str) -> bool:
        expert, stem = ".experts." in name, name.rpartition(".")[2]
        if name.endswith(("norm.w", ".bias")):
            return True
        if expert and precision.startswith("int4"):
            return stem in ("qw", "sc")
        return stem == ("bw" if precision.endswith("bf16") else "w")

    names = kdtr.read(tiny).tensors
    return [n for n in names if not n.startswith(("golden.", "draft.", "meta.")) and read(n)]


@pytest.mark.parametrize("precision", ["fp32", "int4", "bf16", "int4-bf16"])
def test_every_weight_is_required(tmp_path: Path, precision: str) -> None:
    config = "ties" if precision.endswith("bf16") else "block1"  # small, with a layer of each kind
    whole = ensure([config])[config]
    names = weights_of(whole, precision)
    file = kdtr.read(whole)
    others = dict.fromkeys(name for name in file.tensors if name not in names)
    small = changed(whole, tmp_path / "small.kdtr", tensors=others)  # quick to write again for every tensor
    engine.create("cpu").load(small, precision).close()
    for name in names:
        path = changed(small, tmp_path / "bad.kdtr", tensors={name: None})
        with pytest.raises(protocol.MissingTensor, match=f": {name}: the file has no such tensor"):
            engine.create("cpu").load(path, precision)
        array = file.tensor(name)
        longer = np.concatenate([array, array[..., :1]], axis=-1)
        path = changed(small, tmp_path / "bad.kdtr", tensors={name: longer})
        with pytest.raises(protocol.MissingTensor, match=f": {name}: has shape .* must be "):
            engine.create("cpu").load(path, precision)
        path = changed(small, tmp_path / "bad.kdtr", tensors={name: array.astype(np.float64)})
        with pytest.raises(protocol.MissingTensor, match=f": {name}: is f64, must be "):
            engine.create("cpu").load(path, precision)


@pytest.mark.parametrize(
    ("precision", "missed", "other"),
    [
        ("fp32", "layers.1.experts.gate.w", "int4"),
        ("int4", "layers.1.experts.gate.qw", "fp32"),
        ("bf16", "layers.1.experts.gate.bw", "int4-bf16"),
        ("int4-bf16", "embed.bw", "int4"),
    ],
)
def test_the_other_precision_may_be_absent(tiny: Path, tmp_path: Path, precision: str, missed: str, other: str) -> None:
    """A file with one precision loads in that one; the other names the first tensor it misses."""
    bundle = Bundle(tiny)
    kept = weights_of(tiny, other)
    weights = [n for n in bundle.file.tensors if not n.startswith(("golden.", "draft.", "meta."))]
    drop = {n: None for n in weights if n not in kept}
    path = changed(tiny, tmp_path / "one.kdtr", tensors=drop)
    with pytest.raises(protocol.MissingTensor, match=f": {missed}: "):
        engine.create("cpu").load(path, precision)
    with engine.create("cpu").load(path, other) as session:
        assert list(session.decode(bundle.request(other)).tokens) == bundle.tokens(other)


def test_files_that_are_none(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello " * 100)
    cases = {
        tmp_path / "nowhere.kdtr": "file: cannot be read: No such file",
        tmp_path: "file: cannot be read: not a regular file",
        fifo: "file: cannot be read: not a regular file",
        tmp_path / "empty": "header: the file has 0 bytes",
        tmp_path / "text": "header.magic: not 'KDTR'",
    }
    for path, text in cases.items():
        with pytest.raises(protocol.FormatError) as caught:
            engine.create("cpu").load(path, "fp32")
        assert str(caught.value).startswith(f"{path}: {text}")


def cut(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [cut, overwritten])
def test_a_file_that_is_written_to_while_it_is_in_use(tiny: Path, tmp_path: Path, change: Any) -> None:
    """On the CPU weights are used where they are mapped: another model, or a SIGBUS, becomes an error by name."""
    bundle = Bundle(tiny)
    path, other = changed(tiny, tmp_path / "used.kdtr"), changed(tiny, tmp_path / "other.kdtr")
    changed(tiny, other, tensors={"embed.w": bundle.file.tensor("embed.w") * 2})
    assert path.stat().st_size == other.stat().st_size
    with engine.create("cpu").load(path, "fp32") as session:
        stream = session.stream(bundle.request())
        next(stream)
        change(path, other)
        for call in (
            lambda: next(stream),
            lambda: session.decode(bundle.request()),
            lambda: session.prefill([1]),
            lambda: session.verify([1, 2], [-1, 0]),
            lambda: session.taps([1]),
        ):
            with pytest.raises(protocol.FormatError, match=f"{path.name}: file: was written to while it was in use"):
                call()


def test_a_file_that_is_replaced_while_it_is_in_use(tiny: Path, tmp_path: Path) -> None:
    """By rename, as everything here writes: a session keeps what it opened."""
    bundle = Bundle(tiny)
    path = changed(tiny, tmp_path / "used.kdtr")
    with engine.create("cpu").load(path, "fp32") as session:
        changed(tiny, path, tensors={"embed.w": bundle.file.tensor("embed.w") * 2})
        assert list(session.decode(bundle.request()).tokens) == bundle.tokens("fp32")


@pytest.mark.parametrize("name", ["spaß ✓.kdtr", "with space.kdtr", "new\nline.kdtr"])
def test_unusual_file_names(tiny: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.write_bytes(tiny.read_bytes())
    with engine.create("cpu").load(target, "fp32") as session:
        assert session.vocab == 512
    target.write_bytes(b"no")
    with pytest.raises(EngineError, match="the file has 2 bytes"):
        engine.create("cpu").load(target, "fp32")


def test_a_file_name_that_is_no_unicode(tiny: Path, tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/\xff\xfe.kdtr"
    path = Path(os.fsdecode(raw))
    with pytest.raises(protocol.FormatError, match="No such file"):
        engine.create("cpu").load(path, "fp32")
    with open(raw, "wb") as out:
        out.write(tiny.read_bytes())
    engine.create("cpu").load(path, "fp32").close()


def test_weights_are_used_where_they_lie(tiny: Path) -> None:
    """A session holds caches and buffers only; the weights stay in the mapped file."""
    with engine.create("cpu").load(tiny, "fp32", context=16, max_rows=1) as session:
        assert session.memory()[0] < 200_000
        assert tiny.stat().st_size > 2_000_000
