"""The gate opens for one ledger only: whole, green, and of this very checkout. Every other one is told why.

Each test changes one thing about a ledger that opens the gate, through files and the command itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import runs
from checkouts import git

from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED, Cell, Ledger, Verdict
from harness.gate import command as gate
from harness.gate import rules
from harness.ledger_format import ledger_bytes, seal
from harness.matrix import expected
from harness.sources import ROOT, describe
from tests.waiting import PATIENCE

ID = "int4-ddtree-tiny-noisy-cpu"
Result = tuple[int, list[tuple[str, str]]]
"""Exit status, and kind and message of each finding."""
Judge = Callable[..., Result]


@pytest.fixture
def green(checkout: Path) -> Ledger:
    return runs.light(sources=describe(checkout))


@pytest.fixture
def judge(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judge:
    """Write a ledger (or bytes) and hold it against the checkout."""

    def one(ledger: Ledger | bytes, *options: str) -> Result:
        path = tmp_path / "ledger.json"
        path.write_bytes(ledger if isinstance(ledger, bytes) else ledger_bytes(ledger))
        status = gate.main([str(path), "--json", *options], checkout)
        said = json.loads(capsys.readouterr().out)
        assert said["status"] == status
        assert said["open"] == (status == PASSED)
        assert (not said["findings"]) == said["open"]
        return status, [(finding["kind"], finding["message"]) for finding in said["findings"]]

    return one


def resealed(ledger: Ledger, edit: Callable[[dict[str, object]], object]) -> bytes:
    """A ledger edited by someone who knows how to make the checksum fit again."""
    content = json.loads(ledger_bytes(ledger))
    edit(content)
    return seal(content)


def only(result: Result, status: int, kind: str, says: str) -> None:
    """There is one finding, of this kind."""
    assert (result[0], [kind for kind, _ in result[1]]) == (status, [kind])
    assert says in result[1][0][1]


def waive(checkout: Path, cell: str, verdict: str, *, days: int = 5) -> None:
    """Commit-less waiver in the checkout's own file; the ledger has to be made after it."""
    expires = datetime.now(timezone.utc).date() + timedelta(days=days)
    entry = f"cell: {cell}\n  verdict: {verdict}\n  reason: r\n  issue: https://example.org/i/1\n  expires: {expires}\n"
    (checkout / "waivers.yaml").write_text(f"waivers:\n- {entry}")


def failed(green: Ledger, verdict: Verdict = Verdict.FAIL_LOGITS) -> Ledger:
    judged = Verdict.FAIL_LOGITS if verdict in (Verdict.ERROR, Verdict.TIMEOUT) else verdict
    cell = runs.failing(runs.find(green, ID), judged, "logits.max_abs", 1.0, 1e-6, "off by 1")
    return runs.change(green, ID, replace(cell, verdict=verdict))


def test_a_whole_green_ledger_of_this_checkout_opens(green: Ledger, judge: Judge) -> None:
    assert judge(green) == (PASSED, [])


def test_an_empty_ledger(green: Ledger, judge: Judge) -> None:
    only(judge(replace(green, expected=(), cells=())), INFRASTRUCTURE, "empty", "the run expected no cell")


def test_a_filter_that_matched_nothing(green: Ledger, judge: Judge) -> None:
    result = judge(replace(green, expected=(), cells=(), filter="tinny"))
    only(result, INFRASTRUCTURE, "filter-empty", "the filter 'tinny' of this run matched nothing")


def test_a_filtered_ledger(green: Ledger, judge: Judge) -> None:
    ids = tuple(id for id in green.expected if "tiny2" in id)
    part = replace(green, expected=ids, cells=tuple(c for c in green.cells if c.id in ids), filter="tiny2")
    left_out = f"the filter 'tiny2' left out {len(green.expected) - len(ids)} of {len(green.expected)} cells"
    only(judge(part), INCOMPLETE, "filtered", left_out)
    only(judge(replace(green, filter="cpu")), INCOMPLETE, "filtered", "filter 'cpu'")


