"""Measured costs: interpolated, kept, and used without changing a token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine import costs, create
from engine.costs import StepCosts
from harness import bundles
from harness.golden import Golden
from harness.protocol import DecodeRequest, OwnDrafter, RequestError


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
        assert done.logits.tobytes() == ar.logits.tobytes()
        assert len(done.round_seconds) == done.forwards
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
