"""A model whose weights are converted as they are used gives the bits of one that holds them; writing in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.bundles import ensure
from refs import counter, draw, generate, kdtr, model, recipe, streamed
from refs.errors import MissingTensor
from refs.model import Model


@pytest.mark.parametrize(("name", "precision"), [("tiny2", "fp32"), ("tiny2", "int4"), ("stated", "int4")])
def test_streaming_changes_no_bit(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe.load(name)
    fields, tensors = made.model.fields(), draw.weights(made, 0)
    monkeypatch.setattr(streamed, "COLUMNS", 24)  # several blocks, the last one shorter
    for dtype, summation in ((np.float64, "tree"), (np.float32, "strided")):
        taps = []
        for held in (model.HELD_WEIGHTS, 0):
            monkeypatch.setattr(model, "HELD_WEIGHTS", held)
            taps.append(Model(fields, tensors, precision, dtype, summation=summation).taps([1, 2, 3], operations=True))
        assert taps[0].keys() == taps[1].keys()
        for tap, value in taps[0].items():
            np.testing.assert_array_equal(taps[1][tap], value, err_msg=tap)


def test_a_streamed_model_asks_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe.load("stated")
    monkeypatch.setattr(model, "HELD_WEIGHTS", 0)
    tensors = counter.weights(made)
    del tensors["layers.2.experts.up.draw"]
    with pytest.raises(MissingTensor, match=r"layers\.2\.experts\.up\.qw"):
        Model(made.model.fields(), tensors, "int4")


@pytest.mark.slow
def test_goldens_over_mapped_weights_are_those_over_held_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = ensure(["stated"])["stated"].read_bytes()  # made with held ones
    monkeypatch.setattr(model, "HELD_WEIGHTS", 0)
    generate.write("stated", tmp_path / "stated.kdtr")
    assert (tmp_path / "stated.kdtr").read_bytes() == pinned
    assert [path.name for path in tmp_path.iterdir()] == ["stated.kdtr"]


def test_parts_of_another_length_leave_no_file(tmp_path: Path) -> None:
    def parts(name: str) -> Iterator[npt.NDArray[Any]]:
        yield np.zeros((2, 4), np.float32)
        yield np.zeros((1, 4), np.float32)

    path = tmp_path / "a.kdtr"
    kdtr.write_parts(path, {}, {"w": ("f32", (3, 4))}, parts)
    assert path.read_bytes() == kdtr.encode({}, {"w": np.zeros((3, 4), np.float32)})
    with pytest.raises(kdtr.KdtrError, match=r"tensor 'w': its parts have 48 bytes, not 64"):
        kdtr.write_parts(tmp_path / "b.kdtr", {}, {"w": ("f32", (4, 4))}, parts)
    assert [found.name for found in tmp_path.iterdir()] == ["a.kdtr"]