def test_a_missing_cell_that_the_ledger_still_expects(green: Ledger, judge: Judge) -> None:
    data = ledger_bytes(replace(green, cells=green.cells[1:]))
    only(judge(data), INFRASTRUCTURE, "ledger", f"{green.cells[0].id} is expected and missing")


def test_a_missing_cell_that_the_ledger_does_not_expect_either(green: Ledger, judge: Judge) -> None:
    data = replace(green, expected=green.expected[1:], cells=green.cells[1:])
    only(judge(data), INCOMPLETE, "missing", f"{green.cells[0].id}: in the matrix, and the run did not expect it")


def kept(ledger: Ledger, keep: Callable[[str], bool]) -> Ledger:
    """A run that expected only some of the cells."""
    cells = tuple(cell for cell in ledger.cells if keep(cell.id))
    return replace(ledger, expected=tuple(cell.id for cell in cells), cells=cells)


def test_a_config_owes_its_own_precisions_alone(checkout: Path, judge: Judge) -> None:
    path = checkout / "refs" / "configs" / "tiny.yaml"
    path.write_text(path.read_text() + "precisions: [int4]\n")
    git(checkout, "commit", "-q", "-a", "-m", "int4 alone")
    green = runs.light(sources=describe(checkout))
    assert judge(green)[0] == INFRASTRUCTURE
    assert judge(kept(green, lambda id: not id.startswith("fp32-") or "-tiny-" not in id)) == (PASSED, [])


