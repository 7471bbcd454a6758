"""compressed-tensors' ``quantization_config``: is it the format that a KDTR model keeps as it is, and who has it.

Guarantees: anything but ``pack-quantized`` 4-bit signed integers, symmetric, in groups of 32 along the input, with no
reordering, no zero points and no quantised activations is refused by field. Format: compressed-tensors,
``quantization/quant_args.py`` and ``utils/match.py`` (a target or ignore entry is a class name, a module name, or
``re:`` and a pattern matched at the name's beginning).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.hf_fields import Fields

FP8_REMEDY = (
    "FP8 weights are not supported: convert the checkpoint to bf16 first (the model's authors publish a script)"
)
GROUP_INERT = frozenset({"format"})
WEIGHT_INERT = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})  # how the scales came to be
CONFIG_INERT = frozenset({"global_compression_ratio", "version", "quantization_status", "sparsity_config"})


@dataclass(frozen=True)
class Packing:
    """Which modules are packed."""

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, *names: str) -> bool:
        """Whether the Linear module of these names (with and without its prefix) is quantised."""

        def listed(patterns: tuple[str, ...]) -> bool:
            return any(_matches(p, n) for p in patterns for n in names)

        return ("Linear" in self.targets or listed(self.targets)) and not (
            "Linear" in self.ignore or listed(self.ignore)
        )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name


def read_packing(config: Fields) -> Packing:
    """Check ``quantization_config``; `engine.safetensors_reader.CheckpointError` naming the field that does not fit."""
    method = config.get("quant_method")
    if method != "compressed-tensors":
        remedy = FP8_REMEDY if method == "fp8" else "only compressed-tensors is supported"
        raise config.fail("quant_method", f"{method!r}: {remedy}")
    form = config.get("format")
    if form != "pack-quantized":
        remedy = FP8_REMEDY if isinstance(form, str) and "float" in form else "only pack-quantized is supported"
        raise config.fail("format", f"{form!r}: {remedy}")
    config.demand("quantization_status", ("compressed",), "the weights must be stored packed")
    _demand_empty(config, "kv_cache_scheme", "the cache is not quantised")
    _demand_empty(config, "transform_config", "weights are stored as they are used")
    sparsity = config.inner("sparsity_config")
    sparsity.demand("format", ("dense",), "sparse weights are not supported")
    groups = config.inner("config_groups")
    if not groups.values:
        raise config.fail("config_groups", "missing or empty")
    targets: list[str] = []
    for name in groups.values:
        targets += _read_group(groups.inner(name))
    packing = Packing(tuple(targets), tuple(_patterns(config, "ignore")))
    _refuse_unread(config, CONFIG_INERT)
    return packing


def _read_group(group: Fields) -> list[str]:
    group.demand("format", ("pack-quantized",), "only pack-quantized is supported")
    _demand_empty(group, "input_activations", "activations are not quantised")
    _demand_empty(group, "output_activations", "activations are not quantised")
    weights = group.inner("weights")
    rules: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("num_bits", (4,), "only 4-bit weights are supported"),
        ("type", ("int",), "only integer weights are supported"),
        ("group_size", (32,), "only groups of 32 are supported"),
        ("strategy", ("group",), "only groups along the input are supported"),
        ("symmetric", (True,), "zero points are not supported"),
        ("dynamic", (False,), "scales must be stored"),
        ("actorder", (None,), "reordered groups are not supported"),
        ("block_structure", (None,), "blocks are not supported"),
    )
    for name, allowed, why in rules:
        if name not in ("dynamic", "actorder", "block_structure") and weights.values.get(name) is None:
            raise weights.fail(name, "missing")
        weights.demand(name, allowed, why)
    _refuse_unread(weights, WEIGHT_INERT)
    targets = _patterns(group, "targets")
    _refuse_unread(group, GROUP_INERT)
    return targets


def _patterns(fields: Fields, name: str) -> list[str]:
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise fields.fail(name, f"{values!r} is no list of names and patterns")
    for value in values:
        try:
            re.compile(value.removeprefix("re:"))
        except re.error as error:
            raise fields.fail(name, f"{value!r} is no regular expression: {error}") from error
    return values


def _demand_empty(fields: Fields, name: str, why: str) -> None:
    if fields.get(name) not in (None, {}):
        raise fields.fail(name, f"{fields.get(name)!r} is not supported: {why}")


def _refuse_unread(fields: Fields, inert: frozenset[str]) -> None:
    _, unknown = fields.unread(inert)
    if unknown:
        name = min(unknown)
        raise fields.fail(name.removeprefix(fields.prefix), f"{unknown[name]!r}: unknown, and might change the weights")
