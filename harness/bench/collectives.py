"""What an exchange between GPUs costs in a CUDA graph: ``torchrun --nproc-per-node 2 -m harness.bench.collectives``.

Every line: operation, bytes a rank contributes, microseconds (median over replays of a graph of `CALLS` of them, one
after the other on one stream): torch.distributed's, in plain memory and in memory that NCCL knows on every rank, and
the engine's own all-gather through the ranks' windows. ``--json OUT.json`` keeps them. Rank 0 prints.
"""

from __future__ import annotations

import os
import statistics
import sys
from typing import Any

from engine.library import library, named_errors
from engine.ranks.exchange import TorchExchange
from engine.ranks.member import Window
from harness import plain_json
from harness.cli import Parser

SIZES = (8, 1 << 10, 14 << 10, 28 << 10, 64 << 10, 112 << 10, 224 << 10, 448 << 10, 1 << 20, 4 << 20)
CALLS = 20
REPLAYS = 15
OWN = 1  # csrc/ops.h, Origin::kOwn


def _median(torch: Any, stream: Any, replay: Any) -> float:
    """Microseconds of one of the `CALLS` that ``replay`` makes on ``stream``."""
    times = []
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * float(begin.elapsed_time(end)) / CALLS)
    return statistics.median(times)


def _time(torch: Any, call: Any) -> float:
    """Microseconds of one call within a graph of `CALLS`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
    return _median(torch, stream, graph.replay)


def _through_windows(torch: Any, window: Window, rank: int, size: int) -> float:
    """As `_time`, of the engine's own all-gather of ``size`` bytes."""
    ops, count = library("cuda"), len(window.addresses)
    send, recv = (torch.zeros(1, n, dtype=torch.uint8, device="cuda") for n in (size, size * count))
    state = torch.ones(16, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with named_errors():
        handle = ops.backend_open(f"cuda:{torch.cuda.current_device()}", False)
        ops.open_window(handle, rank, list(window.addresses), window.size, window.seconds)
        sequence = ops.sequence_begin(handle)
        for _ in range(CALLS):
            ops.unshard(handle, send, [recv], [0], [1], 1, state, count, OWN)
        ops.sequence_end(handle)
        stream = torch.cuda.ExternalStream(ops.backend_stream(handle))
        us = _median(torch, stream, lambda: ops.sequence_run(handle, sequence))
        ops.backend_close(handle)
    return us


def main() -> int:
    """Measure and print."""
    parser = Parser(prog="python -m harness.bench.collectives", description=__doc__)
    parser.add_json("everything that was measured")
    options = parser.parse_args()
    people = plain_json.beside(options.json)
    import torch
    import torch.distributed as dist

    exchange = TorchExchange("cuda", lambda: None)
    rank, count, device = exchange.rank, exchange.count, torch.device(exchange.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: list[dict[str, Any]] = []

    def note(operation: str, size: int, us: float) -> None:
        found.append({"operation": operation, "bytes": size, "ranks": count, "us": round(us, 2)})
        if rank == 0:
            print(f"{operation:<22} {size:>9} bytes a rank  {us:8.2f} us", file=people, flush=True)

    def sweep(label: str, make: Any) -> None:
        for size in SIZES:
            send, recv = make(size), make(size * count)
            note(f"all_gather{label}", size, _time(torch, lambda send=send, recv=recv: gather(recv, send)))
            floats = make(size).view(torch.float32)
            note(f"all_reduce{label}", size, _time(torch, lambda floats=floats: dist.all_reduce(floats)))

    sweep("", lambda size: torch.zeros(size, dtype=torch.uint8, device=device))
    try:
        backend: Any = dist.group.WORLD._get_backend(device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            block = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool, symm=True)
        at = [0]

        def take(size: int) -> Any:
            first = at[0] = (at[0] + 255) // 256 * 256
            at[0] += size
            return block[first : first + size]

        sweep("_registered", take)
    except Exception as error:  # an older NCCL or torch: the plain figures stand
        if rank == 0:
            print(f"registered memory: {type(error).__name__}: {error}", file=people, flush=True)
    for size in SIZES:
        if exchange.window.addresses:
            note("all_gather_window", size, _through_windows(torch, exchange.window, rank, size))
    if rank == 0:
        plain_json.give({"nccl": torch.cuda.nccl.version(), "lines": found}, options.json)
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # graphs hold communicators that the end of the process would wait for


if __name__ == "__main__":
    raise SystemExit(main())
