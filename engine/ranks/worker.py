"""One rank of a job: what ``torchrun`` starts. It makes the calls that rank 0 is told to, in lockstep with the others.

A call that fails as every rank's must (a request out of range, a bad file) is answered as an error and the job goes on.
What befalls one rank alone - a lost device, no memory, other weights than it loaded, an exchange that failed - ends it.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from engine.ranks.exchange import TorchExchange
from engine.ranks.paths import fingerprint, here
from engine.ranks.watch import Watch
from engine.session import CsrcEngine, CsrcSession
from harness.protocol import DeviceError, EngineError, FormatError, RankDiverged, RankError, RequestError

Answer = tuple[str, Any]


class Worker:
    """Sessions by number, and the commands over them."""

    def __init__(self, exchange: TorchExchange, watch: Watch) -> None:
        self._exchange, self._watch = exchange, watch
        self._engine = CsrcEngine(exchange.device, exchange.member(), watch.progress)
        self._sessions: dict[int, CsrcSession] = {}
        self._streams: dict[int, tuple[int, Iterator[int]]] = {}  # by session, the one begun last, with its number
        self._numbers = itertools.count(1)  # of sessions and streams: none is given twice

    def run(self, command: tuple[Any, ...]) -> Answer:
        """``("ok", value)`` or ``("error", EngineError)``. Raises what ends this rank."""
        name, *arguments = command
        with self._watch.busy(patient=name == "load"):
            answer: Answer = getattr(self, f"_{name}")(*arguments)
        return answer

    def _load(self, name: str, precision: str, options: dict[str, Any]) -> Answer:
        """A session's number; nobody has one unless everybody has."""
        path = here(name)
        copies = self._exchange.each(fingerprint(path))
        if other := [rank for rank, copy in enumerate(copies) if copy != copies[0]]:
            return "error", FormatError(f"{name}: file: rank {other[0]} has none, or another one, than rank 0")
        session, error = None, None
        number = next(self._numbers)
        try:
            session = self._engine.load(path, precision, **options)
        except EngineError as failed:
            error = failed
        errors = [found for found in self._exchange.each(error) if found is not None]
        if errors:
            if session is not None:
                session.close()
            return "error", errors[0]
        self._sessions[number] = session  # type: ignore[assignment]  # no error, so there is one
        return "ok", number

    def _call(self, number: int, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Answer:
        """Rank 0's result; a property is a method without arguments."""
        try:
            target = getattr(self._sessions[number], method)
            return "ok", target(*arguments, **options) if callable(target) else target
        except (DeviceError, RankError):
            raise
        except EngineError as error:
            return "error", error

    def _each(self, number: int, method: str) -> Answer:
        """Every rank's result, by rank."""
        return "ok", self._exchange.each(getattr(self._sessions[number], method)())

    def _stream(self, number: int, request: Any) -> Answer:
        """The number of a stream, which a later one of the session ends."""
        stream = next(self._numbers)
        self._streams[number] = stream, self._sessions[number].stream(request)
        return "ok", stream

    def _next(self, number: int, stream: int) -> Answer:
        last, tokens = self._streams[number]
        if stream != last:
            return "error", RequestError("this decode was ended by another stream of its session")
        try:
            return "ok", next(tokens, None)
        except (DeviceError, RankError):
            raise
        except EngineError as error:
            return "error", error

    def _close(self, number: int) -> Answer:
        self._streams.pop(number, None)
        self._sessions.pop(number).close()
        return "ok", None

    def close(self) -> None:
        """Every session: graphs hold NCCL's communicators, which could not be left before."""
        for number in list(self._sessions):
            self._close(number)

    def _exchanges(self) -> Answer:
        return "ok", self._exchange.calls

    def _flip(self, number: int, rank: int, tensor: str, byte: int) -> Answer:
        """Fault injection: turn one bit of a weight in one rank's GPU (a CPU's weights are the file's, read-only)."""
        at = self._sessions[number].weights()[tensor][0]
        if self._exchange.rank == rank:
            self._exchange.flip(at + byte)
        return "ok", None


def log(text: str) -> None:
    """A line of this rank's log, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def kind_of(error: BaseException, rank: int) -> str:
    """Whose fault it is: this rank's (``diverged``, ``error``), or another's (``waited``)."""
    if not isinstance(error, RankError):
        return "error"
    if not isinstance(error, RankDiverged):
        return "waited"
    named = re.search(r"rank ([\d, ]+) (?:of|is)", str(error))
    return "diverged" if named and str(rank) in named[1].split(", ") else "waited"


def main() -> int:
    """Serve until the supervisor says that it was all."""
    rank = int(os.environ["RANK"])
    watch = Watch(rank)
    try:
        gc.disable()  # importing torch makes hundreds of thousands of objects that stay
        exchange = TorchExchange(sys.argv[1], watch.progress)
        gc.enable()
        gc.freeze()
        control = Watch.connect() if rank == 0 else None
        if control:
            control.send(("control",))
        worker = Worker(exchange, watch)
        log(f"rank {rank} of {exchange.count} on {exchange.device}, process {os.getpid()}")
        while True:
            try:
                command = control.recv() if control else None
            except EOFError:
                command = ("end",)
            command = exchange.say(command)
            if command == ("end",):
                break
            if command[0] in ("load", "close", "flip"):
                log(f"{command[0]} {command[1:3]}")
            answer = worker.run(command)
            if control:
                control.send(answer)
    except BaseException as error:
        traceback.print_exc()
        watch.words(kind_of(error, rank), f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)  # nothing may wait for the others any more
    worker.close()
    watch.words("done", "")
    exchange.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
