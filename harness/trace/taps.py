"""Taps held against what they should be, in the order of computation; the first one outside its bound.

A bundle stores bounds for the residual stream and the logits. For the operations inside a layer the same multiple of
the float32 noise is measured here, on the reference, when it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import compare
from harness.cells import Divergence
from harness.golden import Golden
from harness.protocol import OPERATION_TAPS
from refs.exact import SUMMATIONS
from refs.model import Model

Array = npt.NDArray[Any]

ROUNDING = 2.0**-24
"""Half a unit in the last place: noise is taken as at least this share of a tap's largest value, because a tap of few
elements may by chance be rounded well."""
CHOICES = ("moe.ids",)
"""Taps that hold decisions: any difference is one."""
KEPT = 4  # references held by a process that traces several cells


@dataclass(frozen=True)
class Expected:
    """What every tap should be, [rows, width] by name in any order, and the greatest difference allowed."""

    source: str
    rows: Mapping[str, Array]
    allowed: Mapping[str, float]


def order(golden: Golden) -> list[str]:
    """The names of all taps that an engine may give, in the order of computation."""
    names = ["embed"]
    for layer in range(golden.field("num_layers")):
        names += [f"layers.{layer}.{name}" for name in (*OPERATION_TAPS, "out")]
    return [*names, "logits"]


def axes(golden: Golden, tap: str) -> tuple[tuple[str, int], ...]:
    """What a row of ``tap`` is made of: names and lengths, outermost first; a length of -1 is whatever is left."""
    operation = tap.split(".", 2)[2] if tap.startswith("layers.") else tap
    head, choice = ("head", golden.field("num_heads")), ("choice", golden.field("num_experts_per_tok"))
    rest = ("element", -1)
    return {
        "mla.q": (head, rest),
        "mla.q_lat": (head, rest),
        "mla.q_rope": (head, rest),
        "mla.o_lat": (head, rest),
        "mla.o": (head, rest),
        "moe.router_logits": (("expert", -1),),
        "moe.ids": (("choice", -1),),
        "moe.weights": (("choice", -1),),
        "moe.act": (choice, rest),
        "logits": (("token", -1),),
        "draft": (("token", -1),),
    }.get(operation, (rest,))


def title(tap: str) -> str:
    """``layers.3.mla.q_rope`` as its reader says it: ``layer 3, mla.q_rope``."""
    if not tap.startswith("layers."):
        return tap
    _, layer, operation = tap.split(".", 2)
    return f"layer {layer}, {operation}"


def place(golden: Golden, tap: str, index: Sequence[int], ids: Array | None = None) -> str:
    """``row 5, head 2, element 7`` for an index of `shaped`; ``ids`` [rows, k]: the experts that were chosen."""
    names = ["row", *(name for name, _ in axes(golden, tap))]
    said = [f"{name} {i}" for name, i in zip(names, index, strict=True)]
    if ids is not None and names[1] == "choice":
        said[1] += f" (expert {int(ids[index[0], index[1]])})"
    return ", ".join(said)


def chosen(rows: Mapping[str, Array], tap: str) -> Array | None:
    """The experts that the layer of ``tap`` chose in every row, for a tap behind the choice."""
    layer, _, operation = tap.rpartition(".")
    return None if operation == "ids" else rows.get(f"{layer}.ids")


def shaped(golden: Golden, tap: str, rows: Array) -> Array:
    """[rows, width] as [rows, *axes], so that an index names the head."""
    return rows.reshape(rows.shape[0], *(length for _, length in axes(golden, tap)))


def differ(
    golden: Golden, tap: str, got: Array, want: Array, allowed: float, told: str = "", ids: Array | None = None
) -> Divergence | None:
    """The worst element of one tap if it is beyond ``allowed``, or unlike in a bit where nothing is allowed.

    ``told`` says before what is compared with what; ``ids``: see `place`.
    """
    where = f"{told + ': ' if told else ''}{title(tap)}"
    if got.shape != want.shape:
        detail = f"{where}: shape {list(got.shape)}, expected {list(want.shape)}"
        return Divergence(tap, (), float("nan"), float("nan"), allowed, 0, detail)
    got, want = shaped(golden, tap, got), shaped(golden, tap, want)
    apart = compare.difference(got, want)
    if not allowed and got.dtype == want.dtype:  # two computations of the same bits: a zero's sign is one of them
        alike = np.signbit(got) == np.signbit(want)
        apart = np.where(alike, apart, np.maximum(apart, np.finfo(np.float64).tiny))
    beyond = apart > allowed
    if not beyond.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(apart)), apart.shape))
    count, first = int(beyond.sum()), int(np.argwhere(beyond)[0][0])
    a, b = float(got[index]), float(want[index])
    detail = (
        f"{where}, {place(golden, tap, index, ids)}: got {a:.9g}, want {b:.9g}, allowed {allowed:.3g} "
        f"({count} of {apart.size} elements beyond it, from row {first} on)"
    )
    return Divergence(tap, index, a, b, allowed, count, detail)


def first(golden: Golden, got: Mapping[str, Array], expected: Expected) -> Divergence | None:
    """The first tap in the order of computation that is beyond its bound; taps that either side lacks are left out."""
    for tap in order(golden):
        if tap in got and tap in expected.rows:
            allowed = expected.allowed[tap]
            found = differ(golden, tap, got[tap], expected.rows[tap], allowed, ids=chosen(got, tap))
            if found is not None:
                return found
    return None


def stored(golden: Golden) -> Expected:
    """What the bundle holds of a prefill: the residual stream after every layer, and the cache."""
    rows = dict(golden.taps)
    for layer in range(golden.field("num_layers")):
        rows |= zip((f"layers.{layer}.mla.latent", f"layers.{layer}.mla.k_rope"), golden.cache(layer), strict=True)
    return Expected("golden", rows, {name: golden.tolerance(name) for name in rows})


_REFERENCES: OrderedDict[tuple[str, str, tuple[int, ...]], Expected] = OrderedDict()


def reference(golden: Golden, tokens: Sequence[int]) -> Expected:
    """Every operation of a prefill of ``tokens`` in float64, bounds from float32 (rounding as engines of the
    precision do)."""
    key = (golden.file.file, golden.precision, tuple(tokens))
    if key not in _REFERENCES:
        exact = Model.open(golden.file.file, golden.precision).taps(tokens, operations=True)
        noise = {name: ROUNDING * float(np.abs(rows).max()) for name, rows in exact.items()}
        for summation in SUMMATIONS:
            model = Model.open(
                golden.file.file, golden.precision, np.float32, summation=summation, rounding=golden.rounding
            )
            for name, rows in model.taps(tokens, operations=True).items():
                noise[name] = max(noise[name], float(compare.difference(rows, exact[name]).max()))
        allowed = {name: float(golden.meta["multiple"]) * value for name, value in noise.items()}
        for name in exact:
            if name.endswith(CHOICES):
                allowed[name] = 0.0
            elif not golden.rounding and name in golden.meta["tolerance"][golden.precision]:
                allowed[name] = golden.tolerance(name)
        _REFERENCES[key] = Expected("reference", exact, allowed)
        while len(_REFERENCES) > KEPT:
            _REFERENCES.popitem(last=False)
    _REFERENCES.move_to_end(key)
    return _REFERENCES[key]
