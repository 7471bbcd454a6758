"""Recipes: what is shipped is complete, what is malformed is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from refs import recipe
from refs.edges import EDGES
from refs.errors import ConfigError
from refs.rope import inv_freq


def test_every_edge_asked_for_has_its_config() -> None:
    """The list of issue 2: a config whose fields or checked edges are about it."""
    loaded = {name: recipe.load(name) for name in recipe.names()}
    shown = {edge: [n for n, r in loaded.items() if edge in r.edges] for edge in EDGES}
    assert all(shown.values()), shown
    for name, r in loaded.items():
        assert len(r.purpose) > 40, name
    m = {name: r.model for name, r in loaded.items()}
    run = {name: r.run for name, r in loaded.items()}
    assert (m["tiny"].hidden_size, m["tiny"].num_layers, m["tiny"].first_k_dense, m["tiny"].vocab_size) == (
        64,
        6,
        1,
        512,
    )
    assert (run["tiny"].max_tokens, run["tiny"].block_size, run["tiny"].budget) == (24, 8, 7)
    assert m["groups"].n_group > 1
    assert m["experts"].n_routed_experts > 256
    assert m["odd"].moe_intermediate_size % 32
    assert m["odd"].hidden_size % 2
    assert run["long"].prompt_length > 2 * 64
    assert len(run["prompt1"].prompt) == 1
    assert run["past_end"].budget > run["past_end"].max_tokens
    assert run["past_end"].block_size > run["past_end"].max_tokens
    assert run["budget0"].budget == 0
    assert run["budget1"].budget == 1
    assert run["budget_vocab"].budget > m["budget_vocab"].vocab_size
    assert run["block1"].block_size == 1
    assert run["wide"].budget == 64
    assert run["sampled"].temperature > 0
    assert run["limit"].draft_rows > run["limit"].max_tokens + run["limit"].block_size
    assert m["vocab"].vocab_size > 2 * 4096
    ramps = [
        dataclasses.replace(m["yarn"], **{field: value})
        for field, value in (
            ("rope_original_context", m["yarn"].max_context),
            ("rope_beta_fast", 1e9),  # the ramp then begins at pair 0
            ("rope_beta_slow", 1e-9),  # and ends at the last
        )
    ]
    assert all(not np.array_equal(inv_freq(m["yarn"]), inv_freq(other)) for other in ramps)
    assert m["budget1"].max_context == run["budget1"].prompt_length + run["budget1"].max_tokens
    assert not m["groups"].n_shared_experts
    assert not m["odd"].first_k_dense
    for value in (v for v in vars(m["tiny2"]).values() if isinstance(v, int) and v > 2):
        assert value & (value - 1), f"{value} is a power of two"


def written(folder: Path, changes: dict[str, Any], *, drop: tuple[str, ...] = (), name: str = "tiny") -> str:
    raw = yaml.safe_load((recipe.CONFIGS / "tiny.yaml").read_text("utf-8"))
    for key, value in changes.items():
        section, _, field = key.partition(".")
        if field:
            raw.setdefault(section, {})[field] = value
        else:
            raw[section] = value
    for key in drop:
        section, _, field = key.partition(".")
        if field:
            del raw[section][field]
        else:
            del raw[section]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(raw), "utf-8")
    return name


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"surprise": 1}, "surprise", "unknown field"),
        ({"model.surprise": 1}, "model: surprise", "unknown field"),
        ({"weights.surprise": 1}, "weights: surprise", "unknown field"),
        ({"run.surprise": 1}, "run: surprise", "unknown field"),
        ({"name": "other"}, "name", "differs from the file's"),
        ({"purpose": ""}, "purpose", "not a text"),
        ({"purpose": 7}, "purpose", "not a text"),
        ({"exact_ties": "yes"}, "exact_ties", "neither true nor false"),
        ({"model": [1]}, "model", "not a mapping"),
        ({"model.hidden_size": "64"}, "model: hidden_size", "not an integer"),
        ({"model.rope_theta": 10000}, "model: rope_theta", "written with a point"),
        ({"weights.logit_gain": 1}, "weights: logit_gain", "not of type float"),
        ({"weights.outlier_channels": 1.5}, "weights: outlier_channels", "not of type int"),
        ({"weights.one_hot_ties": 1}, "weights: one_hot_ties", "not of type bool"),
        ({"run.max_tokens": True}, "run: max_tokens", "not of type int"),
        ({"run.max_tokens": 0}, "run: max_tokens", "less than 1"),
        ({"run.block_size": 0}, "run: block_size", "less than 1"),
        ({"run.budget": -1}, "run: budget", "negative"),
        ({"run.seed": -1}, "run: seed", "not in"),
        ({"run.temperature": -1.0}, "run: temperature", "negative"),
        ({"run.prompt": [1]}, "run: prompt", "either"),
        ({"run.prompt_length": 0}, "run: prompt", "either"),
        ({"run.prompt_length": 0, "run.prompt": [512]}, "run: prompt", "outside the vocabulary"),
        ({"run.prompt_length": 0, "run.prompt": ["a"]}, "run: prompt", "not a list of integers"),
        ({"run.prompt_length": 500}, "run: max_tokens", "exceed max_context"),
        ({"run.drafters": ["oracle", "psychic"]}, "run: drafters", "psychic"),
        ({"run.drafters": ["oracle", "oracle"]}, "run: drafters", "different names"),
        ({"weights.checkpoint": "text"}, "weights: checkpoint", "no other option"),
        ({"weights": {"checkpoint": "nowhere"}}, "weights: checkpoint", "no such folder"),
        ({"run.eos": "last"}, "run: eos", "none of"),
        ({"run.eos": "first", "model.eos_id": 3}, "run: eos", "the model's fields do too"),
        ({"edges": ["cliff"]}, "edges", "cliff"),
        ({"edges": "cliff"}, "edges", "not a list"),
        ({"base": "tiny9"}, "base", "there is no config 'tiny9'; did you mean tiny"),
        ({"model.rope_beta_fast": 64 / 6.283185307179586}, "model: rope_beta_fast", "too near a whole number"),
    ],
)
def test_each_mistake_names_file_and_field(tmp_path: Path, changes: dict[str, Any], field: str, reason: str) -> None:
    name = written(tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        recipe.load(name, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/")
    assert f".yaml: {field}: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("key", ["name", "purpose", "model.hidden_size", "run.max_tokens", "run.budget"])
def test_what_is_missing_is_named(tmp_path: Path, key: str) -> None:
    name = written(tmp_path, {}, drop=(key,))
    with pytest.raises(ConfigError, match=rf"{key.split('.')[-1]}: (missing|None)"):
        recipe.load(name, tmp_path)


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\x00", "a: b: c"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"x\.yaml: file: "):
        recipe.load("x", tmp_path)


def test_a_base_gives_what_is_not_said(tmp_path: Path) -> None:
    written(tmp_path, {})
    text = "name: y\npurpose: p\nbase: tiny\nmodel: {vocab_size: 77, mask_id: -1}\n"
    (tmp_path / "y.yaml").write_text(text, "utf-8")
    got, below = recipe.load("y", tmp_path), recipe.load("tiny", tmp_path)
    assert got.model.vocab_size == 77
    assert got.model.hidden_size == below.model.hidden_size
    assert got.run == below.run
    assert got.weights == below.weights
    assert got.edges == ()
    (tmp_path / "z.yaml").write_text("name: z\npurpose: p\nbase: y\n", "utf-8")
    with pytest.raises(ConfigError, match=r"z\.yaml: base: y\.yaml has a base itself"):
        recipe.load("z", tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tiny3\.yaml: file: .* no such config; did you mean tiny2? or tiny2?\?"):
        recipe.load("tiny3")
    with pytest.raises(ConfigError, match=r"nothing\.yaml: file: .* no such config; known configs: .*tiny, tiny2"):
        recipe.load("nothing")
