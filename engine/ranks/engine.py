"""The engine on several ranks, seen from outside: a `harness.protocol.Engine` whose sessions live in a job's ranks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.ranks.job import PORTS, VARIABLE, Job, Nodes, free
from engine.ranks.paths import portable
from engine.ranks.shares import check_file
from engine.session import CsrcEngine
from harness.protocol import F32, Decoded, DecodeRequest, RankError, RequestError


class RankedSession:
    """A `harness.protocol.Session` that every rank of a job has a part of."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self._number = job, number
        self._open = True

    def _ask(self, command: str, *arguments: Any) -> Any:
        if not self._open:
            raise RequestError("the session is closed")
        return self._job.ask(command, self._number, *arguments)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._ask("call", method, arguments, options)

    @property
    def length(self) -> int:
        """Committed rows."""
        return int(self._call("length"))

    def reset(self) -> None:
        """Forget all rows."""
        self._call("reset")

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Commit ``tokens``; logits [n, V]."""
        return self._call("prefill", tuple(tokens))  # type: ignore[no-any-return]

    def step(self, token: int) -> F32:
        """Commit one token; logits [V]."""
        return self._call("step", token)  # type: ignore[no-any-return]

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F32:
        """Run a tree, commit none of it; logits [M, V]."""
        return self._call("verify", tuple(tokens), tuple(parents))  # type: ignore[no-any-return]

    def commit(self, path: Sequence[int]) -> None:
        """Commit rows of the last verify."""
        self._call("commit", tuple(path))

    def decode(self, request: DecodeRequest) -> Decoded:
        """Reset, prefill and decode to the end."""
        return self._call("decode", request)  # type: ignore[no-any-return]

    def stream(self, request: DecodeRequest) -> Iterator[int]:
        """As `decode`, yielding tokens as rounds accept them."""
        stream = self._ask("stream", request)
        while (token := self._ask("next", stream)) is not None:
            yield int(token)

    def cache(self, layer: int) -> tuple[F32, F32]:
        """Committed rows of one layer, rank 0's copy: latent [length, R], k_rope [length, P]."""
        return self._call("cache", layer)  # type: ignore[no-any-return]

    def taps(self, tokens: Sequence[int], *, operations: bool = False) -> Mapping[str, F32]:
        """Reset, prefill and return the intermediate rows by name."""
        return self._call("taps", tuple(tokens), operations=operations)  # type: ignore[no-any-return]

    def verify_taps(self, tokens: Sequence[int], parents: Sequence[int]) -> Mapping[str, F32]:
        """Run a tree and return every operation's rows by name; nothing is left to commit."""
        return self._call("verify_taps", tuple(tokens), tuple(parents))  # type: ignore[no-any-return]

    def counters(self) -> Mapping[str, int]:
        """Kernel launches by name, rank 0's."""
        return self._call("counters")  # type: ignore[no-any-return]

    def reset_counters(self) -> None:
        """Count from zero again."""
        self._call("reset_counters")

    def broken_guard(self) -> str:
        """Name of a buffer written outside its bounds on any rank, or ``""``."""
        found = self._ask("each", "broken_guard")
        return next((f"{name} of rank {rank}" for rank, name in enumerate(found) if name), "")

    def memory(self) -> tuple[int, int]:
        """Bytes that a rank holds and has held at most, those of the rank that has the most."""
        held = [tuple(pair) for pair in self._ask("each", "memory")]
        return max(pair[0] for pair in held), max(pair[1] for pair in held)

    def weights(self) -> list[Mapping[str, tuple[int, int, int, int]]]:
        """What each rank holds, see `engine.session.CsrcSession.weights`."""
        return list(self._ask("each", "weights"))

    def exchanges(self) -> int:
        """How often the engine has called rank 0's transport; exchanges that a graph replays are not among them."""
        return int(self._job.ask("exchanges"))

    def flip(self, rank: int, tensor: str, byte: int) -> None:
        """Fault injection: turn one bit of a weight in one rank's GPU."""
        self._ask("flip", rank, tensor, byte)

    def close(self) -> None:
        """Free everything on every rank; further calls raise `RequestError`."""
        if self._open and not self._job.failure:
            self._ask("close")
        self._open = False

    def __enter__(self) -> RankedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankedEngine:
    """``csrc/`` on ``ranks`` devices; the job starts with the first session and is started anew after it failed.

    RankError for hosts, named by the environment, that cannot be.
    """

    def __init__(self, device: str, ranks: int, nodes: Nodes | None = None) -> None:
        self.name = "csrc"
        self.device = device
        self._ranks = ranks
        self.nodes = nodes or _nodes_of_environment()
        """The hosts of its jobs, and this one's place."""
        if ranks % self.nodes.count:
            raise RankError(f"{VARIABLE}: {self.nodes.count} hosts cannot have {ranks} ranks in equal numbers")
        self._job: Job | None = None
        self._alone = CsrcEngine(device)

    def load(self, path: Path, precision: str, **options: Any) -> RankedSession:
        """Open a KDTR file on every rank; options as those of `engine.session.CsrcEngine.load`."""
        check_file(path, self._ranks)
        if self._job is None or self._job.failure:
            self.close()
            threads = max(1, len(os.sched_getaffinity(0)) // self._ranks) if hasattr(os, "sched_getaffinity") else 1
            local = self._ranks // self.nodes.count
            environment = {"KDTREE_THREADS": str(threads), "OMP_NUM_THREADS": "1"}
            # Calls of one process follow each other, each waited for: nothing that this support is for can happen.
            environment["NCCL_GRAPH_MIXING_SUPPORT"] = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT", "0")
            # Nothing else runs on a GPU during an exchange: it may have more blocks than NCCL would leave to others.
            environment["NCCL_MIN_CTAS"] = os.environ.get("NCCL_MIN_CTAS", "16")
            environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # nothing here uses it
            if "KDTREE_RANKS_GPUS" in os.environ:  # a test worker, which sees one GPU itself
                environment["CUDA_VISIBLE_DEVICES"] = os.environ["KDTREE_RANKS_GPUS"]
            self._job = Job(self.device, local, self.rendezvous(), environment)
            atexit.register(self.close)
        return RankedSession(self._job, self._job.ask("load", portable(path), precision, options))

    def rendezvous(self) -> Nodes:
        """The first port of those agreed on that nothing else on this host has."""
        n = self.nodes
        if n.count == 1:
            return n
        port = next((port for port in range(n.port, n.port + PORTS) if free(port)), 0)
        if not port:
            raise RankError(f"rendezvous: the ports {n.port} to {n.port + PORTS - 1} of {n.address} are all taken")
        return replace(n, port=port)

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        """As those of one device, and the exchanges."""
        exchanges = {"all_gather", "broadcast", "checksum"} | ({"unshard"} if self.device == "cpu" else set())
        return self._alone.kernels(precision, moe) | exchanges

    @property
    def job(self) -> Job:
        """The job under way. Raises RankError before the first session."""
        if self._job is None:
            raise RankError("no job: nothing was loaded")
        return self._job

    def close(self) -> None:
        """End the job."""
        if self._job is not None:
            self._job.close()
        self._job = None
        atexit.unregister(self.close)


def _nodes_of_environment() -> Nodes:
    """What `VARIABLE` says, or this host alone."""
    try:
        return Nodes.of(os.environ[VARIABLE]) if VARIABLE in os.environ else Nodes()
    except ValueError as error:
        raise RankError(f"{VARIABLE}: {error}") from None