def test_large_configs_are_owed_whole_or_not_at_all(checkout: Path, judge: Judge) -> None:
    folder = checkout / "refs" / "configs" / "scale"
    folder.mkdir()
    for name in ("large", "larger"):
        (folder / f"{name}.yaml").write_text("precisions: [int4]\nrun: {drafters: [noisy]}\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "large ones")
    sources, table = describe(checkout), {**runs.TABLE, "large": ("noisy",), "larger": ("noisy",)}
    assert judge(runs.light(sources=sources)) == (PASSED, [])
    whole = kept(runs.light(sources=sources, table=table), lambda id: not (id.startswith("fp32") and "large" in id))
    assert judge(whole) == (PASSED, [])
    status, findings = judge(kept(whole, lambda id: "larger" not in id))
    assert status == INCOMPLETE
    assert [message.split(":")[0] for _, message in findings] == [
        "int4-ar-larger-cpu",
        "int4-ddtree-larger-noisy-cpu",
    ]


def test_a_cell_that_did_not_run(green: Ledger, judge: Judge) -> None:
    only(judge(runs.change(green, ID, None)), INCOMPLETE, "not-run", f"{ID}: no worker recorded this cell")


def test_a_duplicated_cell(green: Ledger, judge: Judge) -> None:
    data = ledger_bytes(replace(green, cells=(*green.cells, green.cells[0])))
    only(judge(data), INFRASTRUCTURE, "ledger", f"{green.cells[0].id} occurs twice")


def test_a_cell_that_the_matrix_does_not_have(green: Ledger, judge: Judge) -> None:
    table = {**runs.TABLE, "extra": ("oracle",)}
    status, findings = judge(runs.light(table, sources=green.sources))
    assert status == INFRASTRUCTURE
    assert {kind for kind, _ in findings} == {"unexpected"}
    assert len(findings) == 4


def test_a_hand_edited_verdict(green: Ledger, judge: Judge) -> None:
    data = ledger_bytes(failed(green)).replace(b'"FAIL_LOGITS"', b'"PASS"')
    only(judge(data), INFRASTRUCTURE, "ledger", "checksum")


def test_a_hand_edited_verdict_with_a_new_checksum(green: Ledger, judge: Judge) -> None:
    def edit(content: dict[str, object]) -> None:
        for cell in content["cells"]:  # type: ignore[attr-defined]
            cell["verdict"] = "PASS"

    only(judge(resealed(failed(green), edit)), INFRASTRUCTURE, "ledger", "PASS, but its checks say FAIL_LOGITS")


def test_nan_called_fine(green: Ledger, judge: Judge) -> None:
    def edit(content: dict[str, object]) -> None:
        content["cells"][0]["checks"][-1]["value"] = "nan"  # type: ignore[index]

    only(judge(resealed(green, edit)), INFRASTRUCTURE, "ledger", "but nan against")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_metrics_that_are_no_numbers(green: Ledger, judge: Judge, value: float) -> None:
    cell = replace(runs.find(green, ID), step_errors=(0.0, value))
    only(judge(runs.change(green, ID, cell)), FAILED, "nan", f"{ID}: logit error of step 1 is no finite number")
    bad = runs.failing(runs.find(green, ID), Verdict.FAIL_LOGITS, "logits.kl", value, 1.0, "not a number")
    status, findings = judge(runs.change(green, ID, bad))
    assert (status, [kind for kind, _ in findings]) == (FAILED, ["failed", "nan"])


@pytest.mark.parametrize("verdict", [v for v in Verdict if v not in (Verdict.PASS, Verdict.NOT_RUN)])
def test_a_failed_cell(green: Ledger, judge: Judge, verdict: Verdict) -> None:
    only(
        judge(failed(green, verdict)), FAILED, "failed", f"{ID}: {verdict.value}: logits.max_abs: off by 1; again: nox"
    )


def test_a_problem_of_the_run(green: Ledger, judge: Judge) -> None:
    only(judge(replace(green, problems=("no nvcc",))), INFRASTRUCTURE, "problem", "no nvcc")


def test_a_file_that_is_no_ledger(judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only(judge(b"{}"), INFRASTRUCTURE, "ledger", "checksum")
    only(judge(b"[1"), INFRASTRUCTURE, "ledger", "is not JSON")
    assert gate.main([str(tmp_path / "none.json")]) == INFRASTRUCTURE
    assert "none.json" in capsys.readouterr().out


def test_another_commit(checkout: Path, green: Ledger, judge: Judge) -> None:
    git(checkout, "commit", "-q", "--allow-empty", "-m", "next")
    only(judge(green), INFRASTRUCTURE, "sources", f"another commit: {green.sources.commit[:12]}, here it is ")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("csrc/model.cpp", "another engine (csrc/, engine/)"),
        ("engine/new.py", "another engine (csrc/, engine/)"),
        ("refs/bundles.lock", "another refs/bundles.lock"),
        ("harness/compare.py", "another harness (harness/, refs/, tests/)"),
        ("tests/test_x.py", "another harness (harness/, refs/, tests/)"),
    ],
)
def test_files_changed_since_the_run(checkout: Path, green: Ledger, judge: Judge, path: str, says: str) -> None:
    (checkout / path).write_text("changed\n")
    status, findings = judge(green)
    assert status == INFRASTRUCTURE
    assert {kind for kind, _ in findings} == {"sources"}
    assert any(says in message for _, message in findings)
    assert any(f"other uncommitted files: {path}" in message for _, message in findings)


def test_content_changed_while_the_list_of_files_did_not(checkout: Path, judge: Judge) -> None:
    (checkout / "csrc" / "model.cpp").write_text("first\n")
    ledger = runs.light(sources=describe(checkout))
    assert judge(ledger) == (PASSED, [])
    (checkout / "csrc" / "model.cpp").write_text("second\n")
    only(judge(ledger), INFRASTRUCTURE, "sources", "another engine")


def test_another_engine_is_not_what_the_gate_is_about(green: Ledger, judge: Judge) -> None:
    only(judge(replace(green, engine="reference")), INFRASTRUCTURE, "engine", "'reference' was judged, not 'csrc'")
    assert judge(replace(green, engine="mine"), "--engine", "mine") == (PASSED, [])


def test_a_required_device(green: Ledger, judge: Judge) -> None:
    only(judge(green, "--require-device", "cuda"), INFRASTRUCTURE, "device", "cuda is required, and no cell ran on it")
    both = runs.light(devices=("cpu", "cuda"), sources=green.sources)
    assert judge(both, "--require-device", "cuda", "--require-device", "cpu") == (PASSED, [])
    part = tuple(id for id in both.expected if id != "fp32-ar-tiny-cuda")
    part_run = replace(both, expected=part, cells=tuple(cell for cell in both.cells if cell.id in part))
    only(judge(part_run, "--require-device", "cuda"), INCOMPLETE, "missing", "fp32-ar-tiny-cuda")


