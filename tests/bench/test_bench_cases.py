"""The cases cover what they are meant to cover: every operation, and the shapes whose speed is promised."""

from __future__ import annotations

import re

import pytest

from harness.bench.cases import KINDS, cases, choose
from harness.bench.operands import OPERATIONS, binary_parents, paths, routes
from harness.sources import ROOT


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_operation_of_the_bindings_has_cases_in_both_families(device: str) -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "csrc" / "bindings").glob("*.h") if path.name != "call.h"]
    bound = {name for text in texts for name in re.findall(r'\{"(\w+)",\s*"\(int backend', text)}
    bound -= {"open_window", "unshard", "checksum"}  # of several ranks, which `bench.ranks` times
    bound -= {"draw_experts"}  # of loading
    bound -= {"mla_output"}  # mla_attention and mla_value, which have cases, in one call
    bound -= {"routed_moe", "moe_down"}  # what a moe_block case calls; moe's second half, after an exchange
    assert len(bound) >= 15
    for family in ("tiny", "k26"):
        assert {case.op for case in cases(device) if case.family == family} == bound | set(OPERATIONS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_are_keys(device: str) -> None:
    known = list(cases(device))
    names = [case.name for case in known]
    assert len(set(names)) == len(names)
    for name in names:
        assert choose(known, [name])[0].name.startswith(name)


def test_the_promised_shapes_are_there() -> None:
    for device in ("cpu", "cuda"):
        names = {case.name for case in cases(device)}
        for shape in ("k7168-n4096", "k2048-n7168"):
            assert {f"k26-linear-{kind}-{shape}-m1" for kind in KINDS} <= names
        assert {"k26-tree_build-n163840-l15-b16-m17", "k26-tree_build-n163840-l15-b64-m65"} <= names
        assert {f"k26-mla_attention-t{t}-h64-m1" for t in (1024, 4096)} <= names
    assert "k26-moe-int4-k7168-n2048-e384-m64" in {case.name for case in cases("cuda")}


def test_choosing() -> None:
    every = cases("cpu")
    assert choose(every, []) == every
    assert {c.op for c in choose(every, ["tiny-linear"])} == {"linear"}
    assert choose(every, ["tiny-*-m8"]) == [c for c in every if c.family == "tiny" and c.M == 8]
    assert choose(every, ["nothing of the kind"]) == []


def test_the_tree_is_binary_and_paths_lead_to_the_root() -> None:
    parents = binary_parents(9)
    depths, path = paths(parents, 9)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 3]
    assert depths.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3]
    for row in range(9):
        walk, at = [], row
        while at >= 0:
            walk.append(at)
            at = int(parents[at])
        assert path[row, : depths[row] + 1].tolist() == walk[::-1]


def test_routes_differ_between_copies_and_not_within_a_row() -> None:
    case = choose(cases("cpu"), ["k26-moe-*-m4"])[0]
    a, b = routes(case, 0), routes(case, 1)
    assert (a != b).any()
    assert all(len(set(row)) == case.top_k for row in a.tolist())
    assert 0 <= a.min() <= a.max() < case.experts
