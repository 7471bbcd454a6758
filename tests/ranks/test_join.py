"""A host that takes part in another's jobs: it waits for the rendezvous, whenever and at whichever port that comes."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from engine.ranks import join
from engine.ranks.job import PORTS, Nodes
from engine.ranks.join import answering, main
from harness.cells import INFRASTRUCTURE
from harness.protocol import RankError

PLACE = Nodes(2, 1, "127.0.0.1", 20000 + secrets.randbelow(12000))  # below those that systems hand out


@pytest.fixture
def listening() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listen(stack: ExitStack, *numbers: int) -> None:
    for number in numbers:
        stack.enter_context(socket.create_server((PLACE.address, PLACE.port + number)))


def test_the_first_port_that_answers_is_taken_from_the_one_after_those_that_failed(listening: ExitStack) -> None:
    assert answering(PLACE, 0, seconds=0) is None
    listen(listening, 2, 5)
    found = [answering(PLACE, first) for first in (0, 2, 3, 6, PORTS + 3)]
    assert [at and at.port - PLACE.port for at in found] == [2, 2, 5, 2, 5]


def test_a_rendezvous_may_come_late(listening: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that holds it compiles first, for minutes: here for as long as nobody has knocked in vain."""
    knocked = threading.Event()
    pause = join.time.sleep
    monkeypatch.setattr(join.time, "sleep", lambda seconds: knocked.set() or pause(seconds))
    late = threading.Thread(target=lambda: knocked.wait() and listen(listening, 1))
    late.start()
    at = answering(PLACE, 0)
    late.join()
    assert at == Nodes(2, 1, PLACE.address, PLACE.port + 1)


class FakeJob:
    """One that comes at the second place where it is tried."""

    asked: list[int] = []  # noqa: RUF012

    def __init__(self, device: str, ranks: int, nodes: Nodes, threads: object, seconds: float) -> None:
        self.asked.append(nodes.port - PLACE.port)
        if len(self.asked) == 1:
            raise RankError("not every rank came")

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> str:
        return ""


def test_a_port_that_is_another_s_is_left_out(
    listening: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--device", "cpu", "--ranks", "1", "--nodes", str(PLACE), "--jobs", "1"]
    monkeypatch.setattr(join, "Job", FakeJob)
    monkeypatch.setattr(join.signal, "signal", lambda *_: None)
    monkeypatch.setattr(join, "KNOCKING", 0.0)
    assert main(line) == INFRASTRUCTURE
    assert f"no rendezvous at 127.0.0.1:{PLACE.port}" in capsys.readouterr().out
    listen(listening, 3, 7)
    monkeypatch.setattr(FakeJob, "asked", [])
    assert main(line) == 0
    assert FakeJob.asked == [3, 7]
    assert f"{PLACE.port + 3}: not every rank came; knocking on\n" in capsys.readouterr().out
