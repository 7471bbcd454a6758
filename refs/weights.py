"""A model's tensors in the type and layout that the forward pass reads: K first, so that sums run over whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.config import BF16_PRECISIONS, ModelConfig
from refs.elementary import F32, F
from refs.errors import MissingTensor
from refs.exact import Summation, bf16_value, matmul, matmul_chosen
from refs.quant import dequantise
from refs.stated import Stated, draw

KDTR_TYPES = {"f32": np.dtype("<f4"), "bf16": np.dtype("<u2"), "u8": np.dtype("u1"), "i64": np.dtype("<i8")}
Index = npt.NDArray[np.int64]
EXPERT_ROWS = 64  # dequantised at a time: numpy's temporaries then stay near a core's cache


class Weights:
    """``w[name]`` for every name of docs/model.md without its ``.w``.

    A matrix [N, K] is held as [K, N], experts [E, N, K] as [K, E, N], ``kv_b`` as its two halves ``w_uk`` [N, H, R]
    and ``w_uv`` [R, H, Vh]; vectors and the embedding as they are. INT4 experts are expanded and bf16
    matrices widened, which is exact.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, npt.NDArray[Any]],
        precision: str,
        dtype: npt.DTypeLike,
        file: str,
    ) -> None:
        self._held: dict[str, F] = {}
        check(config, tensors, precision, file)
        for name, shape in config.shapes().items():
            base = name.removesuffix(".w")
            if precision.startswith("int4") and ".experts." in name:
                every = (expert(tensors, base, e, range(shape[1]), shape[2]) for e in range(shape[0]))
                value: npt.NDArray[Any] = np.stack(list(every))
            else:
                value = plain(tensors, name, precision, len(shape))
            wide: F = value.astype(dtype)
            if base.endswith("kv_b"):
                heads = wide.reshape(config.num_heads, -1, config.kv_lora_rank)
                nope = config.qk_nope_head_dim
                stem = base.removesuffix("kv_b")
                self._held[stem + "w_uk"] = np.ascontiguousarray(heads[:, :nope].transpose(1, 0, 2))
                self._held[stem + "w_uv"] = np.ascontiguousarray(heads[:, nope:].transpose(2, 0, 1))
            elif value.ndim == 1 or base == "embed":
                self._held[base] = wide
            else:
                self._held[base] = np.ascontiguousarray(np.moveaxis(wide, -1, 0))

    def __getitem__(self, name: str) -> F:
        return self._held[name]

    def embed(self, tokens: Index) -> F:
        """[M, D]"""
        return self._held["embed"][tokens]

    def linear(self, x: F, name: str, summation: Summation) -> F:
        """[M, K] times a matrix -> [M, N]."""
        return matmul(x, self._held[name], summation)

    def chosen(self, x: F, name: str, ids: Index, summation: Summation) -> F:
        """Row j of [J, K] times expert ``ids[j]`` -> [J, N]."""
        return matmul_chosen(x, self._held[name], ids, summation)


def plain(tensors: Mapping[str, npt.NDArray[Any]], name: str, precision: str, ndim: int) -> npt.NDArray[Any]:
    """A tensor that is not quantised, as float32: a matrix of a bf16 precision from its ``.bw``."""
    if precision in BF16_PRECISIONS and ndim > 1:
        return bf16_value(tensors[name.removesuffix("w") + "bw"])
    return tensors[name]


def check(config: ModelConfig, tensors: Mapping[str, npt.NDArray[Any]], precision: str, file: str) -> None:
    """`MissingTensor` unless every tensor is there that ``precision`` needs, with its shape and type."""
    for name, (shape, kind) in config.stored(precision).items():
        stem, _, suffix = name.rpartition(".")
        if suffix in ("qw", "sc") and stem + ".draw" in tensors:
            name, shape, kind = stem + ".draw", (5,), "i64"
        if name not in tensors:
            raise MissingTensor(f"{file}: {name}: precision {precision} needs this tensor and it is not there")
        found = tensors[name]
        if found.shape != shape or found.dtype != KDTR_TYPES[kind]:
            raise MissingTensor(f"{file}: {name}: is {found.dtype} {found.shape}, must be {kind} {shape}")


_drawn = lru_cache(maxsize=32768)(draw)  # of real sizes at most 256 KiB each; every model of a bundle asks for the same


def expert(tensors: Mapping[str, npt.NDArray[Any]], stem: str, index: int, rows: range, k: int) -> F32:
    """Neighbouring rows [rows, k] of an INT4 expert's matrix, stored or stated; exact."""
    name = stem + ".draw"
    stated = Stated.of(tensors[name], name) if name in tensors else None
    out = np.empty((len(rows), k), np.float32)
    for first in range(rows.start, rows.stop, EXPERT_ROWS):
        part = range(first, min(first + EXPERT_ROWS, rows.stop))
        if stated:
            packed, scales = _drawn(stated, index, part, k)
        else:
            packed, scales = (tensors[stem + end][index, part.start : part.stop] for end in (".qw", ".sc"))
        out[part.start - rows.start : part.stop - rows.start] = dequantise(packed, scales, k)
    return out
