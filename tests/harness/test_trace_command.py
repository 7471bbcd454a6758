"""A prefill held against what it should be, and the command around the stages, with their numbers written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.cells import Divergence
from harness.golden import Golden
from harness.prepare import Infrastructure
from harness.protocol import NonFiniteError, RequestError
from harness.trace import command, taps
from harness.trace.taps import Expected

Rows = npt.NDArray[Any]
LOGITS = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
"""Of three rows, the first of which stands before the last of the prompt."""
FIELDS = {"num_layers": 1, "num_heads": 1, "num_experts_per_tok": 1}


def golden(*, rounding: bool = False) -> Any:
    return SimpleNamespace(
        prompt=(1, 2),
        tokens=(3,),
        logits=LOGITS[1:],
        rounding=rounding,
        precision="int4",
        file=SimpleNamespace(file="a.kdtr"),
        field=FIELDS.__getitem__,
        tolerance={"logits": 0.5}.__getitem__,
    )


class Prefilled:
    """A session that gives what it was made with, until it is closed."""

    def __init__(self, found: Mapping[str, Rows], logits: Rows = LOGITS) -> None:
        self._taps = {name: np.array(rows, np.float32) for name, rows in found.items()}
        self._logits = logits.astype(np.float32)
        self._fresh = True
        self.closed = False

    def taps(self, tokens: Sequence[int], *, operations: bool = False) -> dict[str, Rows]:
        assert (tuple(tokens), operations) == ((1, 2, 3), True)
        self._fresh = False
        return self._taps

    def reset(self) -> None:
        self._fresh = True

    def prefill(self, tokens: Sequence[int]) -> Rows:
        assert (tuple(tokens), self._fresh) == ((1, 2, 3), True)
        return self._logits

    def close(self) -> None:
        self.closed = True
        for rows in self._taps.values():
            rows[:] = np.nan


def expected(allowed: float = 0.5, **rows: list[float]) -> Expected:
    names = {name.replace("_", "."): np.array([row]) for name, row in rows.items()}
    return Expected("", names, dict.fromkeys(names, allowed))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle has the embedding alone, the reference one operation."""
    monkeypatch.setattr(taps, "stored", lambda golden: expected(embed=[1.0]))
    monkeypatch.setattr(taps, "reference", lambda golden, tokens: expected(0.25, layers_0_mla_q=[7.0]))


def found(session: Prefilled, against: Expected | None = None, *, rounding: bool = False) -> Divergence | None:
    return command.prefill(session, golden(rounding=rounding), against)  # type: ignore[arg-type]


@pytest.mark.usefixtures("held")
def test_a_prefill_agrees_where_the_bundles_taps_and_logits_do() -> None:
    """The reference's operations are not asked for, however far they are."""
    off = LOGITS.copy()
    off[0] = 9  # before the last row of the prompt there is no golden
    assert found(Prefilled({"embed": [[1.5]], "layers.0.mla.q": [[9.0]], "logits": off}, off)) is None
    assert found(Prefilled({"embed": [[1.5]]})) is None


@pytest.mark.usefixtures("held")
def test_a_tap_of_the_bundle_that_is_off_is_traced_to_an_operation() -> None:
    d = found(Prefilled({"embed": [[2.0]], "layers.0.mla.q": [[8.0]], "logits": LOGITS}))
    assert d is not None
    assert (d.tap, d.allowed, d.got) == ("layers.0.mla.q", 0.25, 8.0)
    d = found(Prefilled({"embed": [[2.0]], "layers.0.mla.q": [[7.25]], "logits": LOGITS + 9}))
    assert d is not None
    assert (d.tap, d.allowed, d.got) == ("embed", 0.5, 2.0)


@pytest.mark.usefixtures("held")
def test_logits_that_are_off_are_those_of_the_taps_or_of_the_prefill_alone() -> None:
    off = LOGITS.copy()
    off[2, 1] += 1
    fine = {"embed": [[1.0]], "layers.0.mla.q": [[7.0]]}
    told = "logits, row 1, token 1: got 5, want 4, allowed 0.5"
    for taken, before in (
        ({"logits": off}, "by step"),
        ({"logits": LOGITS}, "prefill, whose taps agree, by step"),
        ({}, "prefill, whose taps agree, by step"),
    ):
        d = found(Prefilled({**fine, **taken}, off))
        assert d is not None
        assert (d.tap, d.index, d.allowed) == ("logits", (1, 1), 0.5)
        assert d.detail.startswith(f"{before}: {told}")


@pytest.mark.usefixtures("held")
def test_another_engines_taps_are_the_yardstick_where_one_is_named() -> None:
    other = expected(1.0, embed=[5.0], layers_0_mla_q=[5.0])
    assert found(Prefilled({"embed": [[6.0]], "layers.0.mla.q": [[4.0]]}, LOGITS + 9), other) is None
    d = found(Prefilled({"embed": [[6.0]], "layers.0.mla.q": [[3.0]]}), other)
    assert d is not None
    assert (d.tap, d.allowed) == ("layers.0.mla.q", 1.0)


