"""What tests of remote hosts share: a host entry for the test server, what commands print, small repositories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from harness import ledger as ledgers
from harness.cells import Ledger
from harness.remote.hosts import Host
from harness.remote.ssh import Options
from harness.sources import ROOT
from tests.remote.sshd import Sshd, user
from tests.waiting import PATIENCE


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
        )
        return replace(plain, **fields)


Open = Callable[..., Any]


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


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def write(root: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


CACHES = (("KDTREE_BUNDLES", "bundles"), ("KDTREE_BUILD", "build"))
BASE = {name: os.environ.get(name) or str(ROOT / folder) for name, folder in CACHES}
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "PYTHONPATH": "", **BASE}
FILTER = "prompt1 and fp32"


@dataclass
class Result:
    """A finished call."""

    status: int
    out: str
    err: str
    run_dir: Path

    @property
    def ledger(self) -> Ledger:
        return ledgers.read(self.run_dir)


class Remote:
    """Calls the command with hosts of its own, in a checkout that nobody edits meanwhile."""

    def __init__(self, server: Server, folder: Path, checkout: Path) -> None:
        self.server, self.folder, self.checkout = server, folder, checkout
        self.hosts: dict[str, dict[str, Any]] = {}
        self.runs = 0

    def host(self, name: str, **fields: Any) -> str:
        """Add an entry to hosts.yaml."""
        entry = {
            "address": "127.0.0.1",
            "port": self.server.sshd.port,
            "workdir": str(self.folder / name),
            "python": sys.executable,
            "lock": str(self.folder / f"{name}.lock"),
            "environment": dict(BASE),
            "limits": {"silence": 15, "command": 300},
        }
        self.hosts[name] = {**entry, **fields}
        return name

    def start(self, *arguments: str, out: Any = subprocess.PIPE) -> tuple[subprocess.Popen[str], Path]:
        """Start a call; its folder for results."""
        self.runs += 1
        run_dir = self.folder / "reports" / f"run{self.runs}"
        file = self.folder / "hosts.yaml"
        file.write_text(yaml.safe_dump({"hosts": self.hosts}))
        argv = [sys.executable, "-m", "harness", "remote", "--hosts-file", str(file), "--run-dir", str(run_dir)]
        argv += ["--ssh-config", str(self.server.options.config), *arguments]
        argv += [] if "--" in arguments else ["--", "-n", "0"]
        process = subprocess.Popen(
            argv,
            cwd=self.checkout,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            # a shell starts what runs in the background with this ignored, tests included
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return process, run_dir

    def __call__(self, *arguments: str) -> Result:
        process, run_dir = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=4 * PATIENCE)
        finally:
            process.kill()
        return Result(process.returncode, out, err, run_dir)


def matrix(*more: str, k: str = FILTER, engine: str = "csrc") -> list[str]:
    return ["-k", k, "--device", "cpu", "--engine", engine, *more]


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Begin ``work`` in a thread; the list gets what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def until_it_says(process: subprocess.Popen[str], words: str) -> None:
    """Read the command's output up to ``words``, and go on reading in the background so that it is never stuck."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return
    raise AssertionError(f"it ended without saying {words!r}")
