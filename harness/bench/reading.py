"""The fastest streaming read known for the CPU: loops in C, compiled for this processor, on the engine's threads.

A thread reads its part as several streams side by side and asks for their lines ahead, or leaves that to the processor;
which of the loops is fastest differs between machines, so the ceiling is the best of them. One stream without asking
ahead - torch's sum is one - reads two thirds of it where pages have 4 KiB.
"""

from __future__ import annotations

import ctypes
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.bench import clock
from harness.toolchain import BuildError, compiler, extension

STREAMS = (1, 4, 8)
AHEAD = (0, 4096)  # bytes; 0: not asked for
ROUNDS, ROUND_SECONDS = 3, 0.05  # of choosing: the loops take turns

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef uint64_t Line __attribute__((vector_size(64)));
#define LOOP(S, AHEAD)                                                                   \
  uint64_t read_##S##_##AHEAD(const unsigned char* data, size_t bytes) {                 \
    const size_t part = bytes / S / 64 * 64;                                             \
    Line seen[S];                                                                        \
    memset(seen, 0, sizeof seen);                                                        \
    for (size_t i = 0; i < part; i += 64) {                                              \
      for (int s = 0; s < S; ++s) {                                                      \
        Line line;                                                                       \
        memcpy(&line, data + s * part + i, 64);                                          \
        if (AHEAD) __builtin_prefetch(data + s * part + i + AHEAD, 0, 2);                \
        seen[s] ^= line;                                                                 \
      }                                                                                  \
    }                                                                                    \
    uint64_t all = 0;                                                                    \
    for (int s = 0; s < S; ++s) for (int j = 0; j < 8; ++j) all ^= seen[s][j];           \
    return all; /* so that no read can be left out */                                    \
  }
"""


def compiled(folder: Path) -> Any:
    """`BuildError` if the compiler that builds the engine cannot compile it."""
    compiler()
    source, library = folder / "read.c", folder / "read.so"
    loops = "".join(f"LOOP({streams}, {ahead})\n" for streams in STREAMS for ahead in AHEAD)
    source.write_text(SOURCE + loops)
    command = [*shlex.split(str(extension().get_cxx_compiler())), "-x", "c", "-O3", "-march=native", "-fPIC", "-shared"]
    try:
        subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise BuildError(f"the loops that measure the read ceiling do not compile: {said.strip()}") from error
    return ctypes.CDLL(str(library))


class Reader:
    """``data`` read over and over by as many threads; ``name`` is the loop that was fastest when this was made."""

    def __init__(self, data: Any, threads: int) -> None:
        """``data``: a contiguous CPU tensor far larger than the caches. `BuildError` without a compiler."""
        self._data = data  # which the loops read by its address
        self.bytes: int = data.numel() * data.element_size() // threads * threads
        self._pool = ThreadPoolExecutor(threads)
        part = self.bytes // threads
        starts = [data.data_ptr() + i * part for i in range(threads)]
        with tempfile.TemporaryDirectory(prefix="kdtree-bench-") as folder:
            library = compiled(Path(folder))  # it stays loaded when its file goes

        def call(name: str) -> Callable[[], None]:
            loop = getattr(library, name)
            loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64

            def read() -> None:
                for done in [self._pool.submit(loop, start, part) for start in starts]:
                    done.result()

            return read

        names = [f"read_{streams}_{ahead}" for streams in STREAMS for ahead in AHEAD]
        rounds = [{name: clock.wall([call(name)], ROUND_SECONDS).us for name in names} for _ in range(ROUNDS)]
        self.name = min(names, key=lambda name: statistics.median(times[name] for times in rounds))
        self._read = call(self.name)

    def timed(self, seconds: float) -> clock.Timing:
        """Of all the bytes once."""
        return clock.wall([self._read], seconds)
