"""``kdtree plan``: what a rank holds - weights, cache, workspace - before any device is asked for it.

The sizes are those of ``csrc/model.cpp`` and ``csrc/finder.h``; `tests/ranks/test_plan.py` holds them against what
sessions allocate. GiB are 2^30 bytes. What the driver, CUDA's context and NCCL take is not the engine's: ``--reserve``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.ranks.shares import undivided
from harness import plain_json
from harness.bench import k26
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser
from refs.config import BF16_PRECISIONS, PRECISIONS, ModelConfig
from refs.quant import GROUP, groups

GIB = 1 << 30
K26 = "k2.6"
"""Stands for Kimi K2.6 at its full size; so does any config.json of a checkpoint."""
WHOLE = ("attn.q_a.w", "attn.kv_a.w", "router.w", "router.bias", "norm.w")
"""Endings of the tensors that every rank holds whole."""
CONTEXTS = (4096, 8192, 32768, 131072, 262144)
ROWS = 65
SEGMENT = 512  # keys whose partial results attention keeps apart on a GPU (csrc/cuda/mla_attention.cu)
K_SEGMENTS = 8  # parts of K that products of bf16 activations keep apart (csrc/stream_plan.h)
UNIT = 128  # weights that an INT4 product takes at a time on the CPU (csrc/cpu/kernels.h)
SPREAD = 80  # floats between rows that it computes several outputs of at a time (csrc/cpu/gemm.cpp)
STATE = 4096  # bytes of a step's state and checksums
ROW_STATE = 64  # bytes of a row's token, parent, depth, choice, score, acceptance


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank."""

    precision: str
    ranks: int
    context: int
    rows: int
    weights: dict[str, int]
    """By group: experts, attention, dense and shared, vocabulary, whole (what every rank holds)."""
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.cache + self.workspace


def weights(config: ModelConfig, precision: str, ranks: int) -> dict[str, int]:
    """Bytes of a rank's weights by group."""
    found = dict.fromkeys(("experts", "attention", "dense and shared", "vocabulary", "whole"), 0)
    plain = 2 if precision in BF16_PRECISIONS else 4
    for name, shape in config.shapes().items():
        count = math.prod(shape)
        if ".experts." in name and precision.startswith("int4"):
            size = count // shape[-1] * groups(shape[-1]) * (GROUP // 2 + 2)
        else:
            size = count * (4 if name.endswith(("norm.w", "router.bias")) else plain)
        if name.endswith(WHOLE):
            found["whole"] += size
            continue
        group = (
            "experts" if ".experts." in name else "attention" if ".attn." in name
            else "vocabulary" if name in ("embed.w", "lm_head.w") else "dense and shared"
        )  # fmt: skip
        found[group] += size // ranks
    return found


def workspace(config: ModelConfig, precision: str, ranks: int, context: int, rows: int, device: str) -> int:
    """Bytes of a step's buffers, of the exchanges and of scratch."""
    c, operand = config, 2 if precision in BF16_PRECISIONS else 4
    moe, dense = c.first_k_dense < c.num_layers, c.first_k_dense > 0
    heads, shared = c.num_heads // ranks, c.n_shared_experts * c.moe_intermediate_size
    q, o = c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.num_heads * c.v_head_dim
    acts = c.num_experts_per_tok * c.moe_intermediate_size + shared if moe else 0
    act = max(acts, c.intermediate_size if dense else 0)
    row = 4 * (c.hidden_size + c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim + q // ranks + c.vocab_size)
    row += operand * (heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim) + o)
    row += operand * (acts + (c.intermediate_size if dense else 0))
    row += 4 * (c.n_routed_experts + 2 * c.num_experts_per_tok) if moe else 0
    if ranks > 1:
        row += (4 * (c.hidden_size + c.vocab_size) + operand * (o + act)) // ranks
        row += 4 * max(act, c.hidden_size, o, q, c.num_heads * c.kv_lora_rank, c.vocab_size)
    angles = 4 * context * c.qk_rope_head_dim
    scratch = (_cuda_scratch if device == "cuda" else _cpu_scratch)(c, precision, heads, context, rows)
    return rows * (row + ROW_STATE) + 4 * rows * rows + angles + scratch + STATE


