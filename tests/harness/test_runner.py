"""What a worker does around a cell's checks: sessions kept and closed, errors by name, what is traced and what is told.

Nothing is computed here: engines, checks and traces are stand-ins that note what they were asked for.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness.runner
from harness.cells import BadRound, Cell, Check, Divergence, Findings, Tree, Verdict
from harness.matrix import Point
from harness.protocol import DeviceError, NonFiniteError, OutOfMemory
from harness.runner import Runner

AR, TREE = Point("fp32", "ar", "micro", "", "cpu"), Point("int4", "ddtree", "micro", "noisy", "cpu")
FINE = Check("logits.max_abs", 0.5, 1.0, Verdict.FAIL_LOGITS)
OFF, KERNEL = replace(FINE, value=2.0), Check("kernels", 1.0, 0.0, Verdict.FAIL_KERNEL)
PLACE = Divergence("layers.0.mla.q", (0,), 1.0, 2.0, 0.5, 1)
TRACED = replace(PLACE, tap="embed")


class World:
    """Everything a runner meets; ``log`` has what it did, in order."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.findings: Callable[..., Findings] = lambda *_: Findings([FINE])
        self.then: Callable[[], None] = lambda: None
        self.trace: Callable[..., Divergence | None] = lambda *_: TRACED
        self.close: Callable[[], None] = lambda: None
        self.limits: list[float] = []

    def create(self, name: str, device: str, ranks: int) -> Any:
        self.log.append(f"engine {device} {ranks}")

        def load(path: Path, precision: str, **options: Any) -> Any:
            assert options == {"max_rows": 65, "poison": True}
            title = f"{path.name} {precision} {device} {ranks}"
            self.log.append(f"load {title}")

            def close() -> None:
                self.log.append(f"close {title}")
                self.close()

            return SimpleNamespace(title=title, close=close)

        return SimpleNamespace(load=load, close=lambda: self.log.append(f"end {device} {ranks}"))

    def run_checks(self, found: Findings, engine: Any, session: Any, golden: Any, *rest: Any) -> None:
        drafter, seed, alone, known = rest
        self.log.append((session.title, drafter, seed, alone and alone.title, known))
        vars(found).update(vars(self.findings()))
        self.then()

    def run_ar(self, session: Any, golden: Any) -> str:
        self.log.append(f"ar {session.title}")
        return f"ar of {session.title}"

    def first_divergence(self, session: Any, golden: Any, drafter: str, seed: int) -> Divergence | None:
        self.log.append(f"trace {session.title} {drafter} {seed}")
        return self.trace()

    def said(self, *kinds: str) -> list[str]:
        """What of these kinds was done."""
        return [line for line in self.log if isinstance(line, str) and line.split()[0] in kinds]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    limited = harness.runner.limit

    @contextmanager
    def limit(seconds: float, on_hang: Callable[[], None]) -> Iterator[None]:
        world.limits.append(seconds)
        with limited(seconds, on_hang):
            yield

    golden = SimpleNamespace(meta={"run": {"budget": 5}})
    monkeypatch.setattr(harness.runner, "Golden", SimpleNamespace(open=lambda path, precision: golden))
    monkeypatch.setattr(harness.runner, "limit", limit)
    for name in ("create", "run_checks", "run_ar", "first_divergence"):
        monkeypatch.setattr(harness.runner, name, getattr(world, name))
    return world


def runner(seconds: float = 60.0) -> Runner:
    configs = {name: Path("bundles") / name for name in ("micro", "other")}
    return Runner("csrc", configs, seconds=seconds, host="box", worker="gw1")


def run(point: Point = AR, by: Runner | None = None) -> Cell:
    return (by or runner()).run(point, lambda cell: None)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise error

    return fail


def test_a_record_has_all_that_was_found(world: World) -> None:
    tree = Tree((1,), (-1,), (0,))
    world.findings = lambda: Findings(
        [FINE], {"gemm": 2}, {"decode": 1.5}, (1e-7,), (2, 1), PLACE, BadRound(0, tree, tree)
    )
    cell = run(TREE)
    assert cell.times.keys() == {"load", "decode", "total"}
    assert 0 <= cell.times["load"] <= cell.times["total"] < 10
    assert replace(cell, times={}) == Cell(
        id=TREE.id,
        verdict=Verdict.PASS,
        checks=(FINE,),
        kernels={"gemm": 2},
        seed=TREE.seed,
        host="box",
        worker="gw1",
        rerun=f"nox -s test -- -k {TREE.id}",
        divergence=PLACE,
        step_errors=(1e-7,),
        acceptance=(2, 1),
        bad_round=BadRound(0, tree, tree),
    )
    assert world.log[-1] == ("micro int4 cpu 1", "noisy", TREE.seed, None, None)


