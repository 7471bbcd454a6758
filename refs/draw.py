"""Weights and prompts from random integers, one stream per tensor, so that no draw depends on another.

With a checkpoint the weights are its own, and a prompt is the end token and a passage of its held-out text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refs import checkpoint, counter
from refs.config import BF16_PRECISIONS
from refs.drafter_config import TAPS, DrafterConfig
from refs.errors import ConfigError
from refs.exact import Draws, rounded_to_bf16
from refs.quant import GROUP, pack, quantise
from refs.recipe import Recipe, WeightOptions

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
OUTLIER_NORM, OUTLIER_WEIGHT = 8.0, 4.0  # how much larger an outlier channel is, in the activations and the weights


def prompt(recipe: Recipe, attempt: int) -> tuple[int, ...]:
    """The literal prompt, or a drawn one."""
    if recipe.run.prompt:
        return recipe.run.prompt
    draws = Draws(recipe.name, attempt, "prompt")
    if recipe.weights.checkpoint:
        return _passage(recipe, draws)
    return tuple(draws.below(recipe.model.vocab_size, recipe.run.prompt_length).tolist())


def weights(recipe: Recipe, attempt: int) -> dict[str, npt.NDArray[np.generic]]:
    """Every tensor that the file holds; drawn or trained experts in every precision, counted ones in INT4 alone."""
    if recipe.weights.counter:
        return counter.weights(recipe)
    out: dict[str, npt.NDArray[np.generic]] = {}
    trained = checkpoint.weights(recipe.weights.checkpoint, recipe.model) if recipe.weights.checkpoint else {}
    for name, shape in recipe.model.shapes().items():
        if trained:
            value = trained[name]
        else:
            value = _tensor(recipe, name, shape, Draws(recipe.name, attempt, name)).astype(np.float32)
        out[name] = value
        if ".experts." in name:
            q, scales = quantise(value)
            out[name.removesuffix("w") + "qw"], out[name.removesuffix("w") + "sc"] = pack(q), scales
        if len(shape) > 1 and set(recipe.precisions) & set(BF16_PRECISIONS):
            out[name.removesuffix("w") + "bw"] = rounded_to_bf16(value)
    if recipe.drafter:
        out |= _drafter(recipe, recipe.drafter, attempt)
    return out


def _drafter(recipe: Recipe, drafter: DrafterConfig, attempt: int) -> dict[str, npt.NDArray[np.generic]]:
    """The drafter's tensors, its taps among them."""
    shapes = drafter.shapes(recipe.model)
    out: dict[str, npt.NDArray[np.generic]] = {TAPS: np.array(drafter.taps, np.int32)}
    if recipe.weights.checkpoint:
        return out | checkpoint.drafter_weights(recipe.weights.checkpoint, shapes)
    for name, shape in shapes.items():
        draws = Draws(recipe.name, attempt, name)
        fan_in = 1.0 / float(np.sqrt(np.float64(shape[-1])))
        value = 1.0 + draws.normal(shape, 0.1) if name.endswith("norm.w") else draws.normal(shape, fan_in)
        out[name] = value.astype(np.float32)
    return out


def _passage(recipe: Recipe, draws: Draws) -> tuple[int, ...]:
    """The end token, then the bytes from the beginning of a random line on."""
    length = recipe.run.prompt_length - 1
    starts = [
        (text, at)
        for _, text in checkpoint.heldout(recipe.weights.checkpoint)
        for at in (0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n")))
        if at + length <= len(text) and text[at : at + 1].isalpha()
    ]
    if not starts:
        raise ConfigError(f"{recipe.name}: run: prompt_length: no held-out document is as long")
    text, at = starts[int(draws.below(len(starts), 1)[0])]
    return recipe.model.eos_id, *text[at : at + length]


def _tensor(recipe: Recipe, name: str, shape: tuple[int, ...], draws: Draws) -> F64:
    w = recipe.weights
    if name.endswith("norm.w"):
        value = 1.0 + draws.normal(shape, 0.1)
        if name.endswith("mlp_norm.w"):
            value[_outliers(recipe)] *= OUTLIER_NORM
        return value
    if name == "embed.w":
        return draws.normal(shape)
    if name.endswith("router.bias"):
        return _repeat_ties(draws.normal(shape, w.router_bias), w)
    fan_in = 1.0 / float(np.sqrt(np.float64(shape[-1])))
    if name.endswith("router.w") or name == "lm_head.w":
        gain = w.router_gain if name.endswith("router.w") else w.logit_gain
        return _one_hot(shape, gain, draws) if w.one_hot_ties else draws.normal(shape, gain * fan_in)
    if ".experts." not in name:
        return draws.normal(shape, w.linear_gain * fan_in)
    value = draws.normal(shape, (w.expert_gain if ".down." in name else w.linear_gain) * fan_in)
    if ".down." not in name:
        value[..., _outliers(recipe)] *= OUTLIER_WEIGHT
    return _special_groups(value, w, draws)


def _outliers(recipe: Recipe) -> npt.NDArray[np.int64]:
    """The same channels in every layer, whatever the attempt."""
    order = Draws(recipe.name, "outliers").permutation(recipe.model.hidden_size)
    return order[: recipe.weights.outlier_channels]


def _special_groups(value: F64, w: WeightOptions, draws: Draws) -> F64:
    """Make some whole groups zero and some +-amax, with amax 7.5 times a power of two so that q is exactly +-7.5."""
    if not (w.zero_group_share or w.amax_group_share):
        return value
    lines = value.reshape(-1, value.shape[-1])
    starts = range(0, lines.shape[1], GROUP)
    lot = draws.uniform((lines.shape[0], len(starts)))
    signs = draws.below(2, lines.size).reshape(lines.shape) * 2.0 - 1.0
    for g, start in enumerate(starts):
        part = lines[:, start : start + GROUP]
        zero = lot[:, g] < w.zero_group_share
        extreme = ~zero & (lot[:, g] < w.zero_group_share + w.amax_group_share)
        part[zero] = 0.0
        part[extreme] = signs[extreme, start : start + GROUP] * (7.5 * 2.0**-6)
    return value


def _one_hot(shape: tuple[int, ...], gain: float, draws: Draws) -> F64:
    """Rows 2i and 2i+1 are equal and have one non-zero, so that their products are equal in any order of summation."""
    rows, width = shape
    value = np.zeros(shape)
    channels = draws.permutation(width)
    sizes = gain * (1.0 + draws.uniform((rows,)))
    for row in range(rows):
        value[row, channels[(row // 2) % width]] = sizes[row // 2 * 2]
    return value


def _repeat_ties(value: F64, w: WeightOptions) -> F64:
    """Experts 2i and 2i+1 tie only if their bias is equal too."""
    return value[np.arange(value.size) // 2 * 2] if w.one_hot_ties else value
