"""Sums, products and random draws that give the same bytes on every machine.

Guarantees: only elementwise IEEE operations, in an order that this file fixes; no BLAS, no `np.sum`, no reduction of
numpy's own except max, whose result no order can change. A result depends on its own row and column alone, so it is
the same in every bit whichever rows are computed with it. Random values come from the integer stream of Philox, which
numpy promises to keep, by exact operations.

A *summation* is a function that adds up the first axis of an array, destroying it. There are two, so that the noise
of float32 can be measured in the worse of two orders.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.elementary import F, exp

Array = npt.NDArray[Any]
Summation = Callable[[F], F]

BLOCK = 1 << 17  # elements of a product held at once: 1 MiB of float64, so that it stays in a core's cache
LANES = 4  # of strided_sum: few, so that its chains are long and its noise is that of a careless engine


def tree_sum(p: F) -> F:
    """Halve until one is left: p[i] += p[i + ceil(n/2)]. The order depends on the length alone."""
    n = p.shape[0]
    while n > 1:
        half = (n + 1) // 2
        low = p[: n - half]
        np.add(low, p[half:n], out=low)
        n = half
    total: F = p[0]
    return total


def strided_sum(p: F) -> F:
    """Lane t adds p[t], p[t + 4], ... one after the other, then the lanes are added as a tree."""
    n = p.shape[0]
    for start in range(LANES, n, LANES):
        stop = min(start + LANES, n)
        p[: stop - start] += p[start:stop]
    return tree_sum(p[: min(LANES, n)])


SUMMATIONS: dict[str, Summation] = {"tree": tree_sum, "strided": strided_sum}


_held = threading.local()


def product(a: F, b: F) -> F:
    """a * b, broadcast, to be added up and read before the next product of this thread.

    One of at most `BLOCK` elements lies in memory that is kept: an allocation of this size is given back to the system
    and its pages are made anew each time, which costs as much as the arithmetic.
    """
    shape = [max(i, j) for i, j in zip(a.shape, b.shape, strict=True)]
    size = math.prod(shape)
    if size > BLOCK or a.dtype != b.dtype:
        return a * b
    name = a.dtype.char
    if not hasattr(_held, name):
        setattr(_held, name, np.empty(BLOCK, a.dtype))
    out: F = getattr(_held, name)[:size].reshape(shape)
    return np.multiply(a, b, out=out)


def contract(a: F, b: F, summation: Summation = tree_sum) -> F:
    """Sum of a*b over the first axis: [K, M, ...] and [K, M or 1, ...], broadcast -> [M, ...].

    The second axis is walked in blocks, so that memory is bounded by `BLOCK` elements or by one row.
    """
    m = a.shape[1]
    shape = [max(i, j) for i, j in zip(a.shape[2:], b.shape[2:], strict=True)]
    out = np.empty((m, *shape), a.dtype)
    rows = max(1, BLOCK // (a.shape[0] * math.prod(shape)))
    for r in range(0, m, rows):
        other = b if b.shape[1] == 1 else b[:, r : r + rows]
        out[r : r + rows] = summation(product(a[:, r : r + rows], other))
    return out


def matmul(x: F, wt: F, summation: Summation = tree_sum, *, block: int = BLOCK) -> F:
    """[M, K] times [K, N] -> [M, N]; both of one type. ``block``: elements of a product held at once."""
    k, n = wt.shape
    xt = np.ascontiguousarray(x.T)[:, :, None]
    columns = max(1, min(n, block // k))
    parts = [contract(xt, wt[:, None, c : c + columns], summation) for c in range(0, n, columns)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def matmul_chosen(x: F, wt: F, chosen: npt.NDArray[np.int64], summation: Summation = tree_sum) -> F:
    """Row j of [J, K] times matrix ``chosen[j]`` of wt [K, E, N] -> [J, N]; the same bits as `matmul` with it."""
    j, k = x.shape
    n = wt.shape[2]
    out = np.empty((j, n), x.dtype)
    xt = np.ascontiguousarray(x.T)[:, :, None]
    rows = max(1, BLOCK // (k * n))
    for r in range(0, j, rows):
        out[r : r + rows] = summation(product(xt[:, r : r + rows], wt[:, chosen[r : r + rows]]))
    return out


def sum_last(x: F, summation: Summation = tree_sum) -> F:
    """Sum over the last axis."""
    return summation(x.transpose(x.ndim - 1, *range(x.ndim - 1)).copy())


def sigmoid(x: F) -> F:
    """1 / (1 + e^-x)."""
    one = x.dtype.type(1)
    return one / (one + exp(-x))


def silu(x: F) -> F:
    """x / (1 + e^-x)."""
    return x / (x.dtype.type(1) + exp(-x))


def softmax(x: F, summation: Summation = tree_sum) -> F:
    """Over the last axis; -inf gives 0 (a row of nothing but -inf gives NaN)."""
    weights = exp(x - x.max(axis=-1, keepdims=True))
    return weights / sum_last(weights, summation)[..., None]


def top_k(scores: F, k: int) -> npt.NDArray[np.int64]:
    """[..., k] indices of the greatest along the last axis, descending; ties: the lowest index first."""
    order: npt.NDArray[np.int64] = np.argsort(-scores, axis=-1, kind="stable")
    return order[..., :k]


def rounded_to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16, ties to even. Finite input; what exceeds bf16's range becomes inf."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def bf16_value(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 that a bf16 stands for, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_nearest(x: F) -> F:
    """The nearest bf16 of each element, in the type of ``x``: that of its nearest float32, ties to even; NaN stays
    NaN."""
    narrow = np.ascontiguousarray(x, np.float32)
    with np.errstate(over="ignore"):
        near = bf16_value(rounded_to_bf16(narrow))
    out: F = np.where(np.isnan(narrow), narrow, near).astype(x.dtype)
    return out


class Draws:
    """A random stream of its own for each tuple of labels, whatever else is drawn and in which order."""

    def __init__(self, *labels: str | int) -> None:
        digest = hashlib.sha256("\0".join(str(label) for label in labels).encode()).digest()
        self._bits = np.random.Philox(key=np.frombuffer(digest[:16], "<u8").astype(np.uint64))

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        """The next ``count`` words of Philox-4x64-10."""
        words: npt.NDArray[np.uint64] = self._bits.random_raw(count)
        return words

    def uniform(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Multiples of 2^-53 in [0, 1)."""
        words = self.raw(math.prod(shape)) >> np.uint64(11)
        values: npt.NDArray[np.float64] = words.astype(np.float64) * 2.0**-53
        return values.reshape(shape)

    def below(self, bound: int, count: int) -> npt.NDArray[np.int64]:
        """Integers in [0, bound), bound < 2^31."""
        return (((self.raw(count) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)

    def normal(self, shape: tuple[int, ...], scale: float = 1.0) -> npt.NDArray[np.float64]:
        """Nearly normal, mean 0, deviation ``scale``: the sum of four 16-bit uniforms, so at most 3.47 of it."""
        words = self.raw(math.prod(shape))
        mask = np.uint64(0xFFFF)
        total = (words & mask) + ((words >> np.uint64(16)) & mask)
        total = total + ((words >> np.uint64(32)) & mask) + (words >> np.uint64(48))
        centred = total.astype(np.int64) * 2 - 4 * 0xFFFF
        # The variance of one 16-bit uniform is (2^32 - 1)/12; of twice the sum of four it is 4*4 times that.
        values: npt.NDArray[np.float64] = centred.astype(np.float64) * (scale / 75674.454)
        return values.reshape(shape)

    def permutation(self, n: int) -> npt.NDArray[np.int64]:
        """The numbers 0..n-1 in random order."""
        order: npt.NDArray[np.int64] = np.argsort(self.raw(n), kind="stable")
        return order
