"""Products of bf16 activations on tensor cores: against float64, and every row the same bits in any company.

Without a norm the inputs of a product are exact, so that only the order of an f32 sum remains: at most about K * 2^-24
of the sum of magnitudes. With a norm a value may round to the neighbouring bf16 where float64 rounds to this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine.library import library, named_errors
from tests.cuda.operations import quantise

EPS = 1e-5
ULP = 2.0**-24
GUARD = 1e30
KINDS = ["bf16", "int4"]
SIZES = [8, 64, 72, 104, 1000, 1024, 1536, 2048, 4104, 7168]
WIDTHS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 48, 64, 65)
MIXES = 1000


class Device:
    """Operations on torch tensors that stay on the GPU."""

    def __init__(self) -> None:
        self.lib = library("cuda")
        self.handle = self.lib.backend_open("cuda", True)
        self.generator = torch.Generator("cuda").manual_seed(7)

    def __call__(self, name: str, *arguments: Any) -> None:
        torch.cuda.synchronize()
        with named_errors():
            getattr(self.lib, name)(self.handle, *arguments)

    def counters(self) -> Counter[str]:
        lines = (line.split() for line in self.lib.backend_counters(self.handle).splitlines())
        return Counter({key: int(count) for key, count in lines})

    def counted(self, name: str) -> int:
        return self.counters()[name]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device="cuda").normal_(generator=self.generator)

    def weight(self, kind: str, seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., n, k]: as the operations take it, its scales, and its exact values in float64."""
        if kind == "bf16":
            made = (self.normal(*shape) * 0.05).bfloat16()
            return made.view(torch.uint16), torch.empty(0, dtype=torch.uint8, device="cuda"), made.double()
        packed, scale, values = quantise(np.random.default_rng(seed), *shape)
        return torch.from_numpy(packed).cuda(), torch.from_numpy(scale).cuda(), torch.from_numpy(values).cuda()


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KDTREE_CUDA_TENSOR", raising=False)
        opened = Device()
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the streaming kernels are for Hopper and newer")
    yield opened
    opened.lib.backend_close(opened.handle)


def state(rows: int) -> torch.Tensor:
    record = torch.zeros(16, dtype=torch.int32)
    record[1] = rows
    return record.cuda()


def bits(x: torch.Tensor) -> torch.Tensor:
    """bf16 numbers as the operations take them."""
    return x.bfloat16().contiguous().view(torch.uint16)


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()).float().bfloat16().double()


