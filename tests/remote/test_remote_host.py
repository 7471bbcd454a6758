"""One host's part of a run and the ledger of all of them, against a far side that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.ranks.job import Nodes
from harness import ledger as ledgers
from harness.cells import Cell, Ledger, Verdict, exit_status
from harness.filters import select
from harness.matrix import expected, parse
from harness.remote import run
from harness.remote.hosts import Host, Limits
from harness.remote.join import Joiner
from harness.remote.link import FarError, LinkLost
from harness.remote.order import Order, pools
from harness.remote.run import HostRun, assemble
from harness.remote.session import Outcome, Stopped
from harness.remote.ssh_auth import ConnectionFailed
from harness.remote.sync import File, Snapshot
from tests.harness.records import FINE, OFF, SOURCES, cell, ledger
from tests.waiting import PATIENCE

A, B = "fp32-ar-block1-cpu", "fp32-ar-prompt1-cpu"
ENDED = Outcome(0, 0, "")
SENT = replace(SOURCES, harness="s" * 64)
"""What the order says of the tree; hosts' ledgers say what their commands found there."""
TREE = Snapshot(Path("/"), (), ())
Left = Callable[[Path], int]
"""Writes what a batch left into a folder; how many files there were."""


def nothing(folder: Path) -> int:
    return 0


def left(*cells: Cell, of: Sequence[str] = (A, B), **fields: Any) -> Left:
    """A ledger, in which those of ``of`` that are not among ``cells`` did not run."""

    def write(folder: Path) -> int:
        host = cells[0].host if cells else "one"
        blank = ledger(expected=tuple(sorted(of)), run_id=folder.name, environments={host: {}}, **fields)
        ledgers.write(ledgers.complete(blank, cells), folder)
        return 1

    return write


def recorded(*cells: Cell) -> Left:
    """No ledger, but the records of single cells."""

    def write(folder: Path) -> int:
        for one in cells:
            ledgers.record(one, folder)
        return len(cells)

    return write


def fine(id: str, host: str = "one") -> Cell:
    return cell(id, FINE, host=host)


class Far:
    """A session: every command ends well, and a batch as ``batches`` say. A value that is an error is raised."""

    def __init__(self, batches: Sequence[tuple[Outcome, Left]] = (), **answers: Any) -> None:
        self.batches, self.answers = list(batches), answers
        self.facts = {"user": "u", "node": "n", "python": "3", "system": "s", "machine": "m", "workdir": "/there"}
        self.link = SimpleNamespace(skew=answers.get("skew", 0.0))
        self.directory = "/far"
        self.did: list[str] = []
        self.commands: list[tuple[list[str], float]] = []
        self.environments: list[dict[str, str]] = []

    def _answer(self, name: str, value: Any) -> Any:
        self.did.append(name)
        given = self.answers.get(name, value)
        if isinstance(given, BaseException):
            raise given
        return given

    def connected(self) -> Far:
        self._answer("connect", None)
        return self

    def sync(self, tree: Snapshot, part: str, progress: Callable[[int, int], None]) -> Any:
        return self._answer(f"sync {part}", SimpleNamespace(files=9, contents=2, bytes=100, seconds=0.1))

    def prune(self) -> Any:
        return self._answer("prune", {"runs": 0, "bytes": 0})

    def lock(self, command: str, waiting: Callable[[str], None]) -> Any:
        return self._answer("lock", True)

    def unlock(self) -> None:
        self._answer("unlock", None)

    def prepare(self, env: dict[str, str]) -> Any:
        return self._answer("prepare", ENDED)

    def run(self, argv: list[str], *, limit: float, env: dict[str, str] | None = None) -> Any:
        self.commands.append((argv, limit))
        self.environments.append(dict(env or {}))
        if "test" not in argv:
            return self._answer("install" if "install" in argv else argv[3], ENDED)
        self.did.append("test")
        outcome, self._left = self.batches.pop(0)
        return outcome

    def fetch(self, path: str, folder: Path) -> int:
        assert f"/far/{path}" in self.commands[-1][0]
        assert folder.name == Path(path).name
        folder.mkdir(parents=True)
        return self._left(folder)

    def close(self) -> None:
        self.did.append("close")


@pytest.fixture
def order(tmp_path: Path) -> Order:
    points = tuple(select(expected(["cpu"]), f"{A} or {B}"))
    assert {point.id for point in points} == {A, B}
    return Order(tmp_path / "run", "id", "kdtree remote one", points, sources=SENT)


