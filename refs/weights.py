"""A model's tensors in the type and layout that the forward pass reads: K first, so that sums run over whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.config import ModelConfig
from refs.elementary import F
from refs.errors import MissingTensor
from refs.quant import dequantise

KDTR_TYPES = {"f32": np.dtype("<f4"), "bf16": np.dtype("<u2"), "u8": np.dtype("u1")}


class Weights:
    """``w[name]`` for every name of docs/model.md without its ``.w``.

    A matrix [N, K] is held as [K, N], experts [E, N, K] as [K, E, N], ``kv_b`` as its two halves ``w_uk`` [N, H, R]
    and ``w_uv`` [R, H, Vh]; vectors and the embedding as they are. INT4 experts are expanded, which is exact.
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
        for name, (shape, kind) in config.stored(precision).items():
            if name not in tensors:
                raise MissingTensor(f"{file}: {name}: precision {precision} needs this tensor and it is not there")
            found = tensors[name]
            if found.shape != shape or found.dtype != KDTR_TYPES[kind]:
                raise MissingTensor(f"{file}: {name}: is {found.dtype} {found.shape}, must be {kind} {shape}")
        for name, shape in config.shapes().items():
            base = name.removesuffix(".w")
            if precision == "int4" and ".experts." in name:
                value: npt.NDArray[Any] = dequantise(tensors[base + ".qw"], tensors[base + ".sc"], shape[-1])
            else:
                value = tensors[name]
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