def _cuda_scratch(c: ModelConfig, precision: str, heads: int, context: int, rows: int) -> int:
    """Attention's partial results by segment of keys, or a product of every chosen expert.

    Which of its two kernels serves depends on the GPU: the larger is planned for (csrc/cuda/mla_plan.h).
    """
    segments = -(-context // SEGMENT)
    generic = 4 * rows * heads * segments * (c.kv_lora_rank + 2) if segments > 1 else 0
    moe = moe_scratch(c, rows) if c.first_k_dense < c.num_layers else 0  # asked for in every precision
    hopper = hopper_scratch(c, heads, context, rows) if precision in BF16_PRECISIONS else 0
    return max(generic, moe, hopper)


def moe_scratch(c: ModelConfig, rows: int) -> int:
    """Products of the chosen experts and the shared one, rows and acts in order, parts of the router's logits
    (csrc/cuda/moe_scratch.h)."""
    products = 4 * rows * (c.num_experts_per_tok + 1) * c.hidden_size
    normed, acts = 2 * rows * _units(c.hidden_size), 2 * rows * c.num_experts_per_tok * _units(c.moe_intermediate_size)
    parts = 4 * rows * K_SEGMENTS * c.n_routed_experts
    return sum(-(-size // 256) * 256 for size in (products, normed, acts, parts))


def _units(k: int) -> int:
    """Numbers of a row of ``k`` in whole units of INT4."""
    return -(-k // 128) * 128


def hopper_scratch(c: ModelConfig, heads: int, context: int, rows: int) -> int:
    """Attention's splits on tensor cores, which serve one shape; a launch takes no more rows than have room."""
    if (c.kv_lora_rank, c.qk_rope_head_dim) != (512, 64):
        return 0
    chunks = 1 if context <= 64 else -(-(context - 8) // 64)  # the last one may have 72 keys
    splits = (chunks + 1) // 2 if chunks <= 32 else 16 if chunks <= 640 else 33
    row = splits * -(-heads // 64) * 64 * (512 * 2 + (4 + 4) * 4)  # sums, maxima and norms, scales
    return min(row * rows, max(row, 256 << 20))


def _packed(k: int) -> int:
    """Floats of a row of ``k`` as the CPU's products take it."""
    return -(-k // UNIT) * UNIT


def _cpu_scratch(c: ModelConfig, precision: str, heads: int, _context: int, rows: int) -> int:
    """Rows normed and packed for a product, and a product of every chosen expert."""
    o = c.num_heads * c.v_head_dim
    k = max(c.hidden_size, c.q_lora_rank, o, c.intermediate_size if c.first_k_dense else 0)
    linear = rows * (4 * (2 * _packed(k) + SPREAD) + 8)
    chosen, dim = c.num_experts_per_tok, c.hidden_size
    f32 = 2 * dim + dim / 2 + _packed(dim) + chosen * (_packed(c.moe_intermediate_size) + dim + 5) + 4
    moe = math.ceil(rows * 4 * f32) + 8 * c.n_routed_experts
    attention = 4 * rows * heads * c.kv_lora_rank if precision in BF16_PRECISIONS else 0
    return max(linear, moe if c.first_k_dense < c.num_layers else 0, attention)


def plan(config: ModelConfig, precision: str, ranks: int, context: int, rows: int = ROWS, device: str = "cuda") -> Plan:
    """What one of ``ranks`` holds for sessions of ``context`` positions and steps of up to ``rows`` rows.

    Raises ValueError naming the field when ``ranks`` cannot share the model.
    """
    if bad := undivided(config, ranks):
        raise ValueError(f"{bad[0]}: {ranks} ranks cannot share {getattr(config, bad[0])} evenly")
    element = 2 if precision in BF16_PRECISIONS else 4
    cache = element * (context + rows) * config.num_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    space = workspace(config, precision, ranks, context, rows, device)
    return Plan(precision, ranks, context, rows, weights(config, precision, ranks), cache, space)


def longest(config: ModelConfig, precision: str, ranks: int, rows: int, room: int) -> int:
    """The longest context, up to the model's own, that ``room`` bytes a rank hold; 0 if none does."""
    low, high = 0, config.max_context
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if plan(config, precision, ranks, middle, rows).total <= room else (low, middle - 1)
    return low


def find(name: str) -> ModelConfig:
    """A config of refs/configs, ``k2.6``, a checkpoint's config.json or a KDTR file. Raises what reading it raises."""
    path = Path(name)
    if name == K26:
        return k26.model(num_layers=61, max_context=262144)
    if path.suffix == ".kdtr":
        from refs import kdtr
        from refs.drafter_config import split

        return ModelConfig.of(split(kdtr.read(path).fields)[0], name)
    if path.suffix == ".json" or path.is_dir():
        from engine.hf_config import read_config

        folder = path if path.is_dir() else path.parent
        if path.suffix == ".json" and path.name != "config.json":
            raise ValueError(f"{name}: a checkpoint's sizes stand in a file called config.json")
        return ModelConfig.of(read_config(folder).fields, str(folder / "config.json"))
    from refs import recipe

    return recipe.load(name).model


def table(config: ModelConfig, options: argparse.Namespace, room: int) -> list[str]:
    """Lines for a reader."""
    first = plan(config, options.precision, options.gpus, options.context[0], options.rows)
    lines = [f"{options.config} in {options.precision} on {options.gpus} GPUs of {options.memory:g} GiB, a GPU:"]
    for group, size in first.weights.items():
        lines.append(f"  {group:<18} {size / GIB:8.2f} GiB" + (" (on every one)" if group == "whole" else ""))
    lines.append(f"  {'weights':<18} {sum(first.weights.values()) / GIB:8.2f} GiB; reserved {options.reserve:g} GiB")
    lines.append(
        f"  {'context':>9} {'cache':>9} {'workspace':>10} {'total':>9}  GiB, steps of up to {options.rows} rows"
    )
    for context in options.context:
        p = plan(config, options.precision, options.gpus, context, options.rows)
        fits = "fits" if p.total <= room else f"lacks {(p.total - room) / GIB:.2f} GiB"
        sizes = f"{p.cache / GIB:9.2f} {p.workspace / GIB:10.2f} {p.total / GIB:9.2f}"
        lines.append(f"  {context:>9} {sizes}  {fits}")
    best = longest(config, options.precision, options.gpus, options.rows, room)
    lines.append(f"longest context that fits: {best}" if best else "no context fits: take more GPUs or larger ones")
    return lines


def main(argv: Sequence[str]) -> int:
    """``kdtree plan CONFIG --gpus 8 --memory 96``: 0 something fits, 1 nothing does, 3 the config or the arguments."""
    parser = Parser(
        prog="kdtree plan",
        description="What fits where: weights, cache by context length and workspace of each of several GPUs.",
        epilog=f"examples:\n  kdtree plan {K26} --gpus 8 --memory 96\n  kdtree plan config.json --gpus 16 --memory 96 "
        "--precision int4\n\n"
        f"exit status: {PASSED} a context fits, {FAILED} none does, {INFRASTRUCTURE} a wrong config or wrong arguments",
    )
    parser.add_argument("config", help=f"a name of refs/configs, {K26}, a checkpoint's config.json, or a KDTR file")
    parser.add_argument("--gpus", metavar="N", type=int, default=1, help="that share the model (default: 1)")
    parser.add_argument("--memory", metavar="GIB", type=float, required=True, help="of one GPU")
    parser.add_argument(
        "--reserve", metavar="GIB", type=float, default=2.0, help="of it for CUDA, NCCL and others (default: 2)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="int4-bf16", help="default: int4-bf16")
    parser.add_argument(
        "--context", metavar="N", type=int, action="append", default=[], help="positions; repeatable (default: several)"
    )
    parser.add_argument(
        "--rows", metavar="N", type=int, default=ROWS, help=f"of the widest step, budget and root (default: {ROWS})"
    )
    parser.add_json("one JSON object")
    options = parser.parse_args(argv)
    sizes_are = 0 <= options.reserve < options.memory < math.inf  # neither is NaN
    if min(options.gpus, options.rows, *(options.context or [1])) < 1 or not sizes_are:
        parser.error("GPUs, rows and contexts are at least 1, the memory more than the reserve")
    room = int((options.memory - options.reserve) * GIB)
    try:
        config = find(options.config)
        options.context = options.context or [c for c in CONTEXTS if c < config.max_context] + [config.max_context]
        best = longest(config, options.precision, options.gpus, options.rows, room)
        plans = [plan(config, options.precision, options.gpus, c, options.rows) for c in options.context]
    except ValueError as error:
        print(f"kdtree plan: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    rows = [{**asdict(p), "total": p.total, "fits": p.total <= room} for p in plans]
    plain_json.give({"config": options.config, "room": room, "longest_context": best, "plans": rows}, options.json)
    if options.json != plain_json.PRINTED:
        print("\n".join(table(config, options, room)))
    return PASSED if best else FAILED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
