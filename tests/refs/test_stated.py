"""Stated experts and counted weights against a slow writing of the same rule; any part drawn alone is that part."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from refs import counter, quant, recipe
from refs.exact import bf16_value, rounded_to_bf16
from refs.philox import philox
from refs.stated import Stated, draw

RULE = Stated(key=-0x0123456789ABCDEF, scale=118 << 7, zero=150, extreme=150, loud=100)


def slowly(s: Stated, expert: int, row: int, k: int) -> tuple[list[int], list[float]]:
    """One row's q and scales, element by element, by the words of docs/model.md."""
    q: list[int] = []
    scales = []
    key = s.key % 2**64
    for g in range(-(-k // 32)):
        word = int(philox((g // 4, row, expert, 2), key)[g % 4])
        a, b = ([int(w) for w in philox((g, row, expert, part), key)] for part in (0, 1))
        lot = word // 128 % 1024
        kind = "zero" if lot < 150 else "extreme" if lot < 300 else "loud" if lot < 400 else ""
        for i in range(32):
            x, y = a[i // 8] >> 4 * (i % 8) & 15, b[i // 8] >> 4 * (i % 8) & 15
            value = (x + y + 1) // 2 - 8
            if kind == "zero" or 32 * g + i >= k:
                value = 0
            elif kind == "extreme":
                value = 7 if x % 2 else -8
            q.append(value)
        scale = 2.0 ** (118 - 127) * (1 + word % 128 / 128)
        scales.append(0.0 if kind == "zero" else 16 * scale if kind == "loud" else scale)
    return q, scales


@pytest.mark.parametrize("k", [1, 31, 32, 33, 83, 160, 290])
def test_the_rule_element_by_element(k: int) -> None:
    packed, scales = draw(RULE, 383, range(5, 9), k)
    padded = -(-k // 32) * 32
    for i, row in enumerate(range(5, 9)):
        q, wanted = slowly(RULE, 383, row, k)
        assert quant.unpack(packed, padded)[i].tolist() == q
        assert bf16_value(scales)[i].tolist() == wanted


def test_any_rows_are_those_of_the_whole() -> None:
    packed, scales = draw(RULE, 2, range(40), 100)
    for rows in (range(1), range(17, 40)):
        part, some = draw(RULE, 2, rows, 100)
        np.testing.assert_array_equal(part, packed[rows.start : rows.stop])
        np.testing.assert_array_equal(some, scales[rows.start : rows.stop])
    assert not np.array_equal(draw(RULE, 3, range(40), 100)[0], packed)
    assert not np.array_equal(draw(dataclasses.replace(RULE, key=1), 2, range(40), 100)[0], packed)


def test_all_nibbles_occur_and_special_groups_are_as_frequent_as_asked() -> None:
    packed, scales = draw(dataclasses.replace(RULE, extreme=0, loud=0), 0, range(200), 3200)
    q = quant.unpack(packed, 3200)
    counts = np.bincount(q[q != 0] + 8, minlength=16)
    assert (counts[np.arange(16) != 8] > 0).all()
    assert 1 / 512 < counts[0] / q.size < 1 / 128  # the end of a triangle: 1/256
    assert abs((scales == 0).mean() - 150 / 1024) < 0.02


def test_counted_weights_are_bf16_exact_and_of_the_size_asked_for() -> None:
    made = recipe.load("stated")
    tensors = counter.weights(made)
    assert {name: (array.dtype.str[1:], array.shape) for name, array in tensors.items()} == {
        name: ({"f32": "f4", "u8": "u1", "bf16": "u2", "i64": "i8"}[kind], shape)
        for name, (kind, shape) in counter.declared(made).items()
    }
    for name, array in tensors.items():
        if array.dtype == np.float32:
            np.testing.assert_array_equal(bf16_value(rounded_to_bf16(array)), array, err_msg=name)
    assert len({array.tobytes() for array in tensors.values()}) == len(tensors)
    q_b = tensors["layers.0.attn.q_b.w"]
    assert isinstance(q_b, np.ndarray)
    assert 0.7 < float(np.asarray(q_b, np.float64).std()) * np.sqrt(q_b.shape[1]) / made.weights.linear_gain < 1.42
    whole = np.concatenate(list(counter.parts(made, "layers.0.attn.o.w")))
    np.testing.assert_array_equal(whole, tensors["layers.0.attn.o.w"])


def test_stored_experts_are_those_that_would_be_stated() -> None:
    """One config in both forms: what the file holds is what an engine draws."""
    made = recipe.load("stated")
    held = dataclasses.replace(made, weights=dataclasses.replace(made.weights, stated=False))
    for name, (rows, k) in {"gate": (43, 160), "down": (160, 43)}.items():
        stem = f"layers.1.experts.{name}"
        (numbers,) = counter.parts(made, stem + ".draw")
        rule = Stated.of(numbers)
        assert rule == counter.stated(made, stem, k)
        drawn = [draw(rule, expert, range(rows), k) for expert in range(made.model.n_routed_experts)]
        for end, whole in zip(("qw", "sc"), zip(*drawn, strict=True), strict=True):
            parts = np.concatenate(list(counter.parts(held, f"{stem}.{end}")))
            np.testing.assert_array_equal(parts.reshape(np.shape(whole)), np.stack(whole))


def test_outliers_stand_on_both_sides_of_a_group_s_boundary() -> None:
    made = recipe.load("k26_slice")
    assert counter.outliers(made)[:3].tolist() == [31, 32, 7167]
