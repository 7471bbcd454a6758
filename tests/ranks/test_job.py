"""Jobs of real processes that torchrun starts: what ends one, whom the report blames, and that nothing is left."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from engine.ranks import watch
from engine.ranks.engine import RankedEngine, RankedSession
from engine.ranks.job import PORTS, VARIABLE, Job, Nodes, free
from engine.ranks.paths import fingerprint, here, portable
from harness.bundles import ensure
from harness.golden import Golden
from harness.limit import CellTimeout, limit
from harness.matrix import parse
from harness.protocol import ConfigError, RankError, RequestError
from harness.runner import Runner
from harness.sources import ROOT
from tests import processes
from tests.waiting import PATIENCE, until

ALLOWED = 30.0  # seconds from the fault to the end of everything
PORT = 20000 + secrets.randbelow(12000)  # below those that systems hand out: who calls one of these may answer himself
TWO = [Nodes(2, node, "127.0.0.1", PORT) for node in range(2)]
WEIGHT = "layers.1.experts.down.qw"


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.open(ensure(["experts"])["experts"], "int4")


def policies(pid: int) -> set[int]:
    """How the threads of a rank that exchange are scheduled: its first one, and gloo's."""
    gloo = [thread for thread, name in processes.threads(pid).items() if "gloo" in name]
    found = {processes.scheduling(thread) for thread in (pid, *gloo)} if gloo else set()
    return {policy for policy in found if policy is not None}


def corrupt(session: RankedSession, pid: int) -> None:
    """One bit of an expert in rank 1's memory, which maps the file read-only."""
    assert processes.flip(pid, session.weights()[1][WEIGHT][0] + 5)


def interrupt(session: RankedSession, pid: int) -> None:
    """A call that this process gives up before its answer comes."""
    assert processes.tell(pid, signal.SIGSTOP)
    with pytest.raises(CellTimeout), limit(0.5, lambda: None):
        session.prefill([1, 2, 3])


def decode_for_ever(session: RankedSession, golden: Golden) -> None:
    while True:
        session.decode(golden.request())