def test_a_run_on_the_cpu_owes_the_cells_of_two_ranks() -> None:
    """The chosen configs; or all that two can share, if it ran others as well."""
    table: dict[str, tuple[str, ...]] = {"eight": (), "odd": (), "tiny": ()}
    demand = rules.Demand(sources=runs.SOURCES, table=table, rankable={2: ("eight", "tiny")})

    def missing(
        ranked: dict[int, tuple[str, ...]], device: str = "cpu", engine: str = "csrc", ranks: tuple[int, ...] = (1, 2)
    ) -> list[str]:
        points = [point.id for point in expected([device], table, ranks=ranks, ranked=ranked)]
        ledger = replace(runs.light(table), engine=engine, expected=tuple(sorted(points)))
        found = rules.judge(ledger, replace(demand, engine=engine))
        return [f.message.split(":")[0] for f in found if f.kind in ("missing", "unexpected")]

    assert missing({}) == ["fp32-ar-eight-cpu-x2", "int4-ar-eight-cpu-x2"]
    assert missing({2: ("eight",)}) == []
    assert missing({2: ("tiny",)}) == ["fp32-ar-eight-cpu-x2", "int4-ar-eight-cpu-x2"]
    assert missing({2: ("eight", "tiny")}) == []
    assert missing({}, device="cuda") == [], "a GPU alone has no other rank"
    assert missing({}, engine="reference") == [], "and no other engine has several"
    alone = missing({2: ("eight",)}, ranks=(2,))
    assert alone == [f"{p}-ar-{name}-cpu" for p in ("fp32", "int4") for name in ("eight", "odd", "tiny")]


def test_every_number_of_ranks_has_to_be_whole(green: Ledger, judge: Judge) -> None:
    both = runs.light(devices=("cuda",), ranks=(1, 2), sources=green.sources)
    assert judge(both) == (PASSED, [])
    part = tuple(id for id in both.expected if id != "fp32-ar-tiny-cuda-x2")
    part_run = replace(both, expected=part, cells=tuple(cell for cell in both.cells if cell.id in part))
    only(judge(part_run), INCOMPLETE, "missing", "fp32-ar-tiny-cuda-x2")


def test_every_host_has_to_be_green(green: Ledger, judge: Judge) -> None:
    both = runs.light(sources=green.sources, hosts=("a", "b"))
    assert judge(both) == (PASSED, [])
    bad = runs.failing(next(c for c in both.cells if c.host == "b"), Verdict.FAIL_TREE, "tree", 1, 0, "x")
    only(judge(runs.change(both, bad.id, bad)), FAILED, "failed", f"{bad.id} on b: FAIL_TREE")


def test_a_waived_failure(checkout: Path, judge: Judge) -> None:
    waive(checkout, ID, "FAIL_LOGITS")
    green = runs.light(sources=describe(checkout))
    assert judge(failed(green)) == (PASSED, [])
    other = runs.change(failed(green), "fp32-ar-tiny-cpu", None)
    only(judge(other), INCOMPLETE, "not-run", "fp32-ar-tiny-cpu")


def test_a_waiver_of_another_verdict_excuses_nothing(checkout: Path, judge: Judge) -> None:
    waive(checkout, ID, "FAIL_TREE")
    status, findings = judge(failed(runs.light(sources=describe(checkout))))
    assert (status, [kind for kind, _ in findings]) == (FAILED, ["failed", "waiver-unneeded"])


def test_a_waiver_on_its_last_day_and_after_it(checkout: Path, judge: Judge) -> None:
    waive(checkout, ID, "FAIL_LOGITS", days=0)
    assert judge(failed(runs.light(sources=describe(checkout)))) == (PASSED, [])
    waive(checkout, ID, "FAIL_LOGITS", days=-1)
    result = judge(failed(runs.light(sources=describe(checkout))))
    only(result, FAILED, "waiver-expired", f"the waiver of {ID} expired on ")


