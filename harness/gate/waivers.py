"""Cells that may fail for a while: ``waivers.yaml``, read strictly.

A waiver excuses one verdict of one cell until a day, with a reason and a link to the issue that will end it. The format
is described in ``docs/gate.md``; everything it does not allow is an error that names the entry and the field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import date, datetime
from pathlib import Path

import yaml

from harness.cells import Verdict
from harness.matrix import MatrixError, parse
from harness.yaml_nodes import Strict, YamlError, parsed

_LINK = re.compile(r"https?://[^\s/]+/\S+")


class WaiverError(Exception):
    """The file of waivers cannot be used: ``FILE: ENTRY: FIELD: reason``."""


@dataclass(frozen=True)
class Waiver:
    """One excuse."""

    cell: str
    verdict: Verdict
    """What is excused; any other verdict of the cell is not."""
    reason: str
    issue: str
    """A link."""
    expires: date
    """The last day on which it holds, in UTC."""


class _Days(Strict):
    """What looks like a day and is none stays text, so that its field is named."""


def _day(loader: _Days, node: yaml.ScalarNode) -> object:
    try:
        return loader.construct_yaml_timestamp(node)
    except ValueError:
        return loader.construct_scalar(node)


_Days.add_constructor("tag:yaml.org,2002:timestamp", _day)


def _waiver(entry: object, where: str) -> Waiver:
    names = [f.name for f in fields(Waiver)]
    if not isinstance(entry, dict):
        raise WaiverError(f"{where}: is {type(entry).__name__}, not a mapping with {', '.join(names)}")
    for name in sorted({*map(str, entry)} ^ {*names}):
        raise WaiverError(f"{where}: {name}: {'missing' if name in names else 'unknown field'}")
    for name in ("cell", "verdict", "reason", "issue"):
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise WaiverError(f"{where}: {name}: is {entry[name]!r}, not a text")
    try:
        parse(entry["cell"])
    except MatrixError as error:
        raise WaiverError(f"{where}: cell: {error}") from None
    if entry["verdict"] not in {v.value for v in Verdict} - {Verdict.PASS.value}:
        raise WaiverError(f"{where}: verdict: {entry['verdict']!r} is no verdict that can be excused")
    if not _LINK.fullmatch(entry["issue"]):
        raise WaiverError(f"{where}: issue: {entry['issue']!r} is no link to an issue (https://...)")
    if not isinstance(entry["expires"], date) or isinstance(entry["expires"], datetime):
        raise WaiverError(f"{where}: expires: {entry['expires']!r} is no day (YYYY-MM-DD)")
    return Waiver(entry["cell"], Verdict(entry["verdict"]), entry["reason"].strip(), entry["issue"], entry["expires"])


def load(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises WaiverError."""
    try:
        content = parsed(path.read_text("utf-8"), path, _Days)
    except OSError as error:
        raise WaiverError(f"{path}: {error.strerror}; no waivers at all are the line `waivers: []`") from None
    except YamlError as error:
        raise WaiverError(str(error)) from None
    except ValueError as error:
        raise WaiverError(f"{path}: {error}") from None
    if not isinstance(content, dict) or set(content) != {"waivers"} or not isinstance(content["waivers"], list):
        raise WaiverError(f"{path}: waivers: has to be a list, and nothing else may stand in the file")
    waivers = tuple(_waiver(entry, f"{path}: waivers[{i}]") for i, entry in enumerate(content["waivers"]))
    seen: set[str] = set()
    for i, waiver in enumerate(waivers):
        if waiver.cell in seen:
            raise WaiverError(f"{path}: waivers[{i}]: cell: {waiver.cell} is waived twice")
        seen.add(waiver.cell)
    return waivers