def test_two_sessions_are_kept_those_used_last(world: World) -> None:
    by = runner()
    fp32, int4, other = AR, replace(AR, precision="int4"), replace(AR, config="other")
    for point in (fp32, int4, fp32, TREE, fp32, other, fp32, int4):
        assert run(point, by).verdict is Verdict.PASS
    assert world.said("load", "close") == [
        "load micro fp32 cpu 1",
        "load micro int4 cpu 1",
        "close micro int4 cpu 1",
        "load other fp32 cpu 1",
        "close other fp32 cpu 1",
        "load micro int4 cpu 1",
    ]
    by.close()
    assert world.log[-3:] == ["close micro int4 cpu 1", "close micro fp32 cpu 1", "end cpu 1"]


def test_an_engine_that_cannot_be_closed_and_a_session_that_fails_to_are_let_go(world: World) -> None:
    by = runner()
    run(AR, by)
    run(TREE, by)
    for session, _ in by._sessions.values():
        session.close = raising(RuntimeError("lost"))  # type: ignore[method-assign]
    del by._engines["cpu", 1].close  # type: ignore[attr-defined]
    by.close()


def test_a_cell_that_failed_is_traced_in_its_session_which_is_then_closed(world: World) -> None:
    by = runner()
    world.findings = lambda: Findings([FINE, OFF], divergence=PLACE)
    cell = run(TREE, by)
    assert (cell.verdict, cell.detail, cell.divergence) == (Verdict.FAIL_LOGITS, OFF.sentence, TRACED)
    assert world.log[-2:] == [f"trace micro int4 cpu 1 noisy {TREE.seed}", "close micro int4 cpu 1"]
    world.findings = lambda: Findings([FINE])
    run(TREE, by)
    assert world.said("load") == ["load micro int4 cpu 1"] * 2


@pytest.mark.parametrize("trace", [lambda: None, raising(ValueError("x")), raising(harness.runner.CellTimeout("late"))])
def test_a_trace_that_finds_nothing_or_breaks_changes_nothing(world: World, trace: Callable[..., Any]) -> None:
    world.findings, world.trace = (lambda: Findings([OFF], divergence=PLACE)), trace
    cell = run()
    assert (cell.verdict, cell.detail, cell.divergence) == (Verdict.FAIL_LOGITS, OFF.sentence, PLACE)


def test_what_no_trace_can_explain_is_not_traced(world: World) -> None:
    world.findings = lambda: Findings([KERNEL])
    assert run().verdict is Verdict.FAIL_KERNEL
    world.findings = lambda: Findings([FINE])
    assert run().verdict is Verdict.PASS
    world.findings = raising(DeviceError("gone"))
    assert run().verdict is Verdict.ERROR
    assert world.said("trace") == []


def test_a_cell_and_its_trace_have_their_time(world: World) -> None:
    world.findings = lambda: time.sleep(5)
    late = run(by=runner(0.05))
    assert late.verdict is Verdict.TIMEOUT
    assert late.detail.startswith("took longer than 0.05 s; ")
    assert world.said("trace") == []
    assert world.said("close") == ["close micro fp32 cpu 1"]
    assert late.times["total"] < 4
    world.findings = lambda: Findings([OFF])
    world.limits.clear()
    run(by=runner(900))
    run(by=runner(30))
    assert world.limits == [900, 60.0, 30, 30]


def test_what_was_found_wrong_before_time_ran_out_is_the_verdict(world: World) -> None:
    """A slow engine whose compaction is wrong: its cache differs from AR's long before every width has been tried."""
    world.then = lambda: time.sleep(5)
    world.findings = lambda: Findings([FINE])
    assert run(by=runner(0.05)).verdict is Verdict.TIMEOUT
    world.findings = lambda: Findings([FINE, OFF])
    late = run(by=runner(0.05))
    assert (late.verdict, late.checks) == (OFF.verdict, (FINE, OFF))
    assert f"{OFF.sentence}; then it took longer than 0.05 s" in late.detail
    assert world.said("trace") == []
    assert world.said("close") == ["close micro fp32 cpu 1"] * 2