def test_where_engines_round_an_operation_is_held_to_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def operations(golden: Any, tokens: Sequence[int], rows: Mapping[str, Rows]) -> tuple[list[Any], str]:
        asked.append((tuple(tokens), set(rows)))
        return [], "the first that is off"

    monkeypatch.setattr(command, "operations", operations)
    assert found(Prefilled({"embed": [[9.0]]}), rounding=True) == "the first that is off"  # type: ignore[comparison-overlap]
    assert asked == [((1, 2, 3), {"embed"})]


@pytest.mark.parametrize(
    ("name", "made"),
    [("cpu", ("csrc", "cpu")), ("cuda", ("csrc", "cuda")), ("wrong:tree", ("wrong:tree", "cpu"))],
)
def test_another_engine_is_off_by_as_much_as_this_one(
    monkeypatch: pytest.MonkeyPatch, name: str, made: tuple[str, str]
) -> None:
    """Twice the bound, of the taps that have one; what it gave outlives its session."""
    session = Prefilled({"embed": [[1.0]], "layers.0.mla.q": [[2.0]], "its.own": [[3.0]]})
    opened: list[Any] = []

    def create(*which: str) -> Any:
        opened.append(which)
        return SimpleNamespace(load=lambda path, precision: opened.append((path, precision)) or session)

    monkeypatch.setattr(command, "create", create)
    bounds = Expected("", {}, {"embed": 0.25, "layers.0.mla.q": 4.0, "logits": 1.0})
    monkeypatch.setattr(taps, "reference", lambda golden, tokens: bounds if tokens == (1, 2, 3) else None)
    other = command.other_engine(name, golden())
    assert opened == [made, (Path("a.kdtr"), "int4")]
    assert session.closed
    assert other.allowed == {"embed": 0.5, "layers.0.mla.q": 8.0}
    assert {tap: rows.tolist() for tap, rows in other.rows.items()} == {"embed": [[1.0]], "layers.0.mla.q": [[2.0]]}


CELL = "int4-ddtree-tiny-noisy-cpu"
OFF = Divergence("embed", (0, 1), 2.0, 1.0, 0.5, 3, "embed, row 0, element 1: got 2")


class Stages:
    """In place of the real ones: what there is to find, and what was asked for."""

    def __init__(self) -> None:
        self.found: list[Divergence | None] = [None, None]
        self.error: Exception | None = None
        self.asked: list[Any] = []

    def __call__(
        self, session: Any, golden: Any, drafter: str, seed: int, against: Any = None, say: Any = None
    ) -> Iterator[Any]:
        self.asked.append((drafter, against))
        for name, found in zip(("prefill", "steps"), self.found, strict=False):
            yield command.Stage(name, found)
        if self.error:
            raise self.error


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    made = Stages()
    monkeypatch.setattr(command, "stages", made)
    monkeypatch.setattr(command, "rows_of", lambda golden: 65)
    monkeypatch.setattr(command, "prepare", lambda engine, points, say: {points[0].config: Path("a.kdtr")})
    monkeypatch.setattr(Golden, "open", lambda path, precision: golden())
    monkeypatch.setattr(command, "create", lambda *which: SimpleNamespace(load=lambda *_, **__: None))
    monkeypatch.setattr(command, "other_engine", lambda name, golden: f"taps of {name}")
    return made


def test_the_status_and_the_report_say_whether_something_diverges(
    stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([CELL]) == 0
    assert capsys.readouterr().out.splitlines() == ["prefill   agrees", "steps     agrees"]
    assert command.main([CELL, "--json", "--against", "cuda"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["divergence"] is None
    assert (report["cell"], report["engine"], report["against"]) == (CELL, "csrc", "cuda")
    stages.found = [None, OFF]
    assert command.main([CELL]) == 1
    assert capsys.readouterr().out.splitlines()[1] == f"steps     DIVERGES: {OFF.detail}"
    assert command.main([CELL, "--json", "--engine", "mine"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["stages"] == [{"name": "prefill", "agrees": True}, {"name": "steps", "agrees": False}]
    assert (report["divergence"]["tap"], report["engine"]) == ("embed", "mine")
    assert stages.asked == [("noisy", None), ("noisy", "taps of cuda"), ("noisy", None), ("noisy", None)]


@pytest.mark.parametrize("name", ["int4-ar-k26_layer-cpu", "int4-ar-k26_layer-cpu-x2", f"{CELL}-x2"])
def test_cells_of_real_sizes_and_of_several_ranks_can_be_traced(stages: Stages, name: str) -> None:
    assert command.main([name]) == 0


def test_what_keeps_a_trace_from_its_end_is_named(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages.error = RequestError("too many rows")
    assert command.main([CELL]) == 3
    assert capsys.readouterr().err == "kdtree trace: RequestError: too many rows\n"

    def missing(*_: Any) -> Any:
        raise Infrastructure("no bundle")

    monkeypatch.setattr(command, "prepare", missing)
    assert command.main([CELL]) == 3
    assert capsys.readouterr().err == "kdtree trace: no bundle\n"


def test_a_search_that_meets_what_is_not_finite_ends(stages: Stages) -> None:
    stages.error = NonFiniteError("row 3")
    assert command.first_divergence(None, golden()) is None  # type: ignore[arg-type]
