"""Weights from a counter: each tensor row by row, so that a model of any size is made in pieces.

Every value is a bf16 exactly, and depends on the config's and the tensor's name alone: an attempt that cannot be used
changes the prompt, not the weights. The routed experts are INT4 by the rule of `refs.stated`. Some channels carry
outliers, in the embedding, in the norms before the MLPs, and where those norms meet the experts' groups.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from refs.exact import Draws
from refs.philox import philox
from refs.quant import GROUP, U16
from refs.recipe import Recipe
from refs.stated import LOTS, Stated, draw_nibbles, draw_scales

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[np.generic]
Declared = dict[str, tuple[str, tuple[int, ...]]]

SPREAD = 73.9  # standard deviation of `_odd`'s integers
STATED_SPREAD = 4.88  # of a stated expert's weights in units of its least scale: 3.25 of the nibbles, 1.5 of the scales
PART = 1 << 18  # weights made at a time: numpy's temporaries then stay near a core's cache
THREADS = 2  # more wait for Python's lock: 8 on 32 cores took longer than 2 on 2
MASSIVE, LOUD_NORM = 32.0, 8.0  # how much larger outlier channels are in the embedding and in the norms before an MLP


def key(recipe: Recipe, name: str) -> int:
    """64 bits, signed, from the names alone."""
    digest = hashlib.sha256(f"{recipe.name}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def stated(recipe: Recipe, name: str, k: int) -> Stated:
    """What the experts' matrices ``name`` (without .w, .qw or .draw) with rows of ``k`` are drawn from."""
    w = recipe.weights
    gain = w.expert_gain if name.endswith("down") else w.linear_gain
    shares = (round(share * LOTS) for share in (w.zero_group_share, w.amax_group_share, w.loud_group_share))
    return Stated(key(recipe, name), _exponent(gain / STATED_SPREAD / math.sqrt(k)) + 127 << 7, *shares)


def declared(recipe: Recipe) -> Declared:
    """KDTR type and shape of every tensor that the recipe's file holds."""
    out: Declared = {}
    stored = [item for precision in recipe.precisions for item in recipe.model.stored(precision).items()]
    for name, (shape, kind) in stored:
        if recipe.weights.stated and name.endswith(".qw"):
            out[name.removesuffix("qw") + "draw"] = ("i64", (5,))
        elif not (recipe.weights.stated and name.endswith(".sc")):
            out[name] = (kind, shape)
    return out


def parts(recipe: Recipe, name: str) -> Iterator[Array]:
    """The tensor ``name`` of `declared`, some rows at a time."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("qw", "sc", "draw") and ".experts." in name:
        experts, rows, k = recipe.model.shapes()[stem + ".w"]
        what = stated(recipe, stem, k)
        if suffix == "draw":
            yield what.numbers()
            return
        drawn: Callable[..., Array] = draw_nibbles if suffix == "qw" else draw_scales
        every = range(experts)
        yield from _in_order(partial(drawn, what, e, block, k) for e in every for block in _blocks(rows, k))
        return
    wide = name.removesuffix("bw") + "w" if suffix == "bw" else name
    shape = recipe.model.shapes()[wide]
    blocks = _blocks(*((1, shape[0]) if len(shape) == 1 else shape))
    made: Callable[..., Array] = _narrow_rows if suffix == "bw" else _rows
    yield from _in_order(partial(made, recipe, wide, shape, block) for block in blocks)


def _in_order(jobs: Iterable[Callable[[], Array]]) -> Iterator[Array]:
    """The results in order, made by threads that are a few jobs ahead and no more."""
    waiting: deque[Future[Array]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def weights(recipe: Recipe) -> dict[str, Array]:
    """Every tensor whole, for a small model."""
    return {
        name: np.concatenate([part.reshape(-1) for part in parts(recipe, name)]).reshape(shape)
        for name, (_, shape) in declared(recipe).items()
    }


def _blocks(rows: int, k: int) -> Iterator[range]:
    step = max(1, PART // k)
    for first in range(0, rows, step):
        yield range(first, min(rows, first + step))


def _rows(recipe: Recipe, name: str, shape: tuple[int, ...], block: range) -> F32:
    w, k = recipe.weights, shape[-1]
    value = _odd(key(recipe, name), block, k)
    if name.endswith("norm.w"):
        value = (1 + np.rint(value / 16) / 128).astype(np.float32)  # 0.87 to 1.13
        if name.endswith("mlp_norm.w"):
            value[:, outliers(recipe)] *= np.float32(LOUD_NORM)
        return value
    if name == "embed.w":
        value *= np.float32(1 / 64)
        value[:, outliers(recipe)[:2]] *= np.float32(MASSIVE)
        return value
    if name.endswith("router.bias"):
        return value * np.float32(2.0 ** _exponent(w.router_bias / SPREAD))
    gain = w.router_gain if name.endswith("router.w") else w.logit_gain if name == "lm_head.w" else w.linear_gain
    return value * np.float32(2.0 ** _exponent(gain / SPREAD / math.sqrt(k)))


def _narrow_rows(recipe: Recipe, name: str, shape: tuple[int, ...], block: range) -> U16:
    """As `_rows`, the bits of the bf16 that each value is."""
    return (_rows(recipe, name, shape, block).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _exponent(x: float) -> int:
    """Of the power of two nearest to ``x`` in ratio; only correctly rounded operations decide."""
    mantissa, exponent = math.frexp(x)
    return exponent - (mantissa < 0.7071)


def _odd(tensor_key: int, rows: range, k: int) -> F32:
    """[rows, k] of odd integers from -255 to 255, nearly normal: a quarter of a sum of four bytes."""
    columns = np.arange(-(-k // 4), dtype=np.uint64)
    words = philox((columns, np.asarray(rows, np.uint64)[:, None], 0, 0), tensor_key % 2**64)
    byte, eight = np.uint64(0xFF), np.uint64(8)
    out = np.empty((len(rows), columns.size, 4), np.float32)
    for i, word in enumerate(words):
        total = word & byte
        for _ in range(3):
            word >>= eight
            total += word & byte
        out[..., i] = total >> np.uint64(2)
    out *= np.float32(2)
    out -= np.float32(255)
    return out.reshape(len(rows), -1)[:, :k]


def outliers(recipe: Recipe) -> npt.NDArray[np.int64]:
    """Channels that are much larger: both sides of a group's boundary, the last of all, then drawn ones."""
    size, count = recipe.model.hidden_size, recipe.weights.outlier_channels
    edges = [c for c in (GROUP - 1, GROUP, size - 1, 3 * GROUP - 1) if c < size]
    order = Draws(recipe.name, "outliers").permutation(size).tolist()
    return np.array((edges + [c for c in order if c not in edges])[:count], np.int64)