@pytest.mark.parametrize(
    ("error", "detail", "lost"),
    [
        (ValueError("first line\nand more"), "ValueError: first line (at test_runner.py:", False),
        (DeviceError("gone"), "DeviceError: gone (at", True),
        (OutOfMemory("2 GB"), "OutOfMemory: 2 GB (at", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "RuntimeError: CUDA error", True),
    ],
)
def test_what_is_raised_is_told_in_one_line(
    world: World, capsys: pytest.CaptureFixture[str], error: Exception, detail: str, lost: bool
) -> None:
    world.findings = raising(error)
    by = runner()
    cell = run(by=by)
    assert (cell.verdict, by.device_lost) == (Verdict.ERROR, lost)
    assert cell.detail.startswith(detail)
    assert "\n" not in cell.detail
    assert capsys.readouterr().err == (f"{error}\n" if "\n" in str(error) else "")
    assert bool(world.said("trace")) is not lost


@pytest.mark.parametrize("doing", ["was traced", "was closed"])
@pytest.mark.parametrize(
    ("error", "lost"), [(DeviceError("gone\nat 0x7f"), True), (OutOfMemory("2 GB"), False), (KeyError("x"), False)]
)
def test_a_device_that_is_lost_behind_a_verdict_is_lost_for_the_next_cell(
    world: World, error: Exception, lost: bool, doing: str
) -> None:
    """Whose blame it is not: its worker ends, and another one goes on."""
    world.findings = lambda: Findings([OFF])
    if doing == "was traced":
        world.trace = raising(error)
    else:
        world.close = raising(error)
    by = runner()
    cell = run(by=by)
    assert (cell.verdict, by.device_lost) == (OFF.verdict, lost)
    told = f"; as it {doing}, the device was lost: DeviceError: gone"
    assert cell.detail == OFF.sentence + (told if lost else "")


def test_a_session_that_loses_the_device_as_it_makes_room_is_told_of(world: World) -> None:
    world.close = raising(DeviceError("gone"))
    by = runner()
    for precision in ("fp32", "int4"):
        assert run(replace(AR, precision=precision), by).verdict is Verdict.PASS
    cell = run(replace(AR, config="other"), by)
    assert (cell.verdict, by.device_lost) == (Verdict.ERROR, True)
    assert cell.detail.startswith("DeviceError: gone")


def test_a_number_that_is_not_finite_is_a_check_that_failed(world: World) -> None:
    world.findings = raising(NonFiniteError("layer 1"))
    cell = run()
    (check,) = cell.checks
    assert (check.name, check.ok) == ("engine.finite", False)
    assert (cell.verdict, cell.detail) == (Verdict.FAIL_NONFINITE, check.sentence)
    assert "NonFiniteError: layer 1" in cell.detail


def test_an_engine_that_does_not_load_is_an_error_of_each_cell(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.runner, "create", raising(ImportError("no module")))
    by = runner()
    for _ in range(2):
        assert run(by=by).detail.startswith("ImportError: no module (at")


def test_several_ranks_are_held_against_one_and_against_their_own_ar(world: World) -> None:
    """AR runs once a session of several ranks; of one rank, in every cell: that it gives the same is part of them."""
    by = runner()
    two = replace(TREE, ranks=2)
    run(replace(two, decoder="ar", drafter=""), by)
    assert world.log[-1][3:] == ("micro int4 cpu 1", None)
    run(two, by)
    assert world.log[-1] == ("micro int4 cpu 2", "noisy", two.seed, "micro int4 cpu 1", "ar of micro int4 cpu 2")
    run(replace(two, drafter="hostile"), by)
    assert world.log[-1][4] == "ar of micro int4 cpu 2"
    run(TREE, by)
    assert world.log[-1][3:] == (None, None)
    assert world.said("engine") == ["engine cpu 2", "engine cpu 1"]
    assert world.said("ar") == ["ar micro int4 cpu 2"]
    run(replace(two, precision="fp32"), by)
    assert world.log[-1][4] == "ar of micro fp32 cpu 2", "another session's run is no other's"
    by.close()
    assert world.said("end") == ["end cpu 2", "end cpu 1"]


@pytest.mark.parametrize("failed", [True, False])
def test_a_session_of_several_ranks_that_is_closed_takes_its_ar_along(world: World, failed: bool) -> None:
    by = runner()
    two = replace(TREE, ranks=2)
    run(two, by)
    if failed:
        world.findings = lambda: Findings([OFF])
        run(two, by)
        world.findings = lambda: Findings([FINE])
    else:
        run(AR, by)
        run(replace(AR, config="other"), by)
    run(two, by)
    assert world.said("ar", "close").count("ar micro int4 cpu 2") == 2


def test_cells_of_several_gpus_take_turns_and_no_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda file, how: asked.append(how))
    turns = []
    for point in (AR, replace(AR, ranks=2), replace(AR, device="cuda"), replace(AR, device="cuda", ranks=2)):
        run(point)
        turns.append(len(asked))
    assert turns == [0, 0, 0, 1]
    assert asked == [fcntl.LOCK_EX]
