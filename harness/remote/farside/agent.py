"""Serves one client over stdin and stdout, and sees to it that nothing it started outlives the connection.

Two processes: the *agent* talks to the client and starts commands; its parent, the *keeper*, waits for it. Whichever of
the two dies first, the other ends every process that is left. The agent ends itself when the client closes the
connection, or is not heard from for ``silence`` seconds, or when a signal asks for it.

Requests are JSON messages with an ``op``; each is answered by one message, ``{"ok": true, ...}`` or
``{"error": KIND, "text": ...}``, after any number of ``{"event": ...}`` messages and other frames.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from harness.remote.farside.process import adopt_orphans, end_descendants
from harness.remote.farside.requests import HANDLERS, RequestError
from harness.remote.farside.tree import StoreError, explain
from harness.remote.farside.wire import BEAT, DATA, GREETING, MESSAGE, Wire, WireError, parse

HELLO = 60.0  # seconds without a word until the client has said which silence it grants


class Agent:
    """The state of one connection."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        def write(data: bytes) -> None:
            sink.write(data)
            sink.flush()

        self.wire = Wire(source.read, write)
        self.silence, self.pace = HELLO, 0.5
        """Seconds: how long the client may be silent, and between our own signs of life."""
        self.grace = 3.0
        """Seconds between SIGTERM and SIGKILL when the client is gone."""
        self.inbox: queue.Queue[tuple[bytes, Any]] = queue.Queue(maxsize=16)  # frames of 256 KiB: 4 MiB at most
        self.held: dict[str, Any] = {}
        """Locks and settings that requests leave for later ones."""
        self._heard = time.monotonic()
        self._reading = True
        self._ending = threading.Lock()

    def serve(self) -> None:
        """Answer requests until the client says goodbye; never returns otherwise."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: self.end())
        for work in (self._read, self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()
        while True:
            kind, message = self.inbox.get()
            if kind != MESSAGE:
                continue  # the rest of something whose request has failed already
            if message.get("op") == "bye":
                return
            if message.get("op") != "cancel":  # one that came after the command's own end
                self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        handler: Callable[[Agent, dict[str, Any]], dict[str, Any]] | None = HANDLERS.get(str(message.get("op")))
        try:
            if handler is None:
                raise RequestError("protocol", f"unknown request {message.get('op')!r}")
            reply = {"ok": True, **handler(self, message)}
        except (RequestError, StoreError) as error:
            reply = {"error": error.kind, "text": str(error)}
        except OSError as error:
            failure = explain(error, self.held["store"].root if "store" in self.held else b"/")
            reply = {"error": failure.kind, "text": str(failure)}
        if self._ending.locked():  # how a command ended that is being ended is nobody's result
            threading.Event().wait()
        self.wire.say(**reply)

    def end(self) -> None:
        """Take everything down with this process. Called from any thread; only the first call acts."""
        if self._ending.acquire(blocking=False):
            try:
                end_descendants(os.getpid(), self.grace)
            finally:
                os._exit(3)  # the keeper ends what is left

    def data(self, size: int) -> Any:
        """The next ``size`` bytes of DATA frames, chunk by chunk. Raises RequestError when the client stops early."""
        while size > 0:
            kind, payload = self.inbox.get()
            if kind != DATA or len(payload) > size:
                raise RequestError("protocol", "the client stopped in the middle of a file")
            size -= len(payload)
            yield payload

    def _read(self) -> None:
        try:
            while True:
                self._reading = True
                kind, payload = self.wire.receive()
                self._heard = time.monotonic()
                self._reading = False  # blocked on a full inbox is busy, not silent
                if kind == MESSAGE:
                    self.inbox.put((kind, parse(payload)))
                elif kind == DATA:
                    self.inbox.put((kind, payload))
        except (EOFError, OSError, ValueError, WireError):
            self.end()

    def _beat(self) -> None:
        try:
            while True:
                self.wire.send(BEAT)
                time.sleep(self.pace)
        except (OSError, ValueError):
            self.end()

    def _watch(self) -> None:
        parent = os.getppid()
        while True:
            time.sleep(0.25)
            silent = self._reading and time.monotonic() - self._heard > self.silence
            if silent or os.getppid() != parent:
                self.end()


def main(source: BinaryIO) -> None:
    """Entry of the program: ``source`` is standard input, at the first byte after the program itself."""
    if not os.path.exists("/proc/self/stat"):
        sys.exit("no Linux with /proc: what runs here could not be ended reliably")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    adopt_orphans()
    agent = os.fork()
    if agent:
        _keep(agent)
    adopt_orphans()
    sys.stdout.buffer.write(GREETING)
    sys.stdout.buffer.flush()
    Agent(source, sys.stdout.buffer).serve()
    end_descendants(os.getpid(), 0)
    os._exit(0)


def _keep(agent: int) -> None:
    """Wait for the agent to end, end what it left, and exit as it did."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nowhere, descriptor)  # so that the agent's end is the end of the channel
    while True:
        pid, status = os.wait()
        if pid == agent:
            end_descendants(os.getpid(), 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
