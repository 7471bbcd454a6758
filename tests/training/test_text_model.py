"""The shipped text model: the files that the card speaks of, and one meaning to everybody who reads them.

Torch's reading of the weights (`training.target`, attention in the direct form, experts stacked) was written without
the engine's or the reference's code, and transformers' by somebody else; the latter is held against it in
tests/oracles/test_trained_model.py.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import create, importer
from harness import bundles, quality
from harness.golden import Golden
from harness.protocol import Session
from refs import checkpoint, draw, kdtr, recipe
from refs.config import F32_PRECISIONS, ModelConfig
from refs.drafter_config import of_file, split
from refs.errors import CheckpointError
from refs.exact import bf16_value
from refs.quant import dequantise
from training import corpus
from training import drafter as draft
from training import target as text
from training.target import Target, fake_int4, open_target

FOLDER = Path(recipe.__file__).parent / "text"
SHA256 = {
    "model.safetensors": "a150dbcfe5d1cfa797f548fb6469e1c11c030a7e66d73edcfb6f3f8aff44266a",
    "drafter/model.safetensors": "4ddf3ef659bdf5e0dbab966259dd1cd5892793dc8351760cdbff4addca4f745d",
    "heldout.json": "e4ff69e11aac27e1039fb24707031367de2e7a275aeb741c83137955163c297b",
}
LIMIT = 8 << 20


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> kdtr.Kdtr:
    out = tmp_path_factory.mktemp("text") / "text.kdtr"
    assert importer.main([str(FOLDER), "--drafter", str(FOLDER / "drafter"), "-o", str(out), "--quantize", "both"]) == 0
    return kdtr.read(out)


@pytest.fixture(scope="module")
def bundle() -> Path:
    return bundles.ensure(["text"])["text"]


@pytest.fixture(scope="module")
def model() -> Target:
    return open_target(FOLDER)


def passages(count: int, length: int) -> list[list[int]]:
    """Held-out text in the form the model was trained on."""
    found = [list(t[:length]) for _, t in checkpoint.heldout("text") if len(t) >= length]
    return [[corpus.END, *ids] for ids in found[:count]]


def test_the_files_are_those_of_the_card() -> None:
    card = (FOLDER / "README.md").read_text("utf-8")
    for name, digest in SHA256.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
        assert digest in card
    assert sum((FOLDER / name).stat().st_size for name in SHA256 if "model" in name) <= LIMIT


def test_the_configs_are_those_that_were_trained() -> None:
    assert json.loads((FOLDER / "config.json").read_text("ascii")) == text.CONFIG
    assert json.loads((FOLDER / "drafter" / "config.json").read_text("ascii")) == draft.CONFIG


def test_importer_and_reference_read_the_same_model(imported: kdtr.Kdtr) -> None:
    wanted = recipe.load("text")
    own, drafter = split(imported.fields)
    model = ModelConfig.of(own, "imported")
    assert model == wanted.model
    assert of_file(drafter, imported.tensors, model, "imported") == wanted.drafter
    tensors = draw.weights(wanted, 0)
    narrow = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".bw")}
    for name, bits in narrow.items():  # trained in bf16, so nothing is lost
        np.testing.assert_array_equal(bf16_value(bits), tensors[name.removesuffix("bw") + "w"], err_msg=name)
    assert sorted([*tensors, "meta.json"]) == sorted(imported.tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(value, imported.tensor(name), err_msg=name)


def test_the_bundle_holds_that_model(bundle: Path, imported: kdtr.Kdtr) -> None:
    stored = kdtr.read(bundle)
    for name in sorted({*imported.tensors} - {"meta.json"}):
        np.testing.assert_array_equal(stored.tensor(name), imported.tensor(name), err_msg=name)
    prompt = Golden.open(bundle, "fp32").prompt
    assert prompt[0] == corpus.END
    assert any(bytes(prompt[1:]) in document for _, document in checkpoint.heldout("text"))


@pytest.mark.parametrize("precision", F32_PRECISIONS)
def test_engine_and_torch_agree(bundle: Path, precision: str) -> None:
    """Whole passages, past YaRN's original context; the bound is four times the noise of float32 in torch."""
    stored, wide = kdtr.read(bundle), open_target(FOLDER).double()
    for layer, moe in enumerate(wide.experts(), 1):
        if precision == "int4":
            for part in ("gate", "up", "down"):
                weight = getattr(moe, part)
                at = f"layers.{layer}.experts.{part}"
                q, scale = (stored.tensor(at + end) for end in (".qw", ".sc"))
                exact = torch.from_numpy(dequantise(q, scale, weight.shape[-1]).astype(np.float64))
                torch.testing.assert_close(fake_int4(weight.float()).double(), exact, rtol=1e-6, atol=1e-7)
                weight.data = exact
    narrow = open_target(FOLDER)
    narrow.load_state_dict({name: value.float() for name, value in wide.state_dict().items()})
    with create("cpu").load(bundle, precision) as session, torch.no_grad():
        for prompt in [*passages(2, 48), *passages(1, 280)]:
            exact = wide(torch.tensor([prompt]))[0][0].double().numpy()
            noise = float(np.abs(narrow(torch.tensor([prompt]))[0][0].numpy() - exact).max())
            session.reset()
            got = session.prefill(prompt)
            assert np.abs(exact).max() > 5
            assert np.abs(got - exact).max() <= 4 * max(noise, 2e-6)


