"""Peers compute what they are compared on, and one that is not there says so."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from harness.bench import peers_cpu, peers_cuda
from harness.bench.cases import Case, cases, choose
from harness.bench.peers import Peer, peers


def test_int4pack_multiplies_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (96, 256), dtype=torch.int32, generator=generator)
    scale, x = torch.rand(96, 8, generator=generator), torch.rand(4, 256, generator=generator)
    want = x.double() @ ((q - 8).double() * scale.double().repeat_interleave(32, 1)).T
    torch.testing.assert_close(peers_cpu.int4pack(x, q, scale)().double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="ggml-python is an optional peer")
@pytest.mark.parametrize("q4", [False, True])
def test_ggml_multiplies_the_same_weights(q4: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.random((4, 256), np.float32) - 0.5, rng.random((96, 256), np.float32) - 0.5
    call = peers_cpu.GgmlMatmul(peers_cpu.GgmlPool(), x, w, q4)
    call()
    want = x @ w.T
    assert np.abs(call.result() - want).max() < (0.1 if q4 else 1e-5) * np.abs(want).max()


def test_every_cpu_peer_serves_something_and_refuses_the_rest() -> None:
    tiny = choose(cases("cpu"), ["tiny"])
    for peer in peers("cpu"):
        if peer.absent:
            continue
        served = [case for case in tiny if (calls := peer.serve(case, 2)) is not None and [call() for call in calls]]
        assert 0 < len(served) < len(tiny), peer.name
        assert peer.serve(Case("accept", "tiny", 1), 2) is None


def test_an_absent_peer_is_listed_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)

    def absent(found: list[Peer]) -> dict[str, str]:
        return {peer.name: peer.absent for peer in found if peer.absent}

    assert absent(peers_cpu.peers()) == {"ggml": "not installed: pip install ggml-python"}
    assert absent(peers_cuda.peers()) == {
        "humming": "not installed: pip install humming-kernels",
        "humming-invariant": "not installed: pip install humming-kernels",
        "humming-experts": "not installed: pip install humming-kernels",
        "humming-experts-invariant": "not installed: pip install humming-kernels",
        "flash-mla": "not installed: pip install sgl-flash-mla",
    }
