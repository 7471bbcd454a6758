"""The records of measured runs in ``docs/evidence``: a page names each, it can be read, and has the page's figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness.bench import tables
from harness.mutants.catalogue import load
from harness.sources import ROOT
from tests.harness.test_documents import PAGES

EVIDENCE = ROOT / "docs" / "evidence"
FILES = sorted(EVIDENCE.iterdir())
CARD = ROOT / "refs" / "text" / "README.md"
RULE = "`python -m harness.bench.tables --write` puts the record's figures into the documents"


def strict(text: str) -> Any:
    """JSON as every reader takes it: NaN and infinities are Python's own."""

    def refused(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_record_is_named_by_a_page_and_readable(path: Path) -> None:
    assert any(path.name in page.read_text("utf-8") for page in (*PAGES, CARD)), "no page names it"
    text = path.read_text("utf-8")
    assert strict(text) if path.suffix == ".json" else text.strip()


def test_records_that_pages_name_are_there() -> None:
    named = {
        name for page in (*PAGES, CARD) for name in re.findall(r"docs/evidence/([\w.-]+)", page.read_text("utf-8"))
    }
    assert named - {path.name for path in FILES} == {"bench-"}  # bench-<device>.json


def pairs(record: Any) -> Iterator[str]:
    shapes = record["shapes"]
    assert all(not found["differing_rows"] and not found["unfit"] and found["pairs"] == 1000 for found in shapes)
    rows = sum(found["rows"] for found in shapes)
    yield f"{len(shapes)} shapes, 1,000 random (M, tree) pairs each, {rows:,} rows, none"


def broken(record: Any) -> Iterator[str]:
    assert all(how in ("fails", "crashes", "hangs") for noticed in record for how in noticed["how"].values())
    yield f"{len(record)}, noticed by {sum(len(noticed['how']) for noticed in record)} tests and shapes"


def short(value: float) -> str:
    """7.4e-6."""
    return f"{value:.1e}".replace("e-0", "e-")


def cells(record: Any) -> Iterator[str]:
    passed = [cell for cell in record["cells"] if cell["verdict"] == "PASS"]
    yield f"{len(passed)} of {len(record['expected'])} cells"
    for precision in ("fp32", "int4"):
        checks = [
            (check["value"], check["allowed"])
            for cell in passed
            if re.match(rf"{precision}-(ar|ddtree)-", cell["id"])
            for check in cell["checks"]
            if check["name"] == "logits.max_abs"
        ]
        value, allowed = max(checks)
        yield f"{short(value)} of {short(allowed)}"


def latency(record: Any) -> Iterator[str]:
    at = {name: record[name]["ms"] for name in record if name.endswith(("-24", "-400"))}
    yield f"AR {at['fp32-ar-24']:.3f} and {at['fp32-ar-400']:.3f} ms a token"
    yield f"DDTree with 8 nodes {at['fp32-ddtree-24']:.3f} and {at['fp32-ddtree-400']:.3f} ms a round"


def dflash(record: Any) -> Iterator[str]:
    name = "draft_logits_share_of_the_bound"
    shares = [cell[name] for cell in record["cells"] if name in cell]
    assert {cell["verdict"] for cell in record["cells"]} == {"PASS"}
    yield f"{min(shares):.2f} to {max(shares):.2f} of their bound"


def faults(file: str, kind: str) -> Callable[[Any], Iterator[str]]:
    def figures(record: Any) -> Iterator[str]:
        planted = [line for line in record if line["group"] != "controls"]
        stated = [line for line in planted if line["operation_named"] is not None]
        caught, named = (
            sum(bool(line["caught_by"]) for line in planted),
            sum(line["operation_named"] for line in stated),
        )
        yield f"| `docs/evidence/{file}` | {caught} of {len(planted)} of {kind} | {named} of {len(stated)} stated |"

    return figures


def catalogue(record: Any) -> Iterator[str]:
    of_cuda = [fault for fault in load() if fault.device == "cuda"]
    yield f"has {len(record)} of the catalogue's {len(of_cuda)}"


def alarms(record: Any) -> Iterator[str]:
    runs = record["runs"]
    seconds = [run["seconds"] for run in runs]
    green = sum(run["status"] == 0 for run in runs)
    yield f"{len(runs)} runs of {runs[0]['expected']} cells"
    yield f"{min(seconds):.0f} to {max(seconds):.0f} s each: {green} green"


def acceptance(record: Any) -> Iterator[str]:
    lines = {(line["precision"], line["budget"]): line for line in record["lines"]}
    assert all(line["equal"] for line in lines.values())
    for budget in sorted({budget for _, budget in lines}):
        found = [lines[p, budget][kind] for p in ("fp32", "int4") for kind in ("tree", "chain")]
        yield f"| {budget} | " + " | ".join(f"{one['value']:.2f} +- {one['error']:.2f}" for one in found) + " |"


def quality(record: Any) -> Iterator[str]:
    one = {name: f"{found['value']:.4f} +- {found['error']:.4f}" for name, found in record.items() if "bits" in name}
    yield f"| bits per byte | {one['fp32_bits']} | {one['int4_bits']} |"
    yield f"{one['kl_bits']} bits per byte"


def imported(record: str) -> Iterator[str]:
    rows = {"f32": "f32, which writes twice what it reads", "bf16": "`--matrices bf16`"}
    for part in record.split("matrices ")[1:]:
        words = ("import", "import / read", "import / both at once", "peak memory")
        speed, alone, both, memory = (re.findall(rf"  {word} +([\d.]+)", part)[0] for word in words)
        yield f"| {rows[part.partition(':')[0]]} | {speed} MB/s | {alone} | {both} | {memory} MiB |"


def ranks(record: Any) -> Iterator[str]:
    lines = {(line["engine"], line["M"]): line["us"] for line in record["window"]["k26_merged"]["lines"]}
    for m in (1, 16, 64):
        one, two = lines["one rank", m], lines["2 ranks", m]
        yield f"| M={m} | {one:.0f} | {two:.0f} | {one / two:.2f}x |"
    found = record["window"]["cells"]
    yield f"{found['passed']} cells of two ranks passed through windows ({found['seconds']:.0f} s)"


def gloo(record: Any) -> Iterator[str]:
    yield f"{record['passed']} of {record['expected']} cells"


def processor(record: Any) -> Iterator[str]:
    case = {line["case"]: line for line in record["cases"]}
    for kind, m in (("int4", 1), ("f32", 4)):
        for k, n in ((7168, 4096), (2048, 7168)):
            line = case[f"k26-linear-{kind}-k{k}-n{n}-m{m}"]
            label = f"{'INT4' if kind == 'int4' else 'FP32'}, M={m}, K{k} N{n}"
            yield f"| {label} | {line['us']:.0f} us | {line['x_floor']:.2f} | {line['peers']['ggml'] / line['us']:.2f}"


def all_passed(record: Any) -> Iterator[str]:
    passed = [cell["verdict"] for cell in record["cells"]].count("PASS")
    yield f"{passed} of {len(record['expected'])} (`docs/evidence/scale-h200.json`"


def tree(record: Any) -> Iterator[str]:
    us = {line["M"]: line["us"] for line in record["cases"] if line["op"] == "tree_build"}
    yield f"{us[17]:.1f} us for B = 16 and {us[65]:.1f} us for B = 64"


FIGURES: tuple[tuple[str, str, Callable[[Any], Iterator[str]]], ...] = (
    ("docs/cuda.md", "cuda-h200-ledger.json", cells),
    ("docs/cuda.md", "cuda-h200-latency.json", latency),
    ("docs/cuda.md", "cuda-h200-dflash.json", dflash),
    ("docs/cuda.md", "pairs-h200.json", pairs),
    ("docs/cuda.md", "broken-h200.json", broken),
    ("docs/mutants.md", "mutants.json", faults("mutants.json", "the CPU")),
    ("docs/mutants.md", "mutants-cuda.json", faults("mutants-cuda.json", "CUDA")),
    ("docs/status.md", "mutants-cuda.json", catalogue),
    ("docs/mutants.md", "false-alarms.json", alarms),
    ("docs/text_model.md", "text-acceptance.json", acceptance),
    ("refs/text/README.md", "text-quality.json", quality),
    ("docs/import.md", "import-k26.txt", imported),
    ("docs/ranks.md", "ranks-h200x2.json", ranks),
    ("docs/ranks.md", "ranks-gloo.json", gloo),
    ("docs/engine.md", "bench-cpu.json", processor),
    ("docs/status.md", "scale-h200.json", all_passed),
    ("docs/kernels_mla.md", "bench-cuda.json", tree),
)


@pytest.mark.parametrize(("page", "file", "figures"), FIGURES, ids=[f"{page}:{file}" for page, file, _ in FIGURES])
def test_a_page_has_the_figures_of_its_record(page: str, file: str, figures: Callable[[Any], Iterator[str]]) -> None:
    text = " ".join((ROOT / page).read_text("utf-8").replace("**", "").split())
    record = (EVIDENCE / file).read_text("utf-8")
    wanted = list(figures(strict(record) if file.endswith(".json") else record))
    assert [one for one in wanted if one not in text] == [], f"{page} does not say so of {file}"
    assert wanted


def test_no_kernel_spills_as_the_page_says() -> None:
    record = strict((EVIDENCE / "cuda-kernels.json").read_text("utf-8"))
    assert "none spills" in (ROOT / "docs" / "cuda.md").read_text("utf-8")
    assert [k for k in record["kernels"] if k["spill_stores"] or k["spill_loads"]] == []


def test_every_kernel_on_tensor_cores_has_run_in_a_cell() -> None:
    """Small configs have few sizes that these kernels serve: one may be in no cell, and nobody sees it."""
    sources = "".join(path.read_text("utf-8") for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")))
    names = set(re.findall(r'"(\w+_(?:stream|hopper|tensor))"', sources))
    unused = {"linear_int4_bf16_stream"}  # no model has INT4 outside of its experts
    ledgers = [strict((EVIDENCE / f"cuda-h200-{name}ledger.json").read_text("utf-8")) for name in ("", "k26-small-")]
    run = {kernel for ledger in ledgers for cell in ledger["cells"] for kernel in cell["kernels"]}
    assert len(names) > len(unused)
    assert names - run == unused


def test_the_tables_of_the_bench_are_those_of_its_record() -> None:
    found = {
        table.head: (had, wanted) for table, had, wanted in tables.differing(strict(tables.RECORD.read_text()), False)
    }
    assert found == {}, RULE


def unlike(folder: Path) -> Iterator[str]:
    """What the summaries of ``kdtree evidence`` name that is not there, or was made with another engine than theirs."""
    for path in sorted(folder.glob("cuda-*-run.json")):
        summary = strict(path.read_text("utf-8"))
        for name, found in summary["stages"].items() if "schema" in summary else ():
            record = folder / found.get("record", path.name)
            if not record.is_file():
                if found["status"] == "passed":  # of the others a page tells at most
                    yield f"{path.name}: {name}: {record.name} is missing"
            elif summary["engine"] not in record.read_text("utf-8"):
                yield f"{path.name}: {name}: {record.name} is not of its engine"


def test_records_of_a_run_are_there_and_of_its_engine() -> None:
    assert list(unlike(EVIDENCE)) == []


def test_a_record_of_another_engine_is_told_of(tmp_path: Path) -> None:
    stages = {name: {"status": "passed", "record": f"{name}.json"} for name in ("good", "other", "gone")}
    stages |= {"none": {"status": "failed"}, "late": {"status": "out of time", "record": "late.json"}}
    (tmp_path / "cuda-h200-run.json").write_text(json.dumps({"schema": 1, "engine": "e" * 64, "stages": stages}))
    (tmp_path / "good.json").write_text(json.dumps({"engine": "e" * 64}))
    (tmp_path / "other.json").write_text(json.dumps({"engine": "f" * 64}))
    assert list(unlike(tmp_path)) == [
        "cuda-h200-run.json: other: other.json is not of its engine",
        "cuda-h200-run.json: gone: gone.json is missing",
    ]
