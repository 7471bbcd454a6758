"""Finding GPUs and sharing one, on any machine: a driver written for the test stands in for NVIDIA's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import gpu
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
GPU = gpu.Gpu(0, "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "A card", (9, 0), 1 << 37, 1 << 36)

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuGetErrorName(int code, const char** name) { *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "OTHER"; return 0; }
int cuDriverGetVersion(int* v) { *v = 13010; return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGet(int* d, int i) { *d = i; return 0; }
int cuDeviceGetName(char* s, int n, int d) { strcpy(s, d ? "Broken card" : "A card"); return 0; }
int cuDeviceGetUuid(unsigned char* u, int d) { for (int i = 0; i < 16; ++i) u[i] = i; return 0; }
int cuDeviceGetAttribute(int* v, int what, int d) { *v = what == 75 ? 12 : 0; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { return d ? 2 : 0; }
int cuCtxPushCurrent_v2(void* c) { return 0; }
int cuMemGetInfo_v2(size_t* f, size_t* t) { *f = 5ull << 30; *t = 16ull << 30; return 0; }
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KDTREE_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def _driver(folder: Path, monkeypatch: pytest.MonkeyPatch, init: int) -> None:
    (folder / "cuda.c").write_text(DRIVER)
    compiler = shutil.which("cc") or shutil.which("gcc") or "c++"
    made = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
    subprocess.run(made, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_survey_tells_the_usable_from_the_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which no context can be made is left out; the rest is as the driver said it."""
    _driver(tmp_path, monkeypatch, 0)
    seen = gpu.survey()
    assert seen.driver == "13.1"
    assert seen.reason == ""
    assert seen.gpus == (gpu.Gpu(0, GPU.uuid, "A card", (12, 0), 16 << 30, 5 << 30),)
    assert seen.gpus[0].arch == "12.0"


def test_survey_says_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own word, and the variable that may have hidden the cards."""
    _driver(tmp_path, monkeypatch, 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    seen = gpu.survey()
    assert seen.gpus == ()
    assert "CUDA_ERROR_NO_DEVICE" in seen.reason
    assert "CUDA_VISIBLE_DEVICES='7'" in seen.reason


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_an_empty_list_hides_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Whatever a driver makes of it."""
    _driver(tmp_path, monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    seen = gpu.survey()
    assert seen.gpus == ()
    assert "hides every GPU" in seen.reason


BROKEN = [("import time; time.sleep(600)", 1.0, "did not answer"), ("raise SystemExit(5)", PATIENCE, "status 5")]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "seconds", "word"), BROKEN)
def test_a_driver_that_hangs_or_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seconds: float, word: str
) -> None:
    """Costs its time limit at most, and is a reason like any other."""
    (tmp_path / "probe.py").write_text(script)
    monkeypatch.setattr(gpu, "_PROBE", tmp_path / "probe.py")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = gpu.survey(timeout=seconds)
    assert seen.gpus == ()
    assert word in seen.reason


def test_worker_cap() -> None:
    """As many as fit beside their contexts, never more than asked for, none when not even one does."""
    cell = 1 << 30
    room = lambda workers: int(workers * (cell + gpu.CONTEXT_BYTES) / 0.9) + 2  # noqa: E731
    assert gpu.worker_cap(room(3), cell, 8) == 3
    assert gpu.worker_cap(room(3) - 8, cell, 8) == 2
    assert gpu.worker_cap(room(3), cell, 2) == 2
    assert gpu.worker_cap(cell, cell, 2) == 0
    with pytest.raises(ValueError, match="negative"):
        gpu.worker_cap(1, -1, 1)


def test_sticky_errors() -> None:
    """Those that end the context, in the words of CUDA, of torch and of csrc/cuda; not those that it survives."""
    lost = [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "cudaStreamSynchronize(stream_) failed: cudaErrorLaunchFailure, unspecified launch failure (backend.cu:1)",
        "cudaGraphLaunch(..) failed: cudaErrorNvlinkUncorrectable, ... (backend.cu:1); the CUDA context is lost",
    ]
    kept = ["CUDA out of memory. Tried to allocate 2 GiB", "cudaErrorInvalidValue, invalid argument", "no kernel image"]
    assert [gpu.is_sticky(text) for text in lost + kept] == [True] * len(lost) + [False] * len(kept)


def test_who_waits_gets_the_card_when_it_is_free_and_names_itself_alone(locks: Path) -> None:
    first = gpu.Lease(GPU, run="a name that is longer than the other one's")
    told: list[str] = []

    def say(text: str) -> None:
        told.append(text)
        first.__exit__(None, None, None)

    first.__enter__()
    with gpu.Lease(GPU, run="b", timeout=PATIENCE, say=say) as second:
        assert f"process {os.getpid()} " in second.holder()
        assert "run b, since" in second.holder()
    assert len(told) == 1
    with gpu.Lease(GPU, timeout=0.0):
        pass


def test_a_folder_of_another_user_is_refused(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.lock_folder() == locks
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="belongs to another user; set KDTREE_LOCKS"):
        gpu.lock_folder()
    monkeypatch.setattr(os, "getuid", lambda: owner)
    monkeypatch.delenv("KDTREE_LOCKS")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(locks))
    assert gpu.lock_folder() == locks / f"kdtree-locks-{owner}"
    assert gpu.lock_folder().stat().st_mode & 0o777 == 0o700


HOLD = """
import sys, time
from harness.gpu import Gpu, Lease
with Lease(Gpu(0, sys.argv[1], "A card", (9, 0), 1, 1), run="run-of-the-other"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_one_run_at_a_time(locks: Path) -> None:
    """The second is told who holds the card, and gets it as soon as the first is killed."""
    told: list[str] = []
    holder = subprocess.Popen([sys.executable, "-c", HOLD, GPU.uuid], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        start = time.monotonic()
        with (
            pytest.raises(gpu.GpuBusy, match=rf"process {holder.pid} .*run run-of-the-other, since .*CUDA_VISIBLE"),
            gpu.Lease(GPU, run="mine", timeout=0.5, say=told.append),
        ):
            pass
        assert time.monotonic() - start < PATIENCE  # a fifth of what the other holds it for
        assert len(told) == 1
        assert str(holder.pid) in told[0]
    finally:
        holder.kill()
        holder.wait()
    with gpu.Lease(GPU, run="mine", timeout=PATIENCE, say=told.append) as lease:
        assert f"process {os.getpid()}" in lease.holder()
    assert len(told) == 1
    assert locks.stat().st_mode & 0o077 == 0
