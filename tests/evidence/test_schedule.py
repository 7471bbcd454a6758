"""What starts next, without starting anything: order, room, quiet, time and what waits for what."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness.evidence import schedule
from harness.evidence.schedule import NO_TIME, PASSED, RUNNING, WAITING, decide
from harness.evidence.stages import Stage, stages
from harness.filters import matcher
from harness.mutants.catalogue import CONTROLS

PLENTY = 1000.0


def stage(seconds: float = 10, **fields: object) -> Stage:
    return Stage(("true",), seconds, **fields)  # type: ignore[arg-type]


KNOWN = {
    "build": stage(48, prepares=True),
    "slow-build": stage(200, needs=("build",), beside=True, prepares=True),
    "tests": stage(70, needs=("build",)),
    "bench": stage(97, needs=("build",), quiet=True),
    "left": stage(20, needs=("build",), share=0.5),
    "right": stage(20, needs=("build",), share=0.5),
    "faults": stage(60, needs=("build",), after=("slow-build",)),
}


def waiting(*names: str, **others: str) -> dict[str, str]:
    return dict.fromkeys(names, WAITING) | others


def test_stages_begin_in_their_order_once_what_they_need_has_passed() -> None:
    all_wait = waiting(*KNOWN)
    assert decide(KNOWN, all_wait, PLENTY).start == ("build",)
    assert decide(KNOWN, all_wait | {"build": RUNNING}, PLENTY).start == ()
    assert decide(KNOWN, all_wait | {"build": PASSED}, PLENTY).start == ("slow-build", "tests")


def test_what_waits_for_another_is_overtaken_and_what_waits_for_room_is_not() -> None:
    states = waiting("left", "faults") | {"build": PASSED, "slow-build": RUNNING, "tests": RUNNING}
    assert decide(KNOWN, states | {"bench": WAITING}, PLENTY).start == ()
    assert decide(KNOWN, states, PLENTY).start == ()
    states |= {"tests": PASSED}
    assert decide(KNOWN, states, PLENTY).start == ("left",)
    assert decide(KNOWN, states | {"slow-build": "out of time"}, PLENTY).start == ("left",)
    assert decide(KNOWN, states | {"slow-build": "out of time", "left": PASSED}, PLENTY).start == ("faults",)


def test_shares_of_the_machine_add_up_to_one() -> None:
    done = {"build": PASSED}
    room_for_one = waiting("tests", "right") | done | {"left": RUNNING}
    assert decide(KNOWN, room_for_one, PLENTY).start == (), "not before the one that waits for more room"
    assert decide(KNOWN, waiting("left", "right") | done, PLENTY).start == ("left", "right")
    assert decide(KNOWN, waiting("right") | done | {"left": RUNNING}, PLENTY).start == ("right",)
    assert decide(KNOWN, waiting("right") | done | {"tests": RUNNING}, PLENTY).start == ()


def test_what_measures_runs_alone_and_what_runs_beside_is_suspended() -> None:
    done = {"build": PASSED}
    found = decide(KNOWN, waiting("bench", "left", "faults") | done | {"slow-build": RUNNING}, PLENTY)
    assert (found.start, found.quiet) == (("bench",), True)
    found = decide(KNOWN, waiting("left", "slow-build", "faults") | done | {"bench": RUNNING}, PLENTY)
    assert (found.start, found.quiet) == ((), True)
    assert decide(KNOWN, waiting("bench", "slow-build", "faults") | done, PLENTY).start == ("bench",)
    assert decide(KNOWN, waiting("bench") | done | {"left": RUNNING}, PLENTY).start == ()
    assert not decide(KNOWN, waiting("left") | done, PLENTY).quiet


def test_what_would_not_end_in_time_does_not_begin_nor_does_what_prepares_it() -> None:
    done = {"build": PASSED}
    assert decide(KNOWN, waiting("bench", "left") | done, 50).dropped == {"bench": NO_TIME}
    assert decide(KNOWN, waiting("bench", "left") | done, 50).start == ("left",)
    # 200 s of building and 60 s of faults, which would fit by themselves, but expect what was built
    assert decide(KNOWN, waiting("slow-build", "faults") | done, 259).dropped == {
        "slow-build": NO_TIME,
        "faults": NO_TIME,
    }
    assert decide(KNOWN, waiting("slow-build", "faults") | done, 260).dropped == {}
    found = decide(KNOWN, waiting("slow-build", "bench", "faults") | done, 356)  # 97 s of it suspended
    assert (found.start, found.dropped) == (("bench",), dict.fromkeys(("slow-build", "faults"), NO_TIME))
    assert decide(KNOWN, waiting("slow-build", "bench", "faults") | done, 357).dropped == {}
    every = decide(KNOWN, waiting(*KNOWN), 5)
    assert (every.start, every.dropped) == ((), dict.fromkeys(KNOWN, NO_TIME))
    assert decide(KNOWN, waiting("build"), 50).start == ("build",)  # asked for by itself


def test_what_others_need_begins_in_its_own_time_unless_it_only_prepares_them() -> None:
    for prepares in (False, True):
        known = {"first": stage(10, prepares=prepares), "second": stage(91, needs=("first",))}
        assert decide(known, waiting(*known), 101).start == ("first",)
        found = decide(known, waiting(*known), 100)
        dropped = dict.fromkeys(known if prepares else ("second",), NO_TIME)
        assert (found.start, found.dropped) == (() if prepares else ("first",), {} if not prepares else dropped)
    found = decide(KNOWN, {"build": PASSED, "slow-build": WAITING, "faults": "interrupted"}, PLENTY)
    assert (found.start, found.dropped) == ((), {"slow-build": NO_TIME}), "nothing waits for it any more"


@pytest.mark.parametrize(
    ("beside", "between", "least"),
    [
        (False, dict.fromkeys(("left", "right"), stage(50, share=0.5)), 55),  # side by side, while it is made
        (False, {"half": stage(10, share=0.5)}, 25),
        (False, {"bench": stage(30, quiet=True)}, 35),
        (True, {"bench": stage(30, quiet=True)}, 55),  # suspended for 30 of its 50 s
        (True, {"other": stage(24, beside=True)}, 25),
        (False, {"long": stage(100)}, 25),  # has no time itself
    ],
)
def test_what_prepares_has_until_the_turn_of_what_waits_for_it(
    beside: bool, between: dict[str, Stage], least: float
) -> None:
    known = {"made": stage(20, prepares=True, beside=beside), **between, "uses": stage(5, needs=("made",))}
    for left, made in ((least, True), (least - 1, False)):
        found = decide(known, waiting(*known), left)
        assert {"made": not made, "uses": not made} == {name: name in found.dropped for name in ("made", "uses")}


def test_what_keeps_its_pieces_begins_in_a_third_of_its_time() -> None:
    known = {**KNOWN, "faults": stage(60, needs=("build",), after=("slow-build",), piecewise=True)}
    built = waiting("faults") | {"build": PASSED}
    assert decide(known, built, 20).start == ("faults",)
    assert decide(known, built, 19).dropped == {"faults": NO_TIME}
    assert decide(known, built | {"slow-build": WAITING}, 220).start == ("slow-build",)
    assert decide(known, built | {"slow-build": WAITING}, 219).start == ()
    assert {name for name, one in stages("h200").items() if one.piecewise} == {"faults", "broken"}


def test_a_need_that_has_not_passed_is_told_of_and_takes_what_waits_with_it() -> None:
    found = decide(KNOWN, waiting("tests", "slow-build", "faults") | {"build": "failed"}, PLENTY)
    assert found.dropped == dict.fromkeys(("tests", "slow-build", "faults"), "not started: build failed")


def test_a_preparation_ends_when_nothing_waits_for_it_any_more() -> None:
    states = waiting("faults") | {"build": PASSED, "slow-build": RUNNING}
    assert decide(KNOWN, states, 60).stop == ()
    found = decide(KNOWN, states, 59)
    assert (found.stop, found.dropped) == (("slow-build",), {"faults": NO_TIME})
    assert decide(KNOWN, {"slow-build": RUNNING}, 5).stop == ()  # asked for by itself


def test_what_is_chosen_brings_what_prepares_it_on_every_machine_again() -> None:
    def chosen(*only: str, skip: tuple[str, ...] = (), passed: tuple[str, ...] = ()) -> set[str]:
        return schedule.chosen(KNOWN, only, skip, frozenset(passed))

    assert chosen() == set(KNOWN)
    assert chosen("faults") == {"build", "slow-build", "faults"}
    assert chosen("faults", skip=("slow-build",)) == {"build", "faults"}
    assert chosen("slow-build") == {"build", "slow-build"}
    assert chosen(skip=("faults", "bench")) == {"build", "tests", "left", "right"}
    assert chosen(passed=("build", "tests", "bench", "left", "right")) == {"build", "slow-build", "faults"}
    assert chosen(passed=tuple(KNOWN)) == set()


def run(known: Mapping[str, Stage], budget: float) -> dict[str, str]:
    """A run in which every stage takes the time expected, by the second; suspended ones take longer."""
    states = dict.fromkeys(schedule.chosen(known, (), (), frozenset()), WAITING)
    spent = dict.fromkeys(known, 0.0)
    for now in range(int(budget)):
        found = decide(known, states, budget - now)
        states |= found.dropped | dict.fromkeys(found.start, RUNNING) | dict.fromkeys(found.stop, "no longer needed")
        running = [name for name, state in states.items() if state == RUNNING]
        assert sum(known[name].share for name in running if not known[name].beside) <= 1
        assert sum(known[name].quiet for name in running) <= 1
        for name in running:
            spent[name] += not (found.quiet and known[name].beside)
            if spent[name] >= known[name].seconds:
                states[name] = PASSED
        if not set(states.values()) & {WAITING, RUNNING}:
            break
    return states


@pytest.mark.parametrize("budget", [60, 540, 4000])
def test_the_table_of_stages_comes_to_an_end_in_any_time(budget: float) -> None:
    known = {name: stage for name, stage in stages("h200").items() if stage.gpus == 1}
    states = run(known, budget)
    states = {name: PASSED if known[name].piecewise and how == RUNNING else how for name, how in states.items()}
    assert set(states.values()) <= {PASSED, NO_TIME, "no longer needed"}
    passed = {name for name, state in states.items() if state == PASSED}
    if budget == 540:  # of a machine that is lent for ten minutes
        assert passed >= {"tests", "engine", "matrix", "step", "bench", "pairs"}
    if budget == 4000:
        assert passed == set(known)


def test_ranks_share_a_gpu_where_there_is_but_one() -> None:
    assert stages("h200")["ranks-matrix"].environment == {"KDTREE_RANKS_SHARE_GPU": "1"}
    assert not stages("h200", 2)["ranks-matrix"].environment


def test_faults_do_not_wait_for_engines_without_one() -> None:
    """A control runs every cell and operation in one process: a window ended with it in place of the faults."""
    known = stages("h200")
    for name in ("faults-build", "faults"):
        command = known[name].command
        assert not matcher(command[command.index("-k") + 1])(["unedited", CONTROLS])
    assert matcher(known["controls"].command[known["controls"].command.index("-k") + 1])(["unedited", CONTROLS])


def test_every_stage_waits_for_stages_that_come_before_it() -> None:
    known = stages("h200", 2)
    names = list(known)
    for at, (name, one) in enumerate(known.items()):
        assert set(one.waits_for) <= set(names[:at]), name
        assert one.record or one.counts or one.prepares, name
        assert one.share == 1 or not one.quiet, name
    records = [one.record for one in known.values() if one.record]
    assert len(records) == len(set(records))