@pytest.fixture
def worked(order: Order, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ledger]]:
    """``worked(one=Far(...), two=Far(...), each=True, host={...})``: the hosts one after the other, and their ledger.

    ``worked.runs`` has the hosts' runs afterwards, ``worked.said`` the lines about them.
    """

    def work(*, each: bool = False, host: dict[str, Any] | None = None, wheels: Any = None, **fars: Far) -> Ledger:
        asked = replace(order, each=each, wheels=wheels)
        hosts = [Host(name, name, **(host or {})) for name in fars]
        shared, stop = pools(asked, hosts), threading.Event()
        work.said = []  # type: ignore[attr-defined]
        console: Any = SimpleNamespace(sink=lambda *_: None, say=lambda name, text: work.said.append((name, text)))  # type: ignore[attr-defined]
        work.stop = stop  # type: ignore[attr-defined]
        work.runs = [HostRun(one, asked, TREE, shared[one.name], console, stop) for one in hosts]  # type: ignore[attr-defined]
        monkeypatch.setattr(run, "Session", lambda host, *_: fars[host.name].connected())
        for one in work.runs:  # type: ignore[attr-defined]
            one.work()
            assert one.over.is_set()
        made = assemble(asked, "2025-01-02T03:04:05Z", work.runs)  # type: ignore[attr-defined]
        ledgers.write(made, order.run_dir)  # which refuses what is none
        (order.run_dir / ledgers.LEDGER_FILE).unlink()
        return made

    return work  # type: ignore[return-value]


def verdicts(made: Ledger) -> dict[str, str]:
    return {one.id: one.verdict.value for one in made.cells}


def test_a_host_that_does_all_there_is_to_do(worked: Any, order: Order) -> None:
    far = Far([(ENDED, left(fine(A), fine(B)))])
    limits = Limits(prepare=11, command=22)
    made = worked(one=far, host={"limits": limits, "prepare": ("true",), "python": "py"})
    assert far.did == [
        "connect",
        "sync tree",
        "prune",
        "lock",
        "prepare",
        "build",
        "bundles",
        "test",
        "unlock",
        "close",
    ]
    assert [limit for _, limit in far.commands] == [11, 11, 22]
    assert all(env["KDTREE_BUILD"] == "/there/cache/build" for env in far.environments)
    assert (verdicts(made), made.problems, made.notes) == ({A: "PASS", B: "PASS"}, (), ())
    assert (exit_status(made), made.started, made.run_id) == (0, "2025-01-02T03:04:05Z", "run")
    assert made.environments == {"one": {}}
    assert made.sources == SOURCES
    assert not worked.runs[0].trouble
    assert not any("FAILED" in text for _, text in worked.said)
    assert 0 <= worked.runs[0].pool._seconds["one"] < PATIENCE


def test_cells_that_a_batch_did_not_run_are_asked_for_again(worked: Any) -> None:
    far = Far([(Outcome(2, 0, ""), left(fine(A))), (ENDED, left(fine(B), of=[B]))])
    made = worked(one=far)
    assert exit_status(made) == 0
    assert made.problems == ()
    assert "prepare" not in far.did, "nothing to do first"
    asked = [[word for word in argv if "test_cell" in word] for argv, _ in far.commands if "test" in argv]
    assert asked == [[], [f"tests/test_matrix.py::test_cell[{B}]"]]


BOTH = left(fine(A), fine(B))
ONE_OFF = left(fine(A), cell(B, OFF, host="one"))
OFF_THERE = {A: "PASS", B: "FAIL_LOGITS"}
HALF, NONE = {A: "PASS", B: "NOT_RUN"}, {A: "NOT_RUN", B: "NOT_RUN"}


@pytest.mark.parametrize(
    ("outcome", "leaves", "found", "trouble", "status"),
    [
        (Outcome(1, 0, ""), ONE_OFF, OFF_THERE, "", 1),
        (ENDED, ONE_OFF, NONE, "status 0 came back with a ledger of status 1", 3),
        (ENDED, left(fine(A)), NONE, "status 0 came back with a ledger of status 2", 3),
        (Outcome(1, 0, ""), BOTH, NONE, "status 1 came back with a ledger of status 0", 3),
        (Outcome(3, 0, ""), BOTH, NONE, "status 3 came back with a ledger of status 0", 3),
        (Outcome(3, 0, ""), left(fine(A)), HALF, "the matrix ended with status 3", 3),
        (Outcome(2, 0, ""), left(), NONE, "ran none of its cells", 3),
        (Outcome(3, 0, ""), left(problems=("no bundles", "no GPU")), NONE, "no bundles; no GPU", 3),
        (Outcome(0, 9, ""), recorded(fine(A)), HALF, "killed by SIGKILL (out of memory?)", 3),
        (Outcome(0, 0, "limit", 7.2), BOTH, None, "the time limit ended it after 7 s", 0),
        (Outcome(0, 0, "limit", 7.2), nothing, NONE, "the time limit ended it after 7 s", 3),
        (Outcome(5, 0, ""), nothing, NONE, "ended with status 5 and left no ledger", 3),
    ],
)
def test_what_a_batch_left_and_how_it_ended(
    worked: Any, outcome: Outcome, leaves: Left, found: dict[str, str] | None, trouble: str, status: int
) -> None:
    """What one of the two calls passed and the other does not is not believed; what had been recorded is kept."""
    far = Far([(outcome, leaves)])
    made = worked(one=far)
    assert worked.runs[0].trouble == trouble
    assert verdicts(made) == (found or {A: "PASS", B: "PASS"})
    assert exit_status(made) == status
    assert made.problems == ((f"one: {trouble}",) if status == 3 else ())
    assert made.notes == ((f"one: {trouble}; its cells ran elsewhere",) if trouble and status == 0 else ())
    assert far.did[-2:] == ["unlock", "close"]


