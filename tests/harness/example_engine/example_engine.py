"""An engine from outside: the model computed in float32, its sums in another order than the reference's.

It differs from the goldens by float32's noise, as any real engine does, and lies well within their tolerance. A package
of your own needs the same two things: a factory ``create(device)`` that gives a ``harness.protocol.Engine``, and an
entry point in the group ``kdtree.engines`` that names it. ``kdtree test --engine example`` then runs the matrix on it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.protocol import DeviceError
from harness.reference_engine import ReferenceEngine, ReferenceSession, named_errors
from refs.config import BF16_PRECISIONS
from refs.model import Model


class ExampleEngine(ReferenceEngine):
    """`harness.protocol.Engine`; sessions behave as the reference's, in other arithmetic."""

    name = "example"

    def load(
        self,
        path: Path,
        precision: str,
        *,
        context: int | None = None,
        max_rows: int = 65,
        poison: bool = False,
        graphs: bool = True,
    ) -> ReferenceSession:
        with named_errors():
            rounding = precision in BF16_PRECISIONS
            options = {"summation": "strided", "context": context, "rounding": rounding}
            model = Model.open(path, precision, np.float32, **options)
        return ReferenceSession(model, max_rows)


def create(device: str) -> ExampleEngine:
    """Raises DeviceError for another device than ``cpu``."""
    if device != "cpu":
        raise DeviceError(f"the example engine runs on cpu, not on {device}")
    return ExampleEngine(device)
