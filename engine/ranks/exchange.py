"""``torch.distributed`` behind the exchanges of the engine: gloo between CPUs, NCCL between GPUs.

gloo gathers in a ring, a message after the other; its all-to-all, with the same piece for everybody, sends all at once.
Ranks on CPUs are batch processes, which take no processor from others when they wake: gloo's thread that serves the
sockets is woken by a thread that holds the lock it wants, and spins for that lock as long as it may.

Between GPUs of one host the engine exchanges by kernels of its own, through memory that torch's symmetric memory has
allocated and mapped on every rank (the *window*); NCCL carries what is too large for it, and everything where there is
none. Under capture of a CUDA graph the calls run once, on the backend's stream, so that NCCL's work becomes part of the
graph and a replay calls nothing here. Ranks that share a GPU, which only `harness.gpu_share.SHARE` lets them, have the
windows alone: NCCL refuses two ranks of one device, and gloo cannot be captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from engine.library import library
from engine.ranks.member import Member, Window, member
from harness.gpu_share import SHARE, ranks_share
from harness.protocol import ConfigError, DeviceError

IDLE = timedelta(days=30)  # between two commands
WINDOW = "KDTREE_RANKS_WINDOW"
"""MiB of a GPU for memory that all ranks write; 0: none. Not given: `MIB` where all ranks are on one host."""
MIB = 64  # 8 MiB of a contribution for two ranks, 2 MiB for eight
MOST = 8  # ranks that a window may have: kWindowRanks of csrc/ops.h, to which a test holds it
EXCHANGE = timedelta(seconds=20)  # for one exchange: the others are at most one operation behind


class _Memory:
    """Bytes of a CUDA device as torch and others take them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def memory_view(address: int, size: int, device: str) -> Any:
    """A tensor of bytes over memory that somebody else owns; ``size`` bytes of ``cpu`` or of a ``cuda`` device."""
    import torch

    if device != "cpu":
        return torch.as_tensor(_Memory(address, size), device=device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def window_bytes() -> int:
    """What the environment says of the memory through which GPUs exchange. ConfigError if it is no number."""
    text = os.environ.get(WINDOW, str(MIB))
    if not text.isascii() or not text.isdigit() or int(text) > 65536:
        raise ConfigError(f"{WINDOW}: {text!r} is not a number of MiB from 0 to 65536")
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return int(text) << 20 if one_host and int(os.environ["WORLD_SIZE"]) <= MOST else 0


def gpus_of_ranks(gpus: int) -> tuple[int, ...]:
    """Which of ``gpus`` each rank of this host has. DeviceError for fewer than ranks, unless these may share."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus < ranks and not (gpus and ranks_share()):
        raise DeviceError(f"{ranks} ranks need {ranks} GPUs, {gpus} visible; {SHARE}=1 lets them share, slowly")
    return tuple(rank % gpus for rank in range(ranks))


class TorchExchange:
    """This process's place in the job that ``torchrun`` started, and its exchanges with the other ranks."""

    def __init__(self, device: str, progress: Callable[[], None]) -> None:
        """``device``: ``cpu`` or ``cuda``, of which a rank takes the one of its local number. ``progress`` is called
        with every exchange. Raises what torch raises when the others do not come; DeviceError where there are too few
        GPUs, ConfigError where ranks that share one have no window."""
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._progress = torch, dist, progress
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.calls = 0
        """Exchanges made by this process; not those that a graph replays."""
        self._cuda = device == "cuda"
        self._gpus = gpus_of_ranks(torch.cuda.device_count()) if self._cuda else ()
        self.device = f"cuda:{self._gpus[int(os.environ['LOCAL_RANK'])]}" if self._cuda else "cpu"
        self.shared = len(set(self._gpus)) < len(self._gpus)
        """Another rank has this GPU too."""
        if self._cuda:
            torch.cuda.set_device(self.device)
        if self.shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            dist.init_process_group("gloo", timeout=EXCHANGE)
        elif self._cuda:
            bound = torch.device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=EXCHANGE, device_id=bound)
            dist.all_reduce(torch.zeros(1, device=bound))  # NCCL connects now: nothing may be set up during a capture
            torch.cuda.synchronize()
        else:
            if hasattr(os, "SCHED_BATCH"):
                with contextlib.suppress(OSError):  # where a sandbox forbids it, exchanges are slower
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # gloo's threads inherit it
            dist.init_process_group("gloo", timeout=EXCHANGE)
        self._words = dist.new_group(backend="gloo", timeout=IDLE)
        size = window_bytes() if self._cuda else 0
        self.window = self._open(size) if size else Window()
        if self.shared and not self.window.addresses:
            raise ConfigError(f"{SHARE}: ranks of one GPU exchange through windows alone, and there is none ({WINDOW})")
        # torch 2.13 has renamed it
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def member(self) -> Member:
        """What `engine.session.CsrcEngine` takes."""
        return member(self.rank, self.count, self._all_gather, self._broadcast, self.window, self._done)

    def _open(self, size: int) -> Window:
        """``size`` bytes of every rank, mapped on all of them; an empty window unless every rank has got so far."""
        import torch.distributed._symmetric_memory as symmetric

        torch = self._torch

        def all_of(make: Callable[[], Any]) -> Any:
            """What ``make`` gives, None unless every rank has it: what follows waits for all of them."""
            made = None
            try:
                made = make()
            except Exception as error:  # what is missing differs by version of torch and by host; NCCL always serves
                print(f"no window: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return made if all(self.each(made is not None)) else None

        def allocated() -> Any:
            if not all(library("cuda").linked(torch.cuda.current_device(), other) for other in self._gpus):
                raise ConfigError(f"not all GPUs are linked to {self.device} by NVLink")
            return symmetric.empty(size, dtype=torch.uint8, device=self.device)

        def mapped() -> tuple[int, ...]:
            self._handle = symmetric.rendezvous(self._block, self._dist.group.WORLD.group_name)
            self._block.zero_()
            torch.cuda.synchronize()
            return tuple(int(address) for address in self._handle.buffer_ptrs)

        self._block = all_of(allocated)
        addresses = all_of(mapped) if self._block is not None else None
        return Window(addresses, size, EXCHANGE.total_seconds()) if addresses else Window()

    def say(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank; waits as long as it takes."""
        box = [value]
        self._dist.broadcast_object_list(box, 0, group=self._words)
        return box[0]

    def each(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        box: list[Any] = [None] * self.count
        self._dist.all_gather_object(box, value, group=self._words)
        return box

    def flip(self, address: int) -> None:
        """Turn the lowest bit of a byte of the device's memory."""
        self._view(address, 1).bitwise_xor_(1)
        if self._cuda:
            self._torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the job."""
        with contextlib.suppress(Exception):  # the others may have gone first
            self._dist.destroy_process_group()

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one object a process; a view says where bytes lie, not what they are
    def _view(self, address: int, size: int) -> Any:
        return memory_view(address, size, self.device)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _stream(self, stream: int) -> Any:
        return self._torch.cuda.ExternalStream(stream, device=self.device)

    def _on(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        if not self._cuda:
            return contextlib.nullcontext()
        held: contextlib.AbstractContextManager[Any] = self._torch.cuda.stream(self._stream(stream))
        return held

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one object a process; a size is that of a width's exchange
    def _pieces(self, size: int) -> Any:
        """Room for one piece of ``size`` bytes for every rank, [count, size]."""
        return self._torch.empty((self.count, size), dtype=self._torch.uint8)

    def _all_gather(self, recv: int, send: int, size: int, stream: int) -> None:
        into, piece = self._view(recv, size * self.count), self._view(send, size)
        self._refuse_if_shared(size)
        if self._cuda:
            with self._on(stream):
                self._gather(into, piece)
        else:
            pieces = self._pieces(size)
            pieces.copy_(piece)
            self._dist.all_to_all_single(into, pieces.view(-1))
        self._done()

    def _broadcast(self, data: int, size: int, stream: int) -> None:
        self._refuse_if_shared(size)
        with self._on(stream):
            self._dist.broadcast(self._view(data, size), 0)
        self._done()

    def _refuse_if_shared(self, size: int) -> None:
        if self.shared:
            raise ConfigError(
                f"{size} bytes of a rank are more than the window takes ({WINDOW}; 4 MiB at most), and ranks of a GPU "
                f"({SHARE}) have nothing else: fewer rows, or a GPU for every rank"
            )

    def _done(self) -> None:
        self.calls += 1
        self._progress()
