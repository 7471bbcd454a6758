"""A bundle small enough that a whole DDTree cell of the reference takes well under a second; processes to command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from refs import generate, kdtr, recipe
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


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Commands in processes of their own."""
    server = Forks()
    yield server
    server.close()
