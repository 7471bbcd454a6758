"""What this project aims at, per case: at most so many times the floor, at least so many times a peer, at most so long.

Printed beside what was measured as held or missed. A target is never asserted, and never lowered here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

BUILD_SECONDS, BUNDLES_SECONDS, TEST_SECONDS = 15.0, 30.0, 60.0  # from nothing; from nothing on 2 cores; warm
CPU_READ_SHARE = 0.9


@dataclass(frozen=True)
class Target:
    """``case`` as a shell pattern over the names of cases and steps, ``widths`` the M it holds for (empty: all)."""

    device: str
    case: str
    widths: tuple[int, ...] = ()
    floor: float | None = None
    """At most this many times the floor."""
    peers: tuple[tuple[str, float], ...] = ()
    """At least this many times as fast as the peer."""
    us: float | None = None


def _narrow(case: str, widths: tuple[int, ...], floor: float, fast: float, invariant: float) -> Target:
    return Target("cuda", case, widths, floor, (("humming", fast), ("humming-invariant", invariant)))


UP_TO_16 = (1, 4, 8, 16)
INVARIANT = (("humming-experts-invariant", 1.4),)
TARGETS = (
    _narrow("k26-linear-int4-bf16-k7168-n4096-*", UP_TO_16, 1.35, 1.6, 5.0),
    _narrow("k26-linear-int4-bf16-k7168-n4096-*", (64,), 1.7, 1.7, 5.0),
    _narrow("k26-linear-int4-bf16-k2048-n7168-*", UP_TO_16, 1.6, 1.7, 2.6),
    _narrow("k26-linear-int4-bf16-k2048-n7168-*", (64,), 2.0, 1.7, 2.3),
    Target("cuda", "k26-moe_block-int4-bf16-*-e384-*", (1,), 1.25),
    Target("cuda", "k26-moe_block-int4-bf16-*-e384-*", (4,), 1.15),
    Target("cuda", "k26-moe_block-int4-bf16-*-e384-*", (16,), 1.12),
    Target("cuda", "k26-moe_block-int4-bf16-*-e384-*", (64,), 1.10),
    *(
        Target("cuda", "k26-routed-moe_block-int4-bf16-*-e384-*", (m,), floor, (("humming-experts", 1.1), *invariant))
        for m, floor, invariant in (
            (1, 1.25, ()),
            (4, 1.15, INVARIANT),
            (16, 1.12, INVARIANT),
            (64, 1.10, INVARIANT),
        )
    ),
    Target("cuda", "k26-mla_attention-bf16-t1024-*", UP_TO_16, peers=(("flash-mla", 1.5),)),
    Target("cuda", "k26-mla_attention-bf16-t4096-*", UP_TO_16, peers=(("flash-mla", 1.5),)),
    Target("cuda", "k26-mla_attention-bf16-t32768-*", (16, 64), peers=(("flash-mla", 0.95),)),
    Target("cuda", "k26-mla_attention-bf16-t131072-*", (16, 64), peers=(("flash-mla", 0.95),)),
    *(
        Target("cuda", f"k26-mla_attention-bf16-t{keys}-*", (16, 64), peers=(("no-tree", 0.98),))
        for keys in (1024, 4096, 32768)
    ),
    Target("cuda", "k26-tree_build-*-b16-*", us=12.0),
    Target("cuda", "k26-tree_build-*-b64-*", us=18.0),
    Target("cuda", "k26-accept-*", us=10.0),
    Target("cuda", "k26-kv_commit-*", us=10.0),
    Target("cuda", "step-int4-bf16-ar-k26-*", (1,), 1.25),
    Target("cuda", "step-int4-bf16-ddtree-k26-*", (16,), 1.18),
    Target("cpu", "k26-linear-int4-k*", (1,), peers=(("ggml", 1.2),)),
    Target("cpu", "k26-linear-f32-*", (4,), floor=1 / CPU_READ_SHARE),
)


def word(held: bool) -> str:
    """The word that stands beside a target."""
    return "held" if held else "missed"


def verdicts(
    device: str, name: str, m: int, us: float, x_floor: float, peers: Mapping[str, float]
) -> Iterable[tuple[str, bool | None]]:
    """Each target of a case with whether it was held; None where its peer was not measured."""
    for target in TARGETS:
        if target.device != device or not fnmatchcase(name, target.case) or (target.widths and m not in target.widths):
            continue
        if target.floor is not None:
            yield f"at most {target.floor:.3g}x the floor", x_floor <= target.floor
        if target.us is not None:
            yield f"at most {target.us:g} us", us <= target.us
        for peer, least in target.peers:
            yield f"at least {least:g}x {peer}", peers[peer] / us >= least if peer in peers else None
