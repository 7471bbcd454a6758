"""Ledgers: what is written is what is read, and nothing that was edited, doubled, lost or NaN reads as fine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import FINE, OFF, SOURCES, cell, ledger

from harness import ledger as ledgers
from harness.cells import INCOMPLETE, BadRound, Cell, Check, Divergence, Ledger, Tree, Verdict, exit_status, judge
from harness.ledger_format import LedgerError, cell_bytes, ledger_bytes, parse_cell, parse_ledger, seal

A, B = "fp32-ar-tiny-cpu", "int4-ar-tiny-cpu"


def edited(data: bytes, *path: str | int, value: object) -> bytes:
    """The file with one field replaced and its checksum made good, as a careful forger would."""
    content = json.loads(data)
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return seal(content)


number = st.floats(width=64)
text = st.text(max_size=20)
failures = [verdict for verdict in Verdict if verdict.value.startswith("FAIL_")]
checks = st.builds(Check, text, number, number, st.sampled_from(failures), text)
trees = st.builds(Tree, *[st.lists(st.integers(-1, 9), max_size=4).map(tuple)] * 3)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Any record that a run may write."""
    found = tuple(draw(st.lists(checks, min_size=1, max_size=4)))
    verdict = draw(st.sampled_from([judge(found)[0], Verdict.ERROR, Verdict.TIMEOUT]))
    ints = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    return Cell(
        A,
        verdict,
        found,
        draw(text),
        draw(st.dictionaries(text, st.integers(0, 9), max_size=1)),
        draw(st.dictionaries(text, st.floats(0, 1e6), max_size=1)),
        draw(st.integers(0, 2**32)),
        "here",
        draw(text),
        draw(text),
        draw(st.none() | st.builds(Divergence, text, ints, number, number, number, st.integers(0, 9), text)),
        draw(st.lists(number, max_size=3).map(tuple)),
        draw(ints),
        draw(st.none() | st.builds(BadRound, st.integers(0, 9), trees, trees)),
    )


@given(cells())
def test_a_record_reads_back_as_it_was_written(record: Cell) -> None:
    assert repr(parse_cell(cell_bytes(record), "f")) == repr(record)  # repr: NaN does not equal itself
    whole = ledger(record)
    assert repr(parse_ledger(ledger_bytes(whole), "f")) == repr(whole)


def test_a_check_is_a_line_and_any_layout_is_read() -> None:
    whole = ledger(cell(A, Check("logits.max_abs", 0.5, 1.0, Verdict.FAIL_LOGITS)))
    data = ledger_bytes(whole)
    check = {"allowed": 1.0, "detail": "", "name": "logits.max_abs", "ok": True, "value": 0.5, "verdict": "FAIL_LOGITS"}
    assert json.dumps(check) in [line.strip() for line in data.decode().splitlines()]
    for indent in (None, 1):
        assert parse_ledger(json.dumps(json.loads(data), indent=indent).encode(), "f") == whole


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("allowed", [math.nan, math.inf, 1.0])
def test_what_is_not_finite_is_never_fine(value: float, allowed: float) -> None:
    check = Check("logits.max_abs", value, allowed, Verdict.FAIL_LOGITS)
    assert not check.ok
    data = cell_bytes(cell(A, check))
    assert b"NaN" not in data
    assert b"Infinity" not in data
    assert parse_cell(data, "f").verdict is Verdict.FAIL_LOGITS
    with pytest.raises(LedgerError, match=r"checks\[0\]\.ok"):
        parse_cell(edited(data, "checks", 0, "ok", value=True), "f")


def test_a_margin_is_the_share_of_the_bound_that_is_used() -> None:
    """Of a cell, the worst of those that have a bound above zero; what is not a number is the worst of all."""

    def check(value: float, allowed: float) -> Check:
        return Check("logits.max_abs", value, allowed, Verdict.FAIL_LOGITS)

    half, over, exact, wrong, lost = check(1, 2), check(3, 2), check(0, 0), check(1, 0), check(math.nan, 2)
    assert [c.margin for c in (half, over, exact, wrong)] == [0.5, 1.5, 0.0, math.inf]
    assert [cell(A, *c).margin for c in ((exact, wrong), (half, exact), (half, over), (over, half))] == [
        0,
        0.5,
        1.5,
        1.5,
    ]
    assert math.isnan(cell(A, over, lost, half).margin)
    assert math.isnan(cell(A, lost, over).margin)


