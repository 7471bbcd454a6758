"""A trace names the operation, row and head that are wrong, and for trees the round, the row and its path.

The engines here are the reference with one fault each, planted where the trace should find it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness import widths
from harness.bundles import ensure
from harness.cells import Divergence, Verdict
from harness.describe import describe
from harness.golden import Golden
from harness.matrix import parse
from harness.protocol import OPERATION_TAPS
from harness.reference_engine import ReferenceSession
from harness.runner import Runner
from harness.trace import command as trace
from harness.trace import steps as trace_steps
from harness.trace import taps as trace_taps
from harness.widths import ancestors
from refs.elementary import F
from refs.exact import SUMMATIONS
from refs.model import Index, Model

pytestmark = pytest.mark.usefixtures("remembered")


@pytest.fixture
def path(micro: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, few in (("MAX_ROWS", 16), ("PATHS", 3), ("DEPTH", 4)):
        monkeypatch.setattr(widths, name, few)
    return micro


@pytest.fixture
def golden(path: Path) -> Golden:
    return Golden.open(path, "int4")


class TappedSession(ReferenceSession):
    """With the taps of a tree, which the reference engine does not offer."""

    def verify_taps(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[str, Any]:
        self._model._tap = {}
        logits = self._model.verify(tokens, parents)
        found, self._model._tap = self._model._tap, None
        return {name: np.asarray(rows, np.float32) for name, rows in (found | {"logits": logits}).items()}


def session(path: Path, model: type[Model] = Model, kind: type[ReferenceSession] = ReferenceSession) -> Any:
    return kind(model.open(path, "int4"), 65)


def found(path: Path, golden: Golden, model: type[Model], drafter: str = "", **options: Any) -> Divergence:
    divergence = trace.first_divergence(session(path, model, **options), golden, drafter)
    assert divergence is not None
    return divergence


class OneHead(Model):
    """Row 5, head 2 of the rotated queries of layer 1 is off in its fourth element."""

    def _attend(self, q: F, q_rope: F, k: F, v: F, layer: int, keys: Index) -> F:
        if layer == 1 and q_rope.shape[0] > 5:
            q_rope[5, 2, 3] += 1e-3
        return super()._attend(q, q_rope, k, v, layer, keys)


class TwoLayers(Model):
    """Layer 0 is off by little in its MLP, layer 1 by much."""

    def _note(self, name: str, value: F) -> None:
        if name == "layers.0.mlp.act":
            value *= 1 + 1e-4
        if name == "layers.1.mla.q_a":
            value += 1
        super()._note(name, value)


class LateStep(Model):
    """A row that is alone in its forward does not see the key before it, from position 9 on."""

    def _keys(self, parents: Sequence[int], depths: Sequence[int]) -> Index:
        keys = super()._keys(parents, depths)
        if len(parents) == 1 and self.length >= 9:
            keys[0, self.length - 1] = -1
        return keys


class Siblings(Model):
    """A row of a tree sees the row before it, which is its sibling or a stranger."""

    def _keys(self, parents: Sequence[int], depths: Sequence[int]) -> Index:
        keys = super()._keys(parents, depths)
        for row in range(2, len(parents)):
            if parents[row] != row - 1 and depths[row] == 1:
                keys[row, self.length] = self.length + row - 1
        return keys


class Dense(Model):
    """The first rows of a verify are committed in place of the path's."""

    def commit(self, path: Sequence[int]) -> None:
        before, pending = self.length, self._pending
        caches = [cache[before : before + len(path)].copy() for cache in (*self._latent, *self._k_rope)]
        super().commit(path)
        if pending != tuple(range(-1, len(pending) - 1)):
            for cache, rows in zip((*self._latent, *self._k_rope), caches, strict=True):
                cache[before : before + len(path)] = rows


class WideOnly(Model):
    """A verify of 15 rows or more gives its last row another position."""

    def _forward(self, tokens: Index, depths: Index, keys: Index) -> F:
        branches = depths.tolist() != list(range(len(depths)))
        if tokens.size >= 15 and branches:
            depths = depths.copy()
            depths[-1] += 1
        return super()._forward(tokens, depths, keys)


@pytest.mark.parametrize("drafter", ["", "noisy"])
def test_nothing_diverges_in_the_reference(path: Path, golden: Golden, drafter: str) -> None:
    names = [stage.name for stage in trace.stages(session(path), golden, drafter)]
    assert names == [
        "prefill",
        "steps",
        *(["trees"] if drafter else []),
        "decode",
        *(["sampling", "widths"] if drafter else []),
    ]
    assert trace.first_divergence(session(path), golden, drafter) is None


@pytest.mark.parametrize("summation", sorted(SUMMATIONS))
def test_bounds_leave_float32_alone(path: Path, golden: Golden, summation: str) -> None:
    tokens = (*golden.prompt, *golden.tokens)
    rows = Model.open(path, "int4", np.float32, summation=summation).taps(tokens, operations=True)
    assert {tap.split(".", 2)[-1] for tap in rows} >= set(OPERATION_TAPS)
    assert trace_taps.first(golden, rows, trace_taps.reference(golden, tokens)) is None


def test_operation_row_and_head_are_named(path: Path, golden: Golden) -> None:
    d = found(path, golden, OneHead)
    assert (d.tap, d.index, d.count) == ("layers.1.mla.q_rope", (5, 2, 3), 1)
    assert d.got - d.want == pytest.approx(1e-3, rel=1e-2)
    assert d.allowed < 1e-4
    assert d.detail.startswith("layer 1, mla.q_rope, row 5, head 2, element 3: got ")
    assert d.detail.endswith("; everything before it agrees")


def test_the_earliest_of_several_is_named(path: Path, golden: Golden) -> None:
    assert found(path, golden, TwoLayers).tap == "layers.0.mlp.act"


