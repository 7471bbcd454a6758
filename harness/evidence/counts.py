"""What a stage's result comes to in a few numbers, from the record that it wrote itself.

Raises ValueError, KeyError or LedgerError for a record that is none; one that is cut off is counted as far as it goes.
What is counted first is what the record shows: of none of it nothing has passed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree

from harness.cells import Verdict
from harness.ledger_format import parse_ledger
from harness.mutants.run import NOT_BUILT, NOT_RUN

NAMED = 20  # tests and cells that failed, by name; more are counted alone
Counts = dict[str, Any]


def tests(data: bytes) -> Counts:
    """Of pytest's JUnit file. A test that an interrupt met has an entry there, and no place in its sums."""
    suites = list(ElementTree.fromstring(data).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    cases = [case for suite in suites for case in suite.iter("testcase")]
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    counted = {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    return counted | _named([f"{case.get('classname')}::{case.get('name')}" for case in bad])


def cells(data: bytes) -> Counts:
    """Of a ledger."""
    ledger = parse_ledger(data, "the ledger")
    missing = sum(cell.verdict is Verdict.NOT_RUN for cell in ledger.cells)
    bad = [cell.id for cell in ledger.cells if cell.verdict not in (Verdict.PASS, Verdict.NOT_RUN)]
    found = {"expected": ledger.wanted, "passed": ledger.passed, "failed": len(bad), "not run": missing}
    return found | _named(bad) | ({"problems": list(ledger.problems)} if ledger.problems else {})


def faults(data: bytes) -> Counts:
    """Of ``kdtree mutants``."""
    lines = json.loads(data)
    planted = [line for line in lines if line["group"] != "controls"]
    caught = [line for line in planted if line["caught_by"]]
    stated = [line for line in planted if line["operation_named"] is not None]
    return {
        "faults": len(planted), "caught": len(caught),
        "operation named": sum(line["operation_named"] for line in stated), "operation stated": len(stated),
    } | _named([line["name"] for line in planted if not line["caught_by"]])  # fmt: skip


def controls(data: bytes) -> Counts:
    """Of ``kdtree mutants`` without a fault: engines that have to pass, for which one has to be built and to run."""
    lines = [line for line in json.loads(data) if line["group"] == "controls"]
    others = [line["name"] for line in lines if line["caught_by"] or line["verdict"] in (NOT_BUILT, NOT_RUN)]
    return {"controls": len(lines), "passed": len(lines) - len(others)} | _named(others)


def broken(data: bytes) -> Counts:
    """Of ``tests.cuda.broken``."""
    lines = json.loads(data)
    how = Counter(one for line in lines for one in line["how"].values())
    return {"breaks": len(lines), **how, "not built": sum(bool(line["not_built"]) for line in lines)}


def pairs(data: bytes) -> Counts:
    """Of ``tests.cuda.pairs``."""
    shapes = json.loads(data)["shapes"]
    total = {name: sum(shape[name] for shape in shapes) for name in ("pairs", "rows", "differing_rows")}
    return {"shapes": len(shapes), **total, "unfit": sum(bool(shape["unfit"]) for shape in shapes)}


def bench(data: bytes) -> Counts:
    """Of ``kdtree bench``."""
    record = json.loads(data)
    lines = [*record.get("cases", []), *record.get("steps", [])]
    targets = Counter(how for line in lines for how in line["targets"].values())
    missing = {name: why for name, why in record["not_measured"].items() if why}
    absent = [name for name, peer in record["header"].get("peers", {}).items() if peer["absent"]]
    found = {"cases": len(record.get("cases", [])), "steps": len(record.get("steps", [])), "absent peers": absent}
    return found | {f"targets {how}": count for how, count in targets.items()} | {"not measured": missing}


def timeline(data: bytes) -> Counts:
    """Of ``harness.bench.timeline``."""
    shares = json.loads(data)["shares"]
    return {f"launches of 1/{share}": sum(map(len, widths.values())) for share, widths in shares.items()}


def counters(data: bytes) -> Counts:
    """Of ``harness.bench.counters``."""
    entries = json.loads(data)["kernels"]
    return {"cases": len({entry["case"] for entry in entries}), "kernels": len(entries)}


def latency(data: bytes) -> Counts:
    """Of ``tests.cuda.latency``."""
    return {"decodes": sum(isinstance(found, Mapping) and "ms" in found for found in json.loads(data).values())}


def acceptance(data: bytes) -> Counts:
    """Of ``kdtree acceptance``."""
    lines = json.loads(data)["lines"]
    return {"lines": len(lines), "as AR": sum(line["equal"] for line in lines)}


def ranks(data: bytes) -> Counts:
    """Of ``harness.bench.ranks``."""
    lines = json.loads(data)["lines"]
    return {"lines": len(lines), "bits differ": sum(line["equal"] is False for line in lines)}


def sanitizer(data: bytes) -> Counts:
    """Of what compute-sanitizer prints: it has no other record of its verdict."""
    text = data.decode("utf-8", "replace")
    found: Counts = {}
    if last := re.findall(r"ERROR SUMMARY: (\d+) error", text):
        found["errors"] = int(last[-1])
    if last := re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text):
        found |= dict(zip(("hazards", "errors", "warnings"), map(int, last[-1]), strict=True))
    parts = re.findall(r"^(\w+): [\d.]+ s$", text, re.MULTILINE)
    return {"parts": parts, **found} if found else {"parts": [], "without a verdict": parts}


def shows(found: Counts) -> bool:
    """Whether there is anything that can have passed."""
    return "none" not in found and bool(next(iter(found.values()), 0))


def _named(names: list[str]) -> Counts:
    return {"named": sorted(names)[:NAMED]} if names else {}


COUNTS: dict[str, Callable[[bytes], Counts]] = {
    function.__name__: function
    for function in (
        tests, cells, faults, controls, broken, pairs, bench, timeline, counters, latency, acceptance, ranks, sanitizer,
    )
}  # fmt: skip
