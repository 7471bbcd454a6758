"""Every check of a cell can fail, under the verdict that is its own, and a right engine passes them all."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import harness.runner
from harness import engines, widths, wrong_engine
from harness.cells import BadRound, Cell, Tree, Verdict
from harness.checks import _cut_short
from harness.describe import describe
from harness.golden import Golden
from harness.matrix import Point
from harness.protocol import F32, Decoded, DecodeRequest, DeviceError, NonFiniteError, OutOfMemory, Session
from harness.reference_engine import ReferenceEngine, ReferenceSession
from harness.runner import Runner
from harness.sources import ROOT
from refs.model import Model
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("remembered")
AR, TREE = Point("fp32", "ar", "micro", "", "cpu"), Point("int4", "ddtree", "micro", "noisy", "cpu")


@pytest.fixture(autouse=True)
def few_widths_and_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_widths.py looks at all 65 rows over all paths, and test_trace.py at traces; here neither is needed."""
    monkeypatch.setattr(harness.runner, "first_divergence", lambda *_: None)
    for name, few in {"MAX_ROWS": 9, "PATHS": 2, "DEPTH": 4}.items():
        monkeypatch.setattr(widths, name, few)


def run(micro: Path, point: Point, engine: str = "reference", seconds: float = 60.0) -> Cell:
    runner = Runner(engine, {"micro": micro}, seconds=seconds, host="here", worker="gw0")
    try:
        return runner.run(point, lambda cell: None)
    finally:
        runner.close()


def bump(rows: F32) -> F32:
    """One element, one unit in the last place."""
    rows = np.array(rows)
    rows.reshape(-1)[-1] = np.nextafter(rows.reshape(-1)[-1], np.float32(1e9))
    return rows


@pytest.mark.parametrize("point", [AR, TREE, replace(AR, precision="int4"), replace(TREE, drafter="hostile")])
def test_the_reference_passes(micro: Path, point: Point) -> None:
    cell = run(micro, point)
    assert (cell.verdict, cell.detail) == (Verdict.PASS, "")
    assert cell.margin < 0.5
    assert max(cell.step_errors) < 1e-5
    forwards = len(cell.acceptance) or 8
    assert cell.kernels == {f"reference.{point.precision}": 1 + forwards}  # the prefill, and nothing of other decodes
    assert sum(cell.acceptance) == (8 if point.drafter else 0)


def promised(decoder: str) -> set[str]:
    """The checks of a cell of one rank that the tables of docs/harness.md name, ``taps`` and ``cache`` as wholes."""
    page = (ROOT / "docs" / "harness.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| (both|AR|DDTree) \|", page, re.MULTILINE)
    names = {name for cell, of in rows if of in ("both", decoder) for name in re.findall(r"`([^`]+)`", cell)}
    return {re.sub(r"^(taps|cache)\..*", r"\1", name) for name in names}


@pytest.mark.parametrize(("point", "decoder"), [(AR, "AR"), (TREE, "DDTree")])
def test_a_cell_has_the_checks_that_are_described_and_no_other(micro: Path, point: Point, decoder: str) -> None:
    names = {check.name for check in run(micro, point).checks}
    assert {re.sub(r"^(taps|cache)\..*", r"\1", name) for name in names} == promised(decoder)


def test_taps_and_cache_are_checked_in_shape_and_in_every_element(micro: Path) -> None:
    names = {check.name for check in run(micro, AR).checks}
    for whole in ("taps.layers.0.out", "cache.layers.0.latent", "cache.layers.1.k_rope"):
        assert {f"{whole}.{kind}" for kind in ("shape", "finite", "max_abs")} <= names


PROVOKED = {
    "tokens": (AR, Verdict.FAIL_TOKENS),
    "degenerate": (AR, Verdict.FAIL_TOKENS),
    "logits": (AR, Verdict.FAIL_LOGITS),
    "zeros": (AR, Verdict.FAIL_LOGITS),
    "nan": (AR, Verdict.FAIL_NONFINITE),
    "shape": (AR, Verdict.FAIL_SHAPE),
    "kernel": (AR, Verdict.FAIL_KERNEL),
    "error": (AR, Verdict.ERROR),
    "tree": (TREE, Verdict.FAIL_TREE),
    "acceptance": (TREE, Verdict.FAIL_ACCEPTANCE),
    "bitwise": (TREE, Verdict.FAIL_BITWISE),
    "hang": (TREE, Verdict.TIMEOUT),
    "device": (TREE, Verdict.ERROR),
}


