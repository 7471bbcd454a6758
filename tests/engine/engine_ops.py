"""Operations of csrc/ops.h called alone, numpy in and numpy out, on any device; and the devices there are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.library import library, named_errors
from harness.compare import bits
from harness.environment import survey

if TYPE_CHECKING:  # conftest.py, which every run reads first, needs devices() alone
    import torch

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
STORE, RESIDUAL, SILU_MUL = 0, 1, 2
STATE = [
    "kv_len",
    "n_rows",
    "bonus",
    "committed",
    "limit",
    "done",
    "n_accepted",
    "base",
    "error",
    "error_row",
    "error_detail",
    "rounds",
    "draft_first",
    "draft_rows",
    "seed_lo",
    "seed_hi",
]


@functools.cache
def devices() -> tuple[str, ...]:
    """The CPU, and CUDA where a GPU is usable."""
    return ("cpu",) if survey().reason else ("cpu", "cuda")


class Rows:
    """A step's rows from their parents; everything past the active rows is a poison that no operation may read."""

    def __init__(
        self, parents: Sequence[int], tokens: Sequence[int] | None = None, max_rows: int | None = None
    ) -> None:
        m, size = len(parents), max_rows or len(parents)
        self.active = m
        self.parents = np.full(size, -77, np.int32)
        self.tokens = np.full(size, -77, np.int32)
        self.depths = np.full(size, -77, np.int32)
        self.path = np.full((size, size), -77, np.int32)
        self.parents[:m] = parents
        self.tokens[:m] = range(m) if tokens is None else tokens
        for i, parent in enumerate(parents):
            above = [] if parent < 0 else self.ancestors(parent)
            self.depths[i] = len(above)
            self.path[i, : len(above) + 1] = [*above, i]

    def ancestors(self, row: int) -> list[int]:
        """The rows from the root to ``row``, itself included."""
        return [*(self.ancestors(int(self.parents[row])) if self.parents[row] >= 0 else []), row]


def within(got: F32, want: Array, bound: Array | float, what: str) -> None:
    """Fail with the worst element of ``what``, by how much it is off, and how many are, if one is beyond ``bound``.

    ``bound`` is a number, or one for each element; NaN is beyond any.
    """
    __tracebackhide__ = True
    assert got.dtype == np.float32, f"{what}: {got.dtype}"
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    allowed = np.broadcast_to(bound, want.shape)
    apart = np.abs(got.astype(np.float64) - want)
    beyond = ~(apart <= allowed)
    if beyond.any():
        at = np.unravel_index(np.argmax(np.where(np.isnan(apart), np.inf, apart / allowed)), want.shape)
        first, place = int(np.argwhere(beyond)[0][0]), ", ".join(map(str, at))
        pytest.fail(
            f"{what}: {beyond.sum()} of {want.size} elements beyond the bound, from {first} on, worst at [{place}]: "
            f"got {got[at]:.9g}, want {want[at]:.9g}, off by {apart[at]:.3g}, allowed {allowed[at]:.3g}"
        )


def same_bits(got: Array, want: Array, what: str) -> None:
    """Fail with the first element of ``what`` that is not equal in every bit, and how many are not."""
    __tracebackhide__ = True
    if not (found := bits(what, got, want, what)).ok:
        pytest.fail(found.detail)


def chain(m: int) -> Rows:
    """m rows, each the child of the one before."""
    return Rows([i - 1 for i in range(m)])


class Ops:
    """One backend. Arguments are numpy arrays (or tensors already on the device), results are numpy arrays."""

    def __init__(self, device: str, poison: bool = True) -> None:
        import torch

        self.device, self._torch = device, torch
        self.lib = library(device)
        with named_errors():
            self.handle = self.lib.backend_open(device, poison)

    def close(self) -> None:
        self.lib.backend_close(self.handle)

    def __enter__(self) -> Ops:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, int]:
        return {n: int(c) for n, c in (line.split() for line in self.lib.backend_counters(self.handle).splitlines())}

    def tensor(self, array: Array) -> torch.Tensor:
        if self.device == "cpu":
            return self._torch.from_numpy(np.array(array, order="C"))
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def empty(self, *shape: int, dtype: Any = np.float32) -> torch.Tensor:
        """A result to be written: poisoned, so that what is not written shows."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)
        return self.tensor(array)

    def state(self, n_rows: int, **fields: int) -> torch.Tensor:
        values = np.zeros(16, np.int64)
        for name, value in {"n_rows": n_rows, **fields}.items():
            values[STATE.index(name)] = value
        return self.tensor(
            values.astype(np.uint32).view(np.int32) if (values >= 2**31).any() else values.astype(np.int32)
        )

    @staticmethod
    def fields(state: torch.Tensor) -> dict[str, int]:
        return dict(zip(STATE, state.cpu().tolist(), strict=True))

    def rows(self, rows: Rows) -> list[torch.Tensor]:
        return [self.tensor(a) for a in (rows.tokens, rows.parents, rows.depths, rows.path)]

    def call(self, name: str, *arguments: Any) -> None:
        if self.device != "cpu":
            self._torch.cuda.synchronize()  # the tensors were made on torch's stream, not on the backend's
        with named_errors():
            getattr(self.lib, name)(self.handle, *arguments)

    def linear(
        self,
        x: F32,
        weights: Sequence[Array],
        *,
        scales: Sequence[Array] | None = None,
        norm: F32 | None = None,
        eps: float = 1e-5,
        epilogue: int = STORE,
        out: Sequence[F32] | None = None,
        n_rows: int | None = None,
        k: int | None = None,
    ) -> list[F32]:
        """y = W x for one or two weights; int4 weights are nibbles with the bf16 bits of their scales beside them."""
        m = x.shape[0]
        outputs = [w.shape[0] for w in weights][: 1 if epilogue == SILU_MUL else 2]
        results = [self.tensor(o) for o in out] if out is not None else [self.empty(m, n) for n in outputs]
        bits = [np.empty(0, np.uint8)] * len(weights) if scales is None else [s.view(np.uint8) for s in scales]
        self.call(
            "linear",
            self.tensor(x),
            self.tensor(np.empty(0, np.float32) if norm is None else norm),
            eps,
            [self.tensor(w) for w in weights],
            [self.tensor(b) for b in bits],
            results,
            epilogue,
            self.state(m if n_rows is None else n_rows),
        )
        return [r.cpu().numpy() for r in results]
