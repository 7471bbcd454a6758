"""MLA in bf16 at the sizes of Kimi K2.6, where tensor cores serve it: against float64, and every row the bits of AR.

The bound is that of rounding the softmax's weights to bf16 around maxima that are the engine's own (docs/model.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda.operations import Array, Operations, Tree, random_tree, state


@pytest.fixture(scope="module")
def cuda() -> Iterator[Operations]:
    """Operations by the kernels on tensor cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KDTREE_CUDA_TENSOR", raising=False)
        opened = Operations("cuda")
    with opened as operations:
        yield operations


RANK, NOPE, ROPE, V = 512, 128, 64, 128
SCALE = 0.1446796
UNWRITTEN = 0x7FA5  # a NaN that no arithmetic gives
Tensor = Any


def _bf16(seed: int, *shape: int) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=made).to(torch.bfloat16)


def _u16(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint16)


def _bits(x: Tensor) -> Array:
    return np.asarray(x.view(torch.int16).cpu().numpy())


class Layer:
    """Queries of up to 80 rows and a cache; a step's own rows stand at kv_len."""

    def __init__(self, ops: Operations, heads: int, rows: int, slots: int) -> None:
        self.ops, self.heads = ops, heads
        self.q_lat, self.q_rope = _bf16(1, rows, heads, RANK), _bf16(2, rows, heads, ROPE)
        self.latent, self.k_rope = _bf16(3, slots, RANK), _bf16(4, slots, ROPE)
        self.kv_b = _bf16(5, heads * (NOPE + V), RANK)

    def attend(
        self, rows: list[int], tree: Tree, kv_len: int, keys: Tensor = None, more: int = 0, spare: int = 0
    ) -> Tensor:
        """o_lat of these queries; keys: the slots that make up the cache; more: keys the session may hold beyond."""
        latent, k_rope = (self.latent, self.k_rope) if keys is None else (self.latent[keys], self.k_rope[keys])
        out = torch.full((len(tree.tokens), self.heads, RANK), UNWRITTEN, device="cuda", dtype=torch.int16).view(
            torch.uint16
        )
        keys_seen = kv_len + int(tree.depths.max()) + 1
        at = torch.tensor([*rows, *[0] * spare], device="cuda")
        record = state(kv_len=kv_len, n_rows=len(rows))
        self.ops(
            "mla_attention", [self.heads, RANK, NOPE, ROPE, V], SCALE, _u16(self.q_lat[at]), _u16(self.q_rope[at]),
            _u16(latent), _u16(k_rope), out, keys_seen + more, tree.rows, record,
        )  # fmt: skip
        return out

    def as_ar(self, row: int, tree: Tree, kv_len: int) -> Tensor:
        """The row alone, everything before it committed."""
        path = tree.path[row, : tree.depths[row] + 1]
        keys = torch.tensor([*range(kv_len), *(kv_len + path)], device="cuda")
        return self.attend([row], Tree([-1]), len(keys) - 1, keys)[0]


def _exact(layer: Layer, row: int, tree: Tree, kv_len: int) -> Tensor:
    keys = torch.tensor([*range(kv_len), *(kv_len + tree.path[row, : tree.depths[row] + 1])], device="cuda")
    latent, k_rope = layer.latent[keys].double(), layer.k_rope[keys].double()
    score = SCALE * (layer.q_lat[row].double() @ latent.T + layer.q_rope[row].double() @ k_rope.T)
    return torch.softmax(score, -1) @ latent


