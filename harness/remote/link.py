"""The client's end of a connection to the far side: start the program there, ask, and notice when it falls silent.

``LinkLost`` means that nothing is known any more about what runs there (the far side ends it by itself); ``FarError``
is an answer. The far side sends a sign of life at least every quarter of ``limits.silence``.
"""

from __future__ import annotations

import importlib.resources
import json
import queue
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import paramiko

from harness.remote.farside.wire import BEAT, DATA, ERR, GREETING, MESSAGE, OUT, Wire, WireError, parse
from harness.remote.hosts import Host
from harness.remote.ssh import Connection, Options, connect
from harness.remote.ssh_auth import ConnectionFailed

MODULES = ("wire", "tree", "store", "process", "queue_lock", "probe", "requests", "agent")
"""Of ``harness.remote.farside``, each after those it imports."""
LAST_WORDS = 10.0  # seconds for status and complaints after the last byte: at once, but for a busy machine
GRACE = 3.0  # seconds between SIGTERM and SIGKILL for what runs on a host that has lost us
_LOADER = """
import json, sys, types
for name in ("harness", "harness.remote.farside"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, text in json.loads(SOURCES).items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["harness.remote.farside.agent"].main(sys.stdin.buffer)
"""
_PACKET = 32768  # what an OpenSSH server takes at once
# One line, no quote of the other kind, no history character: every login shell passes it on unharmed.
_START = (
    'import sys;sys.version_info<(3,10)and sys.exit("Python %d.%d is too old, 3.10 is needed"%sys.version_info[:2]);'
    "import zlib;exec(zlib.decompress(sys.stdin.buffer.read({size})))"
)


class LinkLost(Exception):
    """The connection ended or fell silent."""


class FarError(Exception):
    """The far side cannot do what it was asked; ``kind`` is one of its words for why."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def program() -> bytes:
    """The far side's program, compressed."""
    folder = importlib.resources.files("harness.remote.farside")
    texts = {f"harness.remote.farside.{name}": folder.joinpath(f"{name}.py").read_text("utf-8") for name in MODULES}
    return zlib.compress(f"SOURCES = {json.dumps(texts)!r}\n{_LOADER}".encode(), 9)


def _start_line(python: str, size: int) -> str:
    home, rest = ("~/", python[2:]) if python.startswith("~/") else ("", python)  # the shell there expands it
    return f"exec {home}{shlex.quote(rest)} -I -c '{_START.format(size=size)}'"


