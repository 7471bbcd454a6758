"""Bundles: what they hold, that nothing but refs/ decides their bytes, and that unusable draws are made anew."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refs import draw, edges, generate, golden, kdtr, quant, recipe
from refs.config import BF16_PRECISIONS, F32_PRECISIONS
from refs.drafters import DRAFTERS
from refs.errors import ConfigError
from refs.exact import Draws

ROOT = Path(generate.__file__).parents[1]


@cache
def result(name: str) -> generate.Result:
    return generate.generate(recipe.load(name))


@cache
def parsed(name: str) -> kdtr.Kdtr:
    return kdtr.parse(kdtr.encode(*generate.layout(result(name))), name, verify=True)


NAMES = ["budget0", "eos_mid", "past_end", "ties"]


def results_of(file: kdtr.Kdtr, made: recipe.Recipe, precision: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind of every result of one precision by its name, as the page lists them."""
    run, v, d = made.run, made.model.vocab_size, made.model.hidden_size
    key = precision.replace("-", "_")
    at = f"golden.{key}."
    n, t = file.tensor("golden.prompt").size, file.tensor(at + "tokens").size
    want: dict[str, tuple[tuple[int, ...], str]] = {
        at + "tokens": ((t,), "i32"),
        at + "logits": ((t + 1, v), "f64"),
    }
    for tap in ("embed", *(f"layers.{i}.out" for i in range(made.model.num_layers))):
        want[at + "taps." + tap] = ((n + t, d), "f64")
    if precision in BF16_PRECISIONS:
        want[at + "decided"] = ((n + t,), "u8")
    else:
        for i in range(made.model.num_layers):
            want[at + f"cache.layers.{i}.latent"] = ((n + t, made.model.kv_lora_rank), "f64")
            want[at + f"cache.layers.{i}.k_rope"] = ((n + t, made.model.qk_rope_head_dim), "f64")
    for drafter in run.drafters:
        rounds = file.tensor(f"{at}{drafter}.size").size
        want |= {
            f"draft.{key}.{drafter}": ((run.draft_rows or run.max_tokens - 1, v), "f32"),
            f"{at}{drafter}.size": ((rounds,), "i32"),
            f"{at}{drafter}.tokens": ((rounds, run.budget + 1), "i32"),
            f"{at}{drafter}.parents": ((rounds, run.budget + 1), "i32"),
            f"{at}{drafter}.accepted": ((rounds, run.block_size), "i32"),
        }
    return want


@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_holds_what_the_page_lists(name: str) -> None:
    file, made = parsed(name), recipe.load(name)
    run = made.run
    meta = json.loads(file.tensor("meta.json").tobytes())
    assert (meta["config"], meta["purpose"], meta["exact_ties"]) == (name, made.purpose, made.exact_ties)
    assert meta["run"]["drafters"] == list(run.drafters)
    assert {k: meta["run"][k] for k in ("max_tokens", "block_size", "budget")} == {
        "max_tokens": run.max_tokens,
        "block_size": run.block_size,
        "budget": run.budget,
    }
    known = {"meta.json", "golden.prompt"}
    for precision in made.precisions:
        want = {**made.model.stored(precision), **results_of(file, made, precision)}
        for tensor, (shape, kind) in want.items():
            assert (file.entries[tensor].shape, file.entries[tensor].dtype) == (shape, kind), tensor
        known |= set(want)
    assert set(file.tensors) == known
    assert dict(file.fields) == made.model.fields() | {"eos_id": result(name).eos}


