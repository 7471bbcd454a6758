"""A real OpenSSH server for tests: on loopback, with keys of its own, run by whoever runs the tests."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests import processes
from tests.waiting import until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin") or ""


_FOLDERS = ("/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/libexec", "/usr/local/libexec")
# What distributions configure: a program started through the user's shell, as every command is.
SFTP = next((f"{f}/sftp-server" for f in _FOLDERS if os.path.exists(f"{f}/sftp-server")), "internal-sftp")


def require_sshd() -> None:
    """Skip where there is no sshd, by name; fail instead where KDTREE_REQUIRE_SSHD says that there must be one."""
    missing = [name for name, there in (("sshd", SSHD), ("ssh-keygen", shutil.which("ssh-keygen"))) if not there]
    if missing:
        text = f"{', '.join(missing)} is not installed: apt-get install openssh-server openssh-client"
        if os.environ.get("KDTREE_REQUIRE_SSHD") == "1":
            pytest.fail(f"{text} (KDTREE_REQUIRE_SSHD=1)")
        pytest.skip(text)


def keygen(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new key pair; the private part's path."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    """``TYPE BASE64`` of a key pair."""
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def free_port(address: str = "127.0.0.1") -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


class Sshd:
    """One server. ``prefix`` is put before the command line, to run it in a network namespace."""

    def __init__(
        self,
        folder: Path,
        authorized: Path,
        *,
        kinds: Sequence[str] = ("ed25519",),
        address: str = "127.0.0.1",
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        passwords: str = "no",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.address, self.port = folder, address, free_port() if not prefix else 2222
        self.keys = [keygen(folder / f"host_{kind}", kind) for kind in kinds]
        self.config = folder / "sshd_config"
        self.log = folder / "log"
        self._options, self._prefix = list(options), list(prefix)
        self._authorized, self._passwords = authorized, passwords
        self.process: subprocess.Popen[bytes] | None = None
        while not self._start():
            self.port = free_port()

    def _start(self) -> bool:
        """False if the port that was free has been taken since. Raises RuntimeError for other troubles."""
        lines = [
            f"Port {self.port}",
            f"ListenAddress {self.address}",
            *(f"HostKey {key}" for key in self.keys),
            f"AuthorizedKeysFile {self._authorized}",
            "StrictModes no",
            "UsePAM no",
            f"PasswordAuthentication {self._passwords}",
            "KbdInteractiveAuthentication no",
            f"PidFile {self.folder / 'pid'}",
            f"Subsystem sftp {SFTP}",
            "MaxStartups 100",
            f"SetEnv HOME={self.folder}",  # no login files: a .bashrc costs time, and may print
            *self._options,
        ]
        self.config.write_text("\n".join(lines) + "\n")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # root's sshd insists on its privilege separation folder
        with self.log.open("ab") as log:
            argv = [*self._prefix, SSHD, "-D", "-e", "-f", str(self.config)]
            process = self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: process.poll() is not None or "Server listening" in self.log.read_text())
        if process.poll() is None:
            return True
        said = self.log.read_text()
        if self._prefix or "Address already in use" not in said:
            raise RuntimeError(f"sshd does not start: {said}")
        self.log.unlink()
        return False

    def sessions(self) -> list[int]:
        """The processes that serve connections, below the listener."""
        assert self.process is not None
        return processes.tree(self.process.pid)[1:]

    def kill_sessions(self) -> None:
        """What a crash of the server's per-connection processes looks like from outside; commands are left alone."""
        for pid in self.sessions():
            if processes.name(pid).startswith("sshd"):
                processes.tell(pid)  # which may end another of them before its turn comes

    def stop(self) -> None:
        if self.process is not None:
            for pid in reversed(processes.tree(self.process.pid)):
                processes.tell(pid)
            self.process.wait()
            self.process = None


class Relay:
    """A TCP relay that counts what passes, and can fall silent without closing anything."""

    def __init__(self, port: int, *, freeze_after: int | None = None) -> None:
        self.target = port
        self.bytes = 0
        self.open = threading.Event()
        self.open.set()
        self._freeze_after = freeze_after  # bytes from the server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def freeze(self) -> None:
        """From here on nothing passes, and nothing is closed."""
        self.open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self._sockets += [near, far]
            for source, sink, count in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, sink, count), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if from_server and self._freeze_after is not None and passed + len(data) > self._freeze_after:
                    sink.sendall(data[: self._freeze_after - passed])
                    self.open.clear()
                passed += len(data)
                self.open.wait()
                self.bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        self.open.set()
        self._listener.close()
        for sock in self._sockets:
            sock.close()


def user() -> str:
    return getpass.getuser()


def ssh_config(path: Path, blocks: Sequence[str], *, key: Path, known_hosts: Path) -> Path:
    """A client's ssh_config that knows nothing of the user's own."""
    common = (
        f"  IdentityFile {key}\n  IdentitiesOnly yes\n  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile none\n"
    )
    path.write_text("\n".join([*blocks, "Host *\n" + common]))
    return path


def relays(*made: Relay) -> Iterator[None]:
    yield
    for relay in made:
        relay.close()
