"""Bytes and flops, from sizes alone: the least traffic that an operation can do, each operand touched once.

No device and no torch. Letters: M rows, K in, N out, H heads, T context, E experts, U distinct experts, D hidden.
A multiply-add is two flops; exponentials and comparisons are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.bench.cases import Case
from refs.config import BF16_PRECISIONS, ModelConfig
from refs.quant import GROUP, groups

F32 = 4


@dataclass(frozen=True)
class Work:
    """What one call has to move and to compute."""

    bytes: int
    flops: int


def weight_bytes(kind: str, n: int, k: int) -> int:
    """A matrix [n, k]: f32; bf16; or int4 as docs/model.md stores it, nibbles in whole groups and a bf16 scale each."""
    if kind.startswith("int4"):
        return n * groups(k) * (GROUP // 2 + 2)
    return n * k * (2 if kind == "bf16" else F32)


def linear(m: int, k: int, n: int, kind: str) -> Work:
    """y [m, n] = x [m, k] W^T; weights read once, x read in f32 or bf16 and y written in f32."""
    return Work(weight_bytes(kind, n, k) + m * (k * (2 if kind.endswith("bf16") else F32) + F32 * n), 2 * m * k * n)


def attention(m: int, keys: int, heads: int, rank: int, rope: int, number: int = F32) -> Work:
    """Absorbed MLA: every row against ``keys`` committed keys and, at most, the m rows of the step."""
    seen = keys + m
    traffic = number * (seen * (rank + rope) + m * heads * (2 * rank + rope))
    return Work(traffic, 2 * m * heads * seen * (2 * rank + rope))


def moe(m: int, top_k: int, dim: int, inner: int, shared: int, distinct: float, kind: str) -> Work:
    """Gate, up and down of the distinct experts, and of a shared one (f32 or bf16) whose inner size is ``shared``."""
    expert = 2 * weight_bytes(kind, inner, dim) + weight_bytes(kind, dim, inner)
    around = weight_bytes("bf16" if kind.endswith("bf16") else "f32", shared, dim)
    traffic = round(distinct * expert) + 3 * around + F32 * m * 2 * dim
    return Work(traffic, 6 * m * dim * (top_k * inner + shared))


def expected_distinct(experts: int, top_k: int, m: int) -> float:
    """Experts that m rows touch on average when every row draws ``top_k`` of them evenly."""
    return experts * (1.0 - (1.0 - top_k / experts) ** m)


def of(case: Case, distinct: float | None = None) -> Work:
    """What ``case`` has to do; ``distinct`` experts (default: as even routing expects)."""
    c, m, number = case, case.M, 2 if case.kind.endswith("bf16") else F32
    if c.op == "linear":
        return linear(m, c.K, c.N, c.kind)
    if c.op == "mla_attention":
        return attention(m, c.T, c.heads, c.rank, c.rope, number)
    if c.op == "mla_prepare":
        up = number * c.heads * c.nope * c.rank  # W_UK and W_UV lie interleaved; only W_UK's rows are needed
        traffic = up + m * c.heads * (F32 * (c.nope + c.rope) + number * (c.rank + c.rope))
        return Work(traffic + (F32 + number) * m * (c.rank + c.rope), 2 * m * c.heads * c.nope * c.rank)
    if c.op == "mla_value":
        return Work(number * (c.heads * c.v * c.rank + m * c.heads * (c.rank + c.v)), 2 * m * c.heads * c.v * c.rank)
    if c.op in ("moe", "moe_block"):
        used = expected_distinct(c.experts, c.top_k, m) if distinct is None else distinct
        block = moe(m, c.top_k, c.K, c.N, c.shared, used, c.kind)
        if c.op == "moe":
            return block
        router = weight_bytes("bf16" if c.kind.endswith("bf16") else "f32", c.experts, c.K)
        return Work(block.bytes + router, block.flops + 2 * m * c.K * c.experts)
    if c.op == "draft_attention":  # every row against the context and the whole block
        keys = c.T + m
        return Work(F32 * (2 * keys * c.kv_heads + 2 * m * c.heads) * c.v, 4 * m * c.heads * keys * c.v)
    if c.op == "draft_prepare":
        return Work(2 * F32 * m * (c.heads + 2 * c.kv_heads) * c.v, 6 * m * (c.heads + c.kv_heads) * c.v)
    if c.op == "gather_rows":
        return Work(2 * F32 * m * c.K, 0)
    if c.op == "router":
        return Work(F32 * (m * c.experts + c.experts + 2 * m * c.top_k), 0)
    if c.op == "select":
        return Work(F32 * m * c.N, 0)
    if c.op == "tree_build":
        return Work(F32 * c.depths * c.N, 2 * c.depths * c.N)
    if c.op == "embed":
        return Work(2 * F32 * m * c.K, 0)
    if c.op == "rms_norm":
        return Work(F32 * (2 * m * c.K + c.K), 3 * m * c.K)
    if c.op == "kv_commit":  # every other row is accepted
        return Work(2 * F32 * ((m + 1) // 2) * c.layers * (c.rank + c.rope), 0)
    if c.op == "record":
        return Work(2 * F32 * m * c.N, 0)
    return Work(F32 * 4 * m, 0)  # tree_root, accept, record_tree, draft_block: a few integers a row


def forward_bytes(model: ModelConfig, precision: str, rows: int, keys: int) -> int:
    """What a forward of ``rows`` rows after ``keys`` committed ones reads: the weights that it needs, and the cache.

    Of the experts those that even routing expects; of the embedding only the rows' own lines.
    """
    total = 0.0
    used = expected_distinct(model.n_routed_experts, model.num_experts_per_tok, rows) / model.n_routed_experts
    for name, (shape, dtype) in model.stored(precision).items():
        size = {"f32": 4, "bf16": 2, "u8": 1}[dtype]
        for width in shape:
            size *= width
        if name.startswith("embed."):
            total += rows * shape[1] * {"f32": 4, "bf16": 2}[dtype]
        else:
            total += size * used if ".experts." in name else size
    number = 2 if precision in BF16_PRECISIONS else F32
    cache = model.num_layers * keys * (model.kv_lora_rank + model.qk_rope_head_dim) * number
    return round(total) + cache
