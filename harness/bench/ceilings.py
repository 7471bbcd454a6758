"""What this machine can do at most, measured in the same run: streaming read, matmul, an empty graph node, read floors.

A ceiling is the fastest of its samples and a time the median of its own: shares err on the low side.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from harness import environment
from harness.bench import clock, reading

READ_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}  # far beyond every cache
MATMUL = {"cpu": 1024, "cuda": 8192}  # square; large enough to be bound by arithmetic
SECONDS = 0.5  # of sampling a ceiling
FLOOR_SECONDS = 0.1  # of sampling a floor, beside each case
NODES = 200  # of a graph of empty kernels
COLD = 4  # times the last cache that operands rotate over
DEFAULT_CACHE = 32 << 20  # where the system does not say how large its last cache is

KERNELS = r"""
extern "C" __global__ void read_once(const uint4* data, unsigned int count, unsigned int* sink) {
  unsigned int seen = 0, stride = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 a = __ldcs(data + i), b = __ldcs(data + i + stride), c = __ldcs(data + i + 2 * stride),
          d = __ldcs(data + i + 3 * stride);
    seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += stride) {
    uint4 a = __ldcs(data + i);
    seen ^= a.x ^ a.y ^ a.z ^ a.w;
  }
  if (seen == 0x9e3779b9u) *sink = seen;  // so that no read can be left out
}
extern "C" __global__ void nothing() {}
"""


@dataclass(frozen=True)
class Ceilings:
    """Bytes and flops a second; ``empty_node_us`` on CUDA alone."""

    read: float
    matmul: dict[str, float]
    """By type: f32, and bf16 on CUDA."""
    empty_node_us: float | None
    cache_bytes: int
    """The last cache before memory: operands rotate over four times this."""
    floor_us: Callable[[int], float]
    """The time of one pass that only reads so many bytes, cold, measured at each call."""

    def roofline_us(self, bytes_: int, flops: int, kind: str) -> float:
        """No implementation can be faster: reading at the ceiling, computing at the ceiling, side by side."""
        peak = self.matmul.get(kind, self.matmul["f32"])
        return 1e6 * max(bytes_ / self.read, flops / peak)


def cpu_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The largest cache that the first processor sees, or DEFAULT_CACHE."""
    sizes = []
    for file in root.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", file.read_text().strip())
        if match:
            sizes.append(int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)])
    return max(sizes, default=DEFAULT_CACHE)


def threads() -> int:
    """The engine's number of threads, by csrc/cpu/threads.h's rule: KDTREE_THREADS, OMP_NUM_THREADS, the processors."""
    for name in ("KDTREE_THREADS", "OMP_NUM_THREADS"):
        if (text := os.environ.get(name, "")).isdigit() and int(text) >= 1:
            return int(text)
    return environment.processors()


def _cpu() -> Ceilings:
    import torch

    torch.set_num_threads(threads())
    reader = reading.Reader(torch.ones(READ_BYTES["cpu"] // 4), threads())
    read = reader.bytes / (1e-6 * reader.timed(SECONDS).fastest)
    n = MATMUL["cpu"]
    a, b = torch.rand(n, n), torch.rand(n, n)
    peak = 2 * n**3 / (1e-6 * clock.wall([lambda: a @ b], SECONDS).fastest)

    def floor(size: int) -> float:  # other machines on the same host change the memory's speed from second to second
        return size * reader.timed(FLOOR_SECONDS).us / reader.bytes

    return Ceilings(read, {"f32": peak}, None, cpu_cache_bytes(), floor)


def _cuda() -> Ceilings:
    import torch

    read_once, nothing = (torch.cuda._compile_kernel(KERNELS, name) for name in ("read_once", "nothing"))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    data = torch.ones(READ_BYTES["cuda"] // 4, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    l2 = int(properties.L2_cache_size)

    def once(size: int) -> clock.Timing:
        words = max(4, size // 16 * 4)  # of four bytes, read four at a time
        cold = COLD * l2 // 4
        starts = range(0, max(1, min(len(data) - words + 1, cold + words)), words)
        blocks = min(properties.multi_processor_count * 8, -(-words // 1024))

        def call(start: int) -> Callable[[], None]:
            part = data[start : start + words]
            return lambda: read_once(grid=(blocks, 1, 1), block=(256, 1, 1), args=[part, words // 4, sink])

        return clock.gpu([call(start) for start in islice(starts, clock.MOST)], FLOOR_SECONDS)

    def floor(size: int) -> float:  # longer than the buffer: at the rate of all of it
        read = min(size, READ_BYTES["cuda"])
        return once(read).us * size / read

    matmul, n = {}, MATMUL["cuda"]
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        a, b = torch.rand(n, n, device="cuda").to(dtype), torch.rand(n, n, device="cuda").to(dtype)
        matmul[name] = 2 * n**3 / (1e-6 * clock.gpu([lambda a=a, b=b: a @ b], SECONDS).fastest)  # type: ignore[misc]
    read = READ_BYTES["cuda"] / (1e-6 * once(READ_BYTES["cuda"]).fastest)
    return Ceilings(read, matmul, _empty_node(torch, nothing), l2, floor)


def _empty_node(torch: Any, nothing: Any) -> float:
    """Microseconds a node of a graph of NODES empty kernels, by events around its replay."""
    nothing(grid=(1, 1, 1), block=(32, 1, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NODES):
            nothing(grid=(1, 1, 1), block=(32, 1, 1))
    times: list[float] = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / NODES)
    return statistics.median(times)


@cache
def measure(device: str) -> Ceilings:
    """Of ``cpu`` or ``cuda``, once in a process; some seconds."""
    return _cuda() if device == "cuda" else _cpu()