def test_a_waiver_that_nobody_needs(checkout: Path, judge: Judge) -> None:
    waive(checkout, ID, "FAIL_LOGITS")
    green = runs.light(sources=describe(checkout))
    only(judge(green), FAILED, "waiver-unneeded", "it excuses FAIL_LOGITS, the cell gave PASS")
    waive(checkout, ID, "FAIL_LOGITS", days=-1)  # that it has expired too tells nobody to mend the cell
    only(judge(runs.light(sources=describe(checkout))), FAILED, "waiver-unneeded", "the cell gave PASS")


def test_a_waiver_of_a_cell_that_is_no_more(checkout: Path, judge: Judge) -> None:
    waive(checkout, "int4-ddtree-gone-noisy-cpu", "FAIL_LOGITS")
    only(judge(runs.light(sources=describe(checkout))), FAILED, "waiver-unneeded", "the matrix has no such cell")


def test_a_waiver_for_a_device_that_this_run_had_not(checkout: Path, judge: Judge) -> None:
    waive(checkout, ID.replace("cpu", "cuda"), "FAIL_LOGITS")
    assert judge(runs.light(sources=describe(checkout))) == (PASSED, [])
    waive(checkout, ID.replace("cpu", "cuda"), "FAIL_LOGITS", days=-1)
    only(judge(runs.light(sources=describe(checkout))), FAILED, "waiver-expired", "tiny-noisy-cuda expired on ")


def test_broken_files_of_the_checkout_close_the_gate(checkout: Path, green: Ledger, judge: Judge) -> None:
    only(judge(green, "--waivers", "nowhere.yaml"), INFRASTRUCTURE, "configuration", "nowhere.yaml")
    (checkout / "waivers.yaml").write_text("waivers: nothing\n")
    only(judge(green), INFRASTRUCTURE, "configuration", "waivers.yaml")
    (checkout / "waivers.yaml").write_text("waivers: []\n")
    (checkout / "refs" / "configs" / "tiny.yaml").write_text("run: []\n")
    only(judge(green), INFRASTRUCTURE, "configuration", "tiny.yaml")


@pytest.fixture
def older(green: Ledger, tmp_path: Path) -> Callable[[Ledger], list[str]]:
    """Options that hold a ledger against an earlier one."""

    def one(ledger: Ledger) -> list[str]:
        path = tmp_path / "older.json"
        path.write_bytes(ledger_bytes(replace(ledger, run_id="20290101T000000Z-000000")))
        return ["--against", str(path)]

    return one


def timed(ledger: Ledger, factor: float) -> Ledger:
    def slow(cell: Cell) -> Cell:
        return replace(cell, times={**cell.times, "decode": factor * cell.times["decode"]})

    return replace(ledger, cells=tuple(slow(c) if c.id.startswith("int4-ddtree") else c for c in ledger.cells))


def test_slower_than_allowed(green: Ledger, judge: Judge, older: Callable[[Ledger], list[str]]) -> None:
    options = [*older(green), "--max-slowdown", "1.1"]
    assert judge(timed(green, 1.09), *options) == (PASSED, [])
    result = judge(timed(green, 1.2), *options)
    only(result, FAILED, "slower", "int4-ddtree-cpu: decoding takes 1.20 times as long as in 20290101T000000Z-000000")
    assert judge(timed(green, 1.2), *older(green)) == (PASSED, [])
    assert judge(green, *older(green), "--max-slowdown", "1") == (PASSED, [])


def test_times_that_cannot_be_compared_do_not_pass(
    green: Ledger, judge: Judge, older: Callable[[Ledger], list[str]]
) -> None:
    other = replace(green, environments={runs.HOST: {**runs.ENVIRONMENT, "cpu": "Another"}})
    result = judge(green, *older(other), "--max-slowdown", "1.1")
    only(result, INFRASTRUCTURE, "untimed", "no cell passed on the same CPU and GPUs")


