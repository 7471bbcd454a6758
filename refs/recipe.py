"""A bundle's recipe: one file of refs/configs/, strictly checked. An error names the file, the field and the reason.

A recipe may name a `base`, another recipe whose values hold where its own says nothing; a base has none itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from refs import checkpoint
from refs.config import F32_PRECISIONS, PRECISIONS, ModelConfig
from refs.drafter_config import DrafterConfig
from refs.drafters import DFLASH, DRAFTERS
from refs.edges import EDGES
from refs.errors import ConfigError
from refs.names import meant
from refs.rope import ramp_edges, rotation

CONFIGS = Path(__file__).parent / "configs"
SCALE = "scale"
"""The folder below the configs with those of real sizes, made and run only when asked for."""
_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml takes a tenth of the time
EOS_RULES = ("none", "first", "mid_path")
Section = TypeVar("Section")


@dataclass(frozen=True)
class WeightOptions:
    """How the weights are drawn; gains are relative to 1/sqrt(K), which keeps a unit input at unit size."""

    checkpoint: str = ""
    """A folder below refs/ that holds trained weights and held-out text; nothing is drawn but the prompt's place."""
    linear_gain: float = 1.0
    expert_gain: float = 1.0
    """Of the routed experts' output; a small one keeps the two precisions' tokens close."""
    logit_gain: float = 1.0
    router_gain: float = 1.0
    router_bias: float = 0.1
    """Standard deviation of the router's bias."""
    zero_group_share: float = 0.0
    """Share of the experts' groups of 32 that are all zero."""
    amax_group_share: float = 0.0
    """Share of the groups that hold nothing but +amax and -amax, so that 7 and -8 are both reached."""
    outlier_channels: int = 0
    """Input channels of the experts that are much larger than the others, in the activations and in the weights."""
    loud_group_share: float = 0.0
    """Share of the groups whose scale is 16 times the others'; of counted weights alone."""
    counter: bool = False
    """Weights are counted: bf16-exact, row by row, the experts INT4 (`refs.counter`). Gains become powers of two."""
    stated: bool = False
    """Of counted weights: the file holds what the experts are drawn from, not the experts (docs/model.md)."""
    one_hot_ties: bool = False
    """Router and lm_head rows have one non-zero and come in pairs, so that ties are exact in any summation order."""


@dataclass(frozen=True)
class RunOptions:
    """What is decoded."""

    max_tokens: int
    block_size: int
    budget: int
    prompt_length: int = 0
    prompt: tuple[int, ...] = ()
    """Literal; else ``prompt_length`` tokens are drawn."""
    drafters: tuple[str, ...] = tuple(DRAFTERS)
    draft_rows: int = 0
    """Rows of the draft tables; 0: one for each token that can be drafted. Rows beyond those draft what never comes."""
    draft_step: float = 0.0
    """Draft logits are rounded to multiples of this, which makes ties; 0: not."""
    widths: tuple[int, ...] = ()
    """Verify widths that a cell holds against AR; none: every one from 1 to 65."""
    eos: str = "none"
    """``first``: the first token emitted is declared EOS; ``mid_path``: one inside an accepted path."""
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """One bundle: why it exists, its model, how its weights are drawn, what is decoded, what must then be seen."""

    name: str
    purpose: str
    model: ModelConfig
    drafter: DrafterConfig | None
    """Its weights are drawn, or the checkpoint's; it drafts where ``run.drafters`` names dflash."""
    weights: WeightOptions
    run: RunOptions
    precisions: tuple[str, ...]
    """Those that goldens are made for."""
    exact_ties: bool
    """Ties are the purpose: a margin of exactly zero is no fault."""
    edges: tuple[str, ...]
    """Names of `refs.edges`, each of which the goldens must show."""


def names(*, scale: bool = False) -> list[str]:
    """All recipes, sorted; those of real sizes only with ``scale``."""
    found = {path.stem for path in CONFIGS.glob("*.yaml")}
    return sorted(found | ({path.stem for path in CONFIGS.glob(f"{SCALE}/*.yaml")} if scale else set()))