def test_json_that_is_no_ledger_is_called_so() -> None:
    with pytest.raises(LedgerError, match=r"x\.json: checksum: missing, so this is no ledger"):
        parse_ledger(b"{}", "x.json")


def test_an_edit_without_a_new_checksum_is_refused() -> None:
    data = ledger_bytes(ledger(cell(A, OFF)))
    with pytest.raises(LedgerError, match=r"run\.json: checksum"):
        parse_ledger(data.replace(b"FAIL_LOGITS", b"PASS"), "run.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cells", 0, "verdict"), "PASS", r"cells\[0\]\.verdict: PASS, but its checks say FAIL_LOGITS"),
        (("cells", 0, "verdict"), "FINE", r"cells\[0\]\.verdict: 'FINE' is not one of PASS"),
        (("cells", 0, "checks"), [], r"cells\[0\]\.verdict: FAIL_LOGITS, but its checks say PASS"),
        (("cells", 0, "checks", 0, "verdict"), "PASS", r"cells\[0\]\.checks\[0\]\.verdict: PASS is no failure"),
        (("cells", 0, "checks", 0, "ok"), True, r"cells\[0\]\.checks\[0\]\.ok"),
        (("cells", 0, "checks", 0, "value"), "small", r"cells\[0\]\.checks\[0\]\.value: 'small' is not a number"),
        (("cells", 0, "checks", 0, "value"), True, r"cells\[0\]\.checks\[0\]\.value"),
        (("cells", 0, "seed"), 1.5, r"cells\[0\]\.seed: 1.5 is not of type int"),
        (("cells", 0, "times"), {"total": "nan"}, r"cells\[0\]\.times\.total: nan is not a duration"),
        (("cells", 0, "host"), "elsewhere", r"cells\[0\]\.host: 'elsewhere' is not among the environments"),
        (("cells", 0, "note"), "x", r"cells\[0\]\.note: unknown field"),
        (("cells",), [], f"cells: {A} is expected and missing"),
        (("expected",), [], rf"cells\[0\]\.id: {A} is not expected"),
        (("expected",), [B, A], "expected: not sorted"),
        (("expected",), [A, A], "expected: .* occurs twice"),
        (("schema",), 99, "schema: 99, this harness reads 1"),
        (("sources", "dirty"), "none", r"sources\.dirty: is str, not a list"),
        (("environments",), [], "environments: is list, not an object"),
        (("sources",), 5, "sources: is int, not an object"),
    ],
)
def test_a_forged_field_is_named(path: tuple[str | int, ...], value: object, message: str) -> None:
    with pytest.raises(LedgerError, match=f"^run.json: {message}"):
        parse_ledger(edited(ledger_bytes(ledger(cell(A, OFF))), *path, value=value), "run.json")


def test_a_doubled_cell_is_refused() -> None:
    content = json.loads(ledger_bytes(ledger(cell(A, FINE))))
    content["cells"] *= 2
    with pytest.raises(LedgerError, match=rf"cells\[1\]\.id: {A} occurs twice"):
        parse_ledger(seal(content), "f")


def test_a_pass_without_checks_is_refused() -> None:
    with pytest.raises(LedgerError, match="PASS without a check"):
        parse_cell(cell_bytes(cell(A)), "f")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'["checksum"]', "is list, not an object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "a: occurs twice in one object"),
        (b'{"a": 1e999, "checksum": ""}', "Out of range float"),
    ],
)
def test_what_is_no_ledger_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(LedgerError, match=rf"^run\.json: {message}"):
        parse_ledger(data, "run.json")


def test_a_truncated_ledger_is_refused_at_every_byte() -> None:
    data = ledger_bytes(ledger(cell(A, FINE)))
    for length in range(len(data) - 1):  # without the last newline it is whole
        with pytest.raises(LedgerError):
            parse_ledger(data[:length], "f")


def test_a_run_from_its_records_to_its_ledger(tmp_path: Path) -> None:
    run = tmp_path / "reports" / "run1"
    ledgers.record(cell(A, FINE), run)
    with pytest.raises(LedgerError, match=f"{A}: recorded twice"):
        ledgers.record(cell(A, OFF), run)
    whole = ledgers.complete(ledger(expected=(A, B)), ledgers.collect(run))
    assert [(c.id, c.verdict) for c in whole.cells] == [(A, Verdict.PASS), (B, Verdict.NOT_RUN)]
    assert whole.cells[1].rerun == f"nox -s test -- -k {B}"
    assert exit_status(whole) == INCOMPLETE
    ledgers.write(whole, run)
    assert (
        ledgers.read(run) == ledgers.read(run / "ledger.json") == ledgers.read(tmp_path / "reports" / "latest") == whole
    )
    assert sorted(path.name for path in run.iterdir()) == ["ledger.json"]
    ledgers.write(replace(whole, run_id="run2"), run.with_name("run2"))
    assert (tmp_path / "reports" / "latest").resolve().name == "run2"
    assert sorted(path.name for path in run.parent.iterdir()) == ["latest", "run1", "run2"]


