"""Bytes and flops against figures worked out by hand, against enumeration, and against what a bundle really holds."""

from __future__ import annotations

import itertools
import math

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


M, H, R, NOPE, ROPE, V, K, N, E, C = 3, 5, 11, 13, 17, 19, 64, 32, 23, 2
MLA = {"heads": H, "rank": R, "nope": NOPE, "rope": ROPE, "v": V}
MOE = {"experts": E, "top_k": C, "shared": 96}
DRAFT = {"heads": 6, "kv_heads": 3, "v": V}
EXPERT = [(2, N, K // 2), (2, N, K // 32 * 2), (K, N // 2), (K, N // 32 * 2)]  # nibbles, and scales of bf16: bytes
SHARED = (3, 96, K)
ROWS = [(M, K), (M, K)]  # read and added to

TOUCHED = [
    (Case("linear", "x", M, K, N, kind="f32"), {4: [(N, K), (M, K), (M, N)]}, 2 * M * N * K),
    (Case("linear", "x", M, K, N, kind="bf16"), {2: [(N, K), (M, K)], 4: [(M, N)]}, 2 * M * N * K),
    (Case("linear", "x", M, K, N, kind="int4"), {1: [(N, K // 2 + K // 32 * 2)], 4: [(M, K), (M, N)]}, 2 * M * N * K),
    (
        Case("linear", "x", M, K, N, kind="int4-bf16"),
        {1: [(N, K // 2 + K // 32 * 2)], 2: [(M, K)], 4: [(M, N)]},
        2 * M * N * K,
    ),
    (
        Case("mla_prepare", "x", M, T=9, **MLA),
        {4: [(M, H, NOPE + ROPE), (M, R + ROPE), (H, NOPE, R), (M, H, R + ROPE), (M, R + ROPE)]},
        2 * M * H * NOPE * R,
    ),
    (
        Case("mla_prepare", "x", M, T=9, kind="bf16", **MLA),
        {4: [(M, H, NOPE + ROPE), (M, R + ROPE)], 2: [(H, NOPE, R), (M, H, R + ROPE), (M, R + ROPE)]},
        2 * M * H * NOPE * R,
    ),
    (Case("mla_value", "x", M, kind="bf16", **MLA), {2: [(H, V, R), (M, H, R), (M, H, V)]}, 2 * M * H * V * R),
    (Case("mla_value", "x", M, **MLA), {4: [(H, V, R), (M, H, R), (M, H, V)]}, 2 * M * H * V * R),
    (
        Case("mla_attention", "x", M, T=9, kind="bf16", **MLA),
        {2: [(9 + M, R + ROPE), (M, H, R + ROPE), (M, H, R)]},
        2 * M * H * (9 + M) * (R + ROPE + R),
    ),
    (Case("moe", "x", M, K, N, kind="f32", **MOE), {4: [(4, 3, N, K), SHARED, *ROWS]}, 6 * M * K * (C * N + 96)),
    (
        Case("moe", "x", M, K, N, kind="int4-bf16", **MOE),
        {1: 4 * EXPERT, 2: [SHARED], 4: ROWS},
        6 * M * K * (C * N + 96),
    ),
    (
        Case("moe_block", "x", M, K, N, kind="int4", **MOE),
        {1: 4 * EXPERT, 4: [SHARED, *ROWS, (E, K)]},
        6 * M * K * (C * N + 96) + 2 * M * K * E,
    ),
    (
        Case("moe_block", "x", M, K, N, kind="int4-bf16", **MOE),
        {1: 4 * EXPERT, 2: [SHARED, (E, K)], 4: ROWS},
        6 * M * K * (C * N + 96) + 2 * M * K * E,
    ),
    (
        Case("moe_block", "x", M, K, N, kind="bf16", **MOE),
        {2: [(4, 3, N, K), SHARED, (E, K)], 4: ROWS},
        6 * M * K * (C * N + 96) + 2 * M * K * E,
    ),
    (
        Case("draft_attention", "x", M, T=9, **DRAFT),
        {4: [(2, 9 + M, 3, V), (M, 6, V), (M, 6, V)]},
        2 * 2 * M * 6 * (9 + M) * V,
    ),
    (Case("draft_prepare", "x", M, T=9, **DRAFT), {4: [(2, M, 6, V), (2, M, 3, V), (2, M, 3, V)]}, 6 * M * (6 + 3) * V),
    (Case("gather_rows", "x", M, K), {4: ROWS}, 0),
    (Case("embed", "x", M, K), {4: ROWS}, 0),
    (Case("rms_norm", "x", M, K), {4: [*ROWS, (K,)]}, 3 * M * K),
    (Case("record", "x", M, N=N), {4: [(M, N), (M, N)]}, 0),
    (Case("router", "x", M, experts=E, top_k=C), {4: [(M, E), (E,), (M, C), (M, C)]}, 0),
    (Case("select", "x", M, N=N), {4: [(M, N)]}, 0),
    (Case("tree_build", "x", M, N=N, depths=7, budget=2), {4: [(7, N)]}, 2 * 7 * N),
    (Case("kv_commit", "x", M, T=9, layers=7, rank=R, rope=ROPE), {4: 2 * [(2, 7, R + ROPE)]}, 0),
    (Case("kv_commit", "x", 4, T=9, layers=7, rank=R, rope=ROPE), {4: 2 * [(2, 7, R + ROPE)]}, 0),
    (Case("accept", "x", M), {4: [(4, M)]}, 0),
]
"""What a call has to read and write, by the bytes of a number; experts: four that its rows touch, or two a row."""


@pytest.mark.parametrize(("case", "touched", "flops"), TOUCHED, ids=[case.name for case, _, _ in TOUCHED])
def test_an_operation_touches_each_of_its_numbers_once(
    case: Case, touched: dict[int, list[tuple[int, ...]]], flops: int
) -> None:
    size = sum(width * math.prod(shape) for width, shapes in touched.items() for shape in shapes)
    assert work.of(case, 4) == work.Work(size, flops)


def test_every_operation_is_told_of() -> None:
    told = {case.op for case, _, _ in TOUCHED} | {"tree_root", "record_tree", "draft_block"}
    assert {case.op for case in cases("cuda")} == told


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
