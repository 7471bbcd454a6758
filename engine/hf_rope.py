"""RoPE as docs/model.md has it, from a config's rope fields: plain, or YaRN; every other kind is refused.

docs/model.md's ``mscale`` pair gives two numbers: cos and sin are multiplied by ``m(mscale)/m(mscale_all_dim)``, the
scores by ``m(mscale_all_dim)^2``. Sources: transformers ``modeling_rope_utils`` and ``modeling_deepseek_v3``, and the
modelling code that DeepSeek and Moonshot ship with their checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.hf_fields import Fields


def read_rope(text: Fields, sizes: Mapping[str, int | float]) -> tuple[Fields, dict[str, int | float]]:
    """The rope object, for its unread fields, and the model's rope fields.

    transformers 5 writes ``rope_parameters``, transformers 4 ``rope_scaling`` and a ``rope_theta`` beside it; where
    both stand they must agree. `CheckpointError` names what is missing, malformed or not supported.
    """
    parts = [text.inner(name) for name in ("rope_parameters", "rope_scaling")]
    given = [p for p in parts if p.values]
    merged: dict[str, Any] = {}
    for part in given:
        for key, value in part.values.items():
            if merged.setdefault(key, value) != value:
                raise part.fail(key, f"{value!r} here, {merged[key]!r} in rope_parameters")
    rope = Fields(text.file, merged, given[0].prefix if given else f"{text.prefix}rope_parameters.")
    theta = text.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        raise text.fail("rope_theta", "missing")
    if rope.get("rope_theta", theta) != theta:
        raise text.fail("rope_theta", f"{theta!r} here, {rope.get('rope_theta')!r} in {rope.prefix[:-1]}")
    value = Fields(text.file, {"rope_theta": theta}, text.prefix).number("rope_theta")
    if value <= 1:
        raise text.fail("rope_theta", f"{value!r} is not above 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise rope.fail("type", f"{rope.get('type')!r}, but rope_type is {kind!r}")
    out: dict[str, int | float] = {
        "rope_theta": value,
        "rope_original_context": int(sizes["max_context"]),
        "rope_factor": 1.0,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "rope_mscale": 1.0,
        "rope_mscale_all_dim": 1.0,
    }
    rope.demand("partial_rotary_factor", (1.0, 1), "all of qk_rope_head_dim is rotated")
    if kind == "yarn":
        out |= _yarn(text, rope)
    elif kind != "default":
        raise rope.fail("rope_type", f"{kind!r} is not supported, only default and yarn are")
    return rope, out


def _yarn(text: Fields, rope: Fields) -> dict[str, int | float]:
    factor = rope.number("factor")
    if factor < 1:
        raise rope.fail("factor", f"{factor} is below 1")
    original = rope.integer("original_max_position_embeddings")
    text.demand("original_max_position_embeddings", (original,), f"{rope.prefix[:-1]} says {original}")
    rope.demand("truncate", (True,), "YaRN's ramp begins and ends at whole pairs")
    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    # The two public implementations agree where both are given, and where all_dim is absent and mscale absent or 1
    # (DeepSeek's own code then takes 1 for mscale, transformers ignores it).
    if all_dim == 0 and rope.get("mscale", 1) == 1:
        mscale = 1.0
    elif not (mscale > 0 and all_dim > 0):
        reason = f"mscale {rope.get('mscale')!r} with mscale_all_dim {rope.get('mscale_all_dim')!r}"
        raise rope.fail("mscale", f"{reason}: implementations disagree on what that means")
    amplitude = _mscale(factor, mscale) / _mscale(factor, all_dim)
    given = rope.number("attention_factor", amplitude)
    if not math.isclose(given, amplitude, rel_tol=1e-12):
        raise rope.fail("attention_factor", f"{given}, but factor and mscale make it {amplitude}: not supported")
    betas = {f"rope_beta_{n}": rope.number(f"beta_{n}", d) for n, d in (("fast", 32.0), ("slow", 1.0))}
    for name, beta in betas.items():
        if beta <= 0:
            raise rope.fail(name.removeprefix("rope_"), f"{beta} is not above 0")
    return {
        "rope_factor": factor,
        "rope_original_context": original,
        "rope_mscale": mscale,
        "rope_mscale_all_dim": all_dim,
        **betas,
    }


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
