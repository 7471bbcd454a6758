"""A file's own drafter in a session: any chunks of the prefill, any neighbours, any ranks give one set of bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from together import Together

from engine import create
from harness.bundles import ensure
from harness.golden import Golden
from harness.protocol import ConfigError, Decoded, DecodeRequest, DrafterError, MissingTensor, OwnDrafter
from refs import kdtr


def same(a: Decoded, b: Decoded) -> bool:
    """Tokens, trees, and the bits of the target's and the drafter's logits."""
    pairs = ((a.logits, b.logits), (a.draft_logits, b.draft_logits))
    equal = all(x is not None and y is not None and x.tobytes() == y.tobytes() for x, y in pairs)
    return equal and (a.tokens, a.rounds) == (b.tokens, b.rounds)


def test_a_file_without_a_drafter_says_so(tiny: Path) -> None:
    with (
        create("cpu").load(tiny, "fp32") as session,
        pytest.raises(DrafterError, match="no drafter of its own; `kdtree import --drafter` puts one in"),
    ):
        session.decode(DecodeRequest([1, 2], 4, OwnDrafter(), block_size=4, budget=3))


@pytest.mark.parametrize("name", ["drafter.taps", "drafter.hidden_norm.w", "drafter.layers.2.mlp.down.w"])
def test_a_missing_tensor_is_named_when_the_file_is_opened(name: str, tmp_path: Path) -> None:
    found = kdtr.read(ensure(["dflash"])["dflash"])
    kdtr.write(tmp_path / "part.kdtr", found.fields, {n: t for n, t in found.tensors.items() if n != name})
    with pytest.raises(MissingTensor, match=f"part.kdtr: {name}"):
        create("cpu").load(tmp_path / "part.kdtr", "fp32")


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"draft_num_kv_heads": 4}, "draft_num_kv_heads: does not divide"),
    ({"draft_head_dim": 9}, "draft_head_dim: 9 is odd"),
    ({"draft_block_size": 1}, "draft_block_size: 1 is not in 2.."),
    ({"draft_num_layers": 0}, "draft_num_layers: 0 is not in 1.."),
    ({"draft_num_layers": 3.0}, "draft_num_layers: is an f64, must be an i64"),
    ({"draft_num_layers": None}, "draft_num_layers: missing"),
    ({"draft_rms_norm_eps": 0.0}, "draft_rms_norm_eps: must be above 0"),
    ({"draft_rope_theta": 1.0}, "draft_rope_theta: must be above 1"),
    ({"draft_rope_factor": 0.5}, "draft_rope_factor: must be at least 1"),
    ({"draft_num_heads": 2**30, "draft_num_kv_heads": 2**30, "draft_head_dim": 8}, "draft_num_heads: .* exceeds"),
    (
        {"draft_num_heads": 2**27, "draft_num_kv_heads": 2**27, "draft_head_dim": 8},
        "draft_num_kv_heads: 1073741824 \\* 2 exceeds",
    ),
    ({"draft_intermediate_size": 2**30}, "draft_intermediate_size: 1073741824 \\* 2 exceeds"),
    ({"draft_colour": 3}, "draft_colour: unknown field"),
    ({"mask_id": -1}, "mask_id: a drafter needs a mask token"),
]
TAPS = [[0, 4], [-1, 2], [2, 1], [1, 1]]


@pytest.mark.parametrize(("change", "message"), FIELDS, ids=[m for _, m in FIELDS])
def test_fields_out_of_range_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = kdtr.read(ensure(["dflash"])["dflash"])
    fields = {n: v for n, v in {**found.fields, **change}.items() if v is not None}
    kdtr.write(tmp_path / "part.kdtr", fields, found.tensors)
    with pytest.raises(ConfigError, match=f"part.kdtr: {message}"):
        create("cpu").load(tmp_path / "part.kdtr", "fp32")


@pytest.mark.parametrize("taps", TAPS, ids=str)
def test_taps_out_of_range_are_named(taps: list[int], tmp_path: Path) -> None:
    found = kdtr.read(ensure(["dflash"])["dflash"])
    kdtr.write(tmp_path / "part.kdtr", found.fields, {**found.tensors, "drafter.taps": np.array(taps, np.int32)})
    with pytest.raises(ConfigError, match=r"part.kdtr: drafter.taps: layer .* does not ascend or is not in 0..3"):
        create("cpu").load(tmp_path / "part.kdtr", "fp32")


def test_the_prefill_may_come_in_any_chunks(device: str) -> None:
    path = ensure(["dflash_one"])["dflash_one"]
    request = Golden.open(path, "fp32").request("dflash")
    done = []
    for max_rows in (2, 7, 65):
        with create(device).load(path, "fp32", max_rows=max_rows, poison=True) as session:
            done.append(session.decode(request))
    assert same(done[0], done[1])
    assert same(done[0], done[2])


def test_its_memory_is_taken_by_the_first_decode_that_drafts(device: str) -> None:
    path = ensure(["dflash"])["dflash"]
    golden = Golden.open(path, "fp32")
    with create(device).load(path, "fp32") as session:
        session.decode(golden.request())
        before, _ = session.memory()
        session.decode(golden.request("dflash"))
        after, _ = session.memory()
        session.decode(golden.request("dflash"))
        assert session.memory()[0] == after > before


def test_other_decodes_between_change_nothing(device: str) -> None:
    """With and without graphs; wider and narrower trees, a plain chain, AR and single steps in between."""
    path = ensure(["dflash"])["dflash"]
    golden = Golden.open(path, "int4")
    request = golden.request("dflash")
    done = []
    for graphs in (True, False):
        with create(device).load(path, "int4", poison=True, graphs=graphs) as session:
            done.append(session.decode(request))
            for between in (golden.request(), replace(request, budget=3), replace(request, chain=True)):
                assert session.decode(between).tokens == golden.tokens
            session.prefill([1, 2, 3])
            session.step(4)
            done.append(session.decode(request))
    assert all(same(done[0], other) for other in done[1:])


def test_a_drafter_drafts_for_several_ranks() -> None:
    """The lead alone drafts, from residual rows that every rank has whole."""
    path = ensure(["text"])["text"]
    request = replace(Golden.open(path, "int4").request("dflash"), max_tokens=20)
    with create("cpu").load(path, "int4", max_rows=16) as alone:
        want = alone.decode(request)
    assert len(want.tokens) > len(want.rounds), "nothing was accepted"
    with Together(path, "int4", 2, max_rows=16) as both:
        lead, other = both.call("decode", request)
    assert same(lead, want)
    assert (other.tokens, other.rounds) == (want.tokens, want.rounds)
    assert other.draft_logits is not None
    assert not np.any(other.draft_logits)
