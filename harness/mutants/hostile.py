"""Hostile files: one valid model file, broken in one way at a time, and what a loader has to say to each.

A loader refuses every one with the error class named here and a message that begins ``FILE: FIELD``; afterwards it
still opens the valid file. The files break the rules of ``docs/kdtr.md`` (``hostile_format.py``) and of
``docs/model.md``, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.cells import Check, Verdict
from harness.compare import exactly
from harness.mutants.hostile_format import Hostile, of_format
from harness.protocol import ConfigError, Engine, EngineError, FormatError, MissingTensor, NonFiniteError
from refs import kdtr

Tensors = dict[str, npt.NDArray[Any]]
Fields = dict[str, int | float]


CONFIGS: Mapping[str, Mapping[str, int | float]] = {
    "hidden_size": {"hidden_size": 0},
    "num_layers": {"num_layers": -1},
    "more_layers_than_a_file": {"num_layers": 2**31 - 1},
    "n_routed_experts": {"n_routed_experts": 2**31 - 1},
    "vocab_size": {"vocab_size": (1 << 32) + 64},
    "first_k_dense": {"first_k_dense": 1000},
    "num_experts_per_tok": {"num_experts_per_tok": 1000},
    "n_group": {"n_group": 7},
    "topk_group": {"topk_group": 2},
    "norm_topk_prob": {"norm_topk_prob": 2},
    "qk_rope_head_dim": {"qk_rope_head_dim": 7},
    "eos_id": {"eos_id": 1 << 20},
    "mask_id": {"mask_id": -2},
    "rms_norm_eps": {"rms_norm_eps": 0.0},
    "inner_norm_eps": {"inner_norm_eps": -1.0},
    "rope_theta": {"rope_theta": 1.0},
    "rope_factor": {"rope_factor": 0.5},
    "rope_beta_fast": {"rope_beta_fast": 0.0, "rope_factor": 4.0},
    "ramp_without_an_edge": {"rope_beta_slow": 5e-324, "rope_factor": 4.0},
    "rope_mscale_all_dim": {"rope_mscale_all_dim": -10.0, "rope_factor": 4.0},
    "max_context": {"max_context": 0},
}
"""Fields by the name of a file, the first of which is out of range."""


def _of_model(fields: Fields, tensors: Tensors) -> Iterator[Hostile]:
    """Rules of the model: its fields, and the tensors that they ask for."""

    def with_fields(name: str, field: str, changed: Fields) -> Hostile:
        return Hostile(name, kdtr.encode(changed, tensors), ConfigError, field)

    for name, changes in CONFIGS.items():
        yield with_fields(f"config_{name}", next(iter(changes)), {**fields, **changes})
    yield with_fields("config_unknown", "head_dim", {**fields, "head_dim": 64})
    yield with_fields("config_missing", "num_heads", {n: v for n, v in fields.items() if n != "num_heads"})
    yield with_fields("config_float_for_int", "num_heads", {**fields, "num_heads": float(fields["num_heads"])})
    yield with_fields("config_int_for_float", "rope_theta", {**fields, "rope_theta": int(fields["rope_theta"])})
    last = int(fields["num_layers"]) - 1
    expert = f"layers.{last}.experts.up"
    scale = f"layers.{last}.experts.down.sc"
    changed: tuple[tuple[str, str, str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None], ...] = (
        ("tensor_missing", "layers.0.attn.o.w", "fp32", None),
        ("tensor_transposed", "layers.0.attn.q_b.w", "fp32", lambda w: w.T.copy()),
        ("tensor_flat", "lm_head.w", "fp32", lambda w: w.reshape(-1)),
        ("tensor_of_f64", "final_norm.w", "fp32", lambda w: w.astype(np.float64)),
        ("experts_missing", f"{expert}.w", "fp32", None),
        ("one_expert_less", f"{expert}.w", "fp32", lambda w: w[:-1].copy()),
        ("nibbles_missing", f"{expert}.qw", "int4", None),
        ("nibbles_short", f"{expert}.qw", "int4", lambda w: w[..., :-1].copy()),
        ("scales_missing", scale, "int4", None),
        ("scales_of_another_group_size", scale, "int4", lambda w: np.repeat(w, 2, axis=-1)),
        ("scales_of_f32", scale, "int4", lambda w: w.astype(np.float32)),
    )
    for name, tensor, precision, change in changed:
        kept = {n: w for n, w in tensors.items() if n != tensor}
        if change is not None:
            kept[tensor] = change(tensors[tensor])
        yield Hostile(name, kdtr.encode(fields, kept), MissingTensor, tensor, precision)
    for name, tensor in (("nan_router", f"layers.{last}.router.w"), ("nan_logits", "lm_head.w")):
        poisoned = tensors[tensor].copy()
        poisoned[-1, 0] = np.nan
        data = kdtr.encode(fields, {**tensors, tensor: poisoned})
        yield Hostile(name, data, NonFiniteError, "", runs=True)


def corpus(bundle: Path) -> Iterator[Hostile]:
    """Every hostile file, made from the model in ``bundle`` (which has MoE layers and both precisions)."""
    fields, tensors = model_of(bundle)
    yield from of_format(kdtr.encode(fields, tensors))
    yield from _of_model(fields, tensors)


def model_of(bundle: Path) -> tuple[Fields, Tensors]:
    """The fields and weights of a bundle, without what the harness keeps in it."""
    found = kdtr.read(bundle)
    tensors = {n: w for n, w in found.tensors.items() if not n.startswith(("golden.", "draft.", "meta."))}
    return dict(found.fields), tensors


def refusal(engine: Engine, hostile: Hostile, path: Path) -> str:
    """What is wrong with how ``engine`` meets the file ``path``; ``""`` if it refuses it as it has to."""
    wanted = f"{hostile.error.__name__}: {'' if hostile.runs else f'FILE: {hostile.field}'}"
    try:
        session = engine.load(path, hostile.precision, context=8, max_rows=4, poison=True)
        if hostile.runs:
            session.prefill([0, 1])
        session.close()
    except EngineError as error:
        said = f"{type(error).__name__}: {error}".replace(str(path), "FILE")
        return "" if said.startswith(wanted) else f"says {said!r} instead of {wanted!r}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error} instead of {wanted!r}"
    return f"opens it instead of saying {wanted!r}"


def check_files(engine: Engine, bundle: Path, folder: Path) -> Iterator[Check]:
    """One check for each hostile file, and one that the valid file still opens after all of them."""
    for hostile in corpus(bundle):
        path = folder / f"{hostile.name}.kdtr"
        path.write_bytes(hostile.data)
        wrong = refusal(engine, hostile, path)
        path.unlink()
        yield exactly(f"loader.{hostile.name}", int(bool(wrong)), Verdict.ERROR, wrong)
    missing = Hostile("file_missing", b"", FormatError, "file")
    wrong = refusal(engine, missing, folder / "not there.kdtr")
    yield exactly("loader.file_missing", int(bool(wrong)), Verdict.ERROR, wrong)
    fields, tensors = model_of(bundle)
    path = folder / "valid.kdtr"
    path.write_bytes(kdtr.encode(fields, tensors))
    session = engine.load(path, "int4", context=8, max_rows=4)
    finite = bool(np.isfinite(session.prefill([0, 1])).all())
    session.close()
    path.unlink()
    yield exactly("loader.valid", int(not finite), Verdict.ERROR, "the valid file's logits are not finite")
