"""``kdtree remote --join``: one model over several hosts, which here are two entries for one server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.cells import Verdict
from harness.remote import join
from harness.remote.hosts import Gpus, Host, HostsError
from tests.remote.support import Remote

ONE = Host("one", "box1", architectures=("sm_120",), gpus=Gpus(4, "RTX"))
TWO = replace(ONE, name="two", address="box2", rendezvous="10.0.0.2")


@pytest.mark.slow
def test_two_hosts_give_the_bits_of_one(remote: Remote) -> None:
    """A rank on each; the cell's own checks hold it against one rank on the first host."""
    hosts = f"{remote.host('first')},{remote.host('second')}"
    result = remote("--join", hosts, "-k", "int4-ddtree-experts-noisy", "--", "-q")
    assert result.status == 0, result.out + result.err
    (cell,) = result.ledger.cells
    assert (cell.id, cell.verdict, cell.host) == ("int4-ddtree-experts-noisy-cpu-x2", Verdict.PASS, "first")
    assert {check.name for check in cell.checks} >= {"ranks.tokens", "ranks.logits", "ranks.cache"}
    assert "ranks of node 1: taking part" in result.out
    assert result.ledger.problems == ()


def test_the_ranks_are_the_gpus_of_all_hosts() -> None:
    points = join.points([ONE, TWO], None)
    assert {point.ranks for point in points} == {8}
    assert {point.device for point in points} == {"cuda"}
    assert {point.ranks for point in join.points([ONE, TWO], 4)} == {4}
    places = join.nodes([TWO, ONE])
    assert [(place.count, place.node, place.address) for place in places] == [(2, 0, "10.0.0.2"), (2, 1, "10.0.0.2")]
    assert len({place.port for place in places}) == 1


@pytest.mark.parametrize(("ranks", "words"), [(3, "cannot have 3 ranks evenly"), (16, "one has fewer than 8 GPUs")])
def test_ranks_that_the_hosts_do_not_have(ranks: int, words: str) -> None:
    with pytest.raises(HostsError, match=words):
        join.points([ONE, TWO], ranks)
