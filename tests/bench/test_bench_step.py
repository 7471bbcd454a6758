"""Plans of steps, and the K2.6-shaped model: its file loads and decodes, and its full size is what the facts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine import create
from harness.bench import clock, k26, ranks, step, targets, turns, work
from harness.bench.ceilings import Ceilings
from harness.bundles import ensure
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.protocol import Decoded, DecodeRequest, Round, Session
from refs import kdtr

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": 300, "num_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 12, "max_context": 64,
}  # fmt: skip
LIMITS = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, lambda size: size / 1e4)


def test_plans_are_ar_once_and_a_tree_for_each_width() -> None:
    names = [p.name for p in step.plans(["tiny", step.K26], [4], [])]
    assert names == [
        "step-fp32-ar-tiny-m1", "step-fp32-ddtree-tiny-m4", "step-int4-ar-tiny-m1", "step-int4-ddtree-tiny-m4",
        "step-int4-bf16-ar-k26-m1", "step-int4-bf16-ddtree-k26-m4",
    ]  # fmt: skip
    assert [p.name for p in step.plans(["tiny"], [4], ["int4-ar", "nothing"])] == ["step-int4-ar-tiny-m1"]


def test_requests_of_a_bundle_have_the_asked_widths() -> None:
    path = ensure(["tiny"])["tiny"]
    found = step.recorded(path, "int4", "noisy", [2, 16])
    assert {m: (r.draft is not None, r.budget, r.record) for m, r in found.items()} == {
        1: (False, 0, False),
        2: (True, 1, False),
        16: (True, 15, False),
    }
    assert {(r.temperature, r.draft is None) for r in step.recorded(path, "int4", "noisy", [1]).values()} == {
        (0.0, True)
    }
    assert list(step.recorded(path, "int4", "unheard of", [2])) == [1]


def test_the_full_model_has_k26_sizes() -> None:
    """By hand: what a row reads of one dense and three MoE layers, of the head, and of the embedding its own line."""
    expert = 3 * 2048 * 7168 * 9 // 16  # half a byte a weight, a bf16 scale for 32 of them
    q_a, q_b, kv_a, kv_b = 1536 * 7168, 64 * 192 * 1536, 576 * 7168, 64 * 256 * 512
    attention = 2 * (q_a + q_b + kv_a + kv_b + 7168 * 8192) + 4 * (7168 + 1536 + 512)  # norms are f32
    dense = attention + 4 * 7168 + 2 * 3 * 18432 * 7168
    moe = attention + 4 * 7168 + 8 * expert + 2 * 3 * 2048 * 7168 + 384 * (2 * 7168 + 4)
    assert work.forward_bytes(k26.model(), "int4-bf16", 1, 0) == dense + 3 * moe + 4 * 7168 + 2 * 7168 * (163840 + 1)
    assert (
        work.forward_bytes(k26.model(), "int4-bf16", 1, 9) - work.forward_bytes(k26.model(), "int4-bf16", 1, 8)
        == 4 * 2 * 576
    )


class Recording:
    """A session that says how long each of its decodes took: six tokens in three forwards, logged or not."""

    def __init__(self) -> None:
        self.seconds = iter([3e-6, 3e-6, *(3e-6 * us for us in (40, 10, 30, 20, 50))])

    def decode(self, request: Any) -> Decoded:
        rounds = (Round((1, 2, 3), (-1, 0, 0), (0,)), Round((1,), (-1,), (0,))) if request.record else ()
        took = next(self.seconds)
        return Decoded((1, 2, 3, 4, 5, 6), 3, "limit", (2, 2, 2), rounds=rounds, decode_seconds=took)


def test_a_line_is_by_hand_what_its_decodes_took() -> None:
    request = DecodeRequest((1, 2), 6)
    measured = step.measure(cast(Session, Recording()), request, runs=5)
    assert measured[0] == clock.Timing(*(pytest.approx(us) for us in (30.0, 20.0, 40.0, 10.0)), 5)
    assert measured[2] == 2.0, "of the logged decode alone"
    plan = step.Plan(step.K26, "int4-bf16", "ddtree", 16)
    config = k26.model(**SMALL)
    line = step.line(plan, "cuda", config, 2, measured, LIMITS)
    size = work.forward_bytes(config, "int4-bf16", 16, 2 + 3)  # as many keys as there are on average
    assert (line.bytes, line.forwards, line.tokens, line.runs) == (size, 3, 6, 5)
    assert line.x_floor == pytest.approx(30.0 / (size / 1e4))
    assert line.tokens_per_second == pytest.approx(6 / 90e-6)
    assert line.tokens_per_gigabyte == pytest.approx(6 / (3 * size / 1e9))
    assert line.targets == {"at most 1.18x the floor": targets.word(line.x_floor <= 1.18)}


def test_a_gpu_rests_before_the_decodes_and_before_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Engine(Recording):
        device = "cuda"

        def load(self, path: Path, precision: str, *, max_rows: int) -> Engine:
            self.seconds = iter([3e-5] * 99)
            return self

        def decode(self, request: Any) -> Decoded:
            done.append("decode")
            return super().decode(request)

        def close(self) -> None:
            done.append("closed")

    def floor(size: int) -> float:
        done.append("floor")
        return 1.0

    monkeypatch.setattr(turns.time, "sleep", lambda seconds: done.append(f"{seconds:g}"))
    limits = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, floor)
    chosen = step.plans(["tiny"], [], ["step-fp32-ar-tiny-m1"])
    files, said = {"tiny": ensure(["tiny"])["tiny"]}, []
    engine = Engine()
    step.run(cast(Any, engine), files, chosen, "noisy", limits, said.append)
    decodes = ["decode"] * (2 + step.RUNS)
    assert done == ["0.3", *decodes, "0.3", "floor", "closed"]
    engine.device = "cpu"
    done.clear()
    step.run(cast(Any, engine), files, chosen, "noisy", limits, said.append)
    assert done == [*decodes, "floor", "closed"]


@pytest.mark.slow
def test_a_small_one_is_written_loaded_and_timed(tmp_path: Path) -> None:
    config, path, said = k26.model(**SMALL), tmp_path / "small.kdtr", []
    k26.write(path, config, said.append, f32=False)
    assert "small.kdtr" in said[0]
    file = kdtr.read(path)
    assert np.array_equal(file.tensor("final_norm.w"), np.ones(64, np.float32))
    lines: list[str] = []
    chosen = step.plans([step.K26], [4], [])
    found = step.run(create("cpu"), {step.K26: path}, chosen, "noisy", LIMITS, lines.append)
    assert [(s.case, s.M) for s in found] == [("step-int4-bf16-ar-k26-m1", 1), ("step-int4-bf16-ddtree-k26-m4", 4)]
    assert all(s.tokens == k26.TOKENS and s.us > 0 for s in found)
    assert found[0].forwards == k26.TOKENS
    assert found[1].rows > 3, "trees are full but for the last tokens"
    assert found[1].bytes > found[0].bytes


@pytest.mark.slow
def test_widths_are_held_to_each_others_bits(tmp_path: Path) -> None:
    """A file without f32 matrices is enough; AR and trees of one engine agree, and what does not is said to differ."""
    path = tmp_path / "small.kdtr"
    k26.write(path, k26.model(**SMALL), lambda text: None, f32=False)
    kept: dict[str, Any] = {}
    arguments = ("one", create("cpu"), path, "int4-bf16", [1, 4], kept)
    assert [(line["M"], line["equal"]) for line in ranks.measure(*arguments)] == [(1, True), (4, True)]
    kept["int4-bf16"] = kept["int4-bf16"] ^ np.uint32(1)
    assert [line["equal"] for line in ranks.measure(*arguments)] == [False, False]
    assert [line["equal"] for line in ranks.measure(*arguments[:-1], None)] == [None, None]


@pytest.mark.parametrize(("bits", "status"), [([True, True], PASSED), ([True, False], FAILED)])
def test_ranks_end_with_1_where_bits_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bits: list[bool], status: int
) -> None:
    """Every engine's lines stand in the record; a share alone is held to nobody's bits."""
    equal = iter(bits)
    asked = []

    def measured(label: str, engine: Any, path: Path, precision: str, widths: Any, logits: Any) -> list[dict[str, Any]]:
        asked.append((label, engine, precision, widths))
        return [{"engine": label, "equal": None if logits is None else next(equal)}]

    monkeypatch.setattr(ranks, "create", lambda device, ranks=1: f"{device} {ranks}")
    monkeypatch.setattr(ranks, "CsrcEngine", lambda device, member: f"{device} {member}")
    monkeypatch.setattr(ranks.share, "alone", lambda n: f"one of {n}")
    monkeypatch.setattr(ranks, "measure", measured)
    out = tmp_path / "ranks.json"
    (tmp_path / "model").touch()
    arguments = ["--file", str(tmp_path / "model"), "--ranks", "2", "--alone", "4", "-M", "1", "--json", str(out)]
    assert ranks.main(arguments) == status
    several = "2 ranks that share 0 GPU(s)"
    assert [a[0] for a in asked] == ["one rank", "share of 4 ranks, alone", several]
    assert [a[1] for a in asked] == ["cuda 1", "cuda:0 one of 4", "cuda 2"]
    assert all(a[2:] == ("int4-bf16", [1]) for a in asked)
    lines = json.loads(out.read_text())["lines"]
    assert [line["equal"] for line in lines] == [bits[0], None, bits[1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "'0' is no whole number from 1 on"),
        (["-M", "0"], "'0' is no whole number from 1 on"),
        (["--experts", "4"], "num_experts_per_tok"),
    ],
)
def test_what_ranks_cannot_do_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    try:
        status = ranks.main(["--file", str(tmp_path / "model"), *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == INFRASTRUCTURE
    assert said in capsys.readouterr().err