def test_a_ledger_that_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ledgers.record(cell(A, FINE), run)
    with pytest.raises(LedgerError, match=rf"ledger\.json: cells: {B} is expected and missing"):
        ledgers.write(ledger(cell(A, FINE), expected=(A, B)), run)
    assert [path.name for path in run.iterdir()] == ["cells"], "its cells can still be collected"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    ledgers.record(cell(A, FINE), tmp_path)
    path = tmp_path / "cells" / f"{A}.json"
    path.rename(path.with_name(f"{B}.json"))
    with pytest.raises(LedgerError, match=rf"{B}\.json: id: holds {A}"):
        ledgers.collect(tmp_path)


def test_a_record_that_nobody_expected_is_refused() -> None:
    with pytest.raises(LedgerError, match=f"{B}: recorded but not expected"):
        ledgers.complete(ledger(expected=(A,)), [cell(B, FINE)])


def test_a_missing_ledger_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.json: No such file"):
        ledgers.read(tmp_path)


@pytest.mark.parametrize(
    ("whole", "status"),
    [
        (ledger(cell(A, FINE)), 0),
        (ledger(cell(A, OFF)), 1),
        (ledger(cell(A, verdict=Verdict.ERROR)), 1),
        (ledger(cell(A, verdict=Verdict.TIMEOUT)), 1),
        (ledger(cell(A, verdict=Verdict.NOT_RUN)), 2),
        (ledger(cell(A, OFF), cell(B, verdict=Verdict.NOT_RUN)), 1),
        (ledger(cell(A, FINE), expected=(A, B)), 2),
        (ledger(), 3),
        (ledger(cell(A, FINE), problems=("the build failed",)), 3),
        (ledger(cell(A, OFF), problems=("the build failed",)), 3),
    ],
)
def test_exit_statuses(whole: Ledger, status: int) -> None:
    assert exit_status(whole) == status


def shard(*cells: Cell, host: str, **changes: object) -> Ledger:
    return ledger(*cells, environments={host: {"os": host}}, **changes)


def merged(*shards: Ledger, expected: tuple[str, ...] = (A, B), per_host: bool = False) -> Ledger:
    return ledgers.merge(shards, run_id="m", expected=expected, command="remote", per_host=per_host)


def test_shards_become_one_ledger() -> None:
    whole = merged(shard(cell(A, FINE, host="x"), host="x"), shard(cell(B, OFF, host="y"), host="y"))
    assert [(c.id, c.host) for c in whole.cells] == [(A, "x"), (B, "y")]
    assert set(whole.environments) == {"x", "y"}
    assert parse_ledger(ledger_bytes(whole), "f") == whole


def test_a_merged_run_begins_with_its_first_shard_and_ends_with_its_last() -> None:
    early = shard(cell(A, FINE, host="x"), host="x", started="2025-01-02T03:00:00Z", notes=("slow",))
    late = shard(cell(B, FINE, host="y"), host="y", finished="2025-01-02T04:00:00Z", filter="int4", problems=("full",))
    for whole in (merged(early, late), merged(late, early)):
        assert (whole.started, whole.finished) == ("2025-01-02T03:00:00Z", "2025-01-02T04:00:00Z")
        assert (whole.filter, whole.problems, whole.notes) == ("int4", ("full",), ("slow",))


