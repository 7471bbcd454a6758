"""A series of runs leaves a record after each, goes on where it ended, and is red as soon as one run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from harness.sources import Sources
from tests import false_alarms


def test_no_property_fails_because_the_machine_is_busy() -> None:
    """By a deadline of each example, or because examples take long to draw."""
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_a_series_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setattr(false_alarms, "ROOT", tmp_path)

    def describe() -> Sources:
        return Sources("c0ffee", ("record.json",) if record.exists() else (), "", "", "")

    monkeypatch.setattr(false_alarms, "describe", describe)
    began: list[tuple[int, int]] = []

    def one(seed: int, workers: int, device: str, folder: Path) -> dict[str, Any]:
        if len(began) == 2:
            raise KeyboardInterrupt
        began.append((seed, workers))
        return {"seed": seed, "workers": workers, "status": 0, "seconds": 1.0, "passed": 3, "expected": 3, "failed": {}}

    monkeypatch.setattr(false_alarms, "one", one)
    series = ["--runs", "4", "--workers", "1", "2", "--seed", "7", "--json", str(record)]
    with pytest.raises(KeyboardInterrupt):
        false_alarms.main([*series, "--loops", "0"])
    content = json.loads(record.read_text())
    assert [(run["seed"], run["workers"]) for run in content["runs"]] == began == [(7, 1), (8, 2)]
    assert (content["loops"], content["device"]) == (0, "cpu")
    assert (content["commit"], content["dirty"]) == ("c0ffee", [])
    assert "environment" in content
    began.clear()
    with pytest.raises(KeyboardInterrupt):
        false_alarms.main([*series, "--loops", "1"])
    assert began == [(7, 1), (8, 2)], "under another load nothing had been seen"
    monkeypatch.setattr(false_alarms, "one", lambda *a: began.append(a[:2]) or {**content["runs"][0], "seed": a[0]})
    assert false_alarms.main([*series, "--loops", "1"]) == 0
    assert began[2:] == [(9, 1), (10, 2)]
    assert len(json.loads(record.read_text())["runs"]) == 4


@pytest.mark.parametrize("change", [{"status": 1}, {"passed": 2}, {"passed": 0, "expected": 0}])
def test_one_run_that_is_not_green_makes_the_series_red(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, int]
) -> None:
    fine = {"workers": 1, "status": 0, "seconds": 1.0, "passed": 3, "expected": 3, "failed": {}}
    monkeypatch.setattr(false_alarms, "one", lambda seed, *_: {**fine, "seed": seed, **(change if seed == 1 else {})})
    assert false_alarms.main(["--runs", "1", "--loops", "0"]) == 0
    assert false_alarms.main(["--runs", "2", "--loops", "0"]) == 1
