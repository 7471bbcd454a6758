"""Trained weights that lie below refs/ in the Hugging Face layout, as the tensors of docs/model.md.

A second reader beside the engine's importer, and a narrow one: one safetensors file, bf16 or f32, no quantisation. That
the two agree is a test. Errors name the file and the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.config import ModelConfig
from refs.errors import CheckpointError
from refs.exact import bf16_value

FOLDER = Path(__file__).parent
F32 = npt.NDArray[np.float32]
_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}
_NAMES = {
    "embed.w": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
    "attn_norm.w": "input_layernorm.weight",
    "mlp_norm.w": "post_attention_layernorm.weight",
    "attn.q_a.w": "self_attn.q_a_proj.weight",
    "attn.q_a_norm.w": "self_attn.q_a_layernorm.weight",
    "attn.q_b.w": "self_attn.q_b_proj.weight",
    "attn.kv_a.w": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm.w": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b.w": "self_attn.kv_b_proj.weight",
    "attn.o.w": "self_attn.o_proj.weight",
    "router.w": "mlp.gate.weight",
    "router.bias": "mlp.gate.e_score_correction_bias",
}
"""The other names follow from the tensor's own: `_hf_names`."""


def files(name: str) -> list[Path]:
    """What a bundle made of the checkpoint ``name`` depends on."""
    return [FOLDER / name / file for file in ("model.safetensors", "heldout.json")]


def heldout(name: str) -> list[tuple[str, bytes]]:
    """The checkpoint's held-out documents: names and texts."""
    path = FOLDER / name / "heldout.json"
    try:
        return [(str(title), str(text).encode()) for title, text in json.loads(path.read_text(encoding="ascii"))]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: file: no list of documents: {error}") from error


def weights(name: str, config: ModelConfig) -> dict[str, F32]:
    """Every float32 tensor of ``config``, the experts as ``.w``, from ``refs/NAME/model.safetensors``."""
    path = FOLDER / name / "model.safetensors"
    stored = _read(path)
    out: dict[str, F32] = {}
    for tensor, shape in config.shapes().items():
        names = _hf_names(tensor, shape)
        for hf in names:
            if hf not in stored:
                raise CheckpointError(f"{path}: {hf}: not there, {tensor} needs it")
        value = np.stack([stored[hf] for hf in names]) if ".experts." in tensor else stored[names[0]]
        if value.shape != shape:
            raise CheckpointError(f"{path}: {names[0]}: makes {tensor} {value.shape}, the config asks for {shape}")
        if not np.isfinite(value).all():
            raise CheckpointError(f"{path}: {names[0]}: holds NaN or infinity")
        out[tensor] = value
    return out


def drafter_weights(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, F32]:
    """The drafter's float32 tensors of ``shapes`` from ``refs/NAME/drafter/model.safetensors``."""
    path = FOLDER / name / "drafter" / "model.safetensors"
    stored = _read(path)
    out: dict[str, F32] = {}
    for tensor, shape in shapes.items():
        hf = _drafter_name(tensor)
        if hf not in stored or stored[hf].shape != shape or not np.isfinite(stored[hf]).all():
            raise CheckpointError(f"{path}: {hf}: not there, not {shape} or not finite, {tensor} needs it")
        out[tensor] = stored[hf]
    return out


def _drafter_name(tensor: str) -> str:
    """``drafter.layers.0.attn.q.w`` -> ``layers.0.self_attn.q_proj.weight``."""
    *path, last = tensor.removeprefix("drafter.").removesuffix(".w").split(".")
    known = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if path and path[-1] in ("attn", "mlp"):
        path[-1] = {"attn": "self_attn", "mlp": "mlp"}[path[-1]]
        last = last if last.endswith("norm") else f"{last}_proj"
    return ".".join([*path, known.get(last, last), "weight"])


def _hf_names(tensor: str, shape: tuple[int, ...]) -> list[str]:
    if tensor in _NAMES:
        return [_NAMES[tensor]]
    _, layer, rest = tensor.split(".", 2)
    at = f"model.layers.{layer}."
    if rest in _NAMES:
        return [at + _NAMES[rest]]
    part, projection, _ = rest.split(".")
    if part == "experts":
        return [f"{at}mlp.experts.{e}.{projection}_proj.weight" for e in range(shape[0])]
    inner = "mlp.shared_experts" if part == "shared" else "mlp"
    return [f"{at}{inner}.{projection}_proj.weight"]


def _read(path: Path) -> dict[str, F32]:
    """A safetensors file: u64 length of a JSON header, the header, the data it points into."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: file: cannot be read: {error.strerror}") from error
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header: dict[str, Any] = json.loads(data[8:end])
        header.pop("__metadata__", None)
        entries = [
            (str(n), str(e["dtype"]), tuple(map(int, e["shape"])), int(e["data_offsets"][0]), int(e["data_offsets"][1]))
            for n, e in header.items()
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: header: no safetensors header: {type(error).__name__}: {error}") from error
    out: dict[str, F32] = {}
    for name, kind, shape, first, last in entries:
        if kind not in _TYPES:
            raise CheckpointError(f"{path}: {name}: type {kind}, known are {', '.join(_TYPES)}")
        if not 0 <= first <= last <= len(data) - end or last - first != math.prod(shape) * _TYPES[kind].itemsize:
            raise CheckpointError(f"{path}: {name}: bytes {first}..{last} do not hold {kind} {list(shape)}")
        flat = np.frombuffer(data[end + first : end + last], _TYPES[kind])
        out[name] = (bf16_value(flat) if kind == "BF16" else flat.astype(np.float32)).reshape(shape)
    return out
