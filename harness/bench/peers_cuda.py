"""Peers on the GPU: cuBLAS, torch's int4pack, humming-kernels in both modes, and FlashMLA's dense decode.

They work in bf16 where the engine works in f32, so their bytes are not the engine's: times are compared, not shares.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from harness.bench.cases import Case
from harness.bench.clock import Call
from harness.bench.operands import routes
from harness.bench.peers import Peer, copies_of
from refs.quant import GROUP

PAGE = 64  # keys a page of FlashMLA's cache


def cublas_calls(case: Case, copies: int, *, dtype: str) -> Sequence[Call] | None:
    """A dense product on the weights of either kind, unpacked."""
    import torch
    from torch.nn import functional

    kind = getattr(torch, dtype)
    if case.op != "linear":
        return None

    def call() -> Call:
        x = torch.rand(case.M, case.K, device="cuda").to(kind)
        w = torch.rand(case.N, case.K, device="cuda").to(kind)
        return lambda: functional.linear(x, w)

    return copies_of(call, copies)


def int4pack_calls(case: Case, copies: int) -> Sequence[Call] | None:
    """INT4 in groups of 32 with bf16 activations."""
    import torch

    if case.op != "linear" or not case.kind.startswith("int4"):
        return None

    def call() -> Call:
        x = torch.rand(case.M, case.K, device="cuda").bfloat16()
        nibbles = torch.randint(0, 256, (case.N, case.K // 2), dtype=torch.uint8, device="cuda")
        packed = torch.ops.aten._convert_weight_to_int4pack(nibbles, 8)
        scale = torch.rand(case.K // GROUP, case.N, 2, device="cuda").bfloat16()
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scale)

    return copies_of(call, copies)


def _humming_layer(n: int, k: int, experts: int | None = None) -> Any:
    """W4A16 in groups of 32 of humming-kernels, random nibbles and equal scales."""
    import torch

    module: Any = importlib.import_module("humming.layer")
    weights = {"dtype": "int4", "group_size": GROUP}
    layer = module.HummingLayer(
        shape_n=n, shape_k=k, weight_config=weights, num_experts=experts, torch_dtype=torch.bfloat16
    ).cuda()
    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(2**-6)
        else:
            parameter.data.view(torch.uint8).random_(0, 256)
    layer.transform()
    return layer


def _humming_product(layer: Any, rows: int, *, kind: str, invariant: bool) -> tuple[Callable[..., Any], int]:
    """Its product with the kernel it chooses for so many rows, of which alone it is compiled; rows of a block."""
    tune: Any = importlib.import_module("humming.tune")
    config = tune.get_heuristics_config(
        layer.humming_config, shape_m=rows, use_batch_invariant=invariant, gemm_type=kind
    )
    compute = {"use_batch_invariant": invariant, "gemm_type": kind}
    return partial(layer, compute_config=compute, tuning_config=config), config["block_shape"][0]


def humming_calls(case: Case, copies: int, *, invariant: bool) -> Sequence[Call] | None:
    """W4A16 in groups of 32, its own choice of kernel."""
    import torch

    if case.op != "linear" or not case.kind.startswith("int4"):
        return None

    def call() -> Call:
        product, _ = _humming_product(_humming_layer(case.N, case.K), case.M, kind="dense", invariant=invariant)
        return partial(product, torch.rand(case.M, case.K, device="cuda").bfloat16())

    return copies_of(call, copies)


def humming_experts_calls(case: Case, copies: int, *, invariant: bool) -> Sequence[Call] | None:
    """Its two products of the chosen experts alone: no router, no SiLU, no sum of the experts, no shared expert."""
    import torch

    if (case.op, case.kind, case.shared) != ("moe_block", "int4-bf16", 0):
        return None
    data: Any = importlib.import_module("humming.testing.data")
    chosen = case.M * case.top_k
    products = [
        _humming_product(_humming_layer(n, k, case.experts), chosen, kind="indexed", invariant=invariant)
        for n, k in ((2 * case.N, case.K), (case.K, case.N))
    ]
    inputs = [torch.rand(rows, k, device="cuda").bfloat16() for rows, k in ((case.M, case.K), (chosen, case.N))]

    def call(copy: int) -> Call:
        ids = torch.from_numpy(routes(case, copy)).to("cuda", torch.int32)
        made: list[Call] = []
        for (product, block), x, tops in zip(products, inputs, (case.top_k, 1), strict=True):
            _, _, order, experts, padded = data.generate_moe_tensors(ids, case.experts, "indexed", block)
            indices = {"sorted_ids": order, "expert_ids": experts, "num_tokens_padded": padded, "top_k": tops}
            made.append(partial(product, x, **indices))

        def run() -> None:
            for one in made:
                one()

        return run

    return [call(copy) for copy in range(copies)]


def flash_mla_calls(case: Case, copies: int) -> Sequence[Call] | None:
    """Dense decode of M query rows over the committed keys: it knows no tree, every row sees all of them."""
    import torch

    flash_mla: Any = importlib.import_module("flash_mla")

    if (case.op, case.kind, case.heads, case.rank, case.rope) != ("mla_attention", "bf16", 64, 512, 64):
        return None
    pages = -(-case.T // PAGE)

    def call() -> Call:
        # In [-1, 1) as the engine's own: at the card's power limit numbers of one sign are faster ones.
        q = (2 * torch.rand(1, case.M, case.heads, case.rank + case.rope, device="cuda") - 1).bfloat16()
        cache = (2 * torch.rand(pages, PAGE, 1, case.rank + case.rope, device="cuda") - 1).bfloat16()
        table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
        lengths = torch.tensor([case.T], dtype=torch.int32, device="cuda")
        plan, _ = flash_mla.get_mla_metadata()
        return lambda: flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, case.rank, plan, softmax_scale=0.1446796, causal=False, use_legacy=True
        )

    return copies_of(call, copies)


def _missing(module: str, package: str) -> str:
    return "" if importlib.util.find_spec(module) is not None else f"not installed: pip install {package}"


def peers() -> list[Peer]:
    """Those that `harness.bench.targets` names, and torch's own."""
    import torch

    pack: Any = getattr(torch.ops.aten, "_weight_int4pack_mm", None)
    humming = _missing("humming", "humming-kernels")
    return [
        Peer("cublas-bf16", "the product of bf16 weights", "", partial(cublas_calls, dtype="bfloat16")),
        Peer("cublas-f32", "the product of f32 weights", "", partial(cublas_calls, dtype="float32")),
        Peer("torch-int4pack", "W4A16 g32", "" if pack else f"torch {torch.__version__} lacks it", int4pack_calls),
        Peer("humming", "W4A16 g32", humming, partial(humming_calls, invariant=False)),
        Peer("humming-invariant", "W4A16 g32, batch-invariant", humming, partial(humming_calls, invariant=True)),
        Peer("humming-experts", "W4A16 g32, two products", humming, partial(humming_experts_calls, invariant=False)),
        Peer(
            "humming-experts-invariant",
            "W4A16 g32, two products, batch-invariant",
            humming,
            partial(humming_experts_calls, invariant=True),
        ),
        Peer("flash-mla", "bf16 dense decode, no tree", _missing("flash_mla", "sgl-flash-mla"), flash_mla_calls),
    ]