def silu(z: torch.Tensor) -> torch.Tensor:
    return z / (1 + torch.exp(-z))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - want).norm() / want.norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In every bit, NaN included."""
    width = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(torch.equal(a.view(width), b.view(width)))


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_linear(device: Device, kind: str, k: int) -> None:
    """Two weights, their rows no whole tiles; every width gives the bits of one row alone, which are near float64."""
    x, none = device.normal(65, k), torch.empty(0, device="cuda")
    made = [device.weight(kind, k + rows, rows, k) for rows in (37, 150)]
    before = device.counted(f"linear_{'int4_bf16' if kind == 'int4' else 'bf16'}_stream")
    first: list[torch.Tensor] = []
    for m in WIDTHS:
        out = [torch.full((m, rows), GUARD, device="cuda") for rows in (37, 150)]
        given = [bits(x[-m:]), none, EPS, [w[0] for w in made], [w[1] for w in made], out, 0, state(m), True]
        device("linear", *given)
        first = first or [torch.empty(65, rows, device="cuda") for rows in (37, 150)]
        if m == 1:
            for row in range(65):
                one = [torch.empty(1, rows, device="cuda") for rows in (37, 150)]
                device("linear", bits(x[row : row + 1]), *given[1:5], one, 0, state(1), True)
                for whole, part in zip(first, one, strict=True):
                    whole[row] = part[0]
        for whole, part in zip(first, out, strict=True):
            assert same(whole[-m:], part), f"width {m}"
    exact = x.bfloat16().double()
    for got, (_, _, w) in zip(first, made, strict=True):
        bound = (k / 16 + 16) * ULP * (exact.abs() @ w.abs().T) + 1e-30
        assert bool(((got.double() - exact @ w.T).abs() <= bound).all())
    after = device.counted(f"linear_{'int4_bf16' if kind == 'int4' else 'bf16'}_stream")
    assert after - before == 65 + len(WIDTHS), "the streaming kernel is the one that ran"


@pytest.mark.parametrize("k", [64, 1000, 7168])
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_epilogues(device: Device, kind: str, k: int) -> None:
    """The norm before the rounding; the residual; silu(gate)*up as bf16; rows past n_rows keep what was there."""
    m, n = 20, 72
    x, norm = device.normal(m, k), torch.rand(k, device="cuda") + 0.5
    made = [device.weight(kind, i, n, k) for i in range(2)]
    y = [normed(x, norm) @ w[2].T for w in made]
    weights, scales = [w[0] for w in made], [w[1] for w in made]
    residual = device.normal(m, n)
    out = residual.clone()
    device("linear", x, norm, EPS, weights[:1], scales[:1], [out], 1, state(13), True)
    assert relative((out - residual)[:13], y[0][:13]) < 1e-3
    assert same(out[13:], residual[13:])
    gated = torch.zeros(m, n, dtype=torch.uint16, device="cuda")
    device("linear", x, norm, EPS, weights, scales, [gated], 2, state(13), True)
    want = silu(y[0]) * y[1]
    assert relative(gated.view(torch.bfloat16).float()[:13], want[:13]) < 5e-3
    assert not gated[13:].view(torch.int16).any()
    alone = torch.zeros(1, n, dtype=torch.uint16, device="cuda")
    for row in range(13):
        device("linear", x[row : row + 1].contiguous(), norm, EPS, weights, scales, [alone], 2, state(1), True)
        assert same(alone[0], gated[row])


@pytest.mark.parametrize(("k", "n"), [(7168, 4096), (2048, 7168)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_random_company(device: Device, kind: str, k: int, n: int) -> None:
    """A thousand times some of 64 rows in some order and number: every row has the bits it had before."""
    x, none = bits(device.normal(64, k)), torch.empty(0, device="cuda")
    if kind == "bf16":
        w, scale, _ = device.weight(kind, k, n, k)
    else:
        w = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda", generator=device.generator)
        scale = (torch.rand(n, k // 32, device="cuda") * 0.02).bfloat16().view(torch.uint8)
    whole = torch.empty(64, n, device="cuda")
    device("linear", x, none, EPS, [w], [scale], [whole], 0, state(64), True)
    rng = np.random.default_rng(k)
    other = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(MIXES):
        m = int(rng.integers(1, 65))
        rows = torch.from_numpy(rng.integers(0, 64, m)).cuda()
        out = torch.empty(m, n, device="cuda")
        chosen = x.view(torch.int16)[rows].view(torch.uint16)
        device("linear", chosen, none, EPS, [w], [scale], [out], 0, state(m), True)
        other += (out.view(torch.int32) != whole[rows].view(torch.int32)).sum()
    assert int(other) == 0


def routes(rng: np.random.Generator, rows: int, experts: int, top_k: int) -> torch.Tensor:
    drawn = [rng.choice(experts, top_k, replace=False) for _ in range(rows)]
    return torch.from_numpy(np.array(drawn, np.int32)).cuda()


MOE = [
    (64, 32, 64, 16, 4),
    (200, 104, 72, 20, 4),
    (1024, 512, 0, 300, 8),
    (512, 256, 256, 3, 3),
    (512, 512, 512, 5, 2),
    (1000, 96, 96, 12, 1),
    (2304, 768, 512, 9, 4),
    (7168, 2048, 256, 5, 2),
    (3072, 1024, 512, 6, 5),
]
"""dim, inner size, the shared expert's, experts, choices. On Hopper sizes of multiples of 256 are copied in boxes; a
single row of the last ones is multiplied in parts of K."""


@pytest.mark.parametrize("sizes", MOE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_moe(device: Device, kind: str, sizes: tuple[int, int, int, int, int]) -> None:
    """Whoever shares an expert with whom: near float64, and the bits of a row alone."""
    dim, inner, around, experts, top_k = sizes
    rng = np.random.default_rng(dim)
    m = 65
    x, norm = device.normal(m, dim), torch.rand(dim, device="cuda") + 0.5
    ids, weights = routes(rng, m, experts, top_k), torch.rand(m, top_k, device="cuda")
    shapes = [(experts, inner, dim), (experts, inner, dim), (experts, dim, inner)]
    made = [device.weight(kind, i, *shape) for i, shape in enumerate(shapes)]
    outside = [device.weight("bf16", 9, *s) for s in ((around, dim), (around, dim), (dim, around))] if around else []

    def run(rows: torch.Tensor, active: int) -> torch.Tensor:
        count = len(rows)
        act = torch.zeros(count, top_k, inner, dtype=torch.uint16, device="cuda")
        shared_act = torch.zeros(count, around, dtype=torch.uint16, device="cuda")
        out = x[rows].contiguous()
        given = [x[rows].contiguous(), norm, EPS, ids[rows].contiguous(), weights[rows].contiguous()]
        stored = [[w[0] for w in made], [w[1] for w in made], [w[0] for w in outside]]
        device("moe", *given, *stored, act, shared_act, out, state(active), True)
        return out

    counter = f"experts_{'int4_bf16' if kind == 'int4' else 'bf16'}_stream"
    before = device.counted(counter)
    whole = run(torch.arange(m).cuda(), m)
    assert device.counted(counter) == before + 1, "the streaming kernels are the ones that ran"
    b = normed(x, norm)

    def mlp(expert: list[torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        gate, up, down = expert
        return down @ (silu(gate @ row) * (up @ row)).float().bfloat16().double()

    for row in range(0, m, 8):
        want = mlp([w[2] for w in outside], b[row]) if around else torch.zeros(dim, dtype=torch.float64, device="cuda")
        for choice in range(top_k):
            e = int(ids[row, choice])
            want = want + weights[row, choice].double() * mlp([w[2][e] for w in made], b[row])
        assert relative((whole - x)[row], want) < 3e-3
    for count in WIDTHS:
        for _ in range(2):
            rows = torch.from_numpy(rng.integers(0, m, count)).cuda()
            assert same(run(rows, count), whole[rows]), f"{count} rows"
    kept = run(torch.arange(10).cuda(), 6)
    assert same(kept[:6], whole[:6])
    assert same(kept[6:], x[6:10])


@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("scales_first", [False, True])
@pytest.mark.parametrize(("m", "dim"), [(1, 1024), (9, 512), (9, 768)])
def test_moe_wherever_gate_and_up_lie(device: Device, m: int, dim: int, up_first: bool, scales_first: bool) -> None:
    """One copy brings rows of both, those first that lie lower in memory; their scales may lie the other way."""
    inner, experts = 256, 4
    rng = np.random.default_rng(5)
    shapes = [(experts, inner, dim), (experts, inner, dim), (experts, dim, inner)]
    made = [device.weight("int4", i, *shape) for i, shape in enumerate(shapes)]
    outside = [device.weight("bf16", 9, *s)[0] for s in ((256, dim), (256, dim), (dim, 256))]
    x, norm = device.normal(m, dim), torch.rand(dim, device="cuda") + 0.5
    ids, weights = routes(rng, m, experts, 3), torch.rand(m, 3, device="cuda")

    def placed(gate: torch.Tensor, up: torch.Tensor, swap: bool) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([up, gate] if swap else [gate, up])
        return (both[1], both[0]) if swap else (both[0], both[1])

    def run(swap: bool, scales_swap: bool) -> torch.Tensor:
        data = [*placed(made[0][0], made[1][0], swap), made[2][0]]
        scales = [*placed(made[0][1], made[1][1], scales_swap), made[2][1]]
        around = [*placed(outside[0], outside[1], scales_swap), outside[2]]
        act = torch.zeros(m, 3, inner, dtype=torch.uint16, device="cuda")
        shared_act, out = torch.zeros(m, 256, dtype=torch.uint16, device="cuda"), x.clone()
        device("moe", x, norm, EPS, ids, weights, data, scales, around, act, shared_act, out, state(m), True)
        return out

    assert same(run(up_first, scales_first), run(False, False))


ROUTED = [
    (1024, 96, 96, 40, 4, 1, 1),
    (2048, 1024, 512, 30, 8, 1, 1),
    (2048, 128, 0, 300, 8, 1, 1),
    (3072, 32, 32, 24, 3, 6, 2),
    (200, 104, 72, 20, 4, 1, 1),
]
"""dim, inner size, the shared expert's, experts, choices, groups, groups that are kept."""


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", ROUTED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_routed_moe(device: Device, kind: str, sizes: tuple[int, ...], ties: bool) -> None:
    """The router's launch has the bits of a product, a choice and experts by themselves, and a row's in any company.

    Where dim is no multiple of 1024 the norm's squares meet in another order than the product's own, so logits may
    differ by their last bits.
    """
    dim, inner, around, experts, top_k, groups, kept = sizes
    m = 66
    x, norm = device.normal(m, dim), torch.rand(dim, device="cuda") + 0.5
    router = (device.normal(experts, dim) * 0.05).bfloat16()
    if ties:  # neighbours have the same scores
        router[1::2] = router[: experts - 1 : 2]
    bias = torch.zeros(experts, device="cuda") if ties else torch.rand(experts, device="cuda") * 0.1
    shapes = [(experts, inner, dim), (experts, inner, dim), (experts, dim, inner)]
    made = [device.weight(kind, i, *shape) for i, shape in enumerate(shapes)]
    outside = [device.weight("bf16", 9, *s)[0] for s in ((around, dim), (around, dim), (dim, around))] if around else []
    stored = [[w[0] for w in made], [w[1] for w in made], outside]
    none = torch.empty(0, dtype=torch.uint8, device="cuda")

    def run(rows: torch.Tensor, active: int, *, routed: bool) -> list[torch.Tensor]:
        count = len(rows)
        logits, weights = (torch.full((count, n), GUARD, device="cuda") for n in (experts, top_k))
        ids = torch.full((count, top_k), -7, dtype=torch.int32, device="cuda")
        act = torch.zeros(count, top_k, inner, dtype=torch.uint16, device="cuda")
        shared_act = torch.zeros(count, around, dtype=torch.uint16, device="cuda")
        step, out = state(active), x[rows].contiguous()
        how = [groups, kept, True, 2.5, 3]
        if routed:
            given = [out.clone(), norm, EPS, router.view(torch.uint16), bias, logits, ids, weights, *how]
            device("routed_moe", *given, *stored, act, shared_act, out, step, True)
        else:
            device("linear", out, norm, EPS, [router.view(torch.uint16)], [none], [logits], 0, step, True)
            device("router", logits, bias, ids, weights, *how, step)
            device("moe", out.clone(), norm, EPS, ids, weights, *stored, act, shared_act, out, step, True)
        assert int(step[8]) == 0
        return [logits, ids, weights, out]

    before = device.counters()
    whole = run(torch.arange(m).cuda(), m, routed=True)
    launches = {name: n for name, n in (device.counters() - before).items() if not name.endswith("_stream")}
    held = kind == "bf16" or inner % 128 == 0  # else down brings act into the order of nibbles
    assert sum(launches.values()) == (3 if held else 4), launches
    parts = run(torch.arange(m).cuda(), m, routed=False)
    if dim % 1024 == 0:
        assert all(same(a, b) for a, b in zip(whole, parts, strict=True))
    # Float64 may round an element of a normed row to the other neighbour: of rows as short as 200, one is 1.7e-4.
    assert relative(whole[0], normed(x, norm) @ router.double().T) < 1e-3
    for count in WIDTHS:
        rows = torch.randint(0, m, (count,), device="cuda", generator=device.generator)
        for _ in range(3):
            assert all(same(a, b[rows]) for a, b in zip(run(rows, count, routed=True), whole, strict=True)), (
                f"{count} rows"
            )
    for count in (2, 10, 66):  # fewer rows count than there is room for
        some = run(torch.arange(count).cuda(), count - 1, routed=True)
        assert all(same(a[: count - 1], b[: count - 1]) for a, b in zip(some, whole, strict=True))
        assert same(some[3][-1], x[count - 1]), "a row that does not count stays as it is"
        assert int(some[1][-1].max()) == -7
        assert float(some[0][-1].min()) == np.float32(GUARD)


