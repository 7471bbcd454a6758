"""How a tap is compared and what bounds it, with numbers written by hand in place of a model's."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.trace import taps
from refs.exact import SUMMATIONS

Rows = npt.NDArray[Any]
FIELDS = {"num_layers": 1, "num_heads": 2, "num_experts_per_tok": 2}
TOLERANCES = {"logits": 0.5, "layers.0.out": 0.125, "layers.0.mla.latent": 3.0, "layers.0.mla.k_rope": 4.0}
FIRST, SECOND, *_ = SUMMATIONS


def golden(*, rounding: bool = False) -> Any:
    """What the module asks of a golden."""
    return SimpleNamespace(
        field=FIELDS.__getitem__,
        file=SimpleNamespace(file="a.kdtr"),
        precision="int4",
        rounding=rounding,
        meta={"multiple": 4, "tolerance": {"int4": TOLERANCES}},
        tolerance=TOLERANCES.__getitem__,
        taps={"layers.0.out": np.ones((2, 3))},
        cache=lambda layer: (np.full((2, 2), layer + 1.0), np.full((2, 1), layer + 2.0)),
    )


def single(*rows: list[float]) -> Rows:
    return np.array(rows, np.float32)


def test_the_first_row_beyond_and_the_worst_element_of_all() -> None:
    want = np.zeros((4, 6), np.float32)
    got = want.copy()
    got[1, 4], got[2, 1], got[2, 2] = 0.25, -0.75, 0.5
    d = taps.differ(golden(), "layers.0.mla.q_rope", got, want, 0.25)
    assert d is not None
    assert (d.index, d.got, d.want, d.allowed, d.count) == ((2, 0, 1), -0.75, 0.0, 0.25, 2)
    assert d.detail == (
        "layer 0, mla.q_rope, row 2, head 0, element 1: got -0.75, want 0, allowed 0.25 "
        "(2 of 24 elements beyond it, from row 2 on)"
    )
    d = taps.differ(golden(), "layers.0.mla.q_rope", got, want, 0.0, "told")
    assert d is not None
    assert (d.index, d.count) == ((2, 0, 1), 3)
    assert d.detail.startswith("told: layer 0, ")
    assert d.detail.endswith("(3 of 24 elements beyond it, from row 1 on)")


def test_where_bits_are_owed_the_sign_of_a_zero_is_one() -> None:
    got, want = single([1, 0], [0, -0.0]), single([1, 0], [-0.0, -0.0])
    d = taps.differ(golden(), "layers.0.mla.latent", got, want, 0.0)
    assert d is not None
    assert (d.index, d.count) == ((1, 0), 1)
    assert "row 1, element 0: got 0, want -0, allowed 0" in d.detail
    assert taps.differ(golden(), "layers.0.mla.latent", got, want, 1e-30) is None, "within a tolerance"
    assert taps.differ(golden(), "layers.0.mla.latent", got, want.astype(np.float64), 0.0) is None, "exact numbers"
    worse = single([1, 0.5], [0, -0.0])
    d = taps.differ(golden(), "layers.0.mla.latent", worse, want, 0.0)
    assert d is not None
    assert (d.index, d.count) == ((0, 1), 2)


def test_another_shape_has_no_place() -> None:
    d = taps.differ(golden(), "logits", single([1, 2]), single([1]), 9.0)
    assert d is not None
    assert (d.index, d.allowed, d.count) == ((), 9.0, 0)


def test_experts_are_named_where_a_choice_is_and_they_are_known() -> None:
    """Not in the tap that holds them, nor in one that has other axes; without them a choice is a number."""
    ids = single([4, 7])
    for tap, allowed, place in (
        ("moe.weights", 0.0, "row 0, choice 1 (expert 7)"),
        ("moe.ids", 0.0, "row 0, choice 1"),
        ("mla.q", 0.0, "row 0, head 1, element 0"),
    ):
        name = f"layers.0.{tap}"
        expected = taps.Expected("", {name: np.array([[4.0, 8.0]])}, {name: allowed})
        d = taps.first(golden(), {name: ids, "layers.0.moe.ids": ids}, expected)
        assert d is not None
        assert f"{place}: got 7, want 8" in d.detail
    d = taps.first(
        golden(),
        {"layers.0.moe.weights": ids},
        taps.Expected("", {"layers.0.moe.weights": ids + 1}, {"layers.0.moe.weights": 0.5}),
    )
    assert d is not None
    assert "row 0, choice 0: got 4, want 5" in d.detail


def test_the_first_tap_in_the_order_of_computation() -> None:
    names = ["logits", "layers.0.out", "layers.0.moe.act", "layers.0.mla.q_a", "embed"]
    assert [name for name in taps.order(golden()) if name in names] == names[::-1]
    got = {name: single([1, 2]) for name in names}
    want = {name: np.array([[1.0, 4.0]]) for name in names[:-1]}  # the embedding is on one side alone
    expected = taps.Expected("", want, {**dict.fromkeys(names, 1.0), "layers.0.mla.q_a": 2.0})
    d = taps.first(golden(), got, expected)
    assert d is not None
    assert (d.tap, d.allowed) == ("layers.0.moe.act", 1.0)


def test_a_bundle_has_the_residual_stream_and_the_cache() -> None:
    found = taps.stored(golden())
    assert found.allowed == {"layers.0.out": 0.125, "layers.0.mla.latent": 3.0, "layers.0.mla.k_rope": 4.0}
    assert {name: (rows.shape, rows[0, 0]) for name, rows in found.rows.items()} == {
        "layers.0.out": ((2, 3), 1.0),
        "layers.0.mla.latent": ((2, 2), 1.0),
        "layers.0.mla.k_rope": ((2, 1), 2.0),
    }


EXACT = {
    "embed": [[1.0, -2.0]],
    "layers.0.mla.q": [[3.0, -8.0]],
    "layers.0.moe.ids": [[4.0, 7.0]],
    "layers.0.out": [[1.0, 0.0, 0.0]],
}


class Noisy:
    """In place of the reference: float32 is off by 1/4 in one order of its sums, by 1/2 in another, where it is."""

    asked: list[tuple[Any, ...]]

    def __init__(self, shift: float) -> None:
        self._shift = shift

    @classmethod
    def open(cls, file: str, precision: str, dtype: type = np.float64, *, summation: str = "", rounding: bool = False):  # type: ignore[no-untyped-def]
        cls.asked.append((file, precision, dtype, summation, rounding))
        return cls({FIRST: -0.5, SECOND: 0.25}.get(summation, 0.0))

    def taps(self, tokens: tuple[int, ...], *, operations: bool = False) -> dict[str, Rows]:
        assert operations
        rows = {name: np.array(row) for name, row in EXACT.items()}
        for name in ("embed", "layers.0.moe.ids", "layers.0.out"):
            rows[name][0, 0] += self._shift
        return rows


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(taps, "Model", Noisy)
    monkeypatch.setattr(taps, "_REFERENCES", OrderedDict())
    Noisy.asked = []
    return Noisy.asked


@pytest.mark.parametrize("rounding", [False, True])
def test_an_operation_may_be_off_by_a_multiple_of_what_float32_is(asked: list[Any], rounding: bool) -> None:
    """By half a unit of its largest value at the least; decisions by nothing; by the bundle's bound where it has one,
    but for precisions that round, whose noise no bundle bounds."""
    found = taps.reference(golden(rounding=rounding), [1, 2])
    assert {name: rows.tolist() for name, rows in found.rows.items()} == EXACT
    assert found.allowed == {
        "embed": 4 * 0.5,
        "layers.0.mla.q": 4 * 8 * 2.0**-24,
        "layers.0.moe.ids": 0.0,
        "layers.0.out": 4 * 0.5 if rounding else 0.125,
    }
    assert asked[0] == ("a.kdtr", "int4", np.float64, "", False)
    assert asked[1:] == [("a.kdtr", "int4", np.float32, name, rounding) for name in SUMMATIONS]


def test_the_references_used_last_are_kept(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "KEPT", 2)
    made = []
    for token in (1, 2, 1, 3, 1, 2):
        before = len(asked)
        taps.reference(golden(), [token])
        made.append(len(asked) > before)
    assert made == [True, True, False, True, False, True]
