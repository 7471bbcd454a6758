"""What is done with one host in one run: send the tree, hold the box, run commands, bring files back.

Every method may raise ``LinkLost`` (nothing is known any more; infrastructure, never a test result), ``FarError`` or
``Stopped`` (the user wants to end; the far side ends what runs).
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harness.remote.farside.wire import DATA, ERR, MESSAGE, OUT
from harness.remote.hosts import Host
from harness.remote.link import FarError, Link, LinkLost
from harness.remote.ssh import Options
from harness.remote.sync import Snapshot

GRACE = 5.0  # seconds a command has between being asked to end and being killed
BUDGET = 1 << 30  # bytes that one fetch may bring
EXPORTED = "environment"
_POLL = 0.5  # seconds between looks at whether the user wants to stop


class Stopped(Exception):
    """The user ended the run."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``status`` counts only if ``signal`` is 0 and ``reason`` is empty."""

    status: int
    signal: int
    reason: str
    """``limit``, ``cancelled``, or empty when it ended by itself."""
    seconds: float = 0.0
    left: int = 0
    """Processes that could not be ended."""
    text: str = ""

    @property
    def trouble(self) -> str:
        """Why ``status`` is no result; empty if it is one."""
        if self.reason == "limit":
            return f"the time limit ended it after {self.seconds:.0f} s"
        if self.reason:
            return "interrupted"
        if self.signal:
            names = {s.value: s.name for s in signal.Signals}
            hint = " (out of memory?)" if self.signal == signal.SIGKILL else ""
            return f"killed by {names.get(self.signal, f'signal {self.signal}')}{hint}"
        return self.text


@dataclass(frozen=True)
class Sent:
    """What a sync moved."""

    files: int
    contents: int
    bytes: int
    seconds: float