@pytest.mark.parametrize("name", NAMES)
def test_rounds_accept_every_token_and_are_padded(name: str) -> None:
    file, made = parsed(name), recipe.load(name)
    for precision in made.precisions:
        at = f"golden.{precision.replace('-', '_')}."
        for drafter in made.run.drafters:
            accepted = file.tensor(f"{at}{drafter}.accepted")
            assert np.count_nonzero(accepted >= 0) == file.tensor(at + "tokens").size
            padding = np.arange(made.run.budget + 1) >= file.tensor(f"{at}{drafter}.size")[:, None]
            for array in ("tokens", "parents"):
                assert (file.tensor(f"{at}{drafter}.{array}")[padding] == -1).all()


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_multiples_of_the_noise_and_margins_are_beyond_it(name: str) -> None:
    file, made = parsed(name), recipe.load(name)
    meta = json.loads(file.tensor("meta.json").tobytes())
    for precision in made.precisions:
        rounding = precision in BF16_PRECISIONS
        inside = ("out",) if rounding else ("out", "mla.latent", "mla.k_rope")
        names = {
            "logits",
            "embed",
            *(("logits.nmse", "logits.kl") if rounding else ()),
            *(f"layers.{i}.{tap}" for i in range(made.model.num_layers) for tap in inside),
        }
        assert set(meta["noise"][precision]) == set(meta["tolerance"][precision]) == names
        for tap, noise in meta["noise"][precision].items():
            assert meta["tolerance"][precision][tap] == (4 if rounding else meta["multiple"]) * noise
            assert (noise == 0) == (tap == "embed")
        if rounding:
            assert file.tensor(f"golden.{precision.replace('-', '_')}.decided").mean() >= 1 / 3
            continue
        for margin in meta["margins"][precision].values():
            assert margin > 16 * meta["noise"][precision]["logits"] or made.exact_ties


def digest_elsewhere(name: str, **environment: str) -> str:
    code = "import sys, hashlib; from refs import generate, kdtr, recipe; " + (
        "print(hashlib.sha256(kdtr.encode(*generate.layout(generate.generate(recipe.load(sys.argv[1]))))).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_bytes_do_not_depend_on_hash_seed_locale_or_vector_width() -> None:
    """`python -m harness.reproduce` tries every way there is; this is the quick part of it."""
    here = hashlib.sha256(kdtr.encode(*generate.layout(generate.generate(recipe.load("budget0"))))).hexdigest()
    features = " ".join(sorted(supported_features()))
    other = {"PYTHONHASHSEED": "12345", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "NPY_DISABLE_CPU_FEATURES": features}
    assert digest_elsewhere("budget0", **other) == here


def supported_features() -> set[str]:
    """What numpy dispatches on this machine, as NPY_DISABLE_CPU_FEATURES names it."""
    found = np.show_config(mode="dicts")
    assert found is not None
    return set(found.get("SIMD Extensions", {}).get("found", []))


def test_precisions_differ_in_their_goldens() -> None:
    file = parsed("budget0")
    apart = np.abs(file.tensor("golden.fp32.logits")[0] - file.tensor("golden.int4.logits")[0]).max()
    tolerance = json.loads(file.tensor("meta.json").tobytes())["tolerance"]
    assert apart > 2 * max(tolerance[p]["logits"] for p in F32_PRECISIONS)
    same = result("budget0").goldens["fp32"]
    with pytest.raises(golden.Rejected, match="less than the tolerance"):
        generate._check_precisions_differ({"fp32": same, "int4": same})


def test_decisions_within_the_noise_are_drawn_anew_and_in_the_end_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "MULTIPLE", 1e6)
    monkeypatch.setattr(generate, "ATTEMPTS", 3)
    with pytest.raises(generate.GenerateError, match=r"budget0: none of 3 attempts .*fp32: \w+ \(3x\)"):
        generate.generate(recipe.load("budget0"))


def test_ties_are_refused_where_they_are_not_the_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe.load("ties")
    result("ties")
    monkeypatch.setattr(generate, "ATTEMPTS", 2)
    with pytest.raises(generate.GenerateError, match="exact ties of top1"):
        generate.generate(dataclasses.replace(made, exact_ties=False))


def test_attempts_draw_everything_anew() -> None:
    made = recipe.load("budget0")
    a, b = draw.weights(made, 0), draw.weights(made, 1)
    assert all((a[name] != b[name]).any() for name in a)
    assert draw.prompt(made, 0) != draw.prompt(made, 1)
    again = draw.weights(made, 0)
    assert all(a[name].tobytes() == again[name].tobytes() for name in a)


