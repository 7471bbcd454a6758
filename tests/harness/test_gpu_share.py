"""Sharing GPUs: the number of workers follows from memory, each sees one GPU, and no second run joins in."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import plan
from harness import gpu_share, prepare, run
from harness.bundles import ensure
from harness.gpu import CONTEXT_BYTES, Gpu, GpuBusy, Survey
from harness.gpu_share import SHARE, GpuTooSmall, give, leased, session_bytes, workers_that_fit
from harness.prepare import Infrastructure, Plan
from harness.remote.hosts import Gpus, Host
from harness.remote.order import able
from harness.run import Run
from refs import kdtr, recipe


def card(free: int, uuid: str = "GPU-a") -> Gpu:
    return Gpu(0, uuid, "Card", (9, 0), 1 << 40, free)


@pytest.mark.parametrize("config", ["tiny", "tiny2"])
def test_a_session_is_reckoned_larger_than_its_weights(config: str) -> None:
    tensors = kdtr.read(ensure([config])[config]).tensors
    stored = sum(t.nbytes for name, t in tensors.items() if not name.startswith(("golden.", "draft.", "meta")))
    other_kinds = sum(t.nbytes for name, t in tensors.items() if name.endswith((".qw", ".sc", ".bw")))
    least = stored - other_kinds
    assert least < session_bytes(config) - gpu_share.SCRATCH_BYTES < 4 * least


@pytest.mark.parametrize("config", recipe.names())
def test_a_session_is_reckoned_as_it_is_planned(config: str) -> None:
    """`kdtree plan`, which tests hold against what sessions allocate; beside it rows that are recorded."""
    found = recipe.load(config)
    model, run = found.model, found.run
    rows = max(65, run.budget + 1)
    plans = [plan.plan(model, precision, 1, model.max_context, rows) for precision in found.precisions]
    largest = max(sum(one.weights.values()) for one in plans)
    cache = 4 * (model.max_context + rows) * model.num_layers * (model.kv_lora_rank + model.qk_rope_head_dim)
    kept = 4 * (rows + 2 * run.max_tokens + 2) * model.vocab_size
    reckoned = session_bytes(config) - gpu_share.SCRATCH_BYTES
    assert reckoned == largest + cache + kept
    assert max(one.workspace for one in plans) <= gpu_share.SCRATCH_BYTES


def test_memory_caps_the_workers_and_the_fullest_gpu_decides() -> None:
    need = 2 * session_bytes("tiny") + CONTEXT_BYTES
    room = [int(need * count / 0.9) + 1 for count in range(4)]
    assert workers_that_fit([card(room[3])], ["tiny"], 8) == 3
    assert workers_that_fit([card(room[3])], ["tiny"], 2) == 2
    assert workers_that_fit([card(room[3]), card(room[1], "GPU-b")], ["tiny", "tiny2"], 8) == 2
    largest = max(recipe.names(), key=session_bytes)
    short = int((2 * session_bytes(largest) + CONTEXT_BYTES) / 0.9) - 64
    assert workers_that_fit([card(short)], ["tiny"], 8) == 1
    for configs in (["tiny", largest], [largest, "tiny"]):
        assert workers_that_fit([card(short + 128)], configs, 8) == 1
        with pytest.raises(GpuTooSmall):  # the largest config of the run decides
            workers_that_fit([card(short)], configs, 8)
    with pytest.raises(GpuTooSmall, match=r"needs \d+ MiB of GPU memory \(Card: \d+ MiB free\)"):
        workers_that_fit([card(room[1] - need // 8)], ["tiny"], 8)


def test_workers_are_dealt_out_over_the_gpus() -> None:
    seen = []
    for worker in range(4):
        environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
        give(worker, ["GPU-a", "GPU-b"], environment)
        seen.append(environment["CUDA_VISIBLE_DEVICES"])
        assert environment["KDTREE_RANKS_GPUS"] == "GPU-a,GPU-b", "ranks have them all"
    assert seen == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]


def test_a_second_run_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_LOCKS", str(tmp_path))
    real = gpu_share.Lease
    monkeypatch.setattr(gpu_share, "Lease", lambda gpu, run: real(gpu, run=run, timeout=0.1, say=lambda text: None))
    pair = [card(1, "GPU-b"), card(1, "GPU-a")]
    with leased(pair, "one"), pytest.raises(GpuBusy, match="run one"), leased(pair[:1], "two"):
        pass
    with leased(pair, "two"):
        pass


def test_more_ranks_than_gpus_share_them_only_if_told_to_and_the_ledger_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prepare, run):
        monkeypatch.setattr(module, "survey", lambda: Survey((card(1),), "", "580"))
    monkeypatch.delenv(SHARE, raising=False)
    with pytest.raises(Infrastructure, match=f"--ranks 4: every rank needs a GPU, and there is 1 here; {SHARE}=1"):
        prepare.points_of("csrc", ["cuda"], [4])
    monkeypatch.setenv(SHARE, "1")
    points = prepare.points_of("csrc", ["cuda"], [4, 1])
    assert {point.ranks for point in points} == {1, 4}
    notes = {}
    for ranks in (1, 4):
        expected = tuple(point.id for point in points if point.ranks == ranks)
        plan = Plan("csrc", ("cuda",), expected, "")
        notes[ranks] = Run(plan, (), run_dir=tmp_path / str(ranks), host="box", command="").finish().notes
    assert notes == {1: (), 4: (f"up to 4 ranks shared 1 GPU(s) of box ({SHARE})",)}


def test_a_host_whose_ranks_share_takes_cells_of_more_ranks_than_gpus() -> None:
    of_four = next(point for point in prepare.of_run(["cuda"], ranks=[4]) if point.ranks == 4)
    one = {"name": "box", "address": "box", "gpus": Gpus(count=1, kind="H200"), "architectures": ("sm_90",)}
    assert not able(Host(**one), of_four)
    assert able(Host(**one, environment={SHARE: "1"}), of_four)
    assert not able(Host(name="box", address="box", environment={SHARE: "1"}), of_four)
