"""The check of random (M, tree) pairs itself, on the CPU: what it draws, and that it finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.cuda import pairs
from tests.cuda.operations import read
from tests.cuda.pair_shapes import MOST, Call, Experts, Linear, Ops, Router, Shape
from tests.cuda.pair_trees import Attention, cut, forest

MLA = (4, 32, 16, 8, 16)
SMALL: dict[str, Callable[[Ops], Shape]] = {
    "int4-bf16": lambda ops: Linear(ops, "int4-bf16", "int4-bf16", 72, (24, 10)),
    "residual": lambda ops: Linear(ops, "residual", "f32", 40, (24,), epilogue=1),
    "gated": lambda ops: Linear(ops, "gated", "bf16", 64, (24, 24), normed=True, epilogue=2),
    "choice": lambda ops: Router(ops, "choice", 16, 4),
    "experts": lambda ops: Experts(ops, "experts", "int4-bf16", 64, 32, 32, 16, 4),
    "mla": lambda ops: Attention(ops, "mla", MLA, (5, 70), nodes=160, bf16=True),
}
WIDE = 20


class Flawed(Ops):
    """Where more than WIDE rows count, one bit of the last row of what some operations write is wrong."""

    def together(self, calls: Sequence[Call]) -> None:
        super().together(calls)
        for name, given in calls:
            outputs = {"linear": lambda g: (g[5][-1], g[7]), "mla_attention": lambda g: (g[6], g[9])}
            outputs["routed_moe"] = lambda g: (g[18], g[19])
            if name in outputs:
                out, step = outputs[name](given)
                rows = read(step.numpy())["n_rows"]
                if rows > WIDE:
                    out.view(torch.int16).reshape(len(out), -1)[rows - 1, -1] ^= 1


@pytest.fixture
def ops() -> Iterator[Ops]:
    opened = Ops("cpu")
    yield opened
    opened.close()


@pytest.fixture
def flawed() -> Iterator[Ops]:
    opened = Flawed("cpu")
    yield opened
    opened.close()


@pytest.mark.parametrize("name", SMALL)
def test_rows_have_the_bits_they_have_alone(ops: Ops, name: str) -> None:
    found = pairs.check(ops, SMALL[name](ops), 60, 1)
    assert found.good, found
    assert found.pairs == 60
    assert found.rows > 60 * MOST / 3
    assert set(found.kernels.values()) >= {60}


@pytest.mark.parametrize(("name", "output"), [("int4-bf16", "out1"), ("experts", "out"), ("mla", "o_lat")])
def test_a_bit_of_the_last_of_many_rows_is_found(flawed: Ops, name: str, output: str) -> None:
    found = pairs.check(flawed, SMALL[name](flawed), 60, 1)
    wide = found.differing_rows
    assert 0 < wide <= 60
    assert not found.good
    assert found.widths[0] > WIDE
    assert {part for part, n in found.differing.items() if n} == {output}
    assert found.differing[output] == wide
    assert f"{wide} {output}" in pairs.text(found)


def test_rows_that_are_all_alike_show_nothing(ops: Ops) -> None:
    shape = Linear(ops, "alike", "f32", 40, (24,))
    shape.x[:] = shape.x[0]
    found = pairs.check(ops, shape, 5, 1)
    assert not found.differing_rows
    assert "are the same as others" in found.unfit
    assert not found.good


def test_what_is_not_finite_shows_nothing(ops: Ops) -> None:
    shape = Linear(ops, "not finite", "f32", 40, (24,))
    shape.x[3, 3] = float("nan")
    assert pairs.check(ops, shape, 5, 1).unfit == "out0 is not finite"


@pytest.mark.parametrize("shape", ["star", "chain", "any"])
def test_trees_are_cut_whole(shape: str) -> None:
    """Parents first, each the node's parent in the forest; no node twice."""
    rng = np.random.default_rng(3)
    children = forest(rng, 200)
    for count in [MOST] if shape != "any" else [1, 2, 17, *[MOST] * 30]:
        nodes, tree = cut(rng, children, count, shape)
        assert len(set(nodes)) == len(nodes) == count
        for row, parent in enumerate(tree.parents[1:].tolist(), 1):
            assert parent < row
            assert nodes[row] in children[nodes[parent]]
        if shape == "star":
            assert tree.depths.max() == 1
        if shape == "chain":
            assert tree.depths.max() == MOST - 1


def test_every_shape_of_the_table_is_among_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert pairs.main(["--list"]) == 0
    listed = capsys.readouterr().out.split()
    wanted = [f"linear-{kind}-{sizes}" for kind in ("int4-bf16", "bf16") for sizes in ("k7168-n4096", "k2048-n7168")]
    wanted += ["router-choice", "experts-int4-bf16", "experts-bf16", "mla-t1024", "mla-t4096", "mla-t32768"]
    assert set(wanted) <= set(listed)
