"""What this project aims at, per case: at most so many times the floor, at least so many times a peer, at most so long.

Printed beside what was measured as held or missed. A target is never asserted, and never lowered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

BUILD_SECONDS, BUNDLES_SECONDS, TEST_SECONDS = 15.0, 30.0, 60.0  # from nothing; from nothing on 2 cores; warm
CPU_READ_SHARE = 0.9
FLOOR, US = "the floor", "us"
"""What a figure is beside, if it is no peer's name."""


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


def wanted(device: str, name: str, m: int) -> dict[str, float]:
    """The figures that a case is held to, by what they are beside: FLOOR, US or a peer."""
    found: dict[str, float] = {}
    for target in TARGETS:
        if target.device == device and fnmatchcase(name, target.case) and (not target.widths or m in target.widths):
            figures = {FLOOR: target.floor, US: target.us, **dict(target.peers)}
            found |= {against: figure for against, figure in figures.items() if figure is not None}
    return found


def ratio(against: str, us: float, x_floor: float, peers: Mapping[str, float]) -> float | None:
    """What is held against a figure; None where the peer was not measured."""
    if against in (FLOOR, US):
        return x_floor if against == FLOOR else us
    return peers[against] / us if against in peers else None


def is_held(value: float, figure: float, against: str) -> bool:
    """At most the figure beside the floor and in microseconds, at least it beside a peer."""
    return value <= figure if against in (FLOOR, US) else value >= figure


def word(held: bool) -> str:
    """The word that stands beside a target."""
    return "held" if held else "missed"


def verdicts(device: str, name: str, m: int, us: float, x_floor: float, peers: Mapping[str, float]) -> dict[str, str]:
    """Each target of a case, and how it went."""
    found: dict[str, str] = {}
    for against, figure in wanted(device, name, m).items():
        side = "at most" if against in (FLOOR, US) else "at least"
        text = f"{side} {figure:g} us" if against == US else f"{side} {figure:.3g}x {against}"
        value = ratio(against, us, x_floor, peers)
        found[text] = "not measured" if value is None else word(is_held(value, figure, against))
    return found
