"""Targets: of which cases, on which side, and that committed records say of them what their figures give."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from harness.bench.cases import cases
from harness.bench.step import K26, WIDTHS, plans
from harness.bench.targets import TARGETS, verdicts
from harness.sources import ROOT

K7168 = "k26-linear-int4-bf16-k7168-n4096-m"
ATTENTION = "k26-mla_attention-bf16-t1024-h64-m16"


@pytest.mark.parametrize(
    ("x_floor", "humming", "floor", "fast"),
    [(1.35, 16.0, "held", "held"), (1.3501, 15.99, "missed", "missed"), (0.9, 99.0, "held", "held")],
)
def test_a_floor_is_to_be_kept_near_and_a_peer_left_behind(
    x_floor: float, humming: float, floor: str, fast: str
) -> None:
    assert verdicts("cuda", f"{K7168}4", 4, 10.0, x_floor, {"humming": humming}) == {
        "at most 1.35x the floor": floor,
        "at least 1.6x humming": fast,
        "at least 5x humming-invariant": "not measured",
    }


def test_a_time_is_held_up_to_its_microsecond() -> None:
    name = "k26-accept-m16"
    assert verdicts("cuda", name, 16, 10.0, 99.0, {}) == {"at most 10 us": "held"}
    assert verdicts("cuda", name, 16, 10.01, 0.5, {}) == {"at most 10 us": "missed"}


def test_targets_of_several_lines_are_all_held_against() -> None:
    assert verdicts("cuda", ATTENTION, 16, 10.0, 9.0, {"flash-mla": 15.0, "no-tree": 9.7}) == {
        "at least 1.5x flash-mla": "held",
        "at least 0.98x no-tree": "missed",
    }


def test_what_has_no_target_has_no_verdict() -> None:
    """Another width, another device, another case."""
    assert verdicts("cuda", f"{K7168}64", 64, 1.0, 1.0, {}) != verdicts("cuda", f"{K7168}16", 16, 1.0, 1.0, {})
    assert verdicts("cuda", f"{K7168}2", 2, 1.0, 1.0, {}) == {}
    assert verdicts("cpu", f"{K7168}4", 4, 1.0, 1.0, {}) == {}
    assert verdicts("cuda", "k26-router-e384-m4", 4, 1.0, 1.0, {}) == {}


def test_every_target_is_of_a_case() -> None:
    names = {(device, case.name, case.M) for device in ("cpu", "cuda") for case in cases(device)}
    names |= {("cuda", plan.name, plan.M) for plan in plans([K26], WIDTHS, [])}
    for target in TARGETS:
        found = {m for device, name, m in names if device == target.device and fnmatchcase(name, target.case)}
        assert found, target
        assert found >= {*target.widths}, target


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_record_is_faster_than_its_roofline(device: str) -> None:
    """A ceiling that is not of the operation's own numbers gives shares above 1 where computing is the bound."""
    record = json.loads((ROOT / "docs" / "evidence" / f"bench-{device}.json").read_text("utf-8"))
    cold = [line for line in record["cases"] if line["cold"]]
    assert len(cold) > 10
    assert not [(line["case"], line["roofline"]) for line in cold if not 0 < line["roofline"] <= 1.02]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_records_say_what_their_figures_give(device: str) -> None:
    """So a target that is set anew is set against what was measured; the numbers stand in the records in words."""
    record = json.loads((ROOT / "docs" / "evidence" / f"bench-{device}.json").read_text("utf-8"))
    said = 0
    for line in [*record["cases"], *record["steps"]]:
        peers = line.get("peers", {})
        given = verdicts(device, line["case"], line["M"], line["us"], line["x_floor"], peers)
        assert given == line["targets"], f"{line['case']}: with a target that is new, the record's words are, too"
        said += len(line["targets"])
    assert said >= len([target for target in TARGETS if target.device == device])
