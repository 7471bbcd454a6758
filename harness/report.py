"""Reports made from one ledger; what they say is what the ledger says."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from harness.cells import Cell, Ledger, Verdict
from harness.files import write_atomic


_UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 cannot hold


def _text(text: str) -> str:
    return _UNPRINTABLE.sub("?", text)


def _case(cell: Cell) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=f"matrix.{cell.host or 'none'}", name=cell.id)
    case.set("time", f"{cell.times.get('total', 0.0):.3f}")
    if cell.verdict is not Verdict.PASS:
        broke = cell.verdict in (Verdict.ERROR, Verdict.TIMEOUT, Verdict.NOT_RUN)
        kind = "error" if broke else "failure"
        entry = ElementTree.SubElement(case, kind, type=cell.verdict.value, message=_text(cell.detail))
        entry.text = f"seed {cell.seed}\nagain: {cell.rerun}"
    return case


def junit(ledger: Ledger) -> bytes:
    """JUnit XML: one case a cell; a cell that did not run is an error, never a skip."""
    suite = ElementTree.Element("testsuite", name="kdtree matrix", timestamp=ledger.started)
    suite.extend(map(_case, ledger.cells))
    for number, problem in enumerate(ledger.problems, 1):
        case = ElementTree.SubElement(suite, "testcase", classname="matrix", name=f"infrastructure {number}", time="0")
        ElementTree.SubElement(case, "error", type="INFRASTRUCTURE", message=_text(problem))
    for name, tag in (("failures", "failure"), ("errors", "error")):
        suite.set(name, str(sum(case.find(tag) is not None for case in suite)))
    suite.set("tests", str(len(suite)))
    suite.set("skipped", "0")
    suite.set("time", f"{sum(cell.times.get('total', 0.0) for cell in ledger.cells):.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return text + b"\n"


def write_reports(ledger: Ledger, run_dir: Path) -> None:
    """Every report of a run, beside its ledger."""
    write_atomic(run_dir / "junit.xml", junit(ledger))
