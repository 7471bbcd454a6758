"""One server per test process; for each test a host entry, a working tree and connections closed after it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.build import build
from harness.remote import sync
from harness.remote.hosts import Host
from harness.remote.session import Session
from harness.remote.ssh import Options
from harness.sources import ROOT
from tests.remote.sshd import Sshd, keygen, public, require_sshd, ssh_config
from tests.remote.support import Open, Printed, Remote, Server, git, write


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


@pytest.fixture
def printed() -> Printed:
    return Printed()


@pytest.fixture
def connect(server: Server, host: Host, printed: Printed) -> Iterator[Open]:
    """``connect(host=..., run=..., options=...)`` opens a session; all are closed after the test."""
    opened: list[Session] = []

    def one(at: Host = host, *, run: str | None = None, options: Options = server.options, **more: Any) -> Session:
        session = Session(at, options, run or f"run-{secrets.token_hex(4)}", more.pop("output", printed), **more)
        opened.append(session)
        return session

    yield one
    for session in opened:
        session.close()


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


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as it is now, committed to a repository of its own but for one file."""
    root = tmp_path_factory.mktemp("checkout")
    for name in sync.listed(ROOT):
        target = root / os.fsdecode(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / os.fsdecode(name), target, follow_symlinks=False)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")
    write(root, {"uncommitted.txt": "sent as well"})
    return root


@pytest.fixture(scope="session")
def built() -> None:
    """Compiling takes minutes on a busy machine, and the calls under test have limits."""
    build("cpu")


@pytest.fixture
def remote(server: Server, tmp_path: Path, checkout: Path, built: None) -> Remote:
    return Remote(server, tmp_path, checkout)


@pytest.fixture
def marker() -> str:
    """A number of seconds that no other process sleeps."""
    return f"3{secrets.randbelow(10**6):06}.{secrets.randbelow(10**6):06}"