@pytest.mark.parametrize(
    ("answers", "last", "trouble"),
    [
        ({"prepare": Outcome(4, 0, "")}, "prepare", "prepare: ended with status 4"),
        ({"build": Outcome(0, 9, "")}, "build", "build for cpu: killed by SIGKILL (out of memory?)"),
        ({"bundles": Outcome(0, 0, "cancelled")}, "bundles", "bundles: interrupted"),
    ],
)
def test_a_host_that_cannot_be_prepared_gets_no_cells(
    worked: Any, answers: dict[str, Any], last: str, trouble: str
) -> None:
    far = Far(**answers)
    made = worked(one=far, two=Far([(ENDED, left(fine(A, "two"), of=[A])), (ENDED, left(fine(B, "two"), of=[B]))]),
                  host={"prepare": ("true",)})  # fmt: skip
    assert far.did[-3:] == [last, "unlock", "close"]
    assert made.notes == (f"one: {trouble}; its cells ran elsewhere",)
    assert (exit_status(made), made.problems) == (0, ())
    assert {one.host for one in made.cells} == {"two"} == set(made.environments)
    made = worked(one=Far(**answers), each=True, two=Far([(ENDED, left(fine(A, "two"), fine(B, "two")))]),
                  host={"prepare": ("true",)})  # fmt: skip
    assert (exit_status(made), made.problems) == (3, (f"one: {trouble}",))
    assert set(made.environments) == {"one", "two"}


def test_every_host_runs_every_cell_where_that_is_asked_for(worked: Any) -> None:
    made = worked(each=True, **{n: Far([(ENDED, left(fine(A, n), fine(B, n), per_host=True))]) for n in ("one", "two")})
    assert exit_status(made) == 0
    assert sorted((one.id, one.host) for one in made.cells) == [(id, host) for id in (A, B) for host in ("one", "two")]


def test_a_box_that_is_never_free(worked: Any) -> None:
    far = Far(lock=False)
    made = worked(one=far, host={"limits": Limits(queue=33)})
    assert far.did[-2:] == ["lock", "close"]
    assert made.problems == ("one: the box was not free within 33 s",)


@pytest.mark.parametrize(
    ("where", "error", "trouble"),
    [
        ("connect", ConnectionFailed("refused"), "refused"),
        ("connect", LinkLost("gone"), "gone (connecting); what ran there ends by itself, run it again"),
        ("sync tree", LinkLost("gone"), "gone (sending the tree); what ran there ends by itself, run it again"),
        ("build", LinkLost("gone"), "gone (build for cpu); what ran there ends by itself, run it again"),
        ("prune", FarError("full", "no room"), "no room"),
        ("bundles", OSError(), "OSError"),
        ("lock", Stopped(), "interrupted"),
        ("lock", RuntimeError("odd"), "internal error: RuntimeError: odd"),
    ],
)
def test_what_breaks_a_host_is_said_and_its_cells_are_given_back(
    worked: Any, order: Order, where: str, error: Exception, trouble: str
) -> None:
    far = Far(**{where: error})
    made = worked(one=far)
    assert far.did[-2:] == ([where, "close"] if where != "connect" else [where])
    assert made.problems == (f"one: {trouble}",)
    assert worked.said[-1] == ("one", f"FAILED: {trouble}")
    assert (order.run_dir / "hosts" / "one" / "error.txt").exists() == isinstance(error, RuntimeError)


def test_a_link_that_is_lost_amid_a_batch_gives_its_cells_to_others(worked: Any) -> None:
    def lost(folder: Path) -> int:
        raise LinkLost("gone")

    far = Far([(ENDED, lost)])
    made = worked(one=far, two=Far([(ENDED, left(fine(A, "two"), of=[A])), (ENDED, left(fine(B, "two"), of=[B]))]))
    trouble = "gone (running 1 cells); what ran there ends by itself, run it again"
    assert worked.said[-1][0] == "two"
    assert ("one", f"FAILED: {trouble}; gives back 1 cells") in worked.said
    assert (made.notes, exit_status(made)) == ((f"one: {trouble}; its cells ran elsewhere",), 0)


