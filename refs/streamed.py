"""The weights of a model too large to be held in float64: converted, dequantised or drawn as they are used.

Guarantee: the same bits as `refs.weights.Weights`, because an output's sum depends on its row and column alone; whole
outputs are what threads share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from refs.config import BF16_PRECISIONS, ModelConfig
from refs.elementary import F
from refs.exact import Summation, bf16_value, matmul, tree_sum
from refs.weights import Index, check, expert, plain

COLUMNS = 256  # outputs whose weights are converted at a time, by one thread
TILE = 16  # outputs whose products are held at once
THREADS = 2  # more wait for Python's lock: 8 on 32 cores took longer than 2 on 2
Item = TypeVar("Item")


class StreamedWeights:
    """As `Weights`, over tensors that may be mapped from a file."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, npt.NDArray[Any]],
        precision: str,
        dtype: npt.DTypeLike,
        file: str,
    ) -> None:
        check(config, tensors, precision, file)
        self._config, self._tensors, self._precision = config, tensors, precision
        self._type: np.dtype[Any] = np.dtype(dtype)
        self._shapes = config.shapes()

    def __getitem__(self, name: str) -> F:
        """As `Weights` holds it, the experts excepted; whole, so not what a forward pass asks for of a large matrix."""
        stem, _, last = name.rpartition(".")
        if last in ("w_uk", "w_uv"):
            c = self._config
            heads = self._whole(stem + ".kv_b.w").reshape(c.num_heads, -1, c.kv_lora_rank).astype(self._type)
            nope = c.qk_nope_head_dim
            half = heads[:, :nope].transpose(1, 0, 2) if last == "w_uk" else heads[:, nope:].transpose(2, 0, 1)
            return np.ascontiguousarray(half)
        value: F = self._whole(name if name in self._shapes else name + ".w").astype(self._type)
        return value if value.ndim == 1 or name == "embed" else np.ascontiguousarray(value.T)

    def _whole(self, name: str) -> npt.NDArray[Any]:
        return plain(self._tensors, name, self._precision, len(self._shapes[name]))

    def _narrow(self, name: str, part: Any) -> npt.NDArray[Any]:
        """A part of a matrix, chosen before it is widened."""
        if self._precision not in BF16_PRECISIONS:
            return np.asarray(self._tensors[name][part])
        return bf16_value(self._tensors[name.removesuffix("w") + "bw"][part])

    def embed(self, tokens: Index) -> F:
        """[M, D]"""
        return self._narrow("embed.w", tokens).astype(self._type)

    def linear(self, x: F, name: str, summation: Summation) -> F:
        """[M, K] times a matrix -> [M, N]."""
        outputs = self._shapes[name + ".w"][0]
        out = np.empty((x.shape[0], outputs), self._type)

        def part(first: int) -> None:
            rows = self._narrow(name + ".w", slice(first, first + COLUMNS))
            out[:, first : first + COLUMNS] = _product(x, rows, summation)

        _share(part, range(0, outputs, COLUMNS))
        return out

    def chosen(self, x: F, name: str, ids: Index, summation: Summation) -> F:
        """Row j of [J, K] times expert ``ids[j]`` -> [J, N]."""
        _, n, k = self._shapes[name + ".w"]
        out = np.empty((x.shape[0], n), self._type)

        def part(index: int) -> None:
            rows = np.flatnonzero(ids == index)
            for first in range(0, n, COLUMNS):
                block = range(first, min(n, first + COLUMNS))
                if self._precision.startswith("int4"):
                    w = expert(self._tensors, name, index, block, k)
                else:
                    w = self._narrow(name + ".w", (index, slice(first, block.stop)))
                out[rows, first : block.stop] = _product(x[rows], w, summation)

        _share(part, np.unique(ids).tolist())
        return out


def _product(x: F, w: npt.NDArray[Any], summation: Summation) -> F:
    """[M, K] times [N, K], transposed -> [M, N]; the bits of `matmul`."""
    if summation is not tree_sum:
        return matmul(x, w.T.astype(x.dtype, order="C"), summation, block=w.size)
    # Sums along the rows as they lie: turning them over costs more than the few rows of x use them.
    out = np.empty((x.shape[0], w.shape[0]), x.dtype)
    for first in range(0, w.shape[0], TILE):
        wide = w[first : first + TILE].astype(x.dtype)
        for row, to in zip(x, out, strict=True):
            to[first : first + TILE] = tree_sum((wide * row).T)
    return out


def _share(task: Callable[[Item], None], items: Iterable[Item]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for done in pool.map(task, items):
            del done  # an error of a task is raised here