def load(name: str, folder: Path = CONFIGS) -> Recipe:
    """The recipe ``name``; `ConfigError` if there is none or it breaks the schema."""
    path = folder / f"{name}.yaml"
    if not path.exists() and (folder / SCALE / path.name).exists():
        folder = folder / SCALE
        path = folder / path.name
    if not path.exists():
        raise ConfigError(f"{path}: file: there is no such config{_meant(name)}")
    raw = _read(path)
    if "base" in raw:
        name_of_base = str(raw.pop("base"))
        base = folder / f"{name_of_base}.yaml"
        if not base.exists():
            raise ConfigError(f"{path}: base: there is no config {name_of_base!r}{_meant(name_of_base)}")
        below = _read(base)
        if "base" in below:
            raise ConfigError(f"{path}: base: {base.name} has a base itself")
        if "precisions" in below:  # each config asks for bf16 itself
            raw.setdefault("precisions", [p for p in below["precisions"] if p in F32_PRECISIONS])
        for section in ("model", "drafter", "weights", "run"):
            if section == "drafter" and section not in {*raw, *below}:
                continue
            if not isinstance(raw.get(section, {}), dict):
                raise ConfigError(f"{path}: {section}: {raw[section]!r} is not a mapping")
            raw[section] = {**below.get(section, {}), **raw.get(section, {})}
    known = [f.name for f in dataclasses.fields(Recipe)]
    for key in raw:
        if key not in known:
            raise ConfigError(f"{path}: {key}: unknown field; known are base, {', '.join(known)}")
    for key in ("name", "purpose"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ConfigError(f"{path}: {key}: {raw.get(key)!r} is not a text")
    if raw["name"] != name:
        raise ConfigError(f"{path}: name: {raw['name']!r} differs from the file's")
    exact_ties = raw.get("exact_ties", False)
    if not isinstance(exact_ties, bool):
        raise ConfigError(f"{path}: exact_ties: {exact_ties!r} is neither true nor false")
    model = ModelConfig.of(_section(raw, "model", path), f"{path}: model")
    drafter = _drafter(_section(raw, "drafter", path), model, f"{path}: drafter") if "drafter" in raw else None
    run = _parse(RunOptions, _section(raw, "run", path), f"{path}: run")
    weights = _parse(WeightOptions, _section(raw, "weights", path), f"{path}: weights")
    edges = _texts(raw.get("edges", []), EDGES, f"{path}: edges")
    precisions = _texts(raw.get("precisions", list(F32_PRECISIONS)), PRECISIONS, f"{path}: precisions")
    if not precisions:
        raise ConfigError(f"{path}: precisions: names none")
    _check_run(run, model, f"{path}: run")
    if (DFLASH in run.drafters) != (drafter is not None):
        raise ConfigError(f"{path}: run: drafters: {DFLASH} is named if and only if there is a section drafter")
    if weights.checkpoint and weights != WeightOptions(checkpoint=weights.checkpoint):
        raise ConfigError(f"{path}: weights: checkpoint: trained weights are not drawn; give no other option")
    if weights.checkpoint and not all(file.is_file() for file in checkpoint.files(weights.checkpoint)):
        raise ConfigError(f"{path}: weights: checkpoint: {weights.checkpoint!r}: refs/ has no such folder of weights")
    if weights.stated and not weights.counter:
        raise ConfigError(f"{path}: weights: stated: only counted weights can be stated; set counter too")
    if weights.counter and not set(precisions) <= {"int4", "int4-bf16"}:
        raise ConfigError(f"{path}: precisions: counted experts are INT4 alone; leave fp32 and bf16 out")
    _check_ramp(model, f"{path}: model")
    return Recipe(name, " ".join(raw["purpose"].split()), model, drafter, weights, run, precisions, exact_ties, edges)


def _meant(name: str) -> str:
    """What to type in place of a name that no config has."""
    known = names(scale=True)
    return meant(name, known, "; ") or f"; known configs: {', '.join(known)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _SAFE)
    except OSError as error:
        raise ConfigError(f"{path}: file: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: file: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: file: not a mapping")
    return raw


def _section(raw: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{path}: {name}: {value!r} is not a mapping")
    return value


def _drafter(raw: dict[str, Any], model: ModelConfig, where: str) -> DrafterConfig:
    """The fields without their prefix, and ``taps``."""
    taps = raw.pop("taps", None)
    if not isinstance(taps, list) or any(type(layer) is not int for layer in taps):
        raise ConfigError(f"{where}: taps: {taps!r} is not a list of layers")
    return DrafterConfig.of(raw, taps, model, where)


def _texts(value: Any, allowed: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(set(map(str, value))) != len(value):
        raise ConfigError(f"{where}: {value!r} is not a list of different names")
    for item in value:
        if item not in allowed:
            raise ConfigError(f"{where}: {item!r} is unknown; known are {', '.join(allowed)}")
    return tuple(value)


def _parse(cls: type[Section], raw: dict[str, Any], where: str) -> Section:
    """An options record from a mapping whose values must have the declared types."""
    found: dict[str, Any] = {}
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, value in raw.items():
        if name not in fields:
            raise ConfigError(f"{where}: {name}: unknown field; known are {', '.join(sorted(fields))}")
        kind = str(fields[name].type)
        if name == "drafters":
            found[name] = _texts(value, (*DRAFTERS, DFLASH), f"{where}: {name}")
        elif name in ("prompt", "widths"):
            if not isinstance(value, list) or any(type(token) is not int for token in value):
                raise ConfigError(f"{where}: {name}: {value!r} is not a list of integers")
            found[name] = tuple(value)
        elif type(value).__name__ != kind:
            raise ConfigError(f"{where}: {name}: {value!r} is not of type {kind}")
        else:
            found[name] = value
    for name, f in fields.items():
        if name not in found and f.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: {name}: missing")
    return cls(**found)


def _check_ramp(model: ModelConfig, where: str) -> None:
    """YaRN rounds two numbers to whole ones; a config in which the last bit of a logarithm decides is of no use."""
    if model.rope_factor > 1:
        for name, edge in zip(("rope_beta_fast", "rope_beta_slow"), ramp_edges(rotation(model)), strict=True):
            if abs(edge - round(edge)) < 1e-9:
                raise ConfigError(f"{where}: {name}: gives a ramp edge of {edge!r}, too near a whole number")


def _check_run(run: RunOptions, model: ModelConfig, where: str) -> None:
    rules = (
        ("prompt", bool(run.prompt) != bool(run.prompt_length), "give either prompt or prompt_length"),
        ("prompt", all(0 <= t < model.vocab_size for t in run.prompt), "a token lies outside the vocabulary"),
        ("prompt_length", run.prompt_length >= 0, "negative"),
        ("max_tokens", run.max_tokens >= 1, "less than 1"),
        ("widths", all(1 <= width <= 65 for width in run.widths), "a width is not in 1..65"),
        ("block_size", run.block_size >= 1, "less than 1"),
        ("budget", run.budget >= 0, "negative"),
        ("draft_rows", run.draft_rows >= 0, "negative"),
        ("draft_step", run.draft_step >= 0, "negative"),
        ("temperature", run.temperature >= 0, "negative"),
        ("seed", 0 <= run.seed < 2**63, "not in 0..2^63-1"),
        ("eos", run.eos in EOS_RULES, f"none of {', '.join(EOS_RULES)}"),
        ("eos", run.eos == "none" or model.eos_id == -1, "the rule sets eos_id, which the model's fields do too"),
        (
            "max_tokens",
            max(run.prompt_length, len(run.prompt)) + run.max_tokens <= model.max_context,
            "prompt and tokens exceed max_context",
        ),
    )
    for name, good, reason in rules:
        if not good:
            raise ConfigError(f"{where}: {name}: {getattr(run, name)!r}: {reason}")
