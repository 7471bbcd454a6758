"""Which numbers of ranks can share a model: they divide heads, inner sizes, hidden size and vocabulary."""

from __future__ import annotations

import os

from harness.protocol import ConfigError
from refs import kdtr
from refs.config import ModelConfig
from refs.drafter_config import split


def undivided(config: ModelConfig, ranks: int) -> list[str]:
    """The fields that so many ranks cannot share evenly (``csrc/config.cpp``, check_ranks)."""
    names = ["num_heads", "hidden_size", "vocab_size"]
    names += ["intermediate_size"] if config.first_k_dense > 0 else []
    names += ["moe_intermediate_size"] if config.first_k_dense < config.num_layers else []
    return [name for name in names if getattr(config, name) % ranks]


def check_file(path: str | os.PathLike[str], ranks: int) -> None:
    """Raises ConfigError when the model of a KDTR file cannot be shared; what else is wrong with it a session says."""
    try:
        config = ModelConfig.of(split(kdtr.read(path).fields)[0], os.fspath(path))
    except (OSError, ValueError):
        return
    if bad := undivided(config, ranks):
        raise ConfigError(f"{path}: {bad[0]}: {ranks} ranks cannot share {getattr(config, bad[0])} evenly")