@pytest.mark.parametrize("heads", [64, 32, 128, 5])
@pytest.mark.parametrize("kv_len", [0, 1, 62, 63, 64, 127, 128, 129, 1023, 2559, 2560, 5200])
def test_attention(cuda: Operations, heads: int, kv_len: int) -> None:
    """Both sides of every chunk, split and change of a split's length; one row of each tree as AR sees it."""
    rng = np.random.default_rng(kv_len + heads)
    m = 9
    layer, tree = Layer(cuda, heads, m, kv_len + m), random_tree(rng, m)
    got = layer.attend(list(range(m)), tree, kv_len)
    for row in range(m):
        want = _exact(layer, row, tree, kv_len)
        error = ((got[row].view(torch.bfloat16).double() - want) ** 2).mean() / (want**2).mean()
        assert float(error) < 3e-5, f"row {row}: {float(error):.2e}"
        assert (_bits(layer.as_ar(row, tree, kv_len)) == _bits(got[row])).all(), f"row {row}"


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_trees(cuda: Operations, seed: int) -> None:
    """Random widths, trees and lengths; graphs made for more rows and more keys; a row's bits are AR's."""
    rng = np.random.default_rng(seed)
    layer = Layer(cuda, 64, 64, 9000 + 64)
    for _ in range(100):
        m = int(rng.integers(1, 65))
        kv_len = int(
            rng.choice([64 * rng.integers(0, 40) + rng.integers(0, 3), rng.integers(0, 2700), rng.integers(0, 9000)])
        )
        tree = random_tree(rng, m)
        got = layer.attend(list(range(m)), tree, kv_len, more=int(rng.choice([0, 0, 3000])))
        row = int(rng.integers(0, m))
        assert (_bits(layer.as_ar(row, tree, kv_len)) == _bits(got[row])).all(), f"{m} rows at {kv_len}, row {row}"


@pytest.mark.parametrize("power", [-100, -40, 0, 40, 110])
def test_latents_of_any_size(cuda: Operations, power: int) -> None:
    """Splits leave sums of 16 bits, scaled: as near at every magnitude, and where a head's columns differ by 2^20."""
    rng = np.random.default_rng(7)
    kv_len, m = 900, 3
    layer, tree = Layer(cuda, 64, m, kv_len + m), random_tree(rng, m)
    layer.q_lat.zero_()
    layer.latent.mul_(2.0**power)
    layer.latent[:, ::3].mul_(2.0**-20)
    got = layer.attend(list(range(m)), tree, kv_len)
    for row in range(m):
        want, out = _exact(layer, row, tree, kv_len), got[row].view(torch.bfloat16).double()
        for columns in (slice(0, None, 3), slice(1, None, 3)):
            unit = want[:, columns].abs().max()
            part = want[:, columns] / unit
            error = ((out[:, columns] / unit - part) ** 2).mean() / (part**2).mean()
            assert float(error) < 3e-5, f"row {row}: {float(error):.2e}"


def test_rows_that_do_not_count_are_left_alone(cuda: Operations) -> None:
    rng = np.random.default_rng(0)
    layer, tree = Layer(cuda, 64, 12, 300), random_tree(rng, 12)
    few = Tree(tree.parents.tolist())
    whole = layer.attend(list(range(12)), tree, 200)
    part = layer.attend(list(range(7)), few, 200, spare=5)
    assert (_bits(part[:7]) == _bits(whole[:7])).all()
    assert (_bits(part[7:]) == UNWRITTEN).all()


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize("m", [1, 2, 16, 17, 40])
def test_output_is_attention_then_values(cuda: Operations, heads: int, m: int) -> None:
    """In every bit, and near float64."""
    rng = np.random.default_rng(m)
    kv_len = 700
    layer, tree = Layer(cuda, heads, m, kv_len + m), random_tree(rng, m)
    dims = [heads, RANK, NOPE, ROPE, V]
    o_lat = layer.attend(list(range(m)), tree, kv_len)
    out = [torch.full((m, heads, V), UNWRITTEN, device="cuda", dtype=torch.int16).view(torch.uint16) for _ in range(2)]
    cuda("mla_value", dims, o_lat, _u16(layer.kv_b), out[0], state(n_rows=m))
    cuda(
        "mla_output", dims, SCALE, _u16(layer.q_lat), _u16(layer.q_rope), _u16(layer.latent), _u16(layer.k_rope),
        torch.zeros_like(o_lat), kv_len + m, _u16(layer.kv_b), out[1], tree.rows, state(kv_len=kv_len, n_rows=m),
    )  # fmt: skip
    assert (_bits(out[0]) == _bits(out[1])).all()
    up = layer.kv_b.double().reshape(heads, NOPE + V, RANK)[:, NOPE:]
    want = torch.einsum("hvr,mhr->mhv", up, o_lat.view(torch.bfloat16).double())
    error = ((out[0].view(torch.bfloat16).double() - want) ** 2).mean() / (want**2).mean()
    assert float(error) < 4e-6
    one = torch.empty_like(out[0][:1])
    cuda("mla_value", dims, o_lat[m - 1 :].contiguous(), _u16(layer.kv_b), one, state(n_rows=1))
    assert (_bits(one[0]) == _bits(out[0][m - 1])).all()