def test_routed_moe_tells_of_scores_that_are_not_finite(device: Device) -> None:
    """The lowest row is named, whichever block meets one first, and everything stays in range."""
    dim, experts, top_k, m = 1024, 16, 4, 40
    x, norm = device.normal(m, dim), torch.ones(dim, device="cuda")
    x[[9, 20, 39], 5] = float("nan")
    router = (device.normal(experts, dim) * 0.05).bfloat16().view(torch.uint16)
    made = [device.weight("bf16", 0, *shape) for shape in ((experts, 32, dim), (experts, 32, dim), (experts, dim, 32))]
    logits, ids = torch.zeros(m, experts, device="cuda"), torch.full((m, top_k), -7, dtype=torch.int32, device="cuda")
    act, none = (
        torch.zeros(m, top_k, 32, dtype=torch.uint16, device="cuda"),
        torch.zeros(m, 0, dtype=torch.uint16, device="cuda"),
    )
    step = state(m)
    given = [
        x,
        norm,
        EPS,
        router,
        torch.zeros(experts, device="cuda"),
        logits,
        ids,
        torch.zeros(m, top_k, device="cuda"),
    ]
    stored = [[w[0] for w in made], [w[1] for w in made], []]
    device("routed_moe", *given, 1, 1, True, 1.0, 7, *stored, act, none, torch.zeros_like(x), step, True)
    assert step[8:11].tolist() == [1, 9, 7]
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
