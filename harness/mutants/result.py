"""What became of a planted fault: whether that is good, as a line, as a record, and by group."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bundles import cache_folder
from harness.files import said
from harness.mutants.catalogue import CatalogueError, Fault, load
from harness.mutants.run import NOT_BUILT, NOT_RUN, Outcome
from harness.sources import ROOT


@dataclass(frozen=True)
class Result:
    """One fault and what became of it."""

    fault: Fault
    outcome: Outcome
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.outcome.caught_by)

    @property
    def broken(self) -> bool:
        """There was no library to run."""
        return self.outcome.verdict == NOT_BUILT

    @property
    def not_run(self) -> bool:
        """This processor has not the kernels that the fault is in."""
        return self.outcome.verdict == NOT_RUN

    @property
    def good(self) -> bool:
        """A fault is to be caught where it can run, a control is not."""
        return self.not_run or (not self.broken and self.caught != self.fault.is_control)

    @property
    def located(self) -> bool | None:
        """Whether the trace named the faulted operation; None for a fault that states none."""
        if not self.fault.taps or self.fault.is_control or self.broken or self.not_run:
            return None
        operation = self.outcome.tap.split(".", 2)[2] if self.outcome.tap.startswith("layers.") else self.outcome.tap
        return operation in self.fault.taps

    def record(self) -> dict[str, Any]:
        """As ``docs/evidence/mutants.json`` holds it (docs/mutants.md)."""
        found = asdict(self.outcome)
        margin = found.pop("margin")
        for folder, name in ((cache_folder(), "bundles/"), (ROOT, "")):  # the record is the same wherever they lie
            found["detail"] = found["detail"].replace(f"{folder}/", name)
        return {
            "name": self.fault.name,
            "group": self.fault.group,
            "device": self.fault.device,
            "caught_by": found.pop("caught_by"),
            "margin": margin if math.isfinite(margin) else str(margin),
            **found,
            "operation": list(self.fault.taps),
            "operation_named": self.located,
            "seconds": round(self.seconds, 2),
            "edits": self.fault.digest,
        }


def recorded(path: Path, *, must_be: bool) -> dict[str, str]:
    """What caught each fault of a record, by name: empty where it is missing and need not be.

    Raises CatalogueError for one that is missing or malformed.
    """
    if not must_be and not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text("utf-8"))
        return {str(entry["name"]): str(entry["caught_by"]) for entry in entries}
    except OSError as error:
        raise CatalogueError(said(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CatalogueError(f"{path}: not a record of `kdtree mutants --out`: {reason}") from None


def good_ones(path: Path, engine: str, device: str, faults: Sequence[Fault]) -> dict[str, dict[str, Any]]:
    """Records of a file, by name, of those of ``faults`` that were caught, and of the controls that passed, with this
    engine on ``device`` and with the same edits; none where there is no file. Raises CatalogueError for a malformed
    one."""
    found: dict[str, dict[str, Any]] = {}
    edits = {fault.name: fault.digest for fault in faults}
    if not recorded(path, must_be=False):
        return found
    for entry in json.loads(path.read_text("utf-8")):
        as_it_should = bool(entry["caught_by"]) != (entry.get("group") == "controls")
        name = entry["name"]
        of_this = name in edits and (entry.get("engine"), entry.get("device")) == (engine, device)
        if as_it_should and of_this and entry.get("edits") == edits[name] and entry.get("verdict") != NOT_BUILT:
            found[name] = entry
    return found


def share_left(path: Path, engine: str, device: str) -> float:
    """Of the catalogue's faults of ``device``, those that `good_ones` does not have. Raises CatalogueError."""
    faults = [fault for fault in load() if fault.device == device and not fault.is_control]
    return 1 - len(good_ones(path, engine, device, faults)) / len(faults)


def line(result: Result) -> str:
    """One fault on one line."""
    o = result.outcome
    if result.broken:
        return f"{result.fault.name:<34} DOES NOT BUILD: {o.detail}"
    if result.not_run:
        return f"{result.fault.name:<34} not run: {o.detail}"
    if not result.caught:
        passed = f"passed all {o.ran}" if o.ran else f"passed: {o.detail}"
        what = passed if result.fault.is_control else f"NOT CAUGHT by any of {o.ran}"
        return f"{result.fault.name:<34} {what}"
    share = f", {o.margin:.2g}x the bound" if math.isfinite(o.margin) else ""
    said = f"{result.fault.name:<34} {o.caught_by} ({o.verdict}{share})"
    if result.fault.is_control:
        return f"{said}: A CONTROL FAILED: {o.detail}"
    named = {True: ", located", False: f", located at {o.tap or 'nothing'} instead", None: ""}[result.located]
    return said + named


def summary(results: Sequence[Result]) -> list[str]:
    """Shares by group."""
    lines = []
    for group in dict.fromkeys(result.fault.group for result in results):
        whole = [result for result in results if result.fault.group == group]
        here = [result for result in whole if not result.not_run]
        done = sum(result.good for result in here)
        stated = [result for result in here if result.located is not None]
        located = (
            f", operation named in {sum(map(bool, (r.located for r in stated)))} of {len(stated)}" if stated else ""
        )
        broken = sum(result.broken for result in here)
        unbuilt = f", {broken} not built" if broken else ""
        unbuilt += f", {len(whole) - len(here)} not run here" if whole != here else ""
        what = "passed" if whole[0].fault.is_control else "caught"
        lines.append(f"{group:<12} {done:3d} of {len(here):3d} {what}{unbuilt}{located}")
    return lines
