"""Measured costs: interpolated, kept, and used without changing a token."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_ops import same_bits

from engine import costs, create
from engine.costs import StepCosts
from harness import bundles
from harness.golden import Golden
from harness.protocol import Decoded, DecodeRequest, OwnDrafter, RequestError, Round


def test_costs_between_the_widths_that_were_measured() -> None:
    made = StepCosts((1, 2, 4, 8), (1.0, 2.0, 1.5, 4.0))
    assert made.by_nodes(9) == pytest.approx((1, 2, 2, 2, 2.5, 3, 3.5, 4, 4.5, 5))
    assert StepCosts((1,), (3.0,)).by_nodes(2) == (3.0, 3.0, 3.0)


def test_costs_are_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> StepCosts:
        calls.append(1)
        return StepCosts((1, 4), (1.0, 2.0))

    for _ in range(2):
        assert costs.kept({"device": "a"}, make, tmp_path) == StepCosts((1, 4), (1.0, 2.0))
    assert len(calls) == 1
    assert costs.kept({"device": "b"}, make, tmp_path)
    assert len(calls) == 2
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text("utf-8"))["rows"] == [1, 4]
        path.write_text("{")
    costs.kept({"device": "a"}, make, tmp_path)
    assert len(calls) == 3, "a broken file was believed"
    (tmp_path / "file").touch()
    assert costs.kept({"device": "a"}, make, tmp_path / "file") == StepCosts((1, 4), (1.0, 2.0))


def rows(done: Sequence[object]) -> list[int]:
    return [len(r.tokens) for r in done]  # type: ignore[attr-defined]


def test_auto_budget_decodes_what_ar_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundles.ensure(["dflash"])["dflash"]
    prompt = Golden.open(path, "int4").prompt
    engine = create("cpu")
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path))  # for the costs: the engine is loaded
    with engine.load(path, "int4", max_rows=24) as session:
        ar = session.decode(DecodeRequest(prompt, 18, record=True))
        request = DecodeRequest(prompt, 18, OwnDrafter(), block_size=5, record=True)
        asked = session.auto_budget(request, limit=20)
        assert (asked.budget, len(asked.costs)) == (20, 21)
        assert list((tmp_path / "costs").iterdir()), "nothing was kept"
        done = session.decode(asked)
        assert done.tokens == ar.tokens
        assert done.logits is not None
        assert ar.logits is not None
        same_bits(done.logits, ar.logits, "DDTree's logits against AR's, [step, token]")
        assert len(done.round_seconds) == done.forwards
        assert sum(done.round_seconds) == pytest.approx(done.decode_seconds, rel=1e-3)
        dear = session.decode(replace(asked, costs=[1.0] + [1e6] * 20))
        free = session.decode(replace(asked, costs=[1.0] * 21))
        assert dear.tokens == free.tokens == ar.tokens
        assert set(rows(dear.rounds)) == {1}
        assert rows(free.rounds)[0] == 21
        for wrong in ([1.0] * 20, [1.0] * 20 + [0.0], [float("nan")] * 21):
            with pytest.raises(RequestError, match="cost"):
                session.decode(replace(asked, costs=wrong))
        with pytest.raises(RequestError, match="AR has no tree"):
            session.auto_budget(DecodeRequest(prompt, 18))


def test_chain_is_the_best_token_of_each_depth() -> None:
    path = bundles.ensure(["dflash"])["dflash"]
    golden = Golden.open(path, "fp32")
    with create("cpu").load(path, "fp32", max_rows=24) as session:
        done = session.decode(replace(golden.request("dflash"), chain=True))
    assert done.tokens == golden.tokens
    assert done.draft_logits is not None
    for drawn, logits in zip(done.rounds, done.draft_logits, strict=True):
        assert list(drawn.tokens[1:]) == logits.argmax(-1).tolist()[: len(drawn.tokens) - 1]
        assert list(drawn.parents) == list(range(-1, len(drawn.tokens) - 1))


class Timed:
    """A session that cuts every tree where the costs of its request are least, and has seconds by runs and rows.

    A round that was cut short, which takes no time, ends each decode.
    """

    def __init__(self, by_run: Sequence[dict[int, float]], most: int = 1000) -> None:
        self.by_run, self.most = by_run, most
        self.asked: list[DecodeRequest] = []

    def decode(self, request: DecodeRequest) -> Decoded:
        earlier = sum(other.costs == request.costs for other in self.asked)
        self.asked.append(request)
        assert sorted(request.costs)[1:2] in ([], [1e30]), "a second size of trees pays"
        width = min(int(np.argmin(request.costs)) + 1, self.most)
        seconds = self.by_run[earlier].get(width)
        if seconds is None:
            return Decoded((), 0, "limit", ())
        widths = [width, width, 0]
        trees = tuple(Round((0,) * n, (-1,) * n, (0,)) for n in widths)
        return Decoded((1,), 3, "limit", (1,) * 3, rounds=trees, round_seconds=(seconds + 1, seconds, 0.0))


REQUEST = DecodeRequest((1, 2, 3), 7, OwnDrafter(), block_size=3, temperature=0.7)


@pytest.mark.parametrize(
    ("budget", "widths"), [(0, (1,)), (1, (1, 2)), (14, (1, 2, 4, 8, 12, 15)), (15, (1, 2, 4, 8, 12, 16))]
)
def test_the_fastest_round_of_three_runs_counts(budget: int, widths: tuple[int, ...]) -> None:
    """Not those of the first run, which warms, nor rounds of fewer rows."""
    runs: list[dict[int, float]] = [{n: share * n for n in widths} for share in (0.5, 3.0, 2.0, 4.0)]
    session = Timed(runs)
    assert costs.measure(session, REQUEST, budget) == StepCosts(widths, tuple(2.0 * n for n in widths))  # type: ignore[arg-type]
    assert len(session.asked) == 4 * len(widths)
    for asked in session.asked:
        assert asked == replace(REQUEST, max_tokens=32, budget=budget, costs=asked.costs, temperature=0.0, record=True)
        assert len(asked.costs) == budget + 1


def test_widths_that_no_tree_reaches_are_left_out() -> None:
    runs = [dict.fromkeys(range(1, 9), 1.0)] * 4
    session = Timed(runs, most=5)
    assert costs.measure(session, REQUEST, 7).rows == (1, 2, 4)  # type: ignore[arg-type]
    for none in ({}, {2: 1.0, 4: 1.0}):
        with pytest.raises(RequestError, match="no round could be timed"):
            costs.measure(Timed([none] * 4), REQUEST, 3)  # type: ignore[arg-type]


def test_what_auto_asks_for_is_kept_by_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    identities: list[dict[str, str]] = []

    def kept(identity: dict[str, str], make: Callable[[], StepCosts]) -> StepCosts:
        identities.append(identity)
        return make()

    monkeypatch.setattr(costs, "kept", kept)
    session = Timed([{1: 1.0, 2: 1.5, 3: 4.0}] * 4)
    asked = costs.auto(session, REQUEST, {"model": "m"}, 2)  # type: ignore[arg-type]
    assert asked == replace(REQUEST, budget=2, costs=(1.0, 1.5, 4.0))
    assert identities == [{"model": "m", "budget": "2", "drafter": "OwnDrafter", "block": "3", "context": "16"}]
    for prompt, tokens, context in (((1,), 0, "1"), ((1,), 1, "2"), ((1,) * 9, 7, "16"), ((1,) * 9, 8, "32")):
        session = Timed([{1: 1.0, 2: 1.5, 3: 4.0}] * 4)
        costs.auto(session, replace(REQUEST, prompt=prompt, max_tokens=tokens), {}, 2)  # type: ignore[arg-type]
        assert identities[-1]["context"] == context


def test_an_identity_is_of_machine_build_model_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.environment.cpu", lambda: ("a processor", "what it can"))
    for name in ("KDTREE_THREADS", "OMP_NUM_THREADS", "KDTREE_ISA"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "model.kdtr"
    file.write_bytes(bytes(range(64)) + b"behind the header")

    def found() -> dict[str, str]:
        return costs.identity(tmp_path / "cpu-abc" / "library.so", "cpu", file, "int4", 2)

    assert found() == {
        "device": f"a processor, {os.cpu_count()} threads, best",
        "engine": "cpu-abc",
        "model": hashlib.sha256(bytes(range(64))).hexdigest(),
        "precision": "int4",
        "ranks": "2",
    }
    for name, value, device in (
        ("OMP_NUM_THREADS", "3", "a processor, 3 threads, best"),
        ("KDTREE_THREADS", "5", "a processor, 5 threads, best"),
        ("KDTREE_ISA", "avx2", "a processor, 5 threads, avx2"),
    ):
        monkeypatch.setenv(name, value)
        assert found()["device"] == device


def test_summary() -> None:
    assert costs.summary([2.0, 3.0]) == "2 rows 1.50"
    assert costs.summary([2.0, 3.0, 3.0, 5.0]) == "2 rows 1.50, 4 rows 2.50"