class Link:
    """One connection with the far side's program at its other end. ``output(kind, data)`` gets what commands print."""

    def __init__(self, host: Host, options: Options, output: Callable[[bytes, bytes], None]) -> None:
        """Connect and start. Raises ConnectionFailed, HostKeyError, LinkLost, FarError."""
        self.host = host
        self.silence = host.limits.silence
        self.connection: Connection = connect(host, options)
        self.lost: str = ""
        self._inbox: queue.Queue[tuple[bytes, Any]] = queue.Queue(maxsize=64)
        self._output = output
        self._heard = time.monotonic()
        self._noise = bytearray()
        try:
            data = program()
            self._channel = self.connection.execute(_start_line(host.python, len(data)), self.silence)
            self._wire = Wire(self._receive, self._send)
            self._errors = threading.Thread(target=self._listen_to_errors, daemon=True)
            self._errors.start()
            self._greet(data)
            for work in (self._listen, self._beat):
                threading.Thread(target=work, daemon=True).start()
            asked = time.time()
            self.facts = self.ask("hello", silence=self.silence, grace=GRACE, workdir=host.workdir)
            self.skew = float(self.facts["time"]) - (asked + time.time()) / 2
            """Seconds by which the host's clock is ahead, give or take half a round trip."""
        except BaseException:
            self.close()
            raise

    def _greet(self, data: bytes) -> None:
        """Send the program and read over whatever the login prints until it answers."""
        seen = b""
        try:
            self._send(data)
            while not seen.endswith(GREETING):
                byte = self._channel.recv(1)
                if not byte:
                    raise ConnectionFailed(self._why_no_start(seen))
                seen = (seen + byte)[-65536:]
        except TimeoutError:
            raise ConnectionFailed(
                f"{self.host.name}: {self.host.python} does not start within {self.silence:g} s: {_last_line(seen)}"
            ) from None
        except (OSError, LinkLost):
            raise ConnectionFailed(self._why_no_start(seen)) from None

    def _why_no_start(self, seen: bytes) -> str:
        self._channel.status_event.wait(LAST_WORDS)
        status = self._channel.exit_status
        said = _last_line(self._complaints() or seen)
        if status == 127:
            return f"{self.host.name}: python: {self.host.python} is not there (status 127); set python in hosts.yaml"
        if status == -1:
            return f"{self.host.name}: the connection closed before {self.host.python} started: {said}"
        return (
            f"{self.host.name}: python: {self.host.python} cannot run the far side's program (status {status}): {said}"
        )

    def _receive(self, size: int) -> bytes:
        return self._channel.recv(min(size, 1 << 20))

    def _send(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            try:
                count = self._channel.send(data[done : done + _PACKET])
                if not count:
                    raise OSError
                done += count
            except TimeoutError:
                if time.monotonic() - self._heard > self.silence:
                    raise LinkLost(self._silent()) from None
            except (OSError, EOFError, paramiko.SSHException):
                raise LinkLost(self.lost or "the connection closed") from None

    def _silent(self) -> str:
        return f"nothing was heard for {self.silence:g} s: the link is dead or the host hangs"

    def _listen(self) -> None:
        try:
            while True:
                kind, payload = self._wire.receive()
                self._heard = time.monotonic()
                if kind in (OUT, ERR):
                    self._output(kind, payload)
                elif kind == MESSAGE:
                    self._inbox.put((MESSAGE, parse(payload)))
                elif kind == DATA:
                    self._inbox.put((DATA, payload))
        except TimeoutError:  # of recv, whose limit is the silence that is granted
            self.lost = self._silent()
        except EOFError:
            self._channel.status_event.wait(LAST_WORDS)
            status = self._channel.exit_status
            complaints = self._complaints()
            said = f": {_last_line(complaints)}" if complaints else ""
            self.lost = (
                f"the far side's program ended (status {status}){said}" if status >= 0 else "the connection closed"
            )
        except (OSError, WireError, paramiko.SSHException) as error:
            self.lost = f"the connection broke: {error}"
        self._inbox.put((b"", None))
        self.connection.close()  # whoever writes into a dead link is stuck until then

    def _listen_to_errors(self) -> None:
        """Keep the last of what the far side's program itself complains about."""
        while not self.lost:
            try:
                data = self._channel.recv_stderr(4096)
            except TimeoutError:
                continue  # silence is the rule on this stream
            except OSError:
                return
            if not data:
                return
            self._noise[:] = (self._noise + data)[-8192:]

    def _complaints(self) -> bytes:
        """What a program that has ended complained of; its status may be known before all of that is read."""
        self._errors.join(LAST_WORDS)
        return bytes(self._noise)

    def _beat(self) -> None:
        while not self.lost:
            try:
                self._wire.send(BEAT)
            except LinkLost:
                return
            time.sleep(min(5.0, self.silence / 4))

    def say(self, op: str, **fields: Any) -> None:
        """Send a request without waiting. Raises LinkLost."""
        self._wire.say(op=op, **fields)

    def give(self, data: bytes) -> None:
        """Send one chunk of data. Raises LinkLost."""
        self._wire.send(DATA, data)

    @property
    def answered(self) -> bool:
        """Whether something waits to be read."""
        return not self._inbox.empty()

    def next(self, timeout: float | None = None) -> tuple[bytes, Any]:
        """The next event (MESSAGE) or chunk (DATA). Raises LinkLost, FarError, TimeoutError."""
        try:
            kind, content = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if kind == b"":
            self._inbox.put((b"", None))  # for whoever asks next
            raise LinkLost(self.lost)
        if kind == MESSAGE and "error" in content:
            raise FarError(str(content["error"]), str(content.get("text", "")))
        return kind, content

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages up to the answer, which is the last of them. Raises as ``next``."""
        while True:
            kind, content = self.next()
            if kind == MESSAGE:
                yield content
                if content.get("ok"):
                    return

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises LinkLost, FarError."""
        self.say(op, **fields)
        return list(self.messages())[-1]

    def close(self) -> None:
        """End the connection; the far side ends whatever still runs."""
        if self.lost == "":
            self.lost = "closed"
        self.connection.close()


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
