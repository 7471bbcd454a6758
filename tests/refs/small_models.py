"""Small models to test on, made once a process."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from refs import draw, recipe
from refs.model import Model
from refs.recipe import Recipe

Tensors = dict[str, npt.NDArray[Any]]


@cache
def small(**changes: Any) -> tuple[Recipe, Tensors]:
    """A recipe like tiny with two layers and 48 tokens, and its weights; ``changes`` replace fields of its model."""
    sizes = {"num_layers": 2, "vocab_size": 48, "mask_id": -1, "max_context": 256, **changes}
    tiny = recipe.load("tiny")
    made = dataclasses.replace(tiny, name="small", model=dataclasses.replace(tiny.model, **sizes))
    return made, draw.weights(made, 0)


def model(
    precision: str = "fp32", dtype: type[np.floating[Any]] = np.float64, *, changes: Any = (), **options: Any
) -> Model:
    """A fresh `Model` of `small`."""
    made, tensors = small(**dict(changes))
    return Model(made.model.fields(), tensors, precision, dtype, **options)