def test_quality_is_that_of_torch(bundle: Path, model: Target) -> None:
    """`kdtree quality` on a part of the text against torch's own cross entropy."""
    documents = checkpoint.heldout("text")[:3]
    sessions: dict[str, Session] = {p: create("cpu").load(bundle, p) for p in F32_PRECISIONS}
    found = quality.measure(sessions, documents, corpus.END, 700)
    total = 0.0
    for _, piece in quality.pieces(documents, 700):
        ids = torch.tensor([[corpus.END, *piece]])
        with torch.no_grad():
            logits = model(ids[:, :-1])[0]
        total += float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")) / float(np.log(2))
    assert found.bytes == 700
    assert found.fp32_bits.value == pytest.approx(total / 700, rel=1e-5)
    assert found.difference.value == pytest.approx(found.int4_bits.value - found.fp32_bits.value)
    assert 1 < found.fp32_bits.value < 3
    assert 0 < found.kl_bits.value < 0.1
    assert 0.9 < found.agreement.value < 1


def test_estimates_against_hand_calculated_ones() -> None:
    assert quality.estimate(np.array([6.0]), np.array([3.0])) == quality.Estimate(2.0, 0.0)
    found = quality.estimate(np.array([1.0, 5.0]), np.array([1.0, 2.0]))  # mean 2, residuals -1 and 1
    assert found.value == 2.0
    assert found.error == pytest.approx(np.sqrt(2 * 2 / 1) / 3)
    assert [piece for _, piece in quality.pieces([("a", b"x" * 600), ("b", b"yz")], 0)] == [
        b"x" * 512,
        b"x" * 88,
        b"yz",
    ]
    assert [piece for _, piece in quality.pieces([("a", b"x" * 600), ("b", b"yz")], 601)][-1] == b"y"


def test_a_damaged_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (FOLDER / "model.safetensors").read_bytes()
    model = recipe.load("text").model
    monkeypatch.setattr(checkpoint, "FOLDER", tmp_path)
    (tmp_path / "text").mkdir()
    for bad, reason in (
        (data[:-1], "do not hold"),
        (data[:6], "header"),
        (data.replace(b"model.norm.weight", b"model.norm.height"), "model.norm.weight: not there"),
        (data.replace(b'"BF16","shape":[258,160]', b'"BF16","shape":[160,258]'), r"\(160, 258\)"),
        (data.replace(b'"dtype":"F32"', b'"dtype":"F16"'), "F16"),
        (data[:-2] + b"\x80\x7f", "infinity"),
    ):
        assert bad != data
        (tmp_path / "text" / "model.safetensors").write_bytes(bad)
        with pytest.raises(CheckpointError, match=reason) as caught:
            checkpoint.weights("text", model)
        assert str(tmp_path) in str(caught.value)
