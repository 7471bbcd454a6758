"""A file's own drafter in a session: any chunks of the prefill, any neighbours, any ranks give one set of bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from together import Together

from engine import create
from harness.bundles import ensure
from harness.golden import Golden
from harness.protocol import Decoded, DecodeRequest, DrafterError, MissingTensor, OwnDrafter
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


def test_the_prefill_may_come_in_any_chunks(device: str) -> None:
    path = ensure(["dflash_one"])["dflash_one"]
    request = Golden.open(path, "fp32").request("dflash")
    done = []
    for max_rows in (2, 7, 65):
        with create(device).load(path, "fp32", max_rows=max_rows, poison=True) as session:
            done.append(session.decode(request))
    assert same(done[0], done[1])
    assert same(done[0], done[2])


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
