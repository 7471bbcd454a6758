"""The drafter against the same equations written here in PyTorch, and its goldens against the loop that takes them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from harness import bundles
from harness.golden import Golden
from refs import recipe
from refs.ddtree import build, cut
from refs.decode import Request, decode
from refs.drafter_config import DrafterConfig, split
from refs.errors import ConfigError, DrafterError, MissingTensor, RequestError
from refs.golden import Rejected, _check_order
from refs.model import Model

CONFIGS = ("dflash", "dflash_one", "dflash_wide", "text")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices so small that torch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def opened(name: str, precision: str = "fp32") -> tuple[Golden, Model]:
    path = bundles.ensure([name])[name]
    return Golden.open(path, precision), Model.open(path, precision)


class PlainDrafter:
    """docs/model.md, Drafter, in float64: the whole context and the block go through every layer each time."""

    def __init__(self, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.f = {name.removeprefix("draft_"): value for name, value in fields.items()}
        names = [n for n in tensors if n.startswith("drafter.") or n in ("embed.w", "lm_head.w")]
        self.t = {n: torch.from_numpy(np.array(tensors[n])).double() for n in names}

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.f["rms_norm_eps"])
        return x * scale * self.t[f"drafter.{name}.w"]

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [heads, rows, W]: the formula of YaRN as its authors' code has it, then halves rotated."""
        w, theta, factor, original = (
            x.shape[-1],
            *(self.f[f"rope_{n}"] for n in ("theta", "factor", "original_context")),
        )
        power = torch.arange(0, w, 2, dtype=torch.float64) / w
        plain = 1.0 / theta**power
        if factor > 1:
            edges = [
                w * np.log(original / (2 * np.pi * self.f[f"rope_beta_{n}"])) / (2 * np.log(theta))
                for n in ("fast", "slow")
            ]
            low, high = max(np.floor(edges[0]), 0), min(np.ceil(edges[1]), w - 1)
            keep = 1 - ((torch.arange(w // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            plain = plain / factor * (1 - keep) + plain * keep
        angle = torch.cat([positions[:, None] * plain] * 2, -1)
        turned = torch.cat([-x[..., w // 2 :], x[..., : w // 2]], -1)
        return (x * angle.cos() + turned * angle.sin()) * self.f["rope_amplitude"]

    def logits(self, features: Tensor, bonus: int) -> Tensor:
        t, f = self.t, self.f
        n, block = len(features), f["block_size"]
        context = self.norm(features @ t["drafter.fc.w"].T, "hidden_norm")
        x = t["embed.w"][[bonus] + [f["mask_id"]] * (block - 1)]
        positions = torch.arange(n + block, dtype=torch.float64)
        for i in range(f["num_layers"]):
            at = f"layers.{i}."

            def heads(rows: Tensor, name: str, at: str = at) -> Tensor:
                return (rows @ t[f"drafter.{at}attn.{name}.w"].T).unflatten(-1, (-1, f["head_dim"])).transpose(0, 1)

            a = self.norm(x, at + "attn_norm")
            seen = torch.cat([context, a])
            q = self.rope(self.norm(heads(a, "q"), at + "attn.q_norm"), positions[n:])
            k = self.rope(self.norm(heads(seen, "k"), at + "attn.k_norm"), positions)
            o = scaled_dot_product_attention(q[None], k[None], heads(seen, "v")[None], enable_gqa=True)[0]
            x = x + o.transpose(0, 1).flatten(1) @ t[f"drafter.{at}attn.o.w"].T
            c = self.norm(x, at + "mlp_norm")
            gate, up = (c @ t[f"drafter.{at}mlp.{name}.w"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ t[f"drafter.{at}mlp.down.w"].T
        return self.norm(x, "norm")[1:] @ t["lm_head.w"].T


def plain(golden: Golden) -> PlainDrafter:
    own, drafter = split(golden.file.fields)
    return PlainDrafter({**drafter, "mask_id": own["mask_id"]}, golden.file.tensors)


def features(golden: Golden) -> Tensor:
    layers = golden.file.tensor("drafter.taps").tolist()
    return torch.from_numpy(np.concatenate([golden.taps[f"layers.{layer}.out"] for layer in layers], axis=1))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_goldens_are_those_of_the_same_equations_in_torch(name: str, precision: str) -> None:
    golden, _ = opened(name, precision)
    drafter, rows = plain(golden), features(golden)
    at = 0
    for want, taken in zip(golden.draft_logits(), golden.rounds("dflash"), strict=True):
        got = drafter.logits(rows[: len(golden.prompt) + at], golden.tokens[at]).numpy()
        assert np.abs(got[: len(want)] - want).max() < 1e-11
        at += len(taken.accepted)
    assert at == len(golden.tokens)


@pytest.mark.parametrize("name", ["dflash", "dflash_one", "dflash_wide"])
def test_the_model_takes_the_golden_rounds(name: str) -> None:
    """Generation derives rounds from AR's tokens and taps; here the model verifies its own drafter's trees."""
    golden, model = opened(name)
    run = recipe.load(name).run
    ar = decode(model, Request(golden.prompt, run.max_tokens))
    limits = {"block_size": run.block_size, "budget": run.budget}
    got = decode(model, Request(golden.prompt, run.max_tokens, dflash=True, **limits))
    assert got.tokens == ar.tokens == golden.tokens
    assert got.logits.tobytes() == ar.logits.tobytes()
    taken = [(r.tree.tokens, r.tree.parents, r.accepted) for r in got.rounds]
    assert taken == [(r.tokens, r.parents, r.accepted) for r in golden.rounds("dflash")]
    drafted = np.stack([r.draft[: golden.draft_logits().shape[1]] for r in got.rounds if r.draft is not None])
    assert drafted.tobytes() == golden.draft_logits().tobytes()


def test_the_context_may_come_in_any_pieces() -> None:
    golden, model = opened("dflash")
    rows = features(golden).numpy()
    drafter = model.drafter
    assert drafter is not None
    found = []
    for cuts in ([len(rows)], [1] * len(rows), [5, 9, len(rows) - 14]):
        drafter.reset()
        for n in cuts:
            drafter.extend(rows[drafter.length : drafter.length + n])
        found.append(drafter.draft(7).tobytes())
    assert len(set(found)) == 1


def test_a_golden_tree_stays_when_every_logit_moves_by_the_tolerance() -> None:
    for name in ("dflash", "dflash_wide"):
        golden, _ = opened(name)
        budget, tolerance = recipe.load(name).run.budget, golden.tolerance("draft")
        rng = np.random.default_rng(1)
        for logits in golden.draft_logits():
            want = build(0, logits.astype(np.float32), budget)
            for _ in range(20):
                moved = logits + tolerance * rng.choice([-1, 1], logits.shape)
                assert build(0, moved.astype(np.float32), budget).tokens == want.tokens


def test_a_tree_that_hangs_on_less_is_rejected() -> None:
    logits = np.array([[3.0, 1.0, 0.5, -4.0], [2.0, 0.0, -1.0, -3.0]])
    _check_order(logits, 3, 1e-3, "apart")
    logits[0, 2] = 1.0 - 1e-4
    with pytest.raises(Rejected, match="near: tree order margin"):
        _check_order(logits, 3, 1e-3, "near")
    _check_order(logits, 3, 1e-5, "apart for a better engine")


def test_a_tree_is_cut_where_tokens_over_cost_are_greatest() -> None:
    golden, _ = opened("dflash")
    for logits in golden.draft_logits():
        tree = build(0, logits.astype(np.float32), 20)
        expected = np.cumsum(np.exp(tree.scores))
        for slope in (0.0, 0.01, 0.05, 1.0):
            costs = 1 + slope * np.arange(21)
            assert cut(tree, costs.tolist()).size == 1 + int((expected / costs).argmax())


def test_costs_and_chain_in_the_loop() -> None:
    golden, model = opened("dflash")
    limits = {"dflash": True, "block_size": 5, "budget": 20}
    free = decode(model, Request(golden.prompt, 12, costs=[1.0] * 21, **limits))
    dear = decode(model, Request(golden.prompt, 12, costs=[1.0] + [1e6] * 20, **limits))
    alone = decode(model, Request(golden.prompt, 12, chain=True, **limits))
    assert free.tokens == dear.tokens == alone.tokens == golden.tokens[:12]
    assert {r.tree.size for r in free.rounds} == {
        r.tree.size for r in decode(model, Request(golden.prompt, 12, **limits)).rounds
    }
    assert [r.tree.size for r in dear.rounds] == [1] * 12
    assert all(r.tree.parents == tuple(range(-1, r.tree.size - 1)) for r in alone.rounds)
    with pytest.raises(RequestError, match="3 costs, must be 21"):
        decode(model, Request(golden.prompt, 12, costs=[1.0] * 3, **limits))


def test_what_is_not_there_is_named() -> None:
    golden, _ = opened("dflash")
    fields, tensors = dict(golden.file.fields), {n: np.array(t) for n, t in golden.file.tensors.items()}
    without = {name: value for name, value in fields.items() if not name.startswith("draft_")}
    with pytest.raises(DrafterError, match="no drafter of its own"):
        Model(without, tensors, "fp32").draft(1)
    for name in ("drafter.taps", "drafter.fc.w", "drafter.layers.2.attn.k_norm.w"):
        with pytest.raises(MissingTensor, match=f"file: {name}: "):
            Model(fields, {n: t for n, t in tensors.items() if n != name}, "fp32", file="file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, "draft_num_kv_heads: 4: does not divide num_heads"),
        ({"head_dim": 7}, "draft_head_dim: 7: odd"),
        ({"block_size": 1}, "draft_block_size: 1: "),
        ({"rope_theta": 1.0}, "draft_rope_theta: 1.0: not above 1"),
        ({"rope_factor": 0.5}, "draft_rope_factor: 0.5: below 1"),
        ({"rms_norm_eps": 0.0}, "draft_rms_norm_eps: 0.0 is not above 0"),
        ({"num_layers": 3.0}, "draft_num_layers: 3.0 is not an integer"),
        ({"colour": 3}, "draft_colour: unknown field"),
        ({"taps": []}, "drafter.taps: .* is empty"),
        ({"taps": [1, 1]}, "drafter.taps: .* does not ascend"),
        ({"taps": [1, 4]}, "drafter.taps: .* leaves the layers 0..3"),
    ],
    ids=str,
)
def test_fields_out_of_range(change: dict[str, Any], message: str) -> None:
    made = recipe.load("dflash")
    assert made.drafter is not None
    fields = {name.removeprefix("draft_"): value for name, value in made.drafter.fields().items()} | change
    taps = fields.pop("taps", [0, 1])
    with pytest.raises(ConfigError, match=f"file: {message}"):
        DrafterConfig.of(fields, taps, made.model, "file")
    with pytest.raises(ConfigError, match="mask_id"):
        DrafterConfig.of(dict(_bare(made.drafter)), [0], dataclasses.replace(made.model, mask_id=-1), "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": {"drafters": ["oracle"]}}, "run: drafters: dflash is named if and only if"),
        ({"drafter": {"taps": [0, 9]}}, "drafter: drafter.taps: .* leaves the layers"),
        ({"drafter": {"taps": "all"}}, "drafter: taps: 'all' is not a list"),
        ({"drafter": {"num_heads": 5}}, "drafter: draft_num_kv_heads: 2: does not divide"),
        ({"drafter": {"colour": 1}}, "drafter: draft_colour: unknown field"),
    ],
    ids=str,
)
def test_a_recipe_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    shutil.copy(recipe.CONFIGS / "dflash.yaml", tmp_path)
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"name": "other", "purpose": "x", "base": "dflash", **change}))
    with pytest.raises(ConfigError, match=message):
        recipe.load("other", tmp_path)


def test_a_drafter_asked_for_and_not_there_is_refused(tmp_path: Path) -> None:
    shutil.copy(recipe.CONFIGS / "tiny2.yaml", tmp_path)
    asked = {"name": "other", "purpose": "x", "base": "tiny2", "run": {"drafters": ["dflash"]}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(asked))
    with pytest.raises(ConfigError, match="dflash is named if and only if there is a section drafter"):
        recipe.load("other", tmp_path)


def _bare(config: DrafterConfig) -> Mapping[str, Any]:
    return {name.removeprefix("draft_"): value for name, value in config.fields().items()}
