"""Bundles read back, and changed copies of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.protocol import DecodeRequest, Draft
from refs import kdtr

Array = npt.NDArray[Any]


class Bundle:
    """A bundle's model, prompt, drafts and goldens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = kdtr.read(path)
        self.run = json.loads(bytes(self.file.tensor("meta.json")))["run"]
        self.prompt: list[int] = self.file.tensor("golden.prompt").tolist()
        self.vocab = int(self.file.fields["vocab_size"])

    def tokens(self, precision: str) -> list[int]:
        return list(self.file.tensor(f"golden.{precision.replace('-', '_')}.tokens").tolist())

    def draft(self, precision: str, drafter: str) -> Draft:
        return Draft(self.file.tensor(f"draft.{precision.replace('-', '_')}.{drafter}"), len(self.prompt) + 1)

    def request(self, precision: str = "fp32", drafter: str = "", **changes: Any) -> DecodeRequest:
        """The bundle's own run: AR, or DDTree with a recorded drafter."""
        given: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.run["max_tokens"], "record": True}
        if drafter:
            given["draft"] = self.draft(precision, drafter)
            given |= {"block_size": self.run["block_size"], "budget": self.run["budget"]}
        return DecodeRequest(**{**given, **changes})


def changed(
    source: Path,
    target: Path,
    *,
    fields: Mapping[str, int | float | None] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
) -> Path:
    """A copy of a KDTR file with fields and tensors replaced, added, or (None) left out."""
    file = kdtr.read(source)
    merged_fields = {**file.fields, **(fields or {})}
    merged_tensors = {**file.tensors, **(tensors or {})}
    kdtr.write(
        target,
        {name: value for name, value in merged_fields.items() if value is not None},
        {name: np.asarray(value) for name, value in merged_tensors.items() if value is not None},
    )
    return target


def poisoned(source: Path, target: Path, tensor: str, at: int, value: float = float("nan")) -> Path:
    """A copy in which one element of one tensor is not finite."""
    array = np.array(kdtr.read(source).tensor(tensor))
    array.reshape(-1)[at] = value
    return changed(source, target, tensors={tensor: array})
