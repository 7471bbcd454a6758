"""A job of ranks on this host: starts ``torchrun``, supervises what it started, and says which rank was to blame.

Guarantees: a rank that dies, hangs or diverges ends the whole job within 30 s, and the error names that rank and begins
with its log; when this process ends, however it ends, so does the job.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from engine.ranks.verdict import OUTPUT, Rank, blame, report, told
from engine.ranks.watch import ADDRESS, KEY, SILENT
from harness.protocol import RankError
from harness.sources import ROOT

VARIABLE = "KDTREE_RANKS_NODES"
"""Says that this host's ranks are those of one of several hosts."""
WORKER = "engine.ranks.worker"
PORTS = 8  # one after the other from the first: one that is taken is left out, there as here
START_SECONDS = 120.0  # for all ranks to say hello: they import torch, from a cold disk perhaps
GRACE = 1.5  # seconds between the first sign of trouble and the verdict: others may know more
TELLING = 8.0  # more, for torchrun to say how a rank died: it notices late on a busy machine
END_SECONDS = 10.0  # for ranks that were told to end


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job. The default is this host alone, with a rendezvous on a free port of its own."""

    count: int = 1
    node: int = 0
    """Of this host; 0 holds the rendezvous and the ranks 0, 1, ..."""
    address: str = "127.0.0.1"
    port: int = 0

    @staticmethod
    def of(text: str) -> Nodes:
        """From ``COUNT,NODE,ADDRESS,PORT``, as `VARIABLE` and ``engine.ranks.join`` take it. Raises ValueError."""
        found = re.fullmatch(r"(\d{1,4}),(\d{1,4}),([^,\s]+),(\d{1,5})", text)
        if found is None or not int(found[2]) < int(found[1]) or not 0 < int(found[4]) < 2**16:
            raise ValueError(f"{text!r} is not COUNT,NODE,ADDRESS,PORT with NODE below COUNT, as in 2,0,box1,29500")
        return Nodes(int(found[1]), int(found[2]), found[3], int(found[4]))

    def __str__(self) -> str:
        return f"{self.count},{self.node},{self.address},{self.port}"


class Job:
    """``torchrun`` and its ranks on this host; on node 0 also the line over which commands go to rank 0."""

    def __init__(
        self,
        device: str,
        ranks: int,
        nodes: Nodes | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """``ranks`` of this host. Raises RankError when not all of them came within ``start_seconds``."""
        self._nodes = nodes or Nodes()
        self._local = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="kdtree-ranks-"))
        self._ranks: dict[int, Rank] = {}
        self._changed = threading.Condition()
        self._control: Connection | None = None
        self._turn = threading.Lock()  # of those who ask: an answer belongs to the command before it
        self._ending = False
        self.failure = ""
        """Why the job ended, its first line naming the rank to blame; empty while all is well."""
        key = secrets.token_bytes(16)
        try:
            self._listener = Listener(str(self.folder / "line"), "AF_UNIX", backlog=4 * ranks, authkey=key)
        except OSError as error:  # the system allows about 100 characters
            shutil.rmtree(self.folder, ignore_errors=True)
            raise RankError(f"{self.folder}/line: {error}; set TMPDIR to a folder with a shorter name") from error
        env = {**os.environ, ADDRESS: str(self.folder / "line"), KEY: key.hex(), **(environment or {})}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
        self._output = (self.folder / OUTPUT).open("wb")
        self._torchrun = subprocess.Popen(
            [*self._command(), "-m", WORKER, device],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._accept, name="ranks-accept", daemon=True).start()
        threading.Thread(target=self._look, name="ranks-look", daemon=True).start()
        try:
            self._wait_for_all(start_seconds)
        except BaseException:
            self.close()
            raise

    def _command(self) -> list[str]:
        n = self._nodes
        where = (
            ["--standalone"]  # a port of its own choice: one that is taken is nobody's concern
            if n.count == 1
            else ["--node-rank", str(n.node), "--master-addr", n.address, "--master-port", str(n.port)]
        )
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(n.count), *where),
            *("--nproc-per-node", str(self._local), "--max-restarts", "0", "--monitor-interval", "0.2"),
            *("--log-dir", str(self.folder), "--redirects", "3"),
        ]

    def ask(self, *command: Any) -> Any:
        """What rank 0 answers after every rank has run ``command``; threads take turns.

        Raises what the engine raised, or RankError. Whatever else ends the waiting, as Ctrl-C does, ends the job.
        """
        message = pickle.dumps(command)
        with self._turn:
            try:
                if self._control is None or self.failure:
                    raise EOFError
                self._control.send_bytes(message)
                while not self._control.poll(0.5):
                    if self.failure:
                        raise EOFError
                kind, value = self._control.recv()
            except (EOFError, OSError):
                raise RankError(self._verdict()) from None
            except BaseException as error:  # the answer, when it came, would be taken for the next command's
                self._fail(f"{command[0]} was interrupted by {type(error).__name__} in the process that asked", [])
                raise
        if kind == "error":
            raise value
        return value

    def wait(self) -> str:
        """Until the job has ended: why it failed, empty if it did not. For hosts that only take part."""
        if self._torchrun.wait():
            with self._changed:
                self._changed.wait_for(lambda: bool(self.failure), GRACE + TELLING + END_SECONDS)
        return self.failure

    def close(self) -> None:
        """End the ranks, at the latest by force, and remove what they left; a failed job's logs stay."""
        self._ending = True
        if self._control and not self.failure:
            with contextlib.suppress(OSError):
                self._control.send(("end",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(END_SECONDS)
        self._kill()
        self._listener.close()
        if not self.failure:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of this host's ranks, by rank."""
        return {rank.number: rank.pid for rank in self._ranks.values()}

    @property
    def torchrun(self) -> int:
        """Its process id."""
        return self._torchrun.pid

    def _wait_for_all(self, seconds: float) -> None:
        lead = self._nodes.node == 0

        def settled() -> bool:
            return bool(self.failure) or (len(self._ranks) == self._local and (not lead or self._control is not None))

        with self._changed:
            done = self._changed.wait_for(settled, seconds)
        if not done:
            came = ", ".join(str(number) for number in sorted(self._ranks)) or "none"
            self._fail(f"not every rank came within {seconds:.0f} s; of {self._local} here: {came}", [])
        if self.failure:
            raise RankError(self.failure)

    def _accept(self) -> None:
        while True:
            try:
                line = self._listener.accept()
                first = line.recv()
            except multiprocessing.AuthenticationError:
                continue
            except (OSError, EOFError):
                return
            with self._changed:
                if first[0] == "control":
                    self._control = line
                    self._changed.notify_all()
                    continue
                rank = self._ranks[int(first[1])] = Rank(int(first[1]), int(first[2]))
                self._changed.notify_all()
            threading.Thread(target=self._listen, args=(rank, line), name=f"rank-{rank.number}", daemon=True).start()

    def _listen(self, rank: Rank, line: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = line.recv()
                rank.heard = time.monotonic()
                if message[0] == "words":
                    rank.words = (message[1], message[2])
        rank.left = time.monotonic()

    def _look(self) -> None:
        """Until the first sign of trouble; then the verdict, and the end of everything."""
        while not self._ending:
            for rank in list(self._ranks.values()):
                rank.silent = rank.silent or (not rank.gone and time.monotonic() - rank.heard > SILENT)
            status = self._torchrun.poll()
            if status == 0:
                self._ending = True
            elif status is not None or any(rank.in_trouble for rank in self._ranks.values()):
                break
            time.sleep(0.1)
        if self._ending:
            return
        time.sleep(GRACE)
        end = time.monotonic() + TELLING
        while not (self._ending or told(self._ranks.values(), self.folder)) and time.monotonic() < end:
            if self._torchrun.poll() is not None:
                end = min(end, time.monotonic() + 0.5)  # its last words are on their way to the file
            time.sleep(0.1)
        if not self._ending:
            self._fail(*blame(self._ranks.values(), self.folder, self._torchrun.poll()))

    def _fail(self, line: str, order: list[int]) -> None:
        """The verdict, unless there is one already."""
        self._kill()
        first = self._nodes.node * self._local
        with self._changed:
            if self.failure:
                return
            self.failure = report(line, order, sorted(self._ranks), first, self.folder)
            (self.folder / "report.txt").write_text(self.failure + "\n", "utf-8")
            self._changed.notify_all()

    def _kill(self) -> None:
        for rank in self._ranks.values():
            if _is_rank(rank.pid):
                with contextlib.suppress(ProcessLookupError):  # also ends a process that is stopped
                    os.kill(rank.pid, signal.SIGKILL)
        self._torchrun.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(END_SECONDS)
        self._output.close()

    def _verdict(self) -> str:
        with self._changed:
            self._changed.wait_for(lambda: bool(self.failure), SILENT + GRACE + TELLING + END_SECONDS)
        return self.failure or "rank 0 closed its line"


def _is_rank(pid: int) -> bool:
    """Whether a process is a rank, and not another one that got the number of a rank that has ended."""
    try:
        return WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return not Path("/proc/self").exists()  # a system without /proc: there the number has to do


def free(port: int) -> bool:
    """Whether nothing on this host listens at ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
