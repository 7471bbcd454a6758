"""Ranks on GPUs: exchanges in captured graphs, the plan against what is allocated, the ends of jobs that fail.

Where there are fewer GPUs than ranks, these share them: their windows, kernels and graphs are the same, only slow.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import plan
from engine.ranks.engine import RankedEngine, RankedSession
from engine.ranks.exchange import WINDOW
from harness.bench import k26
from harness.bundles import ensure
from harness.environment import survey
from harness.golden import Golden
from harness.gpu_share import SHARE
from harness.protocol import F32, RankError
from refs.config import ModelConfig
from refs.drafter_config import split
from refs.kdtr import read
from tests import processes

ALLOWED = 30.0  # seconds from the fault to the end of everything
WEIGHT = "layers.1.experts.down.qw"


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.open(ensure(["experts"])["experts"], "int4")


@pytest.fixture(scope="module", autouse=True)
def shared() -> Iterator[None]:
    """Ranks may have a GPU together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARE, "1")
        yield


@pytest.fixture(scope="module")
def ranked(golden: Golden) -> Iterator[RankedEngine]:
    made = RankedEngine("cuda", 2)
    yield made
    made.close()


NCCL = pytest.param(
    False, id="nccl", marks=pytest.mark.skipif(len(survey().gpus) < 2, reason="NCCL wants a GPU for every rank")
)


@pytest.mark.parametrize("window", [pytest.param(True, id="window"), NCCL])
def test_exchanges_are_part_of_the_graph(golden: Golden, monkeypatch: pytest.MonkeyPatch, window: bool) -> None:
    """The second decode replays what the first captured: as many exchanges by count, and one device's bits in both."""
    request = golden.request("noisy")
    if not window:
        monkeypatch.setenv(WINDOW, "0")
    with engine.create("cuda").load(Path(golden.file.file), "int4") as one:
        alone = one.decode(request)
    with contextlib.closing(RankedEngine("cuda", 2)) as made, made.load(Path(golden.file.file), "int4") as session:
        calls = [session.exchanges()]
        counts = []
        for _ in range(2):
            session.reset_counters()
            decoded = session.decode(request)
            assert np.array_equal(decoded.logits.view(np.uint32), alone.logits.view(np.uint32))  # type: ignore[union-attr]
            calls.append(session.exchanges())
            counts.append(session.counters()["all_gather"])
            assert ("settle" in session.counters()) != window  # which only stands before NCCL
    layers, rounds = golden.field("num_layers"), alone.forwards
    prefill = 4 * layers + 2
    assert counts[0] == counts[1] == prefill + rounds * (4 * layers + 3)
    captured = calls[1] - calls[0] - prefill - 1  # what Python was called for: one round, whatever their number
    assert captured == 4 * layers + 3 + 2
    assert calls[2] - calls[1] == prefill + 1


def test_four_ranks_have_one_gpus_bits() -> None:
    path = ensure(["eight"])["eight"]
    request = Golden.open(path, "int4").request("noisy")
    found = []
    for ranks in (1, 4):
        made = engine.create("cuda", ranks=ranks)
        with made.load(path, "int4") as session:
            found.append(session.decode(request))
        if isinstance(made, RankedEngine):
            made.close()
    assert found[0].tokens == found[1].tokens
    assert np.array_equal(found[0].logits.view(np.uint32), found[1].logits.view(np.uint32))  # type: ignore[union-attr]


def test_layers_of_k26_have_one_gpus_bits(tmp_path: Path) -> None:
    """Shares whose products have the kernels of the whole, for one row and many; the matrix has none so large."""
    config = k26.model(num_layers=2, n_routed_experts=32, vocab_size=1024)
    path, widths = tmp_path / "k26.kdtr", (1, 2, 8, 16, 64)
    k26.write(path, config, lambda text: None, f32=False)
    given = k26.requests(config, widths[1:], 8)
    found: dict[int, list[F32]] = {}
    for ranks in (1, 2):
        made = engine.create("cuda", ranks=ranks)
        with made.load(path, "int4-bf16", max_rows=max(widths)) as session:  # type: ignore[attr-defined]
            found[ranks] = [session.decode(replace(given[m], record=True)).logits for m in widths]
        if isinstance(made, RankedEngine):
            made.close()
    for m, one, two in zip(widths, found[1], found[2], strict=True):
        assert np.array_equal(one.view(np.uint32), two.view(np.uint32)), f"M={m}"


@pytest.mark.parametrize("precision", ["fp32", "int4", "bf16"])
def test_a_rank_allocates_what_is_planned(golden: Golden, ranked: RankedEngine, precision: str) -> None:
    path = ensure(["eight"])["eight"] if precision == "bf16" else Path(golden.file.file)
    config = ModelConfig.of(split(read(path).fields)[0], str(path))
    planned = plan.plan(config, precision, 2, 300, 24)
    with ranked.load(path, precision, context=300, max_rows=24) as session:
        held, _ = session.memory()
    assert held <= planned.total <= 1.1 * held


def decode_for_ever(session: RankedSession, golden: Golden) -> None:
    while True:
        session.decode(golden.request())


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("killed", "rank 1 died of SIGKILL"),
        ("stopped", "rank 1 was not heard of for 8 s"),
        ("corrupted", f"rank 1 diverged: RankDiverged: rank 1 of 2: {WEIGHT} is not what was loaded"),
    ],
)
def test_a_rank_that_fails_ends_the_job_and_is_named_first(golden: Golden, fault: str, verdict: str) -> None:
    made = RankedEngine("cuda", 2)
    try:
        session = made.load(Path(golden.file.file), "int4")
        assert session.decode(golden.request("noisy")).tokens == golden.tokens
        pids = [*made.job.pids.values(), made.job.torchrun]
        if fault == "corrupted":
            session.flip(1, WEIGHT, 5)
        else:
            assert processes.tell(made.job.pids[1], signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            decode_for_ever(session, golden)
        took = time.monotonic() - start
        print(f"{fault}: ended after {took:.1f} s: {str(caught.value).splitlines()[0]}")
        assert took < ALLOWED
        assert str(caught.value).startswith(verdict)
        assert str(caught.value).splitlines()[1] == "  log of rank 1:"
        end = start + ALLOWED  # a killed process lives on while its GPU context is taken down
        while any(map(processes.alive, pids)) and time.monotonic() < end:
            time.sleep(0.1)
        assert not any(map(processes.alive, pids))
    finally:
        made.close()
