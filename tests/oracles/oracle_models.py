"""transformers' own DeepseekV3ForCausalLM: built, run in float32 and in float64, saved as a checkpoint.

*float64*: transformers casts norms, router, softmax and rotary tables to float32 whatever the model's type. `wide` runs
the same source with the name ``torch`` in its modules standing for a torch whose ``float32`` is ``float64``, so that
nothing is narrowed; no line of theirs is changed or copied.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from oracle_cases import Case
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_rope_utils
from transformers.models.deepseek_v3 import modeling_deepseek_v3

F64 = npt.NDArray[np.float64]

transformers.utils.logging.set_verbosity_error()  # it warns of every YaRN factor that is not max/original
transformers.utils.logging.disable_progress_bar()


class _Wide:
    """torch, but float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Inside, transformers' DeepSeek-V3 computes in float64 throughout."""
    modules = (modeling_deepseek_v3, modeling_rope_utils)
    default = torch.get_default_dtype()
    try:
        for module in modules:
            module.torch = _Wide()
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for module in modules:
            module.torch = torch


@dataclass(frozen=True)
class Run:
    """What a model said about n rows: logits [n, V]; per MoE layer the chosen experts [n, k] by ascending id, their
    weights, and the biased scores [n, E] that they were chosen by (transformers alone tells those)."""

    logits: F64
    ids: tuple[npt.NDArray[np.int64], ...]
    weights: tuple[F64, ...]
    scores: tuple[F64, ...] = ()


def build(case: Case) -> Any:
    """A float32 model with random weights that are exact in the case's type."""
    torch.manual_seed(case.index)
    config = DeepseekV3Config(**case.config)
    model = DeepseekV3ForCausalLM._from_config(
        config, experts_implementation="eager"
    ).eval()  # grouped_mm wants even sizes
    fill(model, case.gain, getattr(torch, case.dtype))
    return model


def fill(model: Any, gain: float, dtype: torch.dtype) -> None:
    """Random weights of a spread at which every part of the model matters, rounded to ``dtype``."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or value.numel() == 0:
                continue
            if "norm" in name:
                drawn = 1 + 0.2 * torch.randn_like(value)
            elif "bias" in name:
                drawn = 0.2 * torch.randn_like(value)
            elif "embed" in name:
                drawn = torch.randn_like(value)
            else:
                drawn = torch.randn_like(value) * gain * value.shape[-1] ** -0.5
            value.copy_(drawn.to(dtype))


def in_float64(model: Any) -> Any:
    """The same weights in a float64 model; build and call it inside `wide`."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    twin = DeepseekV3ForCausalLM._from_config(copy.deepcopy(model.config), dtype=torch.float64, **options).eval()
    twin.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    if any(not torch.equal(v.double(), twin.state_dict()[k]) for k, v in model.state_dict().items()):
        raise RuntimeError("transformers did not keep the weights")
    return twin


def run(model: Any, tokens: Sequence[int]) -> Run:
    """One pass over ``tokens``, with the router's doings recorded."""
    said: list[Any] = []
    routers = [m for m in model.modules() if isinstance(m, modeling_deepseek_v3.DeepseekV3TopkRouter)]
    hooks = [m.register_forward_hook(lambda module, _, out: said.append((module, *out))) for m in routers]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    order = [torch.argsort(ids, dim=-1) for _, _, _, ids in said]
    return Run(
        logits.double().numpy(),
        tuple(torch.gather(ids, 1, o).numpy() for (_, _, _, ids), o in zip(said, order, strict=True)),
        tuple(torch.gather(w, 1, o).double().numpy() for (_, _, w, _), o in zip(said, order, strict=True)),
        tuple((x.double().sigmoid() + m.e_score_correction_bias.double()).numpy() for m, x, _, _ in said),
    )


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy continuation."""
    given = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def save(model: Any, case: Case, directory: Path) -> Path:
    """The checkpoint of ``model`` in the case's type, shards and layout."""
    options = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
    twin = DeepseekV3ForCausalLM(copy.deepcopy(model.config))  # saving writes the type into the config
    twin.load_state_dict(model.state_dict())
    twin.to(getattr(torch, case.dtype)).save_pretrained(directory, **options)
    if case.layout != "deepseek_v3":
        _respell(directory, case.layout)
    return directory


def _respell(directory: Path, layout: str) -> None:
    """Config and names as Moonshot publishes them."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config |= {"model_type": "kimi_k2", "rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    for name in ("head_dim", "qk_head_dim", "rope_interleave"):
        config.pop(name, None)
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True}
    if layout == "kimi_k25":
        config = {"model_type": "kimi_k25", "text_config": config, "vision_config": {}, "tie_word_embeddings": False}
        if config["text_config"].get("tie_word_embeddings"):
            config["tie_word_embeddings"] = True
        for shard in directory.glob("*.safetensors"):
            tensors = {f"language_model.{k}": v for k, v in load_file(shard).items()}
            save_file(tensors | {f"vision_tower.{shard.stem}": torch.zeros(2)}, shard)
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            vision = {f"vision_tower.{Path(f).stem}": f for f in names.values()}
            index.write_text(json.dumps({"weight_map": vision | {f"language_model.{k}": f for k, f in names.items()}}))
    file.write_text(json.dumps(config))