@pytest.mark.parametrize("kind", [ReferenceSession, TappedSession])
def test_a_step_that_parts_from_the_prefill(path: Path, golden: Golden, kind: type[ReferenceSession]) -> None:
    d = found(path, golden, LateStep, kind=kind)
    step = 9 - len(golden.prompt) + 1
    assert d.detail.startswith(f"step {step} (position 9), against one prefill of the same tokens, which agrees: ")
    # without taps the first cache row behind layer 0's attention
    tap, row = ("layers.0.mla.o_lat", 0) if kind is TappedSession else ("layers.1.mla.latent", 9)
    assert (d.tap, d.index[0], d.allowed) == (tap, row, 0)


@pytest.mark.parametrize("kind", [ReferenceSession, TappedSession])
def test_the_round_the_row_and_its_path(path: Path, golden: Golden, kind: type[ReferenceSession]) -> None:
    rounds = golden.rounds("noisy")
    number, row = next(
        (i, row)
        for i, round in enumerate(rounds)
        for row, parent in enumerate(round.parents)
        if row >= 2 and parent == 0 and round.parents[row] != row - 1
    )
    d = found(path, golden, Siblings, "noisy", kind=kind)
    way = " > ".join(map(str, ancestors(rounds[number].parents, row)))
    assert d.detail.startswith(f"verify, round {number}, row {row} of {len(rounds[number].tokens)} (depth 1, ")
    assert f"path {way})" in d.detail
    assert d.tap == ("layers.0.mla.o_lat" if kind is TappedSession else "layers.1.mla.latent")


def test_a_commit_of_the_wrong_rows(path: Path, golden: Golden) -> None:
    rounds = golden.rounds("noisy")
    number = next(i for i, r in enumerate(rounds) if list(r.accepted) != list(range(len(r.accepted))))
    d = found(path, golden, Dense, "noisy")
    assert d.detail.startswith(f"commit of rows {list(rounds[number].accepted)}, round {number}, whose verify agrees")
    assert d.tap == "layers.0.mla.latent"


def test_a_fault_that_wide_trees_alone_have(path: Path, golden: Golden) -> None:
    d = found(path, golden, WideOnly, "noisy", kind=TappedSession)
    assert d.detail.startswith("verify, random tree of width 15, row 14 of 15 ")
    assert d.tap == "layers.0.mla.q_rope"


@pytest.mark.parametrize(
    ("fault", "tap"), [("tree", "rounds.tokens"), ("tokens", "tokens"), ("logits", "logits"), ("bitwise", "logits")]
)
def test_a_loop_that_parts_from_its_parts(path: Path, fault: str, tap: str) -> None:
    runner = Runner(f"wrong:{fault}", {"micro": path}, seconds=300, host="", worker="")
    cell = runner.run(parse("int4-ddtree-micro-noisy-cpu"), print)
    assert cell.verdict is not Verdict.PASS
    assert cell.divergence is not None
    assert cell.divergence.tap == tap
    assert f"first divergence: {cell.divergence.detail}" in " ".join(describe(cell).split())


def test_a_value_of_an_expert_names_it(golden: Golden) -> None:
    k = golden.field("num_experts_per_tok")
    want = np.zeros((2, 8 * k))
    got: npt.NDArray[np.float32] = want.astype(np.float32)
    got[1, -1] = 1.0
    ids = np.arange(2 * k, dtype=np.float32).reshape(2, k)[:, ::-1]
    tap = "layers.1.moe.act"
    d = trace_taps.first(golden, {tap: got, "layers.1.moe.ids": ids}, trace_taps.Expected("", {tap: want}, {tap: 0.0}))
    assert d is not None
    assert f"row 1, choice {k - 1} (expert {k}), element 7: got 1" in d.detail


def test_nan_is_a_divergence(golden: Golden) -> None:
    want = np.zeros((3, 40))
    got: npt.NDArray[np.float32] = want.astype(np.float32)
    got[1, 7] = np.nan
    d = trace_taps.differ(golden, "logits", got, want, 1e30)
    assert d is not None
    assert d.index == (1, 7)
    assert trace_taps.differ(golden, "logits", want.astype(np.float32), want, 0.0) is None


def test_a_tap_of_another_shape(golden: Golden) -> None:
    d = trace_taps.differ(golden, "logits", np.zeros((3, 39), np.float32), np.zeros((3, 40)), 1.0)
    assert d is not None
    assert "shape [3, 39], expected [3, 40]" in d.detail


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "int4-ddtree-budget1-hostile-cpu"
    assert trace.main([cell, "--engine", "wrong:tree", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [stage["agrees"] for stage in report["stages"]] == [True, True, True, False]
    assert report["divergence"]["tap"] == "rounds.tokens"
    assert trace.main(["int4-ar-nowhere-cpu"]) == 3
    assert "is no cell of the matrix" in capsys.readouterr().err


def test_command_against_another_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["fp32-ar-budget1-cpu", "--engine", "reference", "--against", "cpu"]) == 0
    assert "prefill   agrees" in capsys.readouterr().out


class MasksOnly(Model):
    """The drafter's block begins with a mask in place of the bonus."""

    def draft(self, bonus: int) -> F:
        return super().draft(self.config.mask_id)


def test_a_wrong_drafter_is_named_before_its_trees() -> None:
    path = ensure(["dflash"])["dflash"]
    golden = Golden.open(path, "int4")
    stages = trace_steps.decoding(session(path, MasksOnly), golden, "dflash")
    assert stages is not None
    assert (stages.tap, len(stages.index)) == ("draft", 2)
    assert "round 0 of the drafter, by depth: draft, row" in stages.detail
    assert trace_steps.decoding(session(path), golden, "dflash") is None