def test_a_cell_given_back_may_run_elsewhere() -> None:
    dead = shard(cell(A, FINE, host="x"), cell(B, verdict=Verdict.NOT_RUN, host="x"), host="x")
    assert exit_status(merged(dead, shard(cell(B, FINE, host="y"), host="y"))) == 0
    assert exit_status(merged(dead)) == 2


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            [shard(cell(A, FINE, host="x"), host="x"), shard(cell(A, FINE, host="y"), host="y")],
            "no merged ledger expected",
        ),
        ([shard(cell(A, FINE, host="x"), cell(B, FINE, host="x"), host="x")] * 2, "recorded twice"),
        ([], "no ledgers"),
        (
            [
                shard(cell(A, FINE, host="x"), host="x"),
                shard(cell(B, FINE, host="y"), host="y", sources=replace(SOURCES, engine="0" * 64)),
            ],
            "sources: .* differs",
        ),
        (
            [shard(cell(A, FINE, host="x"), host="x"), shard(cell(B, host="y"), host="y", engine="other")],
            "engine: other",
        ),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards: list[Ledger], message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        merged(*shards)


def test_every_host_may_run_everything() -> None:
    one, two = (shard(cell(A, FINE, host=h), host=h) for h in "xy")
    whole = merged(one, two, expected=(A,), per_host=True)
    assert (whole.wanted, whole.passed, exit_status(whole)) == (2, 2, 0)
    assert parse_ledger(ledger_bytes(whole), "f") == whole
    gone = merged(one, shard(expected=(A,), host="y"), expected=(A,), per_host=True)
    assert [(c.host, c.verdict) for c in gone.cells] == [("x", Verdict.PASS), ("y", Verdict.NOT_RUN)]
    assert exit_status(gone) == 2


@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=12))
def test_any_split_of_a_run_merges_into_the_same_cells(hosts: list[str]) -> None:
    every = [cell(f"fp32-ar-c{i:02}-cpu", FINE, host=host) for i, host in enumerate(hosts)]
    shards = [shard(*(c for c in every if c.host == host), host=host) for host in sorted(set(hosts))]
    whole = merged(*shards, expected=tuple(c.id for c in every))
    assert list(whole.cells) == every
    assert exit_status(whole) == 0


def test_the_summary_counts_and_names_the_closest_cell() -> None:
    """Of those that passed, by checks that have a bound above zero."""
    near = Check("logits.max_abs", 9e-7, 1e-6, Verdict.FAIL_LOGITS)
    exact = Check("tokens", 0.0, 0.0, Verdict.FAIL_TOKENS)
    far = Check("logits.nmse", 8e-7, 1e-6, Verdict.FAIL_LOGITS)
    more = "fp32-ar-long-cpu"
    cells = (cell(A, exact, FINE), cell(more, replace(FINE, value=2e-7)), cell(B, far, near))
    lines = ledgers.summary(ledger(*cells, expected=(A, more, B), filter="ar"))
    assert lines[0] == "3 of 3 expected cells passed (filter: ar)"
    assert lines[2:] == [
        f"largest logit difference, fp32: 2.00e-07 of 1.00e-06 allowed ({more})",
        f"largest logit difference, int4: 9.00e-07 of 1.00e-06 allowed ({B})",
    ]
    assert lines[1] == f"closest to its bound: {B}, logits.max_abs 9e-07 of 1e-06 allowed (90 %)"
    assert not any("divergence" in line for line in lines)
    lines = ledgers.summary(ledger(cell(A, OFF), cell(B, verdict=Verdict.NOT_RUN)))
    assert "1 FAIL_LOGITS, 1 NOT_RUN" in lines[0]
    assert len(lines) == 1, "what failed is near no bound"
    assert len(ledgers.summary(ledger(cell(A, exact)))) == 1, "nothing has a bound"


def test_the_summary_says_once_where_failed_cells_diverge_first() -> None:
    def off(id: str, tap: str) -> Cell:
        return replace(cell(id, OFF), divergence=Divergence(tap, (0,), 1.0, 0.0, 0.5, 1))

    ids = [A, B, "fp32-ar-long-cpu", "fp32-ar-yarn-cpu"]
    taps = ["layers.0.mla.o_lat", "layers.11.mla.o_lat", "layers.2.mla.o_lat", "logits"]
    lines = ledgers.summary(ledger(*map(off, ids, taps), expected=tuple(ids)))
    assert lines[1:3] == [
        "first divergence: mla.o_lat in 3 cells of long, tiny",
        "first divergence: logits in 1 cell of yarn (docs/trace.md says what each tap is)",
    ]
    for count, rest in ((6, " ("), (9, " and 3 more (")):
        many = [f"fp32-ar-c{i}-cpu" for i in range(count)]
        line = ledgers.summary(ledger(*(off(id, "embed") for id in many), expected=tuple(many)))[1]
        assert line.startswith(f"first divergence: embed in {count} cells of c0, c1, c2, c3, c4, c5{rest}")