ELSEWHERE = {  # of each edge a config that has what it asks about but does not show it
    "eos_first": "eos_mid",
    "eos_mid_path": "eos_first",
    "eos_rejected": "eos_first",
    "token_zero": "block1",
    "chunk_crossing": "block1",
    "unused_experts": "sampled",
    "bias_matters": "no bias",
    "groups_matter": "block1",
    "negative_groups": "block1",
    "router_ties": "block1",
    "argmax_ties": "block1",
    "draft_ties": "eos_mid",
    "limit_cuts_depth": "block1",
    "beyond_original": "block1",
    "extreme_nibbles": "block1",
    "several_accepted": "block1",
    "scattered_path": "dflash_one",
}


@pytest.mark.parametrize("edge", edges.EDGES)
def test_an_edge_that_is_not_there_is_not_seen(edge: str) -> None:
    if ELSEWHERE[edge] == "no bias":
        made = recipe.load("budget0")
        made = dataclasses.replace(made, weights=dataclasses.replace(made.weights, router_bias=0.0), edges=())
        shown = generate.generate(made)
    else:
        shown = result(ELSEWHERE[edge])
    assert not edges.EDGES[edge](shown, "fp32")


def test_an_edge_that_never_shows_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "ATTEMPTS", 2)
    made = dataclasses.replace(recipe.load("block1"), edges=("token_zero",))
    with pytest.raises(generate.GenerateError, match="edge token_zero is not shown"):
        generate.generate(made)


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_drafters_are_what_they_are_called(step: float) -> None:
    tokens = tuple(Draws("t").below(50, 400).tolist())
    rows = np.arange(400)
    tables = {name: make(tokens, 50, Draws("d", name), step) for name, make in DRAFTERS.items()}
    assert all(table.dtype == np.float32 and table.shape == (400, 50) for table in tables.values())
    best = np.sort(tables["oracle"], axis=1)
    assert (np.argmax(tables["oracle"], axis=1) == tokens).all()
    assert (best[:, -1] > best[:, -2] + 1).all()
    assert (tables["hostile"][rows, list(tokens)] == -np.inf).all()
    assert np.isinf(tables["hostile"]).sum() == 400
    ranks = (tables["noisy"] > tables["noisy"][rows, list(tokens)][:, None]).sum(axis=1)
    assert 0.45 < (ranks == 0).mean() < (0.75 if step else 0.65)  # a tie for the third place may be one for the first
    assert 0.15 < ((ranks > 0) & (ranks < 5)).mean() < 0.35
    assert 0.12 < (ranks == 49).mean() < 0.3
    if step:
        assert all((np.rint(t[np.isfinite(t)]) == t[np.isfinite(t)]).all() for t in tables.values())


def test_special_groups_are_there() -> None:
    tensors = result("outliers").tensors
    name = "layers.1.experts.gate."
    q = quant.unpack(np.asarray(tensors[name + "qw"], np.uint8), 64).reshape(-1, 32)
    scales = np.asarray(tensors[name + "sc"]).reshape(-1)
    zero = scales == 0
    assert 0.05 < zero.mean() < 0.15
    assert not q[zero].any()
    extreme = ((q == 7) | (q == -8)).all(axis=1)
    assert 0.05 < extreme.mean() < 0.15
    assert ((q == 7).any(axis=1) & (q == -8).any(axis=1) & extreme).any()
    columns = np.abs(np.asarray(tensors[name + "w"], np.float64)).reshape(-1, 64).mean(axis=0)
    assert (np.sort(columns)[-2:] > 2.5 * np.median(columns)).all()


def test_the_command_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--out", str(tmp_path / "new"), "budget0"]) == 0
    assert "budget0: attempt 0" in capsys.readouterr().out
    assert (tmp_path / "new" / "budget0.kdtr").read_bytes() == kdtr.encode(*generate.layout(result("budget0")))
    assert generate.main(["--out", str(tmp_path), "nothing"]) == 3
    assert "nothing.yaml: file: there is no such config" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        generate.write("nothing", tmp_path / "x")


def test_types_of_the_layout() -> None:
    _, tensors = generate.layout(result("budget0"))
    kinds: dict[str, Any] = {name: t.dtype.name for name, t in tensors.items()}
    assert set(kinds.values()) == {"float64", "float32", "int32", "uint8", "uint16"}
