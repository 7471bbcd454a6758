"""A smaller valid model: some layers, some experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.safetensors_reader import CheckpointError
from refs.config import ModelConfig


@dataclass(frozen=True)
class Selection:
    """Layers and experts to keep, ascending; ``None`` keeps all."""

    layers: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None


def sliced(fields: dict[str, int | float], selection: Selection, file: str) -> tuple[ModelConfig, Selection]:
    """The config of the kept layers and experts, and the selection with ``None`` resolved.

    Raises `CheckpointError` when a slice leaves no valid model: an id out of range, a group cut apart, too few experts.
    """
    whole = ModelConfig.of(fields, file)
    layers = selection.layers or tuple(range(whole.num_layers))
    experts = selection.experts or tuple(range(whole.n_routed_experts))
    for option, ids, count in (("--layers", layers, whole.num_layers), ("--experts", experts, whole.n_routed_experts)):
        if ids[-1] >= count:
            raise CheckpointError(file, option, f"{ids[-1]}, but the model has 0..{count - 1}")
    size = whole.n_routed_experts // whole.n_group
    kept = sorted({e // size for e in experts})
    n_group = whole.n_group if len(experts) == whole.n_routed_experts else len(kept)
    if whole.n_group > 1 and len(experts) != len(kept) * size:
        reason = f"cuts a group apart; the router chooses among {whole.n_group} groups of {size}: keep whole groups"
        raise CheckpointError(file, "--experts", reason)
    topk_group = min(whole.topk_group, n_group)
    if whole.num_experts_per_tok > topk_group * (len(experts) // n_group):
        reason = (
            f"{len(experts)} experts in {n_group} groups, but every token needs {whole.num_experts_per_tok}: keep more"
        )
        raise CheckpointError(file, "--experts", reason)
    config = replace(
        whole,
        num_layers=len(layers),
        first_k_dense=sum(whole.is_dense(layer) for layer in layers),
        n_routed_experts=len(experts),
        n_group=n_group,
        topk_group=topk_group,
    )
    return config, Selection(layers, experts)
