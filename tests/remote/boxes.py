"""Hosts in network namespaces of their own, behind links that can be cut: packets vanish, nothing is closed."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.remote.sshd import Sshd, public


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

    @property
    def port(self) -> int:
        return 2222

    @property
    def key(self) -> str:
        """The server's, as hosts.yaml takes it."""
        assert self.sshd is not None
        return public(self.sshd.keys[0])

    def cut(self) -> None:
        """Take the far end down: what is sent vanishes, and no one says so."""
        ip("-n", self.name, "link", "set", self.far, "down")

    def remove(self) -> None:
        if self.sshd:
            self.sshd.stop()
        # The link as well: sockets that still try to send keep a namespace alive for minutes.
        for argv in (["ip", "link", "del", self.near], ["ip", "netns", "del", self.name]):
            subprocess.run(argv, capture_output=True, check=False)


class Loopback:
    """What stands in for a box where no namespace can be made: a server on loopback; to cut it is to kill it."""

    def __init__(self, number: int, folder: Path, authorized: Path) -> None:
        self.sshd = Sshd(folder / f"loop{number}", authorized)
        self.address, self.port, self.key = "127.0.0.1", self.sshd.port, public(self.sshd.keys[0])

    def cut(self) -> None:
        self.sshd.stop()

    remove = cut


class NoNamespaces(Exception):
    """This machine or this user cannot make network namespaces."""


@contextmanager
def boxes(count: int, folder: Path, authorized: Path) -> Iterator[list[Box]]:
    """``count`` of them. Raises NoNamespaces."""
    if os.getuid() != 0 or not shutil.which("ip"):
        raise NoNamespaces("network namespaces need root and iproute2")
    made: list[Box] = []
    try:
        try:
            for number in range(count):
                made.append(Box(number, folder, authorized))
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(f"no network namespaces here: {error.stderr.decode().strip()}") from None
        yield made
    finally:
        for box in made:
            box.remove()