def test_every_fault_and_every_verdict_is_provoked_here_or_by_a_crash() -> None:
    assert {*wrong_engine.ALWAYS, *wrong_engine.DDTREE} == {*PROVOKED, "crash"}
    assert {verdict for _, verdict in PROVOKED.values()} == {*Verdict} - {Verdict.PASS, Verdict.NOT_RUN}


@pytest.mark.parametrize("fault", PROVOKED)
def test_a_wrong_engine_gets_the_verdict_of_its_fault(micro: Path, fault: str) -> None:
    point, verdict = PROVOKED[fault]
    cell = run(micro, point, f"wrong:{fault}", seconds=0.3 if fault == "hang" else 60.0)
    assert (cell.verdict, cell.rerun) == (verdict, f"nox -s test -- -k {point.id} --engine wrong:{fault}")
    assert all(len(line) <= 120 for line in describe(cell).splitlines())
    text = " ".join(describe(cell).split())
    for part in (verdict.value, point.id, str(cell.seed), cell.rerun, cell.detail, "worker gw0"):
        assert part in text
    if fault == "hang":
        assert "0.3 s, in wrong_engine._hang (at wrong_engine.py:" in text
        assert "--cell-timeout SECONDS allows more" in text


class Tampered(ReferenceSession):
    """The reference with one method wrapped by ``change``."""

    method = ""
    change: Callable[..., Any]

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name != type(self).method:
            return found
        return lambda *args, **named: type(self).change(found(*args, **named), *args)


def dropped(taps: Mapping[str, F32], *_: object) -> dict[str, F32]:
    return {name: rows for name, rows in taps.items() if name != "embed"}


def off(name: str) -> Callable[..., dict[str, F32]]:
    return lambda taps, *_: {**taps, name: taps[name] + np.float32(1e-3)}


def tap_bits(taps: Mapping[str, F32], *_: object) -> dict[str, F32]:
    return {**taps, "logits": bump(taps["logits"])}


def in_trees(edit: Callable[[Decoded], Decoded]) -> Callable[[Decoded, DecodeRequest], Decoded]:
    return lambda decoded, request: edit(decoded) if request.draft is not None else decoded


def in_samples(edit: Callable[[Decoded], Decoded]) -> Callable[[Decoded, DecodeRequest], Decoded]:
    return lambda decoded, request: edit(decoded) if request.temperature else decoded


def sampled_trees(edit: Callable[[Decoded], Decoded]) -> Callable[[Decoded, DecodeRequest], Decoded]:
    return lambda decoded, request: edit(decoded) if request.temperature and request.draft is not None else decoded


def nothing(decoded: Decoded) -> Decoded:
    return replace(decoded, tokens=(), logits=None)


def one_less(decoded: Decoded) -> Decoded:
    assert decoded.logits is not None
    return replace(decoded, tokens=decoded.tokens[:-1], logits=decoded.logits[:-1])


def last_round(decoded: Decoded) -> Decoded:
    *rest, last = decoded.rounds
    return replace(decoded, rounds=(*rest, replace(last, accepted=(*last.accepted, 99))))


def accepting(*counts: int) -> Callable[[Decoded, Any], Decoded]:
    """The rows that forwards say they committed."""
    return lambda decoded, _: replace(decoded, accepted_per_round=counts)


def merged_counts(decoded: Decoded) -> Decoded:
    first, second, *rest = decoded.accepted_per_round
    return replace(decoded, accepted_per_round=(first + second, 0, *rest))


def other_token(decoded: Decoded) -> Decoded:
    return replace(decoded, tokens=(*decoded.tokens[:-1], decoded.tokens[-1] ^ 1))


