"""draw_experts against the reference, byte by byte, on every device; and files that state experts wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import changed
from engine_ops import Ops

import engine
from harness import protocol
from harness.bundles import ensure
from refs.errors import ConfigError
from refs.model import Model
from refs.stated import Stated, draw

RULE = Stated(key=-0x0123456789ABCDEF, scale=118 << 7, zero=150, extreme=150, loud=100)


def drawn(ops: Ops, rule: Stated, first: int, e: int, n: int, k: int, row: int = 0) -> tuple[Any, Any]:
    groups = -(-k // 32)
    q = ops.empty(e, n, 16 * groups, dtype=np.uint8)
    scale = ops.empty(e, n, 2 * groups, dtype=np.uint8)
    ops.call("draw_experts", rule.numbers().tolist(), first, row, k, q, scale)
    return q.cpu().numpy(), scale.cpu().numpy().view(np.uint16)


@pytest.mark.parametrize(
    ("first", "e", "n", "k"),
    [(0, 3, 7, 83), (4, 2, 5, 160), (0, 1, 1, 1), (9, 2, 3, 31), (383, 1, 40, 7168), (200, 2, 70, 2048)],
)
def test_the_bytes_of_the_reference(ops: Ops, first: int, e: int, n: int, k: int) -> None:
    q, scale = drawn(ops, RULE, first, e, n, k)
    for i in range(e):
        packed, scales = draw(RULE, first + i, range(n), k)
        np.testing.assert_array_equal(q[i], packed)
        np.testing.assert_array_equal(scale[i], scales)
    assert ops.counters()["draw_experts"] == 1


def test_a_rank_s_rows_are_those_of_the_whole(ops: Ops) -> None:
    q, scale = drawn(ops, RULE, 3, 2, 20, 100)
    part, some = drawn(ops, RULE, 3, 2, 5, 100, row=10)
    np.testing.assert_array_equal(part, q[:, 10:15])
    np.testing.assert_array_equal(some, scale[:, 10:15])


@pytest.mark.parametrize("shares", [(1024, 0, 0), (0, 1024, 0), (0, 0, 1024), (0, 0, 0)])
def test_shares_at_their_ends(ops: Ops, shares: tuple[int, int, int]) -> None:
    rule = Stated(7, 249 << 7, *shares)
    q, scale = drawn(ops, rule, 0, 1, 4, 96)
    packed, scales = draw(rule, 0, range(4), 96)
    np.testing.assert_array_equal(q[0], packed)
    np.testing.assert_array_equal(scale[0], scales)


@pytest.fixture(scope="module")
def stated() -> Path:
    return ensure(["stated"])["stated"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1, 118 << 7 | 1, 0, 0, 0], r"\[1\]: 15105: not the bits of a bf16 power of two"),
        ([1, 0, 0, 0, 0], r"\[1\]: 0: not the bits"),
        ([1, 250 << 7, 0, 0, 0], r"\[1\]: 32000: not the bits"),
        ([1, 2**40, 0, 0, 0], r"\[1\]: 1099511627776: not the bits"),
        ([1, 118 << 7, -1, 0, 0], r"\[2\]: -1: shares are not negative"),
        ([1, 118 << 7, 1000, 25, 0], r"\[3\]: 25: shares are not negative and at most 1024 in all"),
        ([1, 118 << 7, 0, 0, 2**62], r"\[4\]: 4611686018427387904: shares"),
    ],
)
def test_numbers_out_of_range_are_named(stated: Path, tmp_path: Path, numbers: list[int], text: str) -> None:
    name = "layers.1.experts.gate.draw"
    path = changed(stated, tmp_path / "bad.kdtr", tensors={name: np.array(numbers, np.int64)})
    with pytest.raises(protocol.ConfigError, match=f": {name}{text}"):
        engine.create("cpu").load(path, "int4")
    with pytest.raises(ConfigError, match=f"{name}{text}"):
        Model.open(path, "int4")


def test_a_wrong_shape_and_experts_both_stated_and_stored_are_refused(stated: Path, tmp_path: Path) -> None:
    name, path = "layers.1.experts.up.draw", tmp_path / "bad.kdtr"
    changed(stated, path, tensors={name: np.zeros(4, np.int64)})
    with pytest.raises(protocol.MissingTensor, match=rf"{name}: is i64 \[4\], must be i64 \[5\]"):
        engine.create("cpu").load(path, "int4")
    changed(stated, path, tensors={"layers.1.experts.up.qw": np.zeros((16, 43, 80), np.uint8)})
    with pytest.raises(protocol.ConfigError, match=rf"{name}: stands beside layers\.1\.experts\.up\.qw"):
        engine.create("cpu").load(path, "int4")
    with pytest.raises(protocol.MissingTensor, match=r"experts\.gate\.w"):
        engine.create("cpu").load(stated, "fp32")
