"""INT4 against bytes written by hand and against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refs import exact, quant


def test_nibbles_are_those_of_the_published_word() -> None:
    """[-8,-7,-1,0,1,2,6,7] is 0xfea98710 as a little-endian word; the padding of the group is nibble 8 (q = 0)."""
    packed = quant.pack(np.array([[-8, -7, -1, 0, 1, 2, 6, 7]], np.int8))
    assert packed.shape == (1, 16)
    assert packed.tobytes() == bytes.fromhex("1087a9fe") + b"\x88" * 12
    assert int(packed[0, :4].copy().view("<u4")[0]) == 0xFEA98710
    assert quant.unpack(packed, 8).tolist() == [[-8, -7, -1, 0, 1, 2, 6, 7]]


def test_a_written_group_decodes_to_the_numbers_it_means() -> None:
    """Bytes and scales written by hand: 0x3f80 is 1.0, 0x3e20 is 0.15625, 0 is 0."""
    packed = np.frombuffer(bytes.fromhex("f0" * 16 + "9708" + "88" * 14 + "0f" * 16), np.uint8).reshape(1, 48)
    scales = np.array([[0x3F80, 0x3E20, 0x0000]], np.uint16)
    got = quant.dequantise(packed, scales, 96)[0]
    assert got[:32].tolist() == [-8.0, 7.0] * 16
    assert got[32:38].tolist() == [-0.15625, 0.15625, 0.0, -1.25, 0.0, 0.0]
    assert got[64:].tolist() == [0.0] * 32
    assert quant.dequantise(packed, scales, 35)[0].tolist() == [*got[:35].tolist()]


@settings(max_examples=60)
@given(st.lists(st.integers(-8, 7), min_size=1, max_size=100), st.integers(1, 3))
def test_packing_is_undone(q: list[int], rows: int) -> None:
    array = np.array([q] * rows, np.int8)
    packed = quant.pack(array)
    assert packed.shape == (rows, 16 * -(-len(q) // 32))
    np.testing.assert_array_equal(quant.unpack(packed, len(q)), array)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)
    assert (nibbles[:, len(q) :] == 8).all()


def test_what_does_not_fit_four_bits_is_refused() -> None:
    for bad in (-9, 8):
        with pytest.raises(ValueError, match="4-bit"):
            quant.pack(np.array([0, bad, 0], np.int8))
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="finite"):
            quant.quantise(np.array([1.0, value], np.float32))


def half_even(x: Fraction) -> int:
    return round(x)  # Fraction rounds half to even


@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20])
def test_quantising_follows_the_page_in_exact_fractions(k: int, size: float) -> None:
    w = exact.Draws("w", k).normal((5, k), size).astype(np.float32)
    q, scales = quant.quantise(w)
    assert scales.shape == (5, -(-k // 32))
    for row in range(5):
        for start in range(0, k, 32):
            group = w[row, start : start + 32]
            scale = Fraction(float(exact.bf16_value(scales[row, start // 32 : start // 32 + 1])[0]))
            amax = max(abs(Fraction(float(v))) for v in group)
            assert abs(scale / (amax / Fraction(15, 2)) - 1) <= Fraction(1, 256)
            want = [max(-8, min(7, half_even(Fraction(float(v)) / scale))) for v in group]
            for v, a, b in zip(group, q[row, start : start + 32].tolist(), want, strict=True):
                # float32's quotient may fall on the other side of a half that is nearer than its rounding
                from_half = abs(abs(Fraction(float(v)) / scale % 1) - Fraction(1, 2))
                assert a == b or from_half < Fraction(1, 2**20)
    packed = quant.pack(q)
    values = quant.dequantise(packed, scales, k)
    for a, b, s in zip(
        values[0].tolist(), q[0].tolist(), np.repeat(exact.bf16_value(scales[0]), 32).tolist(), strict=False
    ):
        assert Fraction(a) == b * Fraction(s)


def test_groups_of_zeros_and_of_the_smallest_numbers() -> None:
    w = np.zeros((1, 96), np.float32)
    w[0, 40], w[0, 70] = 1e-45, -1.0
    q, scales = quant.quantise(w)
    assert scales[0, :2].tolist() == [0, 0]  # nothing, and an amax whose scale rounds to 0
    assert not q[0, :64].any()
    assert q[0, 70] == -7 or q[0, 70] == -8
    assert np.isfinite(quant.dequantise(quant.pack(q), scales, 96)).all()


def test_amax_groups_reach_both_ends() -> None:
    w = np.tile(np.array([7.5, -7.5], np.float32) * np.float32(2.0**-6), 16)[None]
    q, scales = quant.quantise(w)
    assert q[0].tolist() == [7, -8] * 16
    assert exact.bf16_value(scales).tolist() == [[2.0**-6]]
