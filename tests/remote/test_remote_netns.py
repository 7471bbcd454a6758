"""Hosts in network namespaces of their own, behind links that can be cut: no packets any more, and nothing is closed.

Needs the right to make namespaces (root); where that is missing, each test says so and is skipped.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import ledger as ledgers
from harness.remote.hosts import Limits
from harness.remote.link import LinkLost
from harness.remote.ssh import connect
from harness.remote.ssh_auth import ConnectionFailed
from harness.remote.sync import working_tree
from tests.remote.sshd import Sshd, alive, public
from tests.remote.support import Open, Remote, Server, matrix, until, until_it_says


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Box:
    """A namespace with an sshd, reached over a veth pair."""

    def __init__(self, number: int, folder: Path, authorized: Path) -> None:
        tag = secrets.token_hex(3)
        self.name, self.near, self.far = f"kdtree-{tag}", f"kdn{tag}", f"kdf{tag}"
        net = f"198.18.{secrets.randbelow(250)}.{4 * (number + 8 * secrets.randbelow(8))}".rsplit(".", 1)
        first = int(net[1])
        self.address = f"{net[0]}.{first + 2}"
        self.sshd: Sshd | None = None
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self.near, "type", "veth", "peer", "name", self.far)
            ip("link", "set", self.far, "netns", self.name)
            ip("addr", "add", f"{net[0]}.{first + 1}/30", "dev", self.near)
            ip("link", "set", self.near, "up")
            ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", self.far)
            for device in ("lo", self.far):
                ip("-n", self.name, "link", "set", device, "up")
            prefix = ["ip", "netns", "exec", self.name]
            self.sshd = Sshd(folder / self.name, authorized, address=self.address, prefix=prefix)
        except BaseException:
            self.remove()
            raise

    def cut(self) -> None:
        """Take the far end down: what is sent vanishes, and no one says so."""
        ip("-n", self.name, "link", "set", self.far, "down")

    def remove(self) -> None:
        if self.sshd:
            self.sshd.stop()
        # The link as well: sockets that still try to send keep a namespace alive for minutes.
        for argv in (["ip", "link", "del", self.near], ["ip", "netns", "del", self.name]):
            subprocess.run(argv, capture_output=True, check=False)


Make = Callable[[int], list[Box]]


@pytest.fixture
def boxes(server: Server, tmp_path: Path) -> Iterator[Make]:
    if os.getuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    made: list[Box] = []

    def make(count: int) -> list[Box]:
        try:
            for number in range(count):
                made.append(Box(number, tmp_path, server.authorized))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        return made

    yield make
    for box in made:
        box.remove()


def key(box: Box) -> str:
    assert box.sshd is not None
    return public(box.sshd.keys[0])


def test_a_dropped_link(boxes: Make, server: Server, connect: Open, tmp_path: Path, repo: Path, marker: str) -> None:
    (box,) = boxes(1)
    host = server.host(tmp_path, address=box.address, port=2222, host_key=key(box), limits=Limits(silence=4))
    session = connect(host)
    session.sync(working_tree(repo))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            session.run(["sleep", marker], limit=60)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: alive(marker), 10)
    box.cut()
    began = time.monotonic()
    thread.join(20)
    assert [type(e) for e in errors] == [LinkLost]
    assert time.monotonic() - began < 4 + 5
    until(lambda: not alive(marker), 15)  # the far side, too, has noticed, on its own


def test_a_link_that_is_cut_while_we_send(
    boxes: Make, server: Server, connect: Open, tmp_path: Path, repo: Path
) -> None:
    """The kernel's buffer is full then, and whoever writes waits in it."""
    (repo / "big").write_bytes(os.urandom(32 << 20))
    (box,) = boxes(1)
    host = server.host(tmp_path, address=box.address, port=2222, host_key=key(box), limits=Limits(silence=3))
    session = connect(host)
    cut: list[float] = []

    def progress(done: int, total: int) -> None:
        if not cut and done > 4 << 20:
            box.cut()
            cut.append(time.monotonic())

    errors: list[BaseException] = []

    def work() -> None:
        try:
            session.sync(working_tree(repo), progress=progress)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until(lambda: cut, 20)
    thread.join(3 + 7)
    assert [type(e) for e in errors] == [LinkLost]
    assert "nothing was heard" in str(errors[0])
    until(lambda: not list(Path(host.workdir, "runs").glob("*/tree")), 1)


def test_a_dead_address_has_the_connect_limit(boxes: Make, server: Server, tmp_path: Path) -> None:
    (box,) = boxes(1)
    box.cut()
    host = server.host(tmp_path, address=box.address, port=2222, limits=Limits(connect=1.5))
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"connect: (no answer within 1\.5 s|No route to host)"):
        connect(host, server.options)
    assert time.monotonic() - began < 4


def test_three_hosts_at_once_and_one_link_is_cut(boxes: Make, remote: Remote) -> None:
    """All cells are run, by the two that are left, and the ledger says what became of the third."""
    names = []
    for number, box in enumerate(boxes(3)):
        more = {"prepare": ["sleep 3600"]} if number == 2 else {}
        fields = {"address": box.address, "port": 2222, "host_key": key(box), "limits": {"silence": 6, "command": 300}}
        names.append(remote.host(f"ns{number}", **fields, **more))
        last = box
    process, run_dir = remote.start(*names, *matrix(k="prompt1 and fp32"))
    until_it_says(process, "running ")
    last.cut()
    assert process.wait(180) == 0
    ledger = ledgers.read(run_dir)
    assert {cell.host for cell in ledger.cells} == {"ns0", "ns1"}
    assert len(ledger.cells) == len(ledger.expected) == 4
    (note,) = [note for note in ledger.notes if note.startswith("ns2: ")]
    assert "nothing was heard for 6 s" in note
    assert "its cells ran elsewhere" in note
