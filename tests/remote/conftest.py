"""One server per test process; for each test a host entry, a working tree and connections closed after it."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from harness.hosts import Host, Limits
from harness.ssh import Options
from tests.remote.sshd import Sshd, keygen, public, require_sshd, ssh_config, user

QUICK = Limits(connect=3, banner=3, auth=3, silence=8, prepare=20, command=20, queue=20)


@dataclass(frozen=True)
class Server:
    """The server and a client that knows it."""

    sshd: Sshd
    key: Path
    authorized: Path
    known_hosts: Path
    options: Options

    def host(self, folder: Path, **fields: Any) -> Host:
        """A host entry for this server, with a directory and a lock of its own."""
        plain = Host(
            name="loop",
            address="127.0.0.1",
            port=self.sshd.port,
            user=user(),
            workdir=str(folder / "far"),
            python=sys.executable,
            lock=str(folder / "lock"),
            limits=QUICK,
        )
        return replace(plain, **fields)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require_sshd()
    folder = tmp_path_factory.mktemp("ssh")
    key = keygen(folder / "id")
    authorized = folder / "authorized_keys"
    authorized.write_text(public(key) + "\n")
    sshd = Sshd(folder / "server", authorized, kinds=("ed25519", "ecdsa"))
    known = folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{sshd.port} {public(sshd.keys[0])}\n")
    config = ssh_config(folder / "config", [], key=key, known_hosts=known)
    yield Server(sshd, key, authorized, known, Options(config=config))
    sshd.stop()


@pytest.fixture
def host(server: Server, tmp_path: Path) -> Host:
    return server.host(tmp_path)


class Printed:
    """What commands print, by stream."""

    def __init__(self) -> None:
        self.streams: dict[bytes, bytearray] = {b"O": bytearray(), b"E": bytearray()}

    def __call__(self, kind: bytes, data: bytes) -> None:
        self.streams[kind] += data

    @property
    def out(self) -> str:
        return self.streams[b"O"].decode()

    @property
    def err(self) -> str:
        return self.streams[b"E"].decode()


@pytest.fixture
def printed() -> Printed:
    return Printed()


Open = Callable[..., Any]


@pytest.fixture
def connect(server: Server, host: Host, printed: Printed) -> Iterator[Open]:
    """``connect(host=..., run=..., options=...)`` opens a session; all are closed after the test."""
    from harness.remote_session import Session

    opened: list[Session] = []

    def one(at: Host = host, *, run: str | None = None, options: Options = server.options, **more: Any) -> Session:
        session = Session(at, options, run or f"run-{secrets.token_hex(4)}", more.pop("output", printed), **more)
        opened.append(session)
        return session

    yield one
    for session in opened:
        session.close()


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write(root: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A small repository: tracked, untracked and ignored files, a script, a link."""
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q")
    write(root, {"a.txt": "one\n", "src/b.py": "print(1)\n", ".gitignore": "*.log\nbuild/\n", "run.sh": "#!/bin/sh\n"})
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("src/b.py")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    write(root, {"new.txt": "untracked\n", "noise.log": "ignored\n", "build/x": "ignored\n"})
    return root
