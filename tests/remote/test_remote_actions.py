"""``kdtree remote`` around its hosts: what it refuses before it asks one, whom it waits for, and its exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from harness import ledger as ledgers
from harness.cells import Cell, Verdict
from harness.matrix import MatrixError, parse
from harness.remote import actions, command
from harness.remote.hosts import Host
from harness.remote.order import Order
from harness.remote.sync import Snapshot, SyncError
from tests.harness.records import FINE, OFF, SOURCES, cell, ledger
from tests.waiting import PATIENCE

A, B = "fp32-ar-block1-cpu", "fp32-ar-prompt1-cpu"
HOSTS = {
    "plain": {"address": "plain"},
    "other": {"address": "other"},
    "card": {"address": "card", "gpus": {"count": 1, "kind": "H200"}, "architectures": ["sm_90"]},
    "cards": {"address": "cards", "gpus": {"count": 2, "kind": "H200"}, "architectures": ["sm_90"]},
}
Go = Callable[..., int]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    monkeypatch.setattr(actions, "describe", lambda root: SOURCES)
    file = tmp_path / "hosts.yaml"
    file.write_text(yaml.safe_dump({"hosts": HOSTS}))
    place = ["--hosts-file", str(file), "--run-dir", str(tmp_path / "run")]
    return lambda *words: command.main([*place, *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nope", "hosts.nope: no such host; there are card, cards, other, plain"),
        ("plain plain", "a host is named twice"),
        ("plian", "hosts.plian: no such host, did you mean plain?"),
        ("", "name hosts of {file}, or name several with --join"),
        ("plain --join plain,other", "name hosts of {file}, or name several with --join"),
        ("--join plain", "--join takes several hosts"),
        ("--join plain,other --each", "and not --each"),
        ("--join plain,other --ranks 2 --ranks 4", "at most one --ranks"),
        ("plain -k nothing-like-this", "matches none of"),
        ("plain --device cuda", "plain cannot run it (gpus in hosts.yaml)"),
        ("plain card --each --device cuda", "plain cannot run it (gpus in hosts.yaml)"),
        ("plain --wheels /nowhere", "holds no wheel"),
    ],
)
def test_what_cannot_be_is_said_before_a_host_is_asked(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    monkeypatch.setattr(actions, "working_tree", lambda root: Snapshot(root, (), ()))
    assert go(*words.split()) == 3
    err = capsys.readouterr().err
    assert err.startswith("kdtree remote: ")
    assert said.format(file=tmp_path / "hosts.yaml") in err
    assert not (tmp_path / "run").exists()


def test_a_tree_that_cannot_be_sent_and_a_folder_that_is_taken(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsent(root: Path) -> Snapshot:
        raise SyncError("a link leads out")

    monkeypatch.setattr(actions, "working_tree", unsent)
    assert go("plain") == 3
    assert "a link leads out" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ledgers.LEDGER_FILE).touch()
    assert go("plain") == 3
    assert "holds the ledger of an earlier run" in capsys.readouterr().err


class Ran:
    """In place of a host's run: it has left this ledger, or this trouble."""

    left: dict[str, tuple[list[Cell], str]]
    seen: list[Order]

    def __init__(
        self, host: Host, order: Order, tree: Snapshot, pool: Any, console: Any, stop: threading.Event
    ) -> None:
        Ran.seen.append(order)
        self.host, self.order, self.pool, self.over = host, order, pool, threading.Event()
        cells, self.trouble = Ran.left.get(host.name, ([], ""))
        self.salvaged: list[Any] = []
        self.notes: list[str] = []
        expected = tuple(sorted(one.id for one in cells))
        made = ledger(*cells, expected=expected, environments={host.name: {}}, run_id=f"of-{host.name}")
        self.shards = [made] if cells else []

    def work(self) -> None:
        self.over.set()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> type[Ran]:
    monkeypatch.setattr(actions, "HostRun", Ran)
    monkeypatch.setattr(actions, "working_tree", lambda root: Snapshot(root, (), ()))
    Ran.left, Ran.seen = {}, []
    return Ran


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(
    ("left", "status", "verdicts"),
    [
        ({"plain": ([cell(A, FINE, host="plain"), cell(B, FINE, host="plain")], "")}, 0, ["PASS", "PASS"]),
        ({"plain": ([cell(A, FINE, host="plain"), cell(B, OFF, host="plain")], "")}, 1, ["PASS", "FAIL_LOGITS"]),
        ({"plain": ([cell(A, FINE, host="plain")], "")}, 2, ["PASS", "NOT_RUN"]),
        ({"plain": ([cell(A, FINE, host="plain")], "gone")}, 3, ["PASS", "NOT_RUN"]),
        ({"plain": ([], "gone")}, 3, ["NOT_RUN", "NOT_RUN"]),
    ],
)
def test_the_status_is_the_ledgers(
    go: Go, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: Any, status: int, verdicts: list[str]
) -> None:
    Ran.left = left
    assert go("plain", "-k", f"{A} or {B}", "--json") == status
    found = json.loads(capsys.readouterr().out)
    made = ledgers.read(tmp_path / "run")
    assert [one.verdict.value for one in made.cells] == verdicts
    count = sum(one.verdict is not Verdict.NOT_RUN for one in made.cells)
    assert found == {
        "run_id": "run",
        "ledger": str(tmp_path / "run" / "ledger.json"),
        "status": status,
        "hosts": {"plain": {"cells": count, "trouble": left["plain"][1]}},
    }
    assert made.command.startswith("kdtree remote ")
    assert (tmp_path / "run" / "junit.xml").exists()


