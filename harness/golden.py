"""A bundle's golden results for one precision, as the checks use them (``docs/bundles.md``).

Letters: n prompt tokens, T committed tokens, V vocabulary, D hidden, B budget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.protocol import DecodeRequest, Draft, OwnDrafter, Round
from refs.config import BF16_PRECISIONS
from refs.drafters import DFLASH
from refs.kdtr import Kdtr, read

F64 = npt.NDArray[np.float64]


class GoldenError(Exception):
    """A bundle lacks what a check needs: ``FILE: FIELD: reason``."""


def _key(precision: str) -> str:
    """A precision in the names of tensors, which have no hyphen."""
    return precision.replace("-", "_")


@dataclass(frozen=True)
class Golden:
    """Views into one mapped bundle."""

    file: Kdtr
    precision: str
    meta: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path, precision: str) -> Golden:
        """Raises KdtrError for a broken file, GoldenError for one that is no bundle."""
        file = read(path)
        tokens = f"golden.{_key(precision)}.tokens"
        if "meta.json" not in file.tensors or tokens not in file.tensors:
            raise GoldenError(f"{path}: {tokens}: not a bundle with this precision; `kdtree bundles` makes them")
        return cls(file, precision, json.loads(file.tensor("meta.json").tobytes()))

    def _golden(self, name: str) -> npt.NDArray[Any]:
        return self.file.tensor(f"golden.{_key(self.precision)}.{name}")

    @property
    def rounding(self) -> bool:
        """Whether engines round activations to bf16, and goldens are to be met in their statistics."""
        return self.precision in BF16_PRECISIONS

    @cached_property
    def decided(self) -> npt.NDArray[np.bool_]:
        """[n+T], of a precision that rounds: the rows whose choices of experts no rounding can move."""
        return self._golden("decided").astype(np.bool_)

    def field(self, name: str) -> int:
        """A model field that is an integer."""
        return int(self.file.fields[name])

    @property
    def has_moe(self) -> bool:
        return self.field("num_layers") > self.field("first_k_dense")

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.file.tensor("golden.prompt").tolist())

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """T of them."""
        return tuple(self._golden("tokens").tolist())

    @property
    def logits(self) -> F64:
        """[T+1, V]: row 0 after the prompt, row i after token i."""
        return self._golden("logits")

    @cached_property
    def taps(self) -> dict[str, F64]:
        """[n+T, D] by tap name, in the order of computation."""
        prefix = f"golden.{_key(self.precision)}.taps."
        names = [name.removeprefix(prefix) for name in self.file.tensors if name.startswith(prefix)]
        order = sorted(names, key=lambda name: [int(part) if part.isdigit() else -1 for part in re.split(r"\.", name)])
        return {name: self.file.tensor(prefix + name) for name in order}

    def cache(self, layer: int) -> tuple[F64, F64]:
        """The rows a layer's cache holds after the decode: latent [n+T, R], rotated k_rope [n+T, P]."""
        return self._golden(f"cache.layers.{layer}.latent"), self._golden(f"cache.layers.{layer}.k_rope")

    def tolerance(self, name: str) -> float:
        """The bundle's bound for ``logits`` or a tap, in their own units. Raises GoldenError if it has none."""
        table = self.meta["tolerance"][self.precision]
        if name not in table:
            raise GoldenError(f"{self.file.file}: meta.json: tolerance.{self.precision}.{name} is missing")
        return float(table[name])

    def request(self, drafter: str = "", **changes: Any) -> DecodeRequest:
        """The decode whose results are stored: AR, or DDTree with ``drafter``; ``changes`` replace its fields."""
        run = self.meta["run"]
        values: dict[str, Any] = {"prompt": self.prompt, "max_tokens": int(run["max_tokens"]), "record": True}
        values.update(temperature=float(run["temperature"]), seed=int(run["seed"]))
        if drafter == DFLASH:
            values.update(draft=OwnDrafter(), block_size=int(run["block_size"]), budget=int(run["budget"]))
        elif drafter:
            table = self.file.tensor(f"draft.{_key(self.precision)}.{drafter}")
            values["draft"] = Draft(logits=np.asarray(table, np.float32), first=len(self.prompt) + 1)
            values.update(block_size=int(run["block_size"]), budget=int(run["budget"]))
        return DecodeRequest(**{**values, **changes})

    def rounds(self, drafter: str) -> tuple[Round, ...]:
        """Every round of the DDTree decode with ``drafter``."""
        sizes = self._golden(f"{drafter}.size").tolist()
        tokens, parents, accepted = (self._golden(f"{drafter}.{name}") for name in ("tokens", "parents", "accepted"))
        return tuple(
            Round(
                tuple(tokens[i, :size].tolist()),
                tuple(parents[i, :size].tolist()),
                tuple(row for row in accepted[i].tolist() if row >= 0),
            )
            for i, size in enumerate(sizes)
        )

    def draft_logits(self) -> F64:
        """[rounds, L, V]: what the bundle's own drafter gives in every round."""
        return self._golden(f"{DFLASH}.logits")

    def other_logits(self) -> F64 | None:
        """Golden logits with the other kind of experts, if the bundle has them."""
        other = {"fp32": "int4", "int4": "fp32", "bf16": "int4-bf16", "int4-bf16": "bf16"}[self.precision]
        return self.file.tensors.get(f"golden.{_key(other)}.logits")
