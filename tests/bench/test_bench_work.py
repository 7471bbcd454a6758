"""Bytes and flops against figures worked out by hand, against enumeration, and against what a bundle really holds."""

from __future__ import annotations

import itertools

import pytest

from harness.bench import work
from harness.bench.cases import Case, cases
from harness.bundles import ensure
from refs import kdtr
from refs.config import ModelConfig


def test_the_weights_of_k26_have_their_known_sizes() -> None:
    assert work.weight_bytes("int4", 4096, 7168) == 4096 * 7168 // 2 + 4096 * 7168 // 32 * 2 == 16_515_072
    assert work.weight_bytes("f32", 4096, 7168) == 117_440_512
    assert work.weight_bytes("int4", 3, 33) == 3 * 2 * 18, "whole groups"
    expert = 3 * 2048 * 7168
    assert work.moe(1, 8, 7168, 2048, 0, 1.0, "int4").bytes == expert // 2 + expert // 16 + 8 * 7168  # 24.8 MB and x


def test_a_linear_is_two_flops_a_weight_and_row() -> None:
    assert work.linear(3, 5, 7, "f32") == work.Work(4 * (35 + 15 + 21), 2 * 3 * 5 * 7)


def test_attention_counts_both_products() -> None:
    # scores: rank + rope multiply-adds a key, head and row; values: rank
    done = work.attention(2, 10, 3, 8, 4)
    assert done.flops == 2 * (2 * 3 * 12) * (8 + 4) + 2 * (2 * 3 * 12) * 8
    assert done.bytes == 4 * (12 * (8 + 4) + 2 * 3 * (8 + 4) + 2 * 3 * 8)


@pytest.mark.parametrize(("experts", "top_k", "m"), [(4, 2, 1), (4, 2, 2), (5, 2, 3), (6, 3, 2)])
def test_expected_distinct_experts_by_enumeration(experts: int, top_k: int, m: int) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    drawn = list(itertools.product(choices, repeat=m))
    mean = sum(len({e for row in rows for e in row}) for rows in drawn) / len(drawn)
    assert work.expected_distinct(experts, top_k, m) == pytest.approx(mean)


def test_every_case_moves_bytes_and_more_rows_move_more() -> None:
    for device in ("cpu", "cuda"):
        for case in cases(device):
            assert work.of(case).bytes > 0, case.name
            assert work.of(case).flops >= 0
    one, many = (work.of(Case("moe", "x", m, 64, 32, kind="int4", experts=16, top_k=4)) for m in (1, 8))
    assert one.bytes < many.bytes < 8 * one.bytes, "rows share experts"


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_forward_that_touches_all_experts_reads_what_the_file_holds(precision: str) -> None:
    path = ensure(["tiny"])["tiny"]
    file = kdtr.read(path)
    model = ModelConfig.of(file.fields, str(path))
    dropped = ".w" if precision == "int4" else ".qw .sc"
    stored = sum(
        e.size
        for e in file.entries.values()
        if not e.name.startswith(("golden.", "draft.", "noise.", "meta.", "embed."))
        and not e.name.endswith(".bw")
        and not (".experts." in e.name and any(e.name.endswith(end) for end in dropped.split()))
        and not e.name.startswith("tolerance.")
    )
    rows, keys = 1000, 5
    cache = model.num_layers * keys * (model.kv_lora_rank + model.qk_rope_head_dim) * 4
    assert work.forward_bytes(model, precision, rows, keys) == stored + cache + rows * model.hidden_size * 4
    assert work.forward_bytes(model, precision, 1, keys) < stored
