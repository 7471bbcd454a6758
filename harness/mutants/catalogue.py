"""The catalogue of planted faults: data in ``faults/*.yaml``, one file per group, and how an edit is applied.

A fault is one or more edits of files under ``csrc/``. The text an edit looks for must be there exactly once (or as
often as the edit says), so that a catalogue which no longer fits the sources is an error that names the fault.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness.sources import ROOT
from harness.yaml_nodes import YamlError, parsed

FAULTS = ROOT / "harness" / "mutants" / "faults"
CSRC = ROOT / "csrc"
CONTROLS = "controls"
"""The group whose members must pass everything."""
NUMERIC_TAPS = re.compile(r"embed|logits|out|(mla|mlp|moe)\.[a-z_]+")
_NAME = re.compile(r"[a-z0-9_]+")
_KEYS = {"name", "says", "edits", "tap", "isa", "device", "first"}


class CatalogueError(Exception):
    """The catalogue is malformed or does not fit the sources: ``FILE: FAULT: reason``."""


@dataclass(frozen=True)
class Edit:
    """Replace ``find`` by ``replace`` in ``file``, a path under ``csrc/``, at each of its ``times`` places."""

    file: str
    find: str
    replace: str
    times: int = 1


@dataclass(frozen=True)
class Fault:
    """One planted fault. ``taps``: the operations any of which a trace should name, empty where no tap shows it."""

    name: str
    group: str
    says: str
    edits: tuple[Edit, ...]
    taps: tuple[str, ...] = ()
    isa: str = ""
    """The instruction set that the edited code belongs to; the engine is made to use it."""
    device: str = "cpu"
    first: str = ""
    """A -k expression of cells that are tried first, ``loader``, ``operations``, or ``operations: FILE[::TEST]`` of
    tests/engine (`harness.mutants.run`)."""

    @property
    def is_control(self) -> bool:
        return self.group == CONTROLS

    @property
    def digest(self) -> str:
        """Of what is planted, 16 hex digits: a record of other edits is of another fault."""
        planted = [self.isa, *(vars(edit) for edit in self.edits)]
        return hashlib.sha256(json.dumps(planted, sort_keys=True).encode()).hexdigest()[:16]


def load(folder: Path = FAULTS) -> list[Fault]:
    """Every fault, by file and in the order of each file. Raises CatalogueError."""
    faults = [fault for path in sorted(folder.glob("*.yaml")) for fault in _read(path)]
    if not faults:
        raise CatalogueError(f"{folder}: holds no fault")
    names = [fault.name for fault in faults]
    for name in names:
        if names.count(name) > 1:
            raise CatalogueError(f"{folder}: {name}: named twice")
    return faults


def _read(path: Path) -> Iterator[Fault]:
    try:
        entries = parsed(path.read_text("utf-8"), path)
    except YamlError as error:
        raise CatalogueError(str(error)) from None
    except (OSError, ValueError) as error:
        raise CatalogueError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise CatalogueError(f"{path}: not a list of faults")
    for at, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CatalogueError(f"{path}: entry {at}: name {name!r} is not made of a-z, 0-9 and _")
        yield _fault(entry, path, f"{path}: {name}")


def _fault(entry: Mapping[str, Any], path: Path, where: str) -> Fault:
    unknown = sorted(set(entry) - _KEYS)
    if unknown:
        raise CatalogueError(f"{where}: unknown field {unknown[0]}; known are {', '.join(sorted(_KEYS))}")
    taps = entry.get("tap", [])
    taps = [taps] if isinstance(taps, str) else taps
    for tap in taps:
        if not NUMERIC_TAPS.fullmatch(tap):
            raise CatalogueError(f"{where}: tap {tap!r} is none")
    edits = entry.get("edits", [])
    if not edits and path.stem != CONTROLS:
        raise CatalogueError(f"{where}: no edits")
    return Fault(
        name=entry["name"],
        group=path.stem,
        says=str(entry.get("says", "")),
        edits=tuple(_edit(edit, where) for edit in edits),
        taps=tuple(taps),
        isa=str(entry.get("isa", "")),
        device=str(entry.get("device", "cpu")),
        first=str(entry.get("first", "")),
    )


def _edit(edit: Mapping[str, Any], where: str) -> Edit:
    try:
        made = Edit(**edit)
    except TypeError as error:
        raise CatalogueError(f"{where}: edit: {error}") from None
    if not all(isinstance(text, str) for text in (made.file, made.find, made.replace)) or not made.find:
        raise CatalogueError(f"{where}: edit: file, find and replace are texts, find not empty")
    if made.find == made.replace:
        raise CatalogueError(f"{where}: edit: find and replace are the same")
    return made


def edited(fault: Fault, csrc: Path = CSRC) -> dict[str, str]:
    """The edited files' new text by path. Raises CatalogueError where an edit does not fit the sources."""
    texts: dict[str, str] = {}
    for edit in fault.edits:
        path = csrc / edit.file
        if edit.file not in texts:
            try:
                texts[edit.file] = path.read_text("utf-8")
            except OSError as error:
                raise CatalogueError(f"{fault.name}: csrc/{edit.file}: {error.strerror}") from None
        found = texts[edit.file].count(edit.find)
        if found != edit.times:
            raise CatalogueError(
                f"{fault.name}: csrc/{edit.file}: {edit.find!r} is there {found} times instead of {edit.times}: "
                "the sources changed, so adapt harness/mutants/faults/"
            )
        texts[edit.file] = texts[edit.file].replace(edit.find, edit.replace)
    return texts


def plant(fault: Fault, target: Path, csrc: Path = CSRC) -> Path:
    """A copy of ``csrc/`` at ``target`` with the fault in it."""
    texts = edited(fault, csrc)
    shutil.copytree(csrc, target)
    for file, text in texts.items():
        (target / file).write_text(text, "utf-8")
    return target


def fraction(faults: Sequence[Fault], share: Fraction, seed: str) -> list[Fault]:
    """A share such as 1/5 of the faults, fixed by ``seed``; over many seeds every fault has its turn.

    Raises CatalogueError for a share beyond 0 to 1.
    """
    if not 0 < share <= 1:
        raise CatalogueError(f"fraction {share} is not in (0, 1]")
    shift = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % share.denominator
    return [fault for at, fault in enumerate(faults) if (at + shift) % share.denominator < share.numerator]
