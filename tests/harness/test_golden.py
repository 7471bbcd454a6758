"""What checks read of a bundle: the run that is stored, whole and of one precision alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from harness.golden import Golden, GoldenError
from harness.protocol import Draft, OwnDrafter
from refs import kdtr


@pytest.fixture
def golden(micro: Path) -> Golden:
    return Golden.open(micro, "int4")


def changed(golden: Golden, tensors: dict[str, Any] | None = None, **fields: Any) -> Golden:
    """The same bundle with other model fields or tensors."""
    given = golden.file.tensors if tensors is None else tensors
    file = SimpleNamespace(file="x.kdtr", fields={**golden.file.fields, **fields}, tensors=given, tensor=given.get)
    return replace(golden, file=cast(kdtr.Kdtr, file))


def test_a_request_is_the_run_that_is_stored(golden: Golden) -> None:
    golden = replace(golden, meta={**golden.meta, "run": {**golden.meta["run"], "temperature": 0.5, "seed": 9}})
    ar = golden.request()
    assert (ar.prompt, ar.max_tokens, ar.temperature, ar.seed, ar.record) == (golden.prompt, 8, 0.5, 9, True)
    assert (ar.draft, ar.block_size, ar.budget) == (None, 1, 0)
    noisy = golden.request("noisy")
    assert isinstance(noisy.draft, Draft)
    assert noisy.draft.first == 5 + 1, "the root stands at the position after the prompt"
    assert noisy.draft.logits.dtype == np.float32
    np.testing.assert_array_equal(noisy.draft.logits, golden.file.tensor("draft.int4.noisy"))
    assert replace(noisy, draft=None) == replace(ar, block_size=4, budget=5)
    own = golden.request("dflash")
    assert own == replace(ar, draft=OwnDrafter(), block_size=4, budget=5)
    sampled = golden.request("noisy", temperature=0.75, seed=3, budget=2)
    assert (sampled.temperature, sampled.seed, sampled.budget, sampled.block_size) == (0.75, 3, 2, 4)


@pytest.mark.parametrize("drafter", ["oracle", "noisy", "hostile"])
def test_rounds_are_whole_and_without_padding(golden: Golden, drafter: str) -> None:
    committed: list[int] = []
    for round in golden.rounds(drafter):
        assert len(round.tokens) == len(round.parents) <= 1 + 5
        assert round.parents[0] == -1
        assert round.accepted[0] == 0
        committed += [round.tokens[row] for row in round.accepted]
    assert tuple(committed) == golden.tokens


def test_taps_stand_in_the_order_of_computation(golden: Golden) -> None:
    names = ["embed", "layers.0.out", "layers.2.out", "layers.10.out"]
    tensors = {f"golden.int4.taps.{name}": np.full(2, number) for number, name in enumerate(names)}
    others = {"golden.fp32.taps.layers.1.out": np.zeros(2), "golden.int4.tokens": np.zeros(2)}
    found = changed(golden, dict(sorted({**tensors, **others}.items()))).taps
    assert [(name, int(rows[0])) for name, rows in found.items()] == [(name, at) for at, name in enumerate(names)]


def test_a_bound_that_is_missing_is_named(golden: Golden) -> None:
    assert golden.tolerance("logits") == golden.meta["tolerance"]["int4"]["logits"] > 0
    with pytest.raises(GoldenError, match=r"micro\.kdtr: meta\.json: tolerance\.int4\.layers\.7\.out is missing"):
        golden.tolerance("layers.7.out")


def test_a_model_has_experts_where_not_all_layers_are_dense(golden: Golden) -> None:
    dense = [changed(golden, num_layers=2, first_k_dense=n).has_moe for n in (0, 1, 2)]
    assert dense == [True, True, False]


def test_the_other_precision_is_that_with_other_experts(golden: Golden) -> None:
    names = {"fp32": "int4", "int4": "fp32", "bf16": "int4_bf16", "int4-bf16": "bf16"}
    for precision, other in names.items():
        found = replace(
            changed(golden, {f"golden.{name}.logits": name for name in names.values()}), precision=precision
        )
        assert cast(str, found.other_logits()) == other
        assert replace(changed(golden, {}), precision=precision).other_logits() is None


@pytest.mark.parametrize("precision", ["bf16", "int4-bf16"])
def test_a_bundle_without_the_precision_is_named(micro: Path, precision: str) -> None:
    with pytest.raises(GoldenError, match=rf"golden\.{precision.replace('-', '_')}\.tokens: not a bundle with this"):
        Golden.open(micro, precision)


def test_a_file_without_goldens_is_no_bundle(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kdtr.read(micro)
    bare = SimpleNamespace(tensors={name: rows for name, rows in whole.tensors.items() if name != "meta.json"})
    monkeypatch.setattr("harness.golden.read", lambda path: bare)
    with pytest.raises(GoldenError, match="not a bundle"):
        Golden.open(micro, "int4")
