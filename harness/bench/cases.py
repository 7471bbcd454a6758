"""The cases: one object a shape, whose name is its command-line key. Nothing heavy is imported.

Two families: ``tiny``, the sizes of the config of that name, where a call's overhead is what one sees, and ``k26``, the
sizes of Kimi K2.6; ``k26-routed`` has the experts without the shared one, as peers have them. A GPU gets longer
contexts, all 384 experts, and more widths than a CPU with a few GB could serve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Case:
    """An operation of csrc/ops.h at one shape, or moe_block: the router's product, its choice, and moe.

    Sizes that an operation has not are 0.

    ``K`` is the input's width and ``N`` the output's: for moe the hidden and the expert's inner size, for select,
    tree_build and record the vocabulary. ``T`` keys are committed.
    """

    op: str
    family: str
    M: int
    K: int = 0
    N: int = 0
    T: int = 0
    kind: str = ""
    """Weights: f32 or int4; with bf16 activations bf16 or int4-bf16; empty where there are none. A shared expert's
    are f32 or bf16. MLA: bf16, or empty for f32."""
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    heads: int = 0
    rank: int = 0
    nope: int = 0
    rope: int = 0
    v: int = 0
    kv_heads: int = 0
    """Of a drafter, whose heads' size is ``v``."""
    depths: int = 0
    """L, levels of a tree."""
    budget: int = 0
    layers: int = 0
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        sizes = (
            ("k", self.K), ("n", self.N), ("t", self.T), ("e", self.experts), ("h", self.heads),
            ("l", self.depths), ("b", self.budget), ("layers", self.layers), ("m", self.M),
        )  # fmt: skip
        parts = [self.op, *([self.kind] if self.kind else []), *(f"{key}{value}" for key, value in sizes if value)]
        object.__setattr__(self, "name", "-".join([self.family, *parts]))


@dataclass(frozen=True)
class _Sizes:
    """What a family's cases are made of."""

    hidden: int
    linears: tuple[tuple[int, int], ...]
    heads: int
    mla: tuple[int, int, int, int]
    """rank, nope, rope, v."""
    drafter: tuple[int, int, int]
    """heads, heads of keys, head_dim."""
    experts: int
    top_k: int
    inner: int
    shared: int
    kinds: tuple[str, ...]
    """Of the experts: f32 and bf16 ones of K2.6's sizes fit no memory."""
    vocab: int
    layers: int
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    trees: tuple[tuple[int, int], ...]
    """Depths L and budget B."""


KINDS = ("f32", "int4", "bf16", "int4-bf16")

TINY = _Sizes(
    hidden=64, linears=((64, 128),), heads=4, mla=(32, 16, 8, 16), drafter=(8, 4, 16), experts=16, top_k=4, inner=32,
    shared=32,
    kinds=KINDS, vocab=512, layers=6, contexts=(64,), widths=(1, 8), trees=((7, 7),),
)  # fmt: skip


def _k26(device: str) -> _Sizes:
    gpu = device == "cuda"
    return _Sizes(
        hidden=7168, linears=((7168, 4096), (2048, 7168)), heads=64, mla=(512, 128, 64, 128), drafter=(64, 8, 128),
        experts=384 if gpu else 32,  # 9.5 GB in INT4; 32 experts are 0.8 GB
        top_k=8, inner=2048, shared=2048, kinds=("int4", "int4-bf16"), vocab=163840, layers=61 if gpu else 8,
        contexts=(1024, 4096, 32768, 131072) if gpu else (1024, 4096),
        widths=(1, 4, 8, 16, 64) if gpu else (1, 4, 16), trees=((15, 16), (15, 64)),
    )  # fmt: skip


def _family(family: str, s: _Sizes) -> Iterable[Case]:
    rank, nope, rope, v = s.mla
    mla: Any = {"heads": s.heads, "rank": rank, "nope": nope, "rope": rope, "v": v}
    draft: Any = dict(zip(("heads", "kv_heads", "v"), s.drafter, strict=True))
    moe: Any = {"experts": s.experts, "top_k": s.top_k}
    for m in s.widths:
        for kind in KINDS:
            for k, n in s.linears:
                yield Case("linear", family, m, k, n, kind=kind)
        for kind in s.kinds:
            yield Case("moe", family, m, s.hidden, s.inner, kind=kind, shared=s.shared, **moe)
            yield Case("moe_block", family, m, s.hidden, s.inner, kind=kind, shared=s.shared, **moe)
            if family == "k26":
                yield Case("moe_block", "k26-routed", m, s.hidden, s.inner, kind=kind, **moe)
        for keys in s.contexts:
            for kind in ("", "bf16"):
                yield Case("mla_attention", family, m, T=keys, kind=kind, **mla)
            yield Case("draft_attention", family, m, T=keys, **draft)
        yield Case("draft_prepare", family, m, T=s.contexts[0], **draft)
        yield Case("draft_block", family, m)
        yield Case("gather_rows", family, m, s.hidden)
        for kind in ("", "bf16"):
            yield Case("mla_prepare", family, m, T=s.contexts[0], kind=kind, **mla)
            yield Case("mla_value", family, m, kind=kind, **mla)
        yield Case("router", family, m, **moe)
        yield Case("select", family, m, N=s.vocab)
        yield Case("embed", family, m, s.hidden)
        yield Case("rms_norm", family, m, s.hidden)
        yield Case("accept", family, m)
        yield Case("kv_commit", family, m, T=s.contexts[0], layers=s.layers, rank=rank, rope=rope)
        yield Case("record", family, m, N=s.vocab)
        yield Case("record_tree", family, m)
    yield Case("tree_root", family, 1)
    for depths, budget in s.trees:
        yield Case("tree_build", family, budget + 1, N=s.vocab, depths=depths, budget=budget)


def cases(device: str) -> list[Case]:
    """Every case of a device, K2.6's sizes last."""
    return [*_family("tiny", TINY), *_family("k26", _k26(device))]


def choose(all_cases: Iterable[Case], patterns: Iterable[str]) -> list[Case]:
    """Those whose name contains a pattern, or matches it as a shell would; all without patterns."""
    wanted = list(patterns)
    return [c for c in all_cases if not wanted or any(p in c.name or fnmatchcase(c.name, p) for p in wanted)]