FAULTS: dict[str, tuple[Callable[[RankedSession, int], object], str]] = {
    "killed": (lambda _, pid: processes.tell(pid), "rank 1 died of SIGKILL"),
    "stopped": (lambda _, pid: processes.tell(pid, signal.SIGSTOP), "rank 1 was not heard of for 8 s"),
    "interrupted": (interrupt, "call was interrupted by CellTimeout in the process that asked"),
    "corrupted": (corrupt, f"rank 1 diverged: RankDiverged: rank 1 of 2: {WEIGHT} is not what was loaded"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_job_and_is_named_first(golden: Golden, fault: str) -> None:
    act, verdict = FAULTS[fault]
    engine = RankedEngine("cpu", 2)
    try:
        session = engine.load(Path(golden.file.file), "int4")
        assert session.decode(golden.request("noisy")).tokens == golden.tokens
        if fault == "killed":  # a job costs seconds: what a sound one owes is asked of this one
            closed_and_overtaken_say_so(engine, session, golden)
            if hasattr(os, "SCHED_BATCH"):
                assert policies(engine.job.pids[1]) == {os.SCHED_BATCH}
        pids = [*engine.job.pids.values(), engine.job.torchrun]
        act(session, engine.job.pids[1])
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            decode_for_ever(session, golden)
        assert time.monotonic() - start < ALLOWED
        lines = str(caught.value).splitlines()
        assert lines[0].startswith(verdict)
        if fault != "interrupted":
            assert lines[1] == "  log of rank 1:"
            assert "rank 1 of 2 on cpu" in lines[2]
        until(lambda: not any(map(processes.alive, pids)))
        if fault in ("interrupted", "corrupted"):  # the engine goes on with a new job
            assert engine.load(Path(golden.file.file), "int4").decode(golden.request()).tokens == golden.tokens
    finally:
        engine.close()


def closed_and_overtaken_say_so(engine: RankedEngine, session: RankedSession, golden: Golden) -> None:
    """As on one rank: a closed session stays closed whatever is opened after it, and a stream is ended by the next."""
    closed = engine.load(Path(golden.file.file), "int4")
    closed.close()
    with engine.load(Path(golden.file.file), "int4") as later:
        for use in (lambda: closed.length, lambda: next(closed.stream(golden.request())), closed.broken_guard):
            with pytest.raises(RequestError, match="the session is closed"):
                use()
        assert later.length == 0
    first, second = session.stream(golden.request()), session.stream(golden.request())
    assert next(first) == next(second) == golden.tokens[0]
    with pytest.raises(RequestError, match="ended by another stream"):
        next(first)
    assert (golden.tokens[0], *second) == golden.tokens


@pytest.mark.slow
def test_nothing_outlives_the_process_that_asked_for_it(golden: Golden) -> None:
    code = (
        "import sys, time; from pathlib import Path; from engine.ranks.engine import RankedEngine\n"
        "engine = RankedEngine('cpu', 2); session = engine.load(Path(sys.argv[1]), 'int4')\n"
        "print(*engine.job.pids.values(), engine.job.torchrun, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, golden.file.file], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    until(lambda: not any(map(processes.alive, pids)))


@pytest.mark.slow
def test_two_hosts_share_a_model_over_one_rendezvous(golden: Golden) -> None:
    """Two torchruns on one machine: the second takes part and gets no command of its own."""
    ended: list[str] = []

    def second() -> None:
        with Job("cpu", 1, TWO[1]) as job:
            ended.append(job.wait())

    other = threading.Thread(target=second)
    other.start()
    engine = RankedEngine("cpu", 2, TWO[0])
    session = engine.load(Path(golden.file.file), "int4")
    assert session.decode(golden.request("noisy")).tokens == golden.tokens
    assert list(engine.job.pids) == [0]
    engine.close()
    other.join(PATIENCE)
    assert ended == [""]


@pytest.mark.slow
def test_a_host_that_does_not_come_ends_the_rendezvous() -> None:
    with pytest.raises(RankError, match="not every rank came within 15 s"):
        Job("cpu", 1, TWO[0], start_seconds=15)


def test_a_model_that_cannot_be_shared_starts_no_process(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ranks.engine.Job", None)
    with pytest.raises(ConfigError, match="num_heads: 3 ranks cannot share 4 evenly"):
        RankedEngine("cpu", 3).load(Path(golden.file.file), "int4")


def test_a_port_that_is_taken_is_left_out() -> None:
    """The next of the ports agreed on serves; that none is free says which were tried."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert not free(port)
        engine = RankedEngine("cpu", 2, Nodes(2, 0, "127.0.0.1", port))
        assert port < engine.rendezvous().port < port + PORTS


def test_a_host_s_place_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Nodes(3, 1, "box.example", 23456)
    assert Nodes.of(str(place)) == place
    monkeypatch.setenv(VARIABLE, str(place))
    assert RankedEngine("cpu", 3).nodes == place


@pytest.mark.parametrize("text", ["2", "2,2,box,29500", "a,b,c,d", "2,0,box,0", "2,0,,29500", "3,0,box,29500"])
def test_a_wrong_place_is_named_before_a_process_is_started(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(RankError, match=f"^{VARIABLE}: "):
        RankedEngine("cpu", 2)


def test_a_folder_whose_name_is_too_long_for_a_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(RankError, match="set TMPDIR to a folder with a shorter name"):
        Job("cpu", 1)
    assert list(deep.iterdir()) == []


def test_bundles_are_found_wherever_a_host_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that rank 0 gives stands for the same file in another folder; two files that differ are told apart."""
    first, second = tmp_path / "a" / "x.kdtr", tmp_path / "b" / "x.kdtr"
    for number, path in enumerate((first, second)):
        path.parent.mkdir()
        path.write_bytes(bytes([number]) * 100)
    monkeypatch.setenv("KDTREE_BUNDLES", str(first.parent))
    name = portable(first)
    assert here(name) == first
    monkeypatch.setenv("KDTREE_BUNDLES", str(second.parent))
    assert here(name) == second
    assert here(str(first)) == first
    assert fingerprint(first) != fingerprint(second) != fingerprint(tmp_path / "none")


def test_a_cell_records_the_first_line_of_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RankError("rank 1 died\n  log of rank 1:\n    last words")

    monkeypatch.setattr("harness.runner.create", fail)
    runner = Runner("csrc", {}, seconds=30, host="box", worker="")
    cell = runner.run(parse("fp32-ar-eight-cpu-x2"), print)
    assert cell.detail.startswith("RankError: rank 1 died (at ")
    assert "\n" not in cell.detail
    assert "    last words" in capsys.readouterr().err


@pytest.mark.slow
def test_a_call_without_progress_stops_the_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that still run say nothing for a main thread that is stuck; one that goes on is heard again."""
    ended = threading.Event()
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "STUCK", 0.3)
    monkeypatch.setattr(watch.os, "_exit", lambda status: ended.set())
    monkeypatch.setenv(watch.ADDRESS, str(tmp_path / "line"))
    monkeypatch.setenv(watch.KEY, "00" * 16)
    with Listener(str(tmp_path / "line"), "AF_UNIX", authkey=bytes(16)) as listener:
        made: list[watch.Watch] = []
        rank = threading.Thread(target=lambda: made.append(watch.Watch(3)))
        rank.start()
        line = listener.accept()
        rank.join()
        assert line.recv() == ("hello", "3", str(os.getpid()))

        def beat() -> bool:
            return line.poll(3 * watch.STUCK) and line.recv() == ("beat",)

        with made[0].busy():
            until(lambda: not beat())  # there may be some until then
            until(lambda: (made[0].progress(), beat())[1])  # which a busy machine may let pass unheard
        with made[0].busy(patient=True):
            start = time.monotonic()
            until(lambda: beat() and time.monotonic() - start > 3 * watch.STUCK)
        line.close()
        assert ended.wait(PATIENCE)  # nobody is there who wants it: the rank ends
