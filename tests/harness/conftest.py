"""A bundle small enough that a whole DDTree cell of the reference takes well under a second; processes to command."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from refs import generate, kdtr, recipe
from refs.elementary import F
from refs.model import Index, Model
from tests.harness.forked import Forks

SMALL = {
    "name": "micro",
    "purpose": "Two layers, one of them of experts.",
    "base": "tiny",
    "model": {"num_layers": 2, "hidden_size": 32, "vocab_size": 64, "n_routed_experts": 8, "mask_id": 63},
    "run": {"prompt_length": 5, "max_tokens": 8, "block_size": 4, "budget": 5},
}


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the bundle ``micro``."""
    folder = tmp_path_factory.mktemp("micro")
    (folder / "tiny.yaml").write_bytes((recipe.CONFIGS / "tiny.yaml").read_bytes())
    (folder / "micro.yaml").write_text(yaml.safe_dump(SMALL))
    path = folder / "micro.kdtr"
    kdtr.write(path, *generate.layout(generate.generate(recipe.load("micro", folder))))
    return path


FORWARDS: dict[bytes, tuple[F, list[F]]] = {}
"""Logits and new cache rows of a forward, by all that it depends on."""


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference makes no forward twice in a process, for tests of what is asked of it and not of its numbers.

    A model with a fault of its own, of a class of its own, and one that notes taps computes all of them.
    """
    opened, forward = Model.open.__func__, Model._forward  # type: ignore[attr-defined]

    def tell(cls: type[Model], path: Any, precision: str, *arguments: Any, **options: Any) -> Model:
        model = opened(cls, path, precision, *arguments, **options)
        if cls is Model and model.drafter is None:
            model.asked = f"{path} {precision} {arguments} {sorted(options.items())}"
        return model

    def remember(self: Model, tokens: Index, depths: Index, keys: Index) -> F:
        if not hasattr(self, "asked") or self._tap is not None:
            return forward(self, tokens, depths, keys)
        caches = (*self._latent, *self._k_rope)
        read = (self.asked.encode(), tokens, depths, keys, *(cache[: self.length].copy() for cache in caches))
        key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in read)).digest()
        if key not in FORWARDS:
            logits = forward(self, tokens, depths, keys)
            made = slice(self.length, self.length + tokens.size)
            FORWARDS[key] = logits, [cache[made].copy() for cache in (*self._latent, *self._k_rope)]
        self._reserve(self.length + tokens.size)
        logits, rows = FORWARDS[key]
        for cache, row in zip((*self._latent, *self._k_rope), rows, strict=True):
            cache[self.length : self.length + tokens.size] = row
        self._tapped = []
        return logits.copy()

    monkeypatch.setattr(Model, "open", classmethod(tell))
    monkeypatch.setattr(Model, "_forward", remember)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Commands in processes of their own."""
    server = Forks()
    yield server
    server.close()
