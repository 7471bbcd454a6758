"""The loops of the read ceiling read every line once."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from harness.bench import reading
from harness.toolchain import BuildError


@pytest.mark.slow
def test_every_loop_reads_all_of_its_streams(tmp_path: Path) -> None:
    library = reading.compiled(tmp_path)
    words = np.random.default_rng(1).integers(
        0, 1 << 63, 8 * 24 * 5 + 3, np.uint64
    )  # 5 lines a stream of 24, and a rest
    for streams in reading.STREAMS:
        read = words.nbytes // streams // 64 * 64 * streams
        for ahead in reading.AHEAD:
            loop = getattr(library, f"read_{streams}_{ahead}")
            loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
            assert loop(words.ctypes.data, words.nbytes) == np.bitwise_xor.reduce(words[: read // 8])


@pytest.mark.slow
def test_a_reader_times_its_bytes() -> None:
    import torch

    reader = reading.Reader(torch.ones(1 << 20), 2)
    assert reader.name in {f"read_{streams}_{ahead}" for streams in reading.STREAMS for ahead in reading.AHEAD}
    assert reader.bytes == 4 << 20
    assert 1e9 < reader.bytes / (1e-6 * reader.timed(0.01).fastest) < 1e13


def test_a_machine_without_a_compiler_is_told_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.toolchain.cxx", lambda: "no-such-compiler")
    with pytest.raises(BuildError, match="'no-such-compiler' is not on PATH; install g"):
        reading.compiled(tmp_path)
