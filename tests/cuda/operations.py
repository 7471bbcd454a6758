"""Operations of csrc/ops.h called alone, on numpy arrays, on either backend; and random trees for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.library import library, named_errors
from tests.engine.engine_ops import STATE

Array = npt.NDArray[Any]
NONE = np.empty(0, np.float32)
NO_SCALE = np.empty(0, np.uint8)


def state(**values: int) -> Array:
    """StepState as 16 i32; what is not named is 0."""
    record = np.zeros(16, np.int32)
    for name, value in values.items():
        record[STATE.index(name)] = value
    return record


def read(record: Array) -> dict[str, int]:
    """StepState's fields by name."""
    return {name: int(record[i]) for i, name in enumerate(STATE)}


class Tree:
    """The rows of a step: parents before children; tokens and the rest follow."""

    def __init__(self, parents: Sequence[int], tokens: Sequence[int] | None = None) -> None:
        m = len(parents)
        self.parents = np.array(parents, np.int32)
        self.tokens = np.array(tokens if tokens is not None else range(m), np.int32)
        self.depths = np.zeros(m, np.int32)
        self.path = np.full((m, max(m, 1)), -1, np.int32)
        for row, parent in enumerate(parents):
            if parent >= 0:
                self.depths[row] = self.depths[parent] + 1
                self.path[row, : self.depths[row]] = self.path[parent, : self.depths[row]]
            self.path[row, self.depths[row]] = row

    @property
    def rows(self) -> list[Array]:
        """As the operations take them."""
        return [self.tokens, self.parents, self.depths, self.path]


def random_tree(rng: np.random.Generator, m: int) -> Tree:
    """m rows, each below any earlier one, with a taste for long paths."""
    parents = [-1] + [int(i - 1 if rng.random() < 0.5 else rng.integers(0, i)) for i in range(1, m)]
    return Tree(parents)


class Operations:
    """One backend. Arrays are copied to it, and what an operation may write is copied back into the same arrays."""

    def __init__(self, device: str, *, poison: bool = True) -> None:
        self.device = device
        self._namespace = library(device)
        with named_errors():
            self._handle = self._namespace.backend_open(device, poison)

    def __enter__(self) -> Operations:
        return self

    def __exit__(self, *_: object) -> None:
        self._namespace.backend_close(self._handle)

    def counters(self) -> Mapping[str, int]:
        """Launches by name since the backend was opened."""
        lines = self._namespace.backend_counters(self._handle).splitlines()
        return {name: int(count) for name, count in (line.split() for line in lines)}

    def __call__(self, name: str, *arguments: Any) -> None:
        """Run an operation; every array among the arguments is updated from the device."""
        import torch

        moved: list[tuple[Array, Any]] = []

        def move(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                tensor = torch.from_numpy(np.ascontiguousarray(value)).to(self.device)
                moved.append((value, tensor))
                return tensor
            return [move(item) for item in value] if isinstance(value, list) else value

        converted = [move(value) for value in arguments]
        if self.device != "cpu":
            torch.cuda.synchronize()  # the copies run on torch's stream, the operation on the backend's own
        with named_errors():
            getattr(self._namespace, name)(self._handle, *converted)
        for array, tensor in moved:
            np.copyto(array, tensor.cpu().numpy())


def quantise(rng: np.random.Generator, *shape: int) -> tuple[Array, Array, Array]:
    """Random INT4 weights [..., n, k]: nibbles, scales (bytes of bf16), and the exact values in float64.

    Written from docs/model.md alone: low nibble first, offset 8, groups of 32 padded with nibble 8.
    """
    *outer, k = shape
    groups = (k + 31) // 32
    q = rng.integers(-8, 8, (*outer, groups * 32))
    q[..., k:] = 0
    nibbles = (q + 8).astype(np.uint8)
    packed = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    scale = rng.uniform(0.001, 0.02, (*outer, groups)).astype(np.float32).view(np.uint32) >> 16
    exact = (scale << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    values = q * np.repeat(exact, 32, axis=-1)
    return packed, scale.astype(np.uint16).view(np.uint8).reshape(*outer, groups * 2), values[..., :k]


def same_bits(a: Array, b: Array) -> bool:
    """Equal in every bit, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