def test_cells_taken_out_of_the_matrix(green: Ledger, judge: Judge, older: Callable[[Ledger], list[str]]) -> None:
    larger = runs.light({**runs.TABLE, "gone": ("oracle",)})
    status, findings = judge(green, *older(larger))
    assert (status, {kind for kind, _ in findings}, len(findings)) == (FAILED, {"removed"}, 4)
    assert judge(green, *older(larger), "--allow-removed") == (PASSED, [])


@pytest.mark.parametrize(
    "options",
    [
        ["--max-slowdown", "1.1"],
        ["--allow-removed"],
        *(["--against", "x", "--max-slowdown", ratio] for ratio in ("nan", "inf", "0", "-1")),
        ["extra"],
    ],
)
def test_wrong_arguments_are_configuration_errors(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        gate.main(["ledger.json", *options])
    assert stop.value.code == INFRASTRUCTURE


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), PASSED),
        ((INCOMPLETE,), INCOMPLETE),
        ((INCOMPLETE, FAILED), FAILED),
        ((FAILED, INFRASTRUCTURE, INCOMPLETE), INFRASTRUCTURE),
    ],
)
def test_the_worst_finding_is_the_exit_status(kinds: tuple[int, ...], expected: int) -> None:
    assert gate.status([gate.Finding("x", status, "") for status in kinds]) == expected


def test_plain_output_ends_with_the_answer(
    checkout: Path, green: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger.json").write_bytes(ledger_bytes(green))
    assert gate.main([str(tmp_path)], checkout) == PASSED
    assert capsys.readouterr().out.splitlines()[-1].startswith("gate: open: 20 of 20 expected cells passed on cpu")
    (tmp_path / "ledger.json").write_bytes(ledger_bytes(failed(green)))
    assert gate.main([str(tmp_path)], checkout) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"  failed  {ID}: FAIL_LOGITS")
    assert lines[-2].strip() == f"again: nox -s test -- -k {ID}"
    assert lines[-1].startswith("gate: CLOSED by 1 finding: 19 of 20 expected cells passed on cpu")


def test_what_was_waived_and_what_is_not_committed_is_told(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of waived cells those that the waiver was needed for."""
    waive(checkout, ID, "FAIL_LOGITS")
    green = runs.light(sources=describe(checkout))
    for ledger, also in ((failed(green), ", 1 waived"), (green, "")):
        (tmp_path / "ledger.json").write_bytes(ledger_bytes(ledger))
        gate.main([str(tmp_path)], checkout)
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2] == "  note: 1 files of this checkout are not committed"
        assert f"of 20 expected cells passed on cpu{also} (" in lines[-1]
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "a waiver")
    gate.main([str(tmp_path)], checkout)
    assert "not committed" not in capsys.readouterr().out


def test_the_worst_stands_first_and_fits_the_page(
    checkout: Path, green: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(failed(green), filter="tiny", problems=("words " * 40,))
    (tmp_path / "ledger.json").write_bytes(ledger_bytes(wrong))
    assert gate.main([str(tmp_path)], checkout) == INFRASTRUCTURE
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 120
    kinds = [line.split()[0] for line in lines[:-1] if line.startswith("  ") and line[2] != " "]
    assert kinds == ["problem", "failed", "filtered"]


def test_a_long_list_of_one_kind_is_cut_and_counted(
    checkout: Path, green: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = runs.light({**runs.TABLE, **{f"more{i}": () for i in range(15)}}, sources=green.sources)
    (tmp_path / "ledger.json").write_bytes(ledger_bytes(larger))
    assert gate.main([str(tmp_path)], checkout) == INFRASTRUCTURE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == gate.LISTED + 2
    assert lines[-2].endswith("... and 10 more; --json lists them all")
    assert "CLOSED by 30 findings" in lines[-1]


def test_the_answer_stands_when_nobody_reads_the_reasons(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "harness", "gate", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.DEVNULL, check=False, timeout=PATIENCE)
    os.close(write_end)
    assert done.returncode == INFRASTRUCTURE
