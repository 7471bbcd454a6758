"""`kdtree plan` against what sessions allocate, and against the published size of the real model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import engine
from engine import plan
from engine.ranks.shares import undivided
from harness.bench import k26
from harness.bundles import ensure
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from refs import recipe
from refs.config import BF16_PRECISIONS, PRECISIONS, ModelConfig
from refs.drafter_config import split
from refs.kdtr import read
from tests.engine.together import Together

ROWS, CONTEXT = 24, 300
SMALL = {
    "num_layers": 2, "first_k_dense": 2, "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 300,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 12, "max_context": 64,
}  # fmt: skip
LEAST = {"intermediate_size": 96, "num_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 32, "v_head_dim": 16}
SPARE = range(plan.STATE, 5000)  # bytes: state, of which more is planned than a session has


@pytest.fixture(scope="module")
def bundle() -> Path:
    return ensure(["experts"])["experts"]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_rank_allocates_what_is_planned(bundle: Path, precision: str, ranks: int) -> None:
    """On the CPU weights stay in the file: the bytes of what a rank was given are counted, and the rest allocated."""
    config = ModelConfig.of(split(read(bundle).fields)[0], str(bundle))
    planned = plan.plan(config, precision, ranks, CONTEXT, ROWS, "cpu")
    with Together(bundle, precision, ranks, context=CONTEXT, max_rows=ROWS) as many:
        held = list(zip(many.call("weights"), many.call("memory"), strict=True))
    for weights, (allocated, *_) in held:
        assert sum(size * count for _, size, count, _ in weights.values()) == sum(planned.weights.values())
        assert planned.cache + planned.workspace - allocated in range(3000, plan.STATE)


@pytest.mark.parametrize("config", [name for name in recipe.names() if name != "stated"])  # its experts are drawn
def test_a_session_allocates_what_is_planned(config: str) -> None:
    """Models with and without dense layers, in every precision."""
    path, found = ensure([config])[config], recipe.load(config)
    for precision in found.precisions:
        context = min(CONTEXT, found.model.max_context)
        planned = plan.plan(found.model, precision, 1, context, ROWS, "cpu")
        with engine.create("cpu").load(path, precision, context=context, max_rows=ROWS) as session:
            given = sum(size * count for _, size, count, _ in session.weights().values())
            allocated = session.memory()[0]
        assert given == sum(planned.weights.values())
        assert planned.cache + planned.workspace - allocated in SPARE
        assert planned.total == given + planned.cache + planned.workspace


@pytest.mark.parametrize(
    "sizes",
    [{"intermediate_size": 1024}, {"num_heads": 64, "kv_lora_rank": 128}, {"q_lora_rank": 2048}, {"v_head_dim": 512}],
    ids=lambda sizes: next(iter(sizes)),
)
def test_scratch_of_a_session_without_experts_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """A bundle's products take less than its experts; here a row of the widest product decides, or attention's sums."""
    monkeypatch.setattr(k26, "BLOCK", 1 << 12)
    config = k26.model(**SMALL, **{**LEAST, **sizes})
    k26.write(tmp_path / "dense.kdtr", config, lambda line: None, f32=False)
    planned = plan.plan(config, "int4-bf16", 1, 64, ROWS, "cpu")
    with engine.create("cpu").load(tmp_path / "dense.kdtr", "int4-bf16", context=64, max_rows=ROWS) as session:
        assert planned.cache + planned.workspace - session.memory()[0] in SPARE


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scratch_of_experts_is_planned_in_every_precision(precision: str) -> None:
    """As `csrc/model.cpp` asks for it; a model without experts has none."""
    sparse = plan.find("tiny")
    dense = replace(sparse, first_k_dense=sparse.num_layers)
    taken = [plan._cuda_scratch(config, precision, 4, 300, 24) for config in (sparse, dense)]
    assert taken == [plan.moe_scratch(sparse, 24), 0]
    for context, segments in ((512, 0), (513, 2), (1024, 2), (1025, 3)):  # one segment is no part
        parts = 4 * 24 * 4 * segments * (dense.kv_lora_rank + 2)  # f32: sums, and a maximum and a norm
        assert plan._cuda_scratch(dense, "fp32", 4, context, 24) == parts
        either = [plan.workspace(dense, precision, 1, context, 24, device) for device in ("cuda", "cpu")]
        heads = dense.num_heads
        scratch = [f(dense, precision, heads, context, 24) for f in (plan._cuda_scratch, plan._cpu_scratch)]
        assert either[0] - either[1] == scratch[0] - scratch[1]
    hopper = replace(dense, kv_lora_rank=512, qk_rope_head_dim=64)
    taken = [plan._cuda_scratch(hopper, precision, 4, 300, 24)]
    assert taken == [plan.hopper_scratch(hopper, 4, 300, 24) if precision in BF16_PRECISIONS else 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_a_model_has_not_take_no_room(ranks: int, device: str) -> None:
    def space(config: ModelConfig) -> int:
        return plan.workspace(config, "int4-bf16", ranks, 300, 24, device)

    tiny = plan.find("tiny")
    dense, sparse = (replace(tiny, first_k_dense=count) for count in (tiny.num_layers, 0))
    experts = {"n_routed_experts": 512, "num_experts_per_tok": 16, "moe_intermediate_size": 4096, "n_shared_experts": 4}
    assert space(dense) == space(replace(dense, **experts))  # type: ignore[arg-type]
    assert space(sparse) == space(replace(sparse, intermediate_size=4096))
    for config, larger in ((dense, {"intermediate_size": 4096}), (sparse, {"moe_intermediate_size": 4096})):
        of_a_row = (space(replace(config, **larger)) - space(config)) / 24  # type: ignore[arg-type]
        exchanged = 0 if ranks == 1 else 2 * (4096 - 256) // 2 + 4 * (4096 - 512)  # a share, and all of it in f32
        assert of_a_row >= 2 * (4096 - 256) + exchanged, "an act of bf16, at least"


def test_k26_is_as_large_as_it_is_said_to_be() -> None:
    """The checkpoint has 595 GB: 4-bit experts, the rest bf16. Its 8 shares are eighths but for what is held whole."""
    config = plan.find(plan.K26)
    one, eight = (plan.weights(config, "int4-bf16", ranks) for ranks in (1, 8))
    assert 585e9 < sum(one.values()) < 600e9
    assert eight["whole"] == one["whole"]
    assert one["experts"] == 60 * 384 * 3 * 2048 * 7168 * 9 // 16  # half a byte a weight, 2 bytes for 32 of them
    assert one["vocabulary"] == 2 * 2 * 163840 * 7168
    assert one["attention"] == 61 * 2 * (64 * 192 * 1536 + 64 * 256 * 512 + 7168 * 64 * 128)
    assert one["dense and shared"] == 2 * 3 * 7168 * (18432 + 60 * 2048)
    norms, down = 4 * (61 * (2 * 7168 + 1536 + 512) + 7168), 2 * 61 * 7168 * (1536 + 576)
    assert one["whole"] == norms + down + 60 * 384 * (2 * 7168 + 4)
    shared = sum(one.values()) - one["whole"]
    assert abs(sum(eight.values()) - eight["whole"] - shared / 8) < 1e6


def test_eight_gpus_of_96_hold_it_and_four_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [plan.K26, "--memory", "96", "--json", "--gpus"]
    assert plan.main([*arguments, "8"]) == PASSED
    found = json.loads(capsys.readouterr().out)
    assert found["longest_context"] >= 131072
    assert [row["fits"] for row in found["plans"]][:2] == [True, True]
    assert plan.main([*arguments, "4"]) == FAILED


def test_ranks_that_cannot_share_the_model_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([plan.K26, "--memory", "96", "--gpus", "3"]) == INFRASTRUCTURE
    assert "num_heads: 3 ranks cannot share 64 evenly" in capsys.readouterr().err
    assert undivided(k26.model(), 16) == []


def test_every_size_that_ranks_share_has_to_divide() -> None:
    config = plan.find("tiny")
    assert undivided(config, 2) == []
    shared = ("num_heads", "hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size")
    for field in shared:
        odd = replace(config, **{field: getattr(config, field) + 1})  # type: ignore[arg-type]
        assert undivided(odd, 2) == [field]
    both = replace(config, intermediate_size=33, moe_intermediate_size=33)
    assert undivided(replace(both, first_k_dense=0), 2) == ["moe_intermediate_size"], "no layer is dense"
    assert undivided(replace(both, first_k_dense=both.num_layers), 2) == ["intermediate_size"], "no layer has experts"


def test_a_config_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["nothing", "--memory", "96"]) == INFRASTRUCTURE
    assert "known configs" in capsys.readouterr().err


def test_another_json_file_is_not_taken_for_the_config_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([str(tmp_path / "generation_config.json"), "--memory", "96"]) == INFRASTRUCTURE
    assert "a file called config.json" in capsys.readouterr().err
