"""Cells shared between hosts: each exactly once, the slow ones get fewer, the dead ones' go to the others."""

from __future__ import annotations

import heapq
import random
import threading
import time

import pytest

from harness.remote.share import Pool
from tests.waiting import PATIENCE


def anything(host: str, cell: str) -> bool:
    return True


def race(pool: Pool, speeds: dict[str, float], *, dies: dict[str, int] | None = None) -> dict[str, list[str]]:
    """Simulated hosts, ``speeds`` in cells a second; those in ``dies`` vanish with a batch after so many."""
    ran: dict[str, list[str]] = {host: [] for host in speeds}

    def work(host: str) -> None:
        batches = 0
        while cells := pool.take(host):
            seconds = len(cells) / speeds[host]
            time.sleep(seconds)
            batches += 1
            if dies and batches > dies.get(host, 10**9):
                break
            ran[host] += cells
            pool.finish(host, cells, seconds)
        pool.leave(host)

    threads = [threading.Thread(target=work, args=(host,), daemon=True) for host in speeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return ran


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.remote.share.SHORTEST", 0.01)


def test_slow_hosts_get_fewer() -> None:
    """By a clock of its own: a busy machine makes fast hosts slow."""
    cells, ran = [f"c{i}" for i in range(400)], dict[str, list[str]]()
    speeds = {"fast": 1000, "slow": 250, "slower": 125}
    pool = Pool(cells, speeds, anything)
    ends: list[tuple[float, str, list[str]]] = [(0.0, host, []) for host in speeds]
    left = len(cells)
    while left:
        clock, host, batch = heapq.heappop(ends)
        pool.finish(host, batch, len(batch) / speeds[host])
        batch = pool.take(host)
        left -= len(batch)
        ran[host] = ran.get(host, []) + batch
        heapq.heappush(ends, (clock + len(batch) / speeds[host], host, batch))
    assert sorted(c for done in ran.values() for c in done) == sorted(cells)
    assert len(ran["fast"]) > 2 * len(ran["slow"])
    assert len(ran["slow"]) > len(ran["slower"]) > 0


def test_a_batch_is_half_of_a_hosts_share_by_the_speeds_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: cells a second are 2 for one host, 1 for another, and for the third, unknown, their mean."""
    pool = Pool([f"c{i}" for i in range(100)], ["a", "b", "c"], anything)
    sizes = []
    for host, seconds in (("a", 4.5), ("b", 8.0)):
        batch = pool.take(host)
        sizes.append(len(batch))
        pool.finish(host, [*batch, "of another's"], seconds)
    assert sizes == [9, 8]  # a twelfth of 100, then of 91
    batch = pool.take("c")
    assert len(batch) == 7  # of 83
    pool.finish("c", [], 5.0)
    assert len(pool.take("c")) == 7, "a host that has finished nothing has shown no speed"
    assert len(pool.take("a")) == 17  # 76 * 2 / (2 + 1 + 1.5) / 2
    pool.finish("a", [], 0.0)
    pool.leave("c")
    assert len(pool.take("a")) == 28  # 83 * 2 / (2 + 1) / 2
    monkeypatch.setattr("harness.remote.share.SHORTEST", 10.0)
    assert len(pool.take("b")) == 10  # 55 / 3 / 2 would be less than ten seconds of work
    pool.finish("b", [], 0.0)
    monkeypatch.setattr("harness.remote.share.SHORTEST", 1000.0)
    assert len(pool.take("b")) == 55


def test_what_a_batch_did_not_finish_wakes_those_who_wait() -> None:
    pool = Pool(["x"], ["a", "b"], anything)
    pool.take("a")
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(pool.take("b")), daemon=True)
    thread.start()
    time.sleep(0.05)
    pool.finish("a", [], 1.0)
    thread.join(PATIENCE)
    assert got == [["x"]]


@pytest.mark.slow
def test_a_dead_hosts_cells_go_to_the_others() -> None:
    cells = [f"c{i}" for i in range(200)]
    ran = race(Pool(cells, ["a", "b", "c"], anything), {"a": 500, "b": 500, "c": 500}, dies={"b": 0, "c": 1})
    assert ran["b"] == []
    assert sorted(ran["a"] + ran["c"]) == sorted(cells)


def test_an_idle_host_waits_for_what_another_may_give_back() -> None:
    pool = Pool(["x"], ["a", "b"], anything)
    assert pool.take("a") == ["x"]
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(pool.take("b")), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert got == []
    assert pool.leave("a") == ["x"]
    thread.join(PATIENCE)
    assert got == [["x"]]
    pool.finish("b", ["x"], 1)
    assert pool.take("b") == []


def test_unfinished_cells_of_a_batch_wait_again() -> None:
    pool = Pool(["x", "y", "z"], ["a"], anything)
    assert pool.take("a") == ["x", "y", "z"]
    pool.finish("a", ["y"], 1)
    assert pool.take("a") == ["x", "z"]


def test_hosts_take_only_what_they_can_run() -> None:
    cells = [f"{i}-cuda" if i % 2 else f"{i}-cpu" for i in range(100)]
    ran = race(
        Pool(cells, ["gpu", "cpu"], lambda host, cell: host == "gpu" or cell.endswith("cpu")), {"gpu": 500, "cpu": 500}
    )
    assert sorted(ran["gpu"] + ran["cpu"]) == sorted(cells)
    assert all(cell.endswith("cpu") for cell in ran["cpu"])


def test_what_nobody_can_run_keeps_nobody_waiting() -> None:
    pool = Pool(["x"], ["a", "b"], lambda host, cell: False)
    assert pool.take("a") == pool.take("b") == []


def test_a_single_host_takes_all_at_once() -> None:
    assert len(Pool([str(i) for i in range(1000)], ["a"], anything).take("a")) == 1000


def test_stopping_wakes_everybody() -> None:
    pool = Pool(["x"], ["a", "b"], anything)
    pool.take("a")
    got: list[list[str]] = []
    thread = threading.Thread(target=lambda: got.append(pool.take("b")), daemon=True)
    thread.start()
    pool.stop()
    thread.join(PATIENCE)
    assert got == [[]]


def test_random_histories_lose_and_double_nothing() -> None:
    source = random.Random(7)
    for _ in range(30):
        hosts = [f"h{i}" for i in range(source.randint(1, 5))]
        cells = [f"c{i}" for i in range(source.randint(1, 60))]
        dies = {host: source.randint(0, 3) for host in hosts[1:] if source.random() < 0.6}
        speeds = {host: source.choice([2000.0, 20000.0]) for host in hosts}
        ran = race(Pool(cells, hosts, anything), speeds, dies=dies)
        assert sorted(c for done in ran.values() for c in done) == sorted(cells)