def test_each_host_is_told_of_with_what_it_ran(
    go: Go, ran: type[Ran], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran.left = {"plain": ([cell(A, FINE, host="plain")], ""), "other": ([cell(B, FINE, host="other")], "gone")}
    assert go("plain", "other", "-k", f"{A} or {B}") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["plain: 1 cells", "other: 1 cells; gone"]
    assert said[-1] == f"ledger: {tmp_path / 'run' / 'ledger.json'}"
    assert any("2 of 2 expected cells passed" in line for line in said)


def test_a_dry_run_sends_nothing(
    go: Go, ran: type[Ran], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(actions, "dry_run", lambda host, order, tree: [f"{len(order.points)} cells"])
    assert go("plain", "--dry-run", "-k", A) == 0
    assert capsys.readouterr().out == "plain | 1 cells\n"
    assert ran.seen == []
    assert not (tmp_path / "run").exists()


def test_cells_of_several_gpus_are_those_that_every_host_has(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def of_run(devices: Any, **more: Any) -> Any:
        asked.append((devices, more["gpus"]))
        raise MatrixError("enough")

    monkeypatch.setattr(actions, "of_run", of_run)
    assert go("card", "cards", "plain") == go("plain") == 3
    assert asked == [(["cpu", "cuda"], 1), (["cpu"], 0)]


def test_hosts_that_join_share_every_model_whatever_one_alone_has(
    go: Go, ran: type[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    point = parse("int4-ar-tiny-cuda-x2")
    monkeypatch.setattr(actions.join, "points", lambda hosts, ranks: asked.append(ranks) or [point])

    def arrange(order: Order, hosts: Any, tree: Any, console: Any, stop: Any) -> Any:
        asked.append([host.name for host in hosts])
        return Ran(hosts[0], order, tree, None, console, stop), []

    monkeypatch.setattr(actions.join, "arrange", arrange)
    assert go("--join", "plain,other") == 2
    assert ran.seen[0].points == (point,)
    monkeypatch.setattr(actions.join, "arrange", lambda *_: pytest.fail("the run's folder has a ledger"))
    assert go("--join", "plain,other", "--ranks", "4") == 3
    assert asked == [None, ["plain", "other"], 4]


def test_hosts_share_the_cells_of_all_their_devices(
    go: Go, ran: type[Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "write_reports", lambda *_: None)  # of 490 cells, which this is not about
    go("plain", "card", "--", "-n", "4")
    one, two = ran.seen
    assert {(point.device, point.ranks) for point in one.points} == {("cpu", 1), ("cpu", 2), ("cuda", 1)}
    assert one == two
    assert (one.arguments, one.each, one.filter, one.engine) == (("-n", "4"), False, "", "csrc")
    ran.seen.clear()
    (tmp_path / "run" / ledgers.LEDGER_FILE).unlink()
    go("plain", "other", "--each", "-k", "tiny", "--engine", "mine", "--ranks", "2", "--", "-x")
    assert {(point.device, point.ranks) for point in ran.seen[0].points} == {("cpu", 2)}
    assert ran.seen[0].arguments == ("--ranks", "2", "-x")
    assert (ran.seen[0].each, ran.seen[0].filter, ran.seen[0].engine) == (True, "tiny", "mine")


class Awaited:
    """A run whose end is waited for as often as ``ends`` says; an error there is raised to who waits."""

    def __init__(self, *ends: bool | BaseException, connected: bool = True) -> None:
        self.ends = list(ends)
        self.over, self.pool = self, SimpleNamespace(stop=lambda: self.did.append("stop"))
        link = SimpleNamespace(close=lambda: self.did.append("close"))
        self.session = SimpleNamespace(link=link) if connected else None
        self.did: list[str] = []

    def work(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        end = self.ends.pop(0) if self.ends else True
        if isinstance(end, BaseException):
            raise end
        return end


@pytest.mark.parametrize(
    ("ends", "interrupted", "did"),
    [
        ((False, True), False, []),
        ((False, KeyboardInterrupt(), False, True), True, ["stop"]),
        ((KeyboardInterrupt(), KeyboardInterrupt()), True, ["stop", "stop", "close"]),
    ],
)
def test_one_ctrl_c_waits_for_what_comes_back_and_two_do_not(
    capsys: pytest.CaptureFixture[str], ends: Any, interrupted: bool, did: list[str]
) -> None:
    stop, host = threading.Event(), Awaited(*ends)
    assert actions._wait([host, Awaited(connected=False)], stop) == interrupted  # type: ignore[list-item]
    assert (host.did, stop.is_set(), host.ends) == (did, interrupted, [])
    assert capsys.readouterr().err.count("Ctrl-C again leaves at once") == int(interrupted)


def test_a_run_that_was_interrupted_says_so_by_its_status(
    go: Go, ran: type[Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran.left = {"plain": ([cell(A, FINE, host="plain")], "")}
    monkeypatch.setattr(actions, "_wait", lambda runs, stop: True)
    assert go("plain", "-k", A) == 130


class Other:
    """A host that takes part in a rendezvous."""

    def __init__(self, trouble: str = "", *waits: bool | BaseException) -> None:
        self.trouble, self.waits, self.told = trouble, list(waits), False
        self.ready, self.over = self, SimpleNamespace(wait=lambda seconds: None)
        self.worked = threading.Event()

    def work(self) -> None:
        self.worked.set()

    def wait(self, seconds: float) -> bool:
        one = self.waits.pop(0) if self.waits else True
        if isinstance(one, BaseException):
            raise one
        return one

    def end(self) -> None:
        self.told = True


@pytest.mark.parametrize(
    ("hosts", "started", "interrupted", "trouble"),
    [
        ([("", False, True), ("",)], True, False, ""),
        ([("",), ("its build",)], False, False, "not started: another host of the rendezvous failed"),
        ([("", False, KeyboardInterrupt())], False, True, ""),
    ],
)
def test_the_first_host_begins_when_all_others_are_ready(
    monkeypatch: pytest.MonkeyPatch, hosts: list[Any], started: bool, interrupted: bool, trouble: str
) -> None:
    others = [Other(*host) for host in hosts]
    lead: Any = SimpleNamespace(trouble="", over=threading.Event())
    waited: list[Any] = []
    monkeypatch.setattr(actions, "_wait", lambda runs, stop: waited.extend(runs) or False)
    assert actions._join(lead, others, threading.Event()) == interrupted  # type: ignore[arg-type]
    assert (waited == [lead], lead.trouble) == (started, trouble)
    assert lead.over.is_set() == bool(trouble), "nothing more happens there"
    assert all(other.told and other.worked.wait(PATIENCE) for other in others)
    assert not any(other.waits for other in others)


def test_hosts_that_cannot_be_looked_at_do_not_keep_the_others(
    go: Go, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.remote.link import LinkLost
    from harness.remote.look import Finding

    found = {
        "plain": [Finding("torch", "2.11")],
        "other": [Finding("torch", "missing", "install it"), Finding("a", "b")],
    }

    def examine(host: Host, options: Any) -> list[Finding]:
        if host.name == "card":
            raise LinkLost("gone")
        return found[host.name]

    monkeypatch.setattr(actions, "examine", examine)
    assert go("plain", "--doctor") == 0
    assert capsys.readouterr().out == "plain | torch         ok       2.11\n"
    assert go("card", "--doctor") == go("other", "--doctor") == 3
    capsys.readouterr()
    assert go("card", "other", "plain", "--doctor", "--json") == 3
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["ok"] is False
    assert report["hosts"]["card"] == {"error": "gone"}
    assert [one["ok"] for one in report["hosts"]["other"]] == [False, True]
    assert [one["ok"] for one in report["hosts"]["plain"]] == [True]
    assert "cannot be used: gone" in said.err
    assert "MISSING  missing; install it" in said.err