@pytest.mark.parametrize("heads", [64, 32])
def test_prepare(cuda: Operations, heads: int) -> None:
    """Absorbed query, rotations and cache rows near float64; bits at every width those of width 65."""
    rng = np.random.default_rng(heads)
    kv_len, m_all = 5, 65
    q = rng.standard_normal((m_all, heads * (NOPE + ROPE))).astype(np.float32)
    kv = rng.standard_normal((m_all, RANK + ROPE)).astype(np.float32)
    norm = rng.uniform(0.5, 1.5, RANK).astype(np.float32)
    kv_b = _bf16(5, heads * (NOPE + V), RANK)
    angles = rng.uniform(0, 6, (kv_len + m_all, ROPE // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    tree = random_tree(rng, m_all)
    results: dict[int, list[Array]] = {}
    for m in (65, 1, 2, 15, 16, 17, 33):
        q_lat, q_rope, latent, k_rope = (
            np.full(shape, UNWRITTEN, np.uint16)
            for shape in ((m, heads, RANK), (m, heads, ROPE), (kv_len + m_all, RANK), (kv_len + m_all, ROPE))
        )
        cuda(
            "mla_prepare", [heads, RANK, NOPE, ROPE, V], q[:m], kv[:m], norm, 1e-5, _u16(kv_b), table, q_lat, q_rope,
            latent, k_rope, [a[:m] for a in tree.rows], state(kv_len=kv_len, n_rows=m),
        )  # fmt: skip
        assert (latent[kv_len + m :] == UNWRITTEN).all()
        assert (latent[:kv_len] == UNWRITTEN).all()
        results[m] = [q_lat, q_rope, latent[kv_len : kv_len + m], k_rope[kv_len : kv_len + m]]
        for whole, part in zip(results[65], results[m], strict=True):
            assert whole[:m].tobytes() == part.tobytes(), f"width {m}"

    def wide(bits: Array) -> Array:
        return np.asarray((bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64))

    def near(got: Array, want: Array) -> None:
        assert ((wide(got) - want) ** 2).mean() / (want**2).mean() < 4e-6

    def turned(x: Array, turn: Array) -> Array:
        pair = (x[..., 0::2] + 1j * x[..., 1::2].astype(np.float64)) * turn
        return np.stack([pair.real, pair.imag], -1).reshape(x.shape)

    by_head = q.reshape(m_all, heads, NOPE + ROPE)
    nope = torch.from_numpy(by_head[..., :NOPE].copy()).to(torch.bfloat16).double().numpy()
    up = kv_b.double().cpu().numpy().reshape(heads, NOPE + V, RANK)[:, :NOPE]
    turn = table[kv_len + tree.depths, :, 0] + 1j * table[kv_len + tree.depths, :, 1].astype(np.float64)
    x = kv[:, :RANK].astype(np.float64)
    near(results[65][0], np.einsum("mhn,hnr->mhr", nope, up))
    near(results[65][1], turned(by_head[..., NOPE:], turn[:, None]))
    near(results[65][2], x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * norm)
    near(results[65][3], turned(kv[:, RANK:], turn))


def test_tensor_cores_ran(cuda: Operations) -> None:
    """What the tests above are about is what served them, where the device has it."""
    rng = np.random.default_rng(3)
    layer = Layer(cuda, 64, 3, 100)
    layer.attend([0, 1, 2], random_tree(rng, 3), 90)
    if torch.cuda.get_device_capability()[0] == 9:
        assert cuda.counters()["mla_attention_bf16_hopper"] > 0