class Session:
    """A host, connected. ``run`` names this run's directory there."""

    def __init__(
        self,
        host: Host,
        options: Options,
        run: str,
        output: Callable[[bytes, bytes], None],
        stop: threading.Event | None = None,
    ) -> None:
        """Connect. Raises ConnectionFailed and HostKeyError too."""
        self.host = host
        self.run_id = f"{run}-{host.name}"
        self._output = output
        self._stop = stop or threading.Event()
        self._asked_to_stop = False
        self.link = Link(host, options, output)
        self.facts: dict[str, Any] = self.link.facts
        self.directory = ""
        """The run's directory there, once something was sent."""
        self._exported: str | None = None

    def _check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def plan(self, tree: Snapshot) -> list[int]:
        """Positions in ``tree.contents()`` of what the host lacks; nothing is changed there."""
        pieces = tree.pieces()
        self.link.say("plan", pieces=list(pieces))
        self._give_pieces(pieces)
        return list(next(self.link.messages())["contents"])

    def _give_pieces(self, pieces: Mapping[str, bytes]) -> None:
        _, event = self.link.next()
        data = list(pieces.values())
        for i in event["missing"]:
            self.link.give(zlib.compress(data[i], 9))

    def sync(self, tree: Snapshot, part: str = "tree", progress: Callable[[int, int], None] | None = None) -> Sent:
        """Send what the host lacks of ``tree``; it appears whole as ``part`` of the run's directory, or not at all."""
        began = time.monotonic()
        pieces, contents = tree.pieces(), tree.contents()
        client = f"{getpass.getuser()}@{socket.gethostname()}"
        self.link.say("sync", run=self.run_id, part=part, pieces=list(pieces), client=client)
        self._give_pieces(pieces)
        sent = count = 0
        for message in self.link.messages():
            if message.get("ok"):
                self.directory = message["directory"]
                break
            wanted = [contents[i] for i in message["missing"]]
            total = sum(file.size for file in wanted)
            try:
                for file in wanted:
                    for chunk in tree.read(file):
                        self._check()
                        if self.link.answered:  # it can only be a complaint
                            break
                        self.link.give(chunk)
                        sent += len(chunk)
                        if progress:
                            progress(sent, total)
                    count += 1
            except BaseException:
                self.link.close()  # half a content is on its way; the far side throws it away
                raise
        return Sent(len(tree.files) + len(tree.links), count, sent, time.monotonic() - began)

    def lock(self, command: str, waiting: Callable[[str], None]) -> bool:
        """Hold the box; ``waiting(text)`` says who has it. False when ``limits.queue`` is over."""
        me = {"client": f"{getpass.getuser()}@{socket.gethostname()}", "run": self.run_id, "command": command[:500]}
        self.link.say("lock", path=self.host.lock, me=me, patience=self.host.limits.queue)
        for message in self._messages_until_stopped():
            if message.get("ok"):
                if not message["held"]:
                    self._check()
                    waiting(f"gave up after {self.host.limits.queue:.0f} s: {holder_text(message['holder'])}")
                return bool(message["held"])
            waiting(holder_text(message["holder"]))
        return False

    def unlock(self) -> None:
        """Let the next run have the box."""
        self.link.ask("unlock")

    def _messages_until_stopped(self) -> Any:
        """Messages up to the answer; when the user stops, the far side is told to cancel, and given time to answer."""
        deadline = None
        while True:
            if self._stop.is_set() and not self._asked_to_stop:
                self._asked_to_stop = True
                self.link.say("cancel")
                deadline = time.monotonic() + GRACE + 15
            if deadline and time.monotonic() > deadline:
                raise LinkLost("it did not end when asked to")
            try:
                kind, content = self.link.next(_POLL)
            except TimeoutError:
                continue
            if kind == MESSAGE:
                yield content
                if content.get("ok"):
                    return

    def run(
        self, argv: Sequence[str], *, limit: float, env: Mapping[str, str] | None = None, cwd: str = "tree"
    ) -> Outcome:
        """Run a command in the run's directory; what it prints goes to ``output`` as it comes."""
        self._check()
        self.link.say(
            "run",
            run=self.run_id,
            argv=list(argv),
            cwd=cwd,
            env={**self.host.environment, **(env or {})},
            exported=self._exported,
            limit=limit,
            grace=GRACE,
        )
        *_, answer = self._messages_until_stopped()
        for kind in (OUT, ERR):
            self._output(kind, b"")
        names = ("status", "signal", "reason", "seconds", "text")
        fields = {name: answer[name] for name in names if name in answer}
        return Outcome(**fields, left=len(answer.get("left", ())))

    def prepare(self, env: Mapping[str, str] | None = None) -> Outcome:
        """Run the host's ``prepare`` commands in one shell; what they export holds for every later command."""
        script = "\n".join(["set -e", *self.host.prepare, 'env -0 > "$KDTREE_EXPORTED"'])
        path = f"{self.directory}/{EXPORTED}"
        outcome = self.run(
            ["sh", "-c", script], limit=self.host.limits.prepare, env={**(env or {}), "KDTREE_EXPORTED": path}
        )
        if not outcome.trouble and outcome.status == 0:
            self._exported = EXPORTED
        return outcome

    def fetch(self, path: str, into: Path) -> int:
        """Bring back the files below ``path`` of the run's directory, as ``into``; how many there were.

        Each is checked against the hash the far side computed; ``into`` appears whole, or not at all.
        """
        staged = into.with_name(f".{into.name}.{os.getpid()}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            self.link.say("fetch", run=self.run_id, path=path, budget=BUDGET)
            while True:
                kind, message = self.link.next()
                if kind == MESSAGE and message.get("ok"):
                    break
                self._receive(staged / _inside(message["path"]), int(message["size"]))
            if into.exists():
                shutil.rmtree(into)
            os.replace(staged, into)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return int(message["files"])

    def _receive(self, target: Path, size: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        hashing = hashlib.sha256()
        with target.open("wb") as file:
            while True:
                kind, content = self.link.next()
                if kind != DATA:
                    break
                hashing.update(content)
                file.write(content)
            written = file.tell()
        if content.get("short") or written != size or content.get("sha256") != hashing.hexdigest():
            raise FarError("damaged", f"{target.name}: arrived damaged, or changed while it was sent")

    def prune(self) -> dict[str, Any]:
        """Remove what old runs left there."""
        return self.link.ask("prune", keep=self.host.keep_runs)

    def close(self) -> None:
        """Say goodbye if there is still somebody to say it to. Never raises."""
        try:
            if not self.link.lost:
                self.link.say("bye")
        except LinkLost:
            pass
        self.link.close()


def holder_text(holder: Mapping[str, Any]) -> str:
    """Who holds a box, for people."""
    if not holder:
        return "somebody holds the box"
    age = f" for {float(holder['age']) / 60:.0f} min" if "age" in holder else ""
    return (
        f"{holder.get('client', '?')} holds the box{age} (run {holder.get('run', '?')}, as user "
        f"{holder.get('user', '?')}, process {holder.get('pid', '?')} there)"
    )


def _inside(path: str) -> PurePosixPath:
    """A path that the far side named, if it stays inside the folder it is for. Raises FarError."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in path:
        raise FarError("path", f"{path!r}: the far side named a path outside of what was asked for")
    return pure
