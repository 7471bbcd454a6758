"""The importer, the reference and the engine against transformers' DeepseekV3ForCausalLM on random models.

Each model is saved by transformers, imported, and run over a prompt and transformers' own greedy continuation. Held
against transformers in float64: logits of every row, chosen experts and their weights, for refs/model.py in float64 and
for csrc/ in float32; and the tokens that the engine's AR and DDTree loops decode. Shown to fail: `test_controls`, where
each of 26 planted misunderstandings of the config or of a layout must be called a disagreement by the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import oracle_agreement as agreement
import oracle_models as hf
import pytest
from oracle_agreement import Disagreement, Noise, agree, same_tokens, taps_run
from oracle_cases import COUNT, Case, case

from engine.importer import main
from harness.protocol import DecodeRequest, Draft
from refs import kdtr
from refs.config import ModelConfig
from refs.model import Model


@dataclass(frozen=True)
class Subject:
    """A model as transformers knows it, and its import."""

    case: Case
    path: Path
    tokens: list[int]
    """transformers' greedy continuation."""
    narrow: hf.Run
    exact: hf.Run
    noise: Noise

    @property
    def rows(self) -> list[int]:
        """Prompt and continuation."""
        return [*self.case.prompt, *self.tokens]


def prepare(given: Case, directory: Path) -> Subject:
    """Build, save, import; run in float32 and in float64."""
    model = hf.build(given)
    path = directory / "model.kdtr"
    assert main([str(hf.save(model, given, directory / "hf")), "-o", str(path)]) == 0
    tokens = hf.greedy(model, given.prompt, given.new_tokens)
    narrow = hf.run(model, [*given.prompt, *tokens])
    with hf.wide():
        exact = hf.run(hf.in_float64(model), [*given.prompt, *tokens])
    return Subject(given, path, tokens, narrow, exact, Noise.of(narrow, exact))


def check_reference(s: Subject, fields: dict[str, Any], tensors: dict[str, Any]) -> agreement.Agreement:
    """The reference in float64, over the file's contents."""
    model = Model(fields, tensors, "fp32")
    got = taps_run(model.taps(s.rows, operations=True), model.config)
    found = agree(got, s.exact, s.noise.times(agreement.NARROW * agreement.FLOAT64), model.config)
    choices = [int(i) for i in got.logits[len(s.case.prompt) - 1 : -1].argmax(axis=1)]
    same = same_tokens(choices, s.tokens, s.exact, len(s.case.prompt), s.noise.logits * agreement.FLOAT32)
    return agreement.Agreement(found.ratio, found.near_tie or not same)