def off_key(rows: tuple[F32, F32], layer: int) -> tuple[F32, F32]:
    return rows[0], rows[1] + np.float32(1e-3)


def one_row_less(rows: tuple[F32, F32], layer: int) -> tuple[F32, F32]:
    return rows[0][:-1], rows[1][:-1]


def one_more(counters: Mapping[str, int]) -> dict[str, int]:
    return {name: count + 1 for name, count in counters.items()}


CALLS = {"cache": 0}


def second_decode_s_cache(rows: tuple[F32, F32], layer: int) -> tuple[F32, F32]:
    """The cache is asked for after AR, layer by layer, and then after DDTree: only the latter is off."""
    CALLS["cache"] += 1
    return (rows[0], bump(rows[1])) if CALLS["cache"] > 2 and layer == 1 else rows


TAMPERED: dict[str, tuple[Point, str, Callable[..., Any], Verdict, str]] = {
    "no logits": (AR, "decode", lambda d, _: replace(d, logits=None), Verdict.FAIL_SHAPE, "logits.shape"),
    "f64": (AR, "decode", lambda d, _: replace(d, logits=d.logits.astype(float)), Verdict.FAIL_SHAPE, "logits.shape"),
    "one token less": (AR, "decode", lambda d, _: replace(d, tokens=d.tokens[:-1]), Verdict.FAIL_SHAPE, "logits.shape"),
    "stop": (AR, "decode", lambda d, _: replace(d, stopped="eos"), Verdict.FAIL_TOKENS, "stopped"),
    "forwards": (AR, "decode", lambda d, _: replace(d, forwards=7), Verdict.FAIL_ACCEPTANCE, "counts"),
    "one row short": (AR, "decode", accepting(1, 1, 1, 1, 1, 1, 1, 0), Verdict.FAIL_ACCEPTANCE, "counts"),
    "one round short": (AR, "decode", accepting(2, 1, 1, 1, 1, 1, 1), Verdict.FAIL_ACCEPTANCE, "counts"),
    "AR by sevens": (
        AR,
        "decode",
        lambda d, _: replace(accepting(2, 1, 1, 1, 1, 1, 1)(d, None), forwards=7),
        Verdict.FAIL_ACCEPTANCE,
        "counts",
    ),
    "stream": (AR, "stream", lambda s, _: iter([*s][:-1]), Verdict.FAIL_TOKENS, "stream"),
    "draws": (AR, "decode", in_samples(other_token), Verdict.FAIL_TOKENS, "sampling.draws"),
    "no draws": (AR, "decode", in_samples(nothing), Verdict.FAIL_TOKENS, "sampling.draws"),
    "one draw less": (AR, "decode", in_samples(one_less), Verdict.FAIL_TOKENS, "sampling.draws"),
    "step": (AR, "step", lambda row, _: bump(row), Verdict.FAIL_BITWISE, "steps"),
    "prefill": (AR, "prefill", lambda rows, _: bump(rows), Verdict.FAIL_BITWISE, "steps"),
    "tap gone": (AR, "taps", dropped, Verdict.FAIL_SHAPE, "taps.embed.shape"),
    "tap off": (AR, "taps", off("layers.1.out"), Verdict.FAIL_LOGITS, "taps.layers.1.out.max_abs"),
    "no logits tap": (
        AR,
        "taps",
        lambda taps, *_: {name: rows for name, rows in taps.items() if name != "logits"},
        Verdict.FAIL_BITWISE,
        "prefill",
    ),
    "tap bits": (AR, "taps", tap_bits, Verdict.FAIL_BITWISE, "prefill"),
    "cache off": (AR, "cache", off_key, Verdict.FAIL_LOGITS, "cache.layers.0.k_rope.max_abs"),
    "cache short": (AR, "cache", one_row_less, Verdict.FAIL_SHAPE, "cache.layers.0.latent.shape"),
    "no reset": (AR, "counters", one_more, Verdict.FAIL_KERNEL, "kernels.reset"),
    "foreign": (AR, "counters", lambda c: {**c, "reference.int4": 1}, Verdict.FAIL_KERNEL, "kernels.foreign"),
    "guard": (AR, "broken_guard", lambda _: "kv cache", Verdict.FAIL_KERNEL, "guards"),
    "no rounds": (TREE, "decode", in_trees(lambda d: replace(d, rounds=())), Verdict.FAIL_ACCEPTANCE, "accepted"),
    "accepted": (TREE, "decode", in_trees(last_round), Verdict.FAIL_ACCEPTANCE, "accepted"),
    "rows": (TREE, "decode", in_trees(merged_counts), Verdict.FAIL_ACCEPTANCE, "accepted"),
    "cache": (TREE, "cache", second_decode_s_cache, Verdict.FAIL_BITWISE, "ar.cache"),
    "samples": (TREE, "decode", sampled_trees(other_token), Verdict.FAIL_BITWISE, "sampling.tokens"),
    "no samples": (TREE, "decode", in_samples(nothing), Verdict.FAIL_BITWISE, "sampling.tokens"),
    "one sample less": (TREE, "decode", in_samples(one_less), Verdict.FAIL_BITWISE, "sampling.tokens"),
    "sample bits": (
        TREE,
        "decode",
        sampled_trees(lambda d: replace(d, logits=bump(d.logits))),
        Verdict.FAIL_BITWISE,
        "sampling.logits",
    ),
    "width 7": (TREE, "verify", lambda rows, t, p: bump(rows) if len(t) == 7 else rows, Verdict.FAIL_BITWISE, "widths"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_each_check_fails_under_its_own_name(micro: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    point, method, change, verdict, check = TAMPERED[name]
    CALLS["cache"] = 0
    session = type("Session", (Tampered,), {"method": method, "change": staticmethod(change)})
    monkeypatch.setattr(ReferenceEngine, "_session", lambda self, model, rows: session(model, rows))
    cell = run(micro, point)
    assert (cell.verdict, cell.detail.partition(":")[0]) == (verdict, check), describe(cell)


def test_a_sampled_decode_goes_on_to_its_limit_or_to_the_end_token() -> None:
    golden = cast(Golden, SimpleNamespace(field=lambda name: {"eos_id": 9}[name], meta={"run": {"max_tokens": 3}}))

    def lacks(tokens: tuple[int, ...], rows: int) -> str:
        decoded = Decoded(tokens, len(tokens), "limit", (), np.zeros((rows, 5), np.float32))
        return _cut_short(golden, decoded)

    for tokens in ((1, 2, 3), (1, 9), (9,), (1, 2, 9)):
        assert lacks(tokens, len(tokens) + 1) == ""
        assert "rows of logits" in lacks(tokens, len(tokens))
    assert lacks((1, 2), 3) == "ended after 2 tokens, not 3; "
    assert lacks((1, 9, 3), 4) == "ended after 3 tokens, not 2; "
    assert lacks((), 0) == "ended after 0 tokens, not 3; "


def test_a_failing_tree_is_kept_with_the_golden_one(micro: Path) -> None:
    cell = run(micro, TREE, "wrong:tree")
    assert cell.bad_round is not None
    assert cell.bad_round.round == 0
    assert cell.bad_round.got.tokens[:-1] == cell.bad_round.want.tokens[:-1]
    assert cell.bad_round.got.tokens[-1] == cell.bad_round.want.tokens[-1] ^ 1


def test_a_message_shows_a_wide_tree_around_its_first_unlike_row() -> None:
    chain = Tree(tuple(range(100, 165)), tuple(range(-1, 64)), (0, 1))
    other = replace(chain, tokens=(*chain.tokens[:40], 7, *chain.tokens[41:]))
    bad = Cell(TREE.id, Verdict.FAIL_TREE, bad_round=BadRound(3, other, chain))
    got, golden = describe(bad).splitlines()[2:4]
    assert got.startswith("  round 3: got    rows 30 to 49 of 65: tokens [130, ")
    assert ", 139, 7, 141, " in got
    assert ", 139, 140, 141, " in golden
    assert golden.endswith("48] accepted [0, 1]")
    assert max(map(len, (got, golden))) < 280


def test_a_message_shows_a_tree_once_where_only_what_was_accepted_differs() -> None:
    want = Tree((5, 6, 7), (-1, 0, 1), (0, 1, 2))
    bad = Cell(TREE.id, Verdict.FAIL_ACCEPTANCE, bad_round=BadRound(0, replace(want, accepted=(0,)), want))
    lines = [line for line in describe(bad).splitlines() if "round 0" in line]
    assert lines == ["  round 0: tree as golden: tokens [5, 6, 7] parents [-1, 0, 1]"]


@pytest.mark.parametrize(
    ("error", "verdict", "lost"),
    [
        (NonFiniteError("layer 1"), Verdict.FAIL_NONFINITE, False),
        (OutOfMemory("2 GB more"), Verdict.ERROR, False),
        (DeviceError("illegal address"), Verdict.ERROR, True),
        (KeyError("x"), Verdict.ERROR, False),
        (MemoryError(), Verdict.ERROR, False),
    ],
)
def test_what_an_engine_raises_is_recorded_by_name(
    micro: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, verdict: Verdict, lost: bool
) -> None:
    def fail(self: ReferenceSession, request: DecodeRequest) -> Decoded:
        raise error

    monkeypatch.setattr(ReferenceSession, "decode", fail)
    runner = Runner("reference", {"micro": micro}, seconds=60, host="here", worker="")
    cell = runner.run(AR, lambda cell: None)
    assert (cell.verdict, runner.device_lost) == (verdict, lost)
    assert type(error).__name__ in cell.detail


def test_cells_share_a_session_until_one_fails(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = Model.open

    def counted(path: Path, precision: str, **options: Any) -> Model:
        opened.append(precision)
        return real(path, precision, **options)

    monkeypatch.setattr(Model, "open", counted)
    runner = Runner("reference", {"micro": micro}, seconds=60, host="here", worker="")
    for _ in range(2):
        runner.run(AR, lambda cell: None)
        runner.run(replace(AR, precision="int4"), lambda cell: None)
    assert opened == ["fp32", "int4"]
    with monkeypatch.context() as broken:
        broken.setattr(ReferenceSession, "broken_guard", lambda self: "x")
        assert runner.run(AR, lambda cell: None).verdict is Verdict.FAIL_KERNEL
    assert runner.run(AR, lambda cell: None).verdict is Verdict.PASS
    assert opened == ["fp32", "int4", "fp32"]


@pytest.mark.slow
def test_native_code_that_never_returns_ends_with_a_record(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the main thread nothing can interrupt the cell; the watchdog gets the record and ends the process."""
    ended, last = threading.Event(), []
    monkeypatch.setattr(os, "_exit", lambda status: ended.set() or last.append(status))
    monkeypatch.setattr(
        ReferenceSession, "decode", lambda self, request: time.sleep(3600) if not ended.wait(PATIENCE) else None
    )
    runner = Runner("reference", {"micro": micro}, seconds=0.5, host="here", worker="")
    records: list[Cell] = []
    thread = threading.Thread(target=runner.run, args=(AR, records.append))
    thread.start()
    thread.join(2 * PATIENCE)
    assert last[0] == 1  # with _exit disarmed the cell goes on, and may be late once more
    assert (records[0].id, records[0].verdict) == (AR.id, Verdict.TIMEOUT)


def test_engines_are_found_by_name() -> None:
    assert engines.create("reference", "cpu").name == "reference"
    with pytest.raises(engines.UnknownEngine, match=r"no engine is named 'x'; known: .*csrc, reference, wrong"):
        engines.create("x", "cpu")
    with pytest.raises(engines.UnknownEngine, match="takes no argument, 'fast' was given"):
        engines.create("reference:fast", "cpu")
    with pytest.raises(DeviceError, match="runs on cpu, not on cuda"):
        engines.create("reference", "cuda")
    with pytest.raises(wrong_engine.RequestError, match="no such fault; there are tokens"):
        engines.create("wrong:nothing", "cpu")


def test_the_reference_stands_behind_the_protocol(micro: Path) -> None:
    session = engines.create("reference", "cpu").load(micro, "fp32")
    assert isinstance(session, Session)