def test_what_is_lost_after_ctrl_c_was_interrupted(worked: Any) -> None:
    def lost(folder: Path) -> int:
        worked.stop.set()
        raise LinkLost("gone")

    assert worked(one=Far([(ENDED, lost)])).problems == ("one: interrupted",)


@pytest.mark.parametrize(("skew", "way"), [(2.0, ""), (-2.0, ""), (3.4, "3 s ahead"), (-3.4, "3 s behind")])
def test_a_clock_that_is_off_is_noted(worked: Any, skew: float, way: str) -> None:
    made = worked(one=Far([(ENDED, BOTH)], skew=skew))
    note = f"one: the host's clock is {way}; times in its entries are by its clock"
    assert (made.notes, exit_status(made)) == ((note,) if way else (), 0)


@pytest.mark.parametrize("pip", [True, False])
def test_wheels_are_installed_by_pip_or_by_the_one_that_is_sent(worked: Any, pip: bool) -> None:
    names = ["a.whl", "pip-1.whl"] if pip else ["a.whl"]
    sent = Snapshot(Path("/"), tuple(File(name.encode(), 0o644, "", 0) for name in names), ())
    far = Far([(ENDED, BOTH)])
    worked(one=far, wheels=sent, host={"python": "py"})
    assert far.did[1:3] == ["sync tree", "sync wheels"]
    argv, limit = far.commands[0]
    assert limit == Limits().prepare
    assert argv[: 2 if pip else 3] == (["py", "/far/wheels/pip-1.whl/pip"] if pip else ["py", "-m", "pip"])
    assert argv[-len(names) - 1 :] == ["/far/site", *(f"/far/wheels/{name}" for name in names)]
    assert {env.get("PYTHONPATH") for env in far.environments[1:]} == {"/far/site"}
    failed = worked(one=Far(install=Outcome(1, 0, "")), wheels=sent)
    assert failed.problems == ("one: wheels: ended with status 1",)


def test_records_alone_are_of_the_tree_that_was_sent(worked: Any) -> None:
    made = worked(one=Far([(Outcome(0, 9, ""), recorded(fine(A), fine(B)))]))
    assert (made.sources, exit_status(made)) == (SENT, 0)
    assert made.environments == {"one": {}}
    made = worked(one=Far([(Outcome(0, 9, ""), recorded(fine(A)))]), two=Far([(ENDED, left(fine(B, "two"), of=[B]))]))
    assert (made.sources, exit_status(made)) == (SOURCES, 0)
    assert worked(one=Far(lock=False)).sources == SENT


def test_a_salvaged_host_is_known_by_its_first_batch(worked: Any) -> None:
    """Its environment is what the first ledger says, and stays so where a later batch left records alone."""
    first = left(fine(A), of=[A, B])

    def told(folder: Path) -> int:
        count = first(folder)
        whole = ledgers.read(folder)
        ledgers.write(replace(whole, environments={"one": {"os": "Linux"}}), folder)
        return count

    far = Far([(Outcome(2, 0, ""), told), (Outcome(0, 9, ""), recorded(fine(B)))])
    made = worked(one=far)
    assert made.environments == {"one": {"os": "Linux"}}
    assert (made.sources, exit_status(made)) == (SOURCES, 0)
    assert verdicts(made) == {A: "PASS", B: "PASS"}
    assert {one.verdict for one in made.cells} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("answers", "told", "trouble"),
    [
        ({}, True, ""),
        ({}, False, "its ranks: ended with status 0"),
        ({"--device": Outcome(0, 9, "")}, False, "its ranks: killed by SIGKILL (out of memory?)"),
        ({"--device": Stopped()}, True, ""),
        ({"--device": Stopped()}, False, "interrupted"),
        ({"build": Outcome(1, 0, "")}, False, "build for cpu: ended with status 1"),
    ],
)
def test_a_host_that_takes_part_runs_its_ranks_until_it_is_told_to_end(
    order: Order, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], told: bool, trouble: str
) -> None:
    far = Far(**answers)
    monkeypatch.setattr(run, "Session", lambda *_: far)
    two = replace(order, points=(parse(f"{A}-x2"),))
    console: Any = SimpleNamespace(sink=lambda *_: None, say=lambda *_: None)
    joiner = Joiner(Host("two", "two", python="py"), two, TREE, console, threading.Event(), Nodes(2, 1, "one", 29500))
    joiner.told = told
    joiner.work()
    assert joiner.ready.is_set()
    assert joiner.trouble == trouble
    assert ("--device" in far.did) == ("build" not in answers)
    if "build" not in answers:
        place = str(Nodes(2, 1, "one", 29500))
        line = ["py", "-m", "engine.ranks.join", "--device", "cpu", "--ranks", "1", "--nodes", place]
        assert far.commands[-1] == (line, Limits().command)