def check_engine(s: Subject, csrc: Any, path: Path) -> agreement.Agreement:
    """An engine in float32: taps over all rows, AR, and DDTree with transformers' logits as drafts."""
    config = ModelConfig.of(kdtr.read(path).fields, str(path))
    allowed = s.noise.times(agreement.FLOAT32)
    session = csrc.load(path, "fp32")
    try:
        found = agree(taps_run(session.taps(s.rows, operations=True), config), s.exact, allowed, config)
        ar = session.decode(DecodeRequest(s.case.prompt, s.case.new_tokens))
        same = same_tokens(ar.tokens, s.tokens, s.exact, len(s.case.prompt), allowed.logits)
        n = len(s.case.prompt)
        drafts = s.narrow.logits[n:-1].astype(np.float32) * np.float32(1000)  # so sharp that the best tree is a chain
        request = DecodeRequest(s.case.prompt, s.case.new_tokens, Draft(drafts, n + 1), block_size=4, budget=3)
        tree = session.decode(request)
    finally:
        session.close()
    if tree.tokens != ar.tokens:
        raise Disagreement(f"DDTree {tree.tokens}, AR {ar.tokens}")
    if same and tree.forwards != -(-s.case.new_tokens // 4):
        raise Disagreement(f"{tree.forwards} forwards, but transformers' own logits drafted every token")
    return agreement.Agreement(found.ratio, found.near_tie or not same)


@pytest.mark.parametrize("index", range(COUNT))
def test_random_model(index: int, tmp_path: Path, csrc: Any, record_property: Callable[[str, object], None]) -> None:
    subject = prepare(case(index), tmp_path)
    found = kdtr.read(subject.path, verify=True)
    reference = check_reference(subject, dict(found.fields), dict(found.tensors))
    engine = check_engine(subject, csrc, subject.path)
    near_tie = reference.near_tie or engine.near_tie
    figures = {"index": index, "reference": reference.ratio, "engine": engine.ratio, "near_tie": near_tie}
    record_property("oracle", json.dumps(figures))


def test_the_cases_cover_what_they_are_for() -> None:
    cases = [case(i) for i in range(COUNT)]
    configs = [c.config for c in cases]
    assert COUNT >= 200
    assert {c.layout for c in cases} == {"deepseek_v3", "kimi_k2", "kimi_k25"}
    assert {c.dtype for c in cases} == {"float32", "bfloat16", "float16"}
    yarn = [(c, c.config["rope_parameters"]) for c in cases if c.config["rope_parameters"]["rope_type"] == "yarn"]
    beyond = [c for c, rope in yarn if len(c.prompt) > rope["original_max_position_embeddings"]]
    counts = {
        "grouped routing": sum(c["n_group"] > 1 and c["topk_group"] < c["n_group"] for c in configs),
        "YaRN": len(yarn),
        "positions beyond YaRN's original context": len(beyond),
        "unequal mscale": sum(r.get("mscale") != r.get("mscale_all_dim") for _, r in yarn),
        "no shared expert": sum(c["n_shared_experts"] == 0 for c in configs),
        "several shared experts": sum(c["n_shared_experts"] > 1 for c in configs),
        "dense layers alone": sum(c["first_k_dense_replace"] >= c["num_hidden_layers"] for c in configs),
        "no dense layer": sum(c["first_k_dense_replace"] == 0 for c in configs),
        "odd sizes": sum(c["hidden_size"] % 2 == 1 and c["kv_lora_rank"] % 2 == 1 for c in configs),
        "weights as they are": sum(not c["norm_topk_prob"] for c in configs),
        "eps that differ": sum(c["rms_norm_eps"] == 1e-3 for c in configs),
        "tied embeddings": sum(c["tie_word_embeddings"] for c in configs),
        "shards": sum(c.shard_bytes > 0 for c in cases),
        "prompts of one token": sum(len(c.prompt) == 1 for c in cases),
        "prompts beyond a chunk of attention": sum(len(c.prompt) > 64 for c in cases),
    }
    assert not [what for what, count in counts.items() if count < 8], counts


# --- controls: planted misunderstandings ---

CONTROL = Case(
    index=0,
    config={
        "vocab_size": 90,
        "hidden_size": 44,
        "intermediate_size": 50,
        "moe_intermediate_size": 26,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 14,
        "kv_lora_rank": 18,
        "qk_rope_head_dim": 12,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
        "bos_token_id": None,
        "eos_token_id": None,
    },
    layout="deepseek_v3",
    dtype="float32",
    shard_bytes=0,
    gain=1.2,
    prompt=tuple((7 * i * i + 3 * i) % 90 for i in range(70)),
    new_tokens=8,
)

Tensors = dict[str, Any]


def field(name: str, value: float) -> Callable[[dict[str, Any], Tensors], None]:
    def change(fields: dict[str, Any], tensors: Tensors) -> None:
        fields[name] = value

    return change


def tensor(suffix: str, function: Callable[[Any], Any]) -> Callable[[dict[str, Any], Tensors], None]:
    def change(fields: dict[str, Any], tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(suffix)]:
            tensors[name] = np.ascontiguousarray(function(tensors[name]))

    return change


def swap(one: str, other: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(fields: dict[str, Any], tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith(one)]:
            twin = name.removesuffix(one) + other
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def per_head(size: int, order: list[int]) -> Callable[[Any], Any]:
    """Rows of every head in another order."""
    return lambda w: w.reshape(-1, size, w.shape[1])[:, order].reshape(w.shape)


HALVES = [*range(0, 12, 2), *range(1, 12, 2)]  # pairs (i, i + P/2) in place of (2i, 2i + 1)

CONTROLS: dict[str, Callable[[dict[str, Any], Tensors], None]] = {
    "inner eps from the config": field("inner_norm_eps", 1e-3),
    "eps of transformers' default": field("rms_norm_eps", 1e-6),
    "theta": field("rope_theta", 101.0),
    "YaRN factor": field("rope_factor", 9.0),
    "no YaRN": field("rope_factor", 1.0),
    "original context": field("rope_original_context", 64),
    "YaRN ramp's fast end": field("rope_beta_fast", 1.0),
    "amplitude of cos and sin": field("rope_mscale", 1.0),
    "softmax scale": field("rope_mscale_all_dim", 0.7),
    "scaling factor": field("routed_scaling_factor", 1.0),
    "weights not normalised": field("norm_topk_prob", 0),
    "one group more": field("topk_group", 3),
    "no groups": lambda fields, tensors: fields.update(n_group=1, topk_group=1),
    "one expert fewer": field("num_experts_per_tok", 2),
    "router bias left out": tensor("router.bias", np.zeros_like),
    "experts off by one": tensor("experts.down.w", lambda w: np.roll(w, 1, axis=0)),
    "gate and up swapped in experts": swap("experts.gate.w", "experts.up.w"),
    "gate and up swapped in shared": swap("shared.gate.w", "shared.up.w"),
    "gate and up swapped in dense": swap("mlp.gate.w", "mlp.up.w"),
    "rope before nope": tensor("q_b.w", per_head(24, [*range(12, 24), *range(12)])),
    "v before k": tensor("kv_b.w", per_head(24, [*range(12, 24), *range(12)])),
    "k_rope before the latent": tensor("kv_a.w", lambda w: np.concatenate([w[-12:], w[:-12]])),
    "halves rotated in q": tensor("q_b.w", per_head(24, [*range(12), *(12 + i for i in HALVES)])),
    "norms swapped": swap("attn_norm.w", "mlp_norm.w"),
    "latent not normed by its weight": tensor("kv_a_norm.w", np.ones_like),
    "head tied": swap("embed.w", "lm_head.w"),
}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return prepare(CONTROL, tmp_path_factory.mktemp("control"))


@pytest.mark.parametrize("name", ["nothing", *CONTROLS])
def test_controls(name: str, control: Subject, csrc: Any, tmp_path: Path) -> None:
    """A model misunderstood in one way disagrees, in reference and engine alike; a faithful copy agrees in both."""
    found = kdtr.read(control.path)
    fields, tensors = dict(found.fields), dict(found.tensors)
    path = tmp_path / "copy.kdtr"
    if name == "nothing":
        kdtr.write(path, fields, tensors)
        assert check_reference(control, fields, tensors).ratio <= 1
        assert check_engine(control, csrc, path).ratio <= 1
        return
    CONTROLS[name](fields, tensors)
    kdtr.write(path, fields, tensors)
    with pytest.raises(Disagreement):
        check_reference(control, fields, tensors)
    with pytest.raises(Disagreement):
        check_engine(control, csrc, path)


# --- the agreement itself ---


def _runs(margin: float) -> tuple[hf.Run, hf.Run, ModelConfig]:
    """Two runs of three rows that choose other experts in row 1, where the scores are ``margin`` apart."""
    config = ModelConfig.of(
        dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "num_heads"), 1)
        | {
            "num_layers": 1,
            "first_k_dense": 0,
            "q_lora_rank": 1,
            "kv_lora_rank": 1,
            "qk_nope_head_dim": 1,
            "n_group": 1,
        }
        | {"qk_rope_head_dim": 2, "v_head_dim": 1, "n_routed_experts": 3, "n_shared_experts": 0, "topk_group": 1}
        | {"num_experts_per_tok": 1, "norm_topk_prob": 1, "rope_original_context": 1, "max_context": 9}
        | {"eos_id": -1, "mask_id": -1}
        | dict.fromkeys(("routed_scaling_factor", "rms_norm_eps", "inner_norm_eps", "rope_factor", "rope_mscale"), 1.0)
        | {"rope_theta": 2.0, "rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "rope_mscale_all_dim": 1.0},
        "test",
    )
    logits = np.arange(6.0).reshape(3, 2)
    weights = np.ones((3, 1))
    scores = np.array([[0.9, 0.1, 0.0], [0.5, 0.5 - margin, 0.0], [0.9, 0.1, 0.0]])
    exact = hf.Run(logits, (np.array([[0], [0], [0]]),), (weights,), (scores,))
    moved = logits.copy()
    moved[1:] += 5  # what follows another expert is not compared
    return hf.Run(moved, (np.array([[0], [1], [0]]),), (weights,)), exact, config


def test_near_ties_of_the_router_are_certified() -> None:
    got, exact, config = _runs(margin=1e-7)
    assert agree(got, exact, Noise(1e-6, 1e-6, 1e-6), config) == agreement.Agreement(0.0, True)
    got, exact, config = _runs(margin=1e-5)
    with pytest.raises(Disagreement, match="experts of MoE layer 0, row 1"):
        agree(got, exact, Noise(1e-6, 1e-6, 1e-6), config)


def test_near_ties_of_the_argmax_are_certified() -> None:
    logits = np.array([[0.0, 1.0, 1.0 - 1e-7], [0.0, 1.0, 0.9]])
    exact = hf.Run(logits, (), ())
    assert same_tokens([1, 1], [1, 1], exact, 1, 1e-6)
    assert not same_tokens([2, 0], [1, 1], exact, 1, 1e-6)
    for wrong in ([0, 1], [1, 2]):
        with pytest.raises(Disagreement):
            same_tokens(wrong, [1, 1], exact, 1, 1e-6)
