"""JUnit XML from a ledger, in the dialect that GitHub's report actions and GitLab read.

One suite a host, one case a cell with the cell's id as its name. A cell that broke or did not run is an error, never a
skip, since readers count skips as fine. Problems of infrastructure are cases too, so that no tool sees a green file.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from harness.cells import Cell, Ledger, Verdict
from harness.describe import describe
from harness.matrix import parse
from harness.reports.view import legal

BROKE = frozenset({Verdict.ERROR, Verdict.TIMEOUT, Verdict.NOT_RUN})


def _properties(parent: ElementTree.Element, pairs: Iterable[tuple[str, str]]) -> None:
    holder = ElementTree.SubElement(parent, "properties")
    for name, value in pairs:
        ElementTree.SubElement(holder, "property", name=legal(name), value=legal(value))


def _numbers(cell: Cell) -> Iterable[tuple[str, str]]:
    yield "verdict", cell.verdict.value
    yield "margin", f"{cell.margin:.4g}"
    yield "seed", str(cell.seed)
    yield "worker", cell.worker or "main"
    if cell.rerun:
        yield "rerun", cell.rerun
    for check in cell.checks:
        if check.allowed > 0 or not check.ok:
            yield f"check.{check.name}", f"{check.value:.6g} of {check.allowed:.6g} allowed"
    for name, count in sorted(cell.kernels.items()):
        yield f"kernel.{name}", str(count)
    for phase, seconds in sorted(cell.times.items()):
        yield f"seconds.{phase}", f"{seconds:.6f}"
    if cell.acceptance:
        yield "acceptance", " ".join(map(str, cell.acceptance))


def _case(cell: Cell) -> ElementTree.Element:
    point = parse(cell.id)
    case = ElementTree.Element("testcase", classname=f"{point.precision}.{point.decoder}.{point.device}", name=cell.id)
    case.set("time", f"{cell.times.get('total', 0.0):.3f}")
    _properties(case, _numbers(cell))
    if cell.verdict is not Verdict.PASS:
        tag = "error" if cell.verdict in BROKE else "failure"
        message = legal(cell.detail or cell.verdict.value)
        entry = ElementTree.SubElement(case, tag, type=cell.verdict.value, message=message)
        entry.text = legal(describe(cell) if cell.host else cell.detail)
    return case


def _suite(name: str, timestamp: str, cases: list[ElementTree.Element]) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite", name=legal(name), timestamp=timestamp.removesuffix("Z"), tests=str(len(cases))
    )
    for attribute, tag in (("failures", "failure"), ("errors", "error")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("skipped", "0")
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    return suite


def junit(ledger: Ledger) -> bytes:
    """The file's bytes."""
    root = ElementTree.Element("testsuites", name="kdtree matrix")
    sources = ledger.sources
    shared = [("run_id", ledger.run_id), ("engine", ledger.engine), ("command", ledger.command)]
    shared += [("commit", sources.commit), ("dirty", " ".join(sources.dirty)), ("filter", ledger.filter)]
    shared += [("hash.engine", sources.engine), ("hash.lock", sources.lock), ("hash.harness", sources.harness)]
    for host in sorted({cell.host for cell in ledger.cells} | set(ledger.environments)):
        cases = [_case(cell) for cell in ledger.cells if cell.host == host]
        suite = _suite(f"matrix on {host}" if host else "matrix, not run", ledger.started, cases)
        if host:
            suite.set("hostname", legal(host))
        _properties(suite, [*shared, *sorted(ledger.environments.get(host, {}).items())])
        suite.extend(cases)
        root.append(suite)
    problems = []
    for i, problem in enumerate(ledger.problems, 1):
        case = ElementTree.Element("testcase", classname="infrastructure", name=f"infrastructure {i}", time="0")
        entry = ElementTree.SubElement(case, "error", type="INFRASTRUCTURE", message=legal(problem.split("\n")[0]))
        entry.text = legal(problem)
        problems.append(case)
    if not ledger.expected:
        case = ElementTree.Element("testcase", classname="infrastructure", name="expected cells", time="0")
        ElementTree.SubElement(case, "error", type="INFRASTRUCTURE", message="no cell was expected")
        problems.append(case)
    if problems:
        suite = _suite("infrastructure", ledger.started, problems)
        suite.extend(problems)
        root.append(suite)
    for attribute in ("tests", "failures", "errors", "skipped"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"
