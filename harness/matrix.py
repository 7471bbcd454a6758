"""The axes of the validation matrix, its cells' ids, and which of them a run expects.

What must run follows from the axes and from ``refs/configs/*.yaml`` alone, never from what a test runner collected.
Nothing heavy is imported, so that listing the matrix needs neither torch nor numpy.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.files import said
from harness.sources import ROOT
from harness.yaml_nodes import YamlError, parsed
from refs.names import meant

CONFIGS = ROOT / "refs" / "configs"
PRECISIONS = ("fp32", "int4", "bf16", "int4-bf16")
F32_PRECISIONS = ("fp32", "int4")
"""Of a config that names none; the others each config asks for itself."""
SCALE = "scale"
"""The folder below the configs with those of real sizes, which run only when asked for."""
DECODERS = ("ar", "ddtree")
DRAFTERS = ("oracle", "noisy", "hostile")
"""Of a config that names none; what `refs.recipe` takes too. ``dflash`` drafts where a config names it."""
RANKED_CONFIGS = ("eight",)
"""What several ranks run unless all is asked for: a model that up to eight can share, in every precision."""

GPU_RANKS = (2, 4, 8)
"""Numbers of GPUs that a run uses together where it finds them."""

_NAME = re.compile(r"[a-z0-9_]+")


class MatrixError(Exception):
    """An axis, a config file or a filter is wrong; the message says which and what to do."""


@dataclass(frozen=True)
class Point:
    """One point of the matrix. ``drafter`` is ``""`` for AR; ``ranks`` counts the devices that share the model."""

    precision: str
    decoder: str
    config: str
    drafter: str
    device: str
    ranks: int = 1

    @property
    def id(self) -> str:
        """``<precision>-<decoder>-<config>[-<drafter>]-<device>[-x<ranks>]``."""
        parts = [self.precision, self.decoder, self.config, self.drafter, self.device]
        return "-".join([*filter(None, parts), *([f"x{self.ranks}"] if self.ranks > 1 else [])])

    @property
    def seed(self) -> int:
        """Of everything the cell draws: the same in every run."""
        return zlib.crc32(self.id.encode())


def parse(id: str) -> Point:
    """The point an id names. Raises MatrixError if it has not the form of one."""
    parts = id.split("-")
    ranks = 1
    if len(parts) > 1 and re.fullmatch(r"x[1-9][0-9]*", parts[-1]):
        ranks = int(parts.pop()[1:])
    at = next((i for i, part in enumerate(parts) if i > 0 and part in DECODERS), 1)
    parts[:at] = ["-".join(parts[:at])]  # a precision's name may hold a hyphen
    if len(parts) == 4 and parts[1] == "ar":
        parts.insert(3, "")
    if (
        len(parts) != 5
        or parts[1] not in DECODERS
        or not all(_NAME.fullmatch(part) for part in (*parts[0].split("-"), *parts[1:]) if part)
        or (parts[1] == "ar") != (not parts[3])
    ):
        raise MatrixError(f"{id!r} is no cell id: <precision>-<decoder>-<config>[-<drafter>]-<device>[-x<ranks>]")
    return Point(parts[0], parts[1], parts[2], parts[3], parts[4], ranks)


@functools.lru_cache(maxsize=64)  # of more files than there are configs, each looked at a dozen times a run
def _parsed(text: str, path: Path) -> Any:
    return parsed(text, path)


def _config(path: Path) -> dict[str, Any]:
    try:
        content = _parsed(path.read_text("utf-8"), path)
    except YamlError as error:
        raise MatrixError(str(error)) from None
    except (OSError, ValueError) as error:
        raise MatrixError(said(error) if isinstance(error, OSError) else f"{path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.setdefault("run", {}), dict):
        raise MatrixError(f"{path}: run: not a mapping")
    return content


def _base(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """What the base of a config file of that content holds, nothing of one without. Raises MatrixError naming both."""
    name = content.get("base")
    if name is None:
        return {"run": {}}
    other = path.parent / f"{name}.yaml"
    if other == path or other.parent != path.parent or not other.is_file():
        known = [found.stem for found in path.parent.glob("*.yaml") if found != path]
        raise MatrixError(f"{path}: base: there is no other config {str(name)!r} beside it{meant(str(name), known)}")
    return _config(other)


def _own_or_base(path: Path, get: Callable[[dict[str, Any]], Any]) -> Any:
    content = _config(path)
    value = get(content)
    return get(_base(path, content)) if value is None else value


def _names(path: Path, field: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) and _NAME.fullmatch(n) for n in names):
        raise MatrixError(f"{path}: {field}: is {names!r}, not a list of names made of a-z, 0-9 and _")
    if len(set(names)) != len(names):
        raise MatrixError(f"{path}: {field}: {names} names one twice")
    return tuple(names)


def drafters(path: Path) -> tuple[str, ...]:
    """The ``run.drafters`` of a config file: its own, its base's, or the default ones.

    Raises MatrixError naming the file and the field. Everything else in the file is for `refs.recipe` to judge.
    """
    names = _own_or_base(path, lambda content: content["run"].get("drafters"))
    return DRAFTERS if names is None else _names(path, "run.drafters", names)


def divides(path: Path, ranks: int) -> bool:
    """Whether so many ranks can share the model of a config file (``csrc/config.cpp`` has the rule).

    Sizes that are not there speak against nothing: they are for `refs.recipe` to judge. Raises MatrixError.
    """
    content = _config(path)
    model = {**(_base(path, content).get("model") or {}), **(content.get("model") or {})}
    try:
        dense, layers = model["first_k_dense"], model["num_layers"]
        shared = ["num_heads", "hidden_size", "vocab_size"]
        shared += ["intermediate_size"] if dense > 0 else []
        shared += ["moe_intermediate_size"] if dense < layers else []
        return all(model[name] % ranks == 0 for name in shared)
    except (KeyError, TypeError):
        return True


def rankable(ranks: int, folder: Path = CONFIGS, *, scale: bool = False) -> tuple[str, ...]:
    """The configs that so many ranks can share, sorted. Raises MatrixError."""
    return tuple(name for name, path in files(folder, scale=scale).items() if divides(path, ranks))


def precisions_of(path: Path) -> tuple[str, ...]:
    """The ``precisions`` of a config file, as `drafters` for its drafters. Raises MatrixError."""
    own = _config(path).get("precisions")
    names = _own_or_base(path, lambda content: content.get("precisions"))
    if not isinstance(names, list):
        return F32_PRECISIONS if names is None else _names(path, "precisions", names)
    if not names or not set(map(str, names)) <= set(PRECISIONS) or len(set(map(str, names))) != len(names):
        raise MatrixError(f"{path}: precisions: is {names!r}, not a list of some of {', '.join(PRECISIONS)}")
    return tuple(name for name in names if own is not None or name in F32_PRECISIONS)


def config_precisions(folder: Path = CONFIGS, *, scale: bool = False) -> dict[str, tuple[str, ...]]:
    """Precisions by config. Raises MatrixError as `configs` does."""
    return {name: precisions_of(path) for name, path in files(folder, scale=scale).items()}


def files(folder: Path = CONFIGS, *, scale: bool = False) -> dict[str, Path]:
    """The config files by name, sorted; with ``scale`` those of real sizes too. Raises MatrixError without any."""
    found = {}
    for path in sorted([*folder.glob("*.yaml"), *(folder.glob(f"{SCALE}/*.yaml") if scale else ())]):
        if not _NAME.fullmatch(path.stem):
            raise MatrixError(f"{path}: a config's name is made of a-z, 0-9 and _")
        found[path.stem] = path
    if not found:
        raise MatrixError(f"{folder}: holds no config (*.yaml)")
    return found


def configs(folder: Path = CONFIGS, *, scale: bool = False) -> dict[str, tuple[str, ...]]:
    """Drafters by config. Raises MatrixError without a single config, or for a broken one."""
    return {name: drafters(path) for name, path in files(folder, scale=scale).items()}


def is_large(config: str, folder: Path = CONFIGS) -> bool:
    """Whether a config is one of real sizes."""
    return (folder / SCALE / f"{config}.yaml").exists()


def expected(
    devices: Sequence[str] = ("cpu",),
    config_drafters: Mapping[str, Sequence[str]] | None = None,
    *,
    precisions: Sequence[str] = PRECISIONS,
    offered: Mapping[str, Sequence[str]] | None = None,
    ranks: Sequence[int] = (1,),
    ranked: Mapping[int, Sequence[str]] | None = None,
    scale: bool = False,
) -> list[Point]:
    """Every point of the axes; those that share a bundle and a precision stand together.

    ``config_drafters`` and ``offered`` are drafters and precisions by config, and go together: by default those of
    ``refs/configs``, with ``scale`` those of real sizes too. A config that ``offered`` does not name has
    `F32_PRECISIONS`.

    ``ranked``: the configs that several ranks run, by their number; without it they run all.

    Raises MatrixError without a device, and as `configs` does.
    """
    if not devices:
        raise MatrixError("no device to run on: name one with --device")
    table = configs(scale=scale) if config_drafters is None else config_drafters
    if offered is None:
        offered = config_precisions(scale=scale) if config_drafters is None else {}
    return [
        Point(precision, decoder, config, drafter, device, count)
        for config in table
        for device in devices
        for count in ranks
        if count == 1 or ranked is None or config in ranked.get(count, ())
        for precision in precisions
        if precision in offered.get(config, F32_PRECISIONS)
        for decoder in DECODERS
        for drafter in (table[config] if decoder == "ddtree" else ("",))
    ]


def of_run(
    devices: Sequence[str], *, gpus: int = 0, ranks: Sequence[int] = (), shared: bool = True, scale: bool = False
) -> list[Point]:
    """The cells of a run, with ``ranks`` of so many ranks and every config that they can share. Raises MatrixError.

    Without it one rank runs everything; and, if the engine can be ``shared``, `RANKED_CONFIGS` run on two CPU ranks and
    on 2, 4 and 8 GPUs where there are so many. ``scale``: with the configs of real sizes.
    """
    if ranks and min(ranks) < 1:
        raise MatrixError(f"--ranks {min(ranks)}: a model is shared by 1 rank or more")
    if ranks:
        ranked = {count: rankable(count, scale=scale) for count in ranks}
        for count in ranks:
            if not ranked[count]:
                raise MatrixError(f"--ranks {count}: no config's sizes can be shared evenly by so many")
        return expected(devices, ranks=ranks, ranked=ranked, scale=scale)
    found = expected(devices, scale=scale)
    for device in devices if shared else ():
        counts = (2,) if device == "cpu" else tuple(n for n in GPU_RANKS if n <= gpus)
        ranked = {count: tuple(name for name in rankable(count) if name in RANKED_CONFIGS) for count in counts}
        found += expected([device], ranks=counts, ranked=ranked)
    return found
