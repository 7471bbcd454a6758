"""What this machine is, as strings for ledgers and for ``kdtree doctor``; torch is looked at, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from harness import gpu

FEATURES = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
"""The CPU features that kernels choose by, as the kernel spells them."""


def first_line(*command: str) -> str:
    """The first line a program prints, ``""`` if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else ""


def cpu() -> tuple[str, list[str]]:
    """The processor's name and those of its FEATURES that the system reports."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return first_line("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine(), []
    text = info.read_text("utf-8", "replace")
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    return name.group(1) if name else platform.machine(), [feature for feature in FEATURES if feature in have]


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """An installed package's version, ``""`` if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_cuda() -> str:
    """The CUDA version that the installed torch was built for, ``""`` for none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    source = Path(spec.origin).with_name("version.py")
    found = (
        re.search(r"^cuda[^=]*=\s*'([\d.]+)'", source.read_text("utf-8"), re.MULTILINE) if source.is_file() else None
    )
    return found.group(1) if found else ""


def nvcc() -> tuple[str, str]:
    """Path and version of the CUDA compiler, both ``""`` without one: CUDA_HOME, then PATH, then /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    places = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    places += [Path(on_path)] if on_path else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    for place in places:
        if os.access(place, os.X_OK):
            done = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=30, check=False)
            found = re.search(r"release ([\d.]+)", done.stdout)
            return str(place), found.group(1) if found else "unknown"
    return "", ""


def cuobjdump(nvcc: str) -> str:
    """Path of CUDA's disassembler, ``""`` without one: beside nvcc (and what it links to), CUDA_HOME, then PATH.

    It needs nvdisasm, which some installations leave out: one without it, beside or on PATH, is passed over.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    folders = [Path(nvcc).parent, Path(nvcc).resolve().parent] if nvcc else []
    folders += [Path(home) / "bin"] if home else []
    on_path = shutil.which("cuobjdump")
    folders += [Path(on_path).parent] if on_path else []
    for folder in folders:
        if os.access(folder / "cuobjdump", os.X_OK) and (
            os.access(folder / "nvdisasm", os.X_OK) or shutil.which("nvdisasm")
        ):
            return str(folder / "cuobjdump")
    return ""


def compiler() -> tuple[str, str]:
    """The C++ compiler that a build takes (CXX, or c++) and what it says of itself; both ``""`` without one."""
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name.split()[0]) or ""
    return path, first_line(path, "--version") if path else ""


@cache
def survey() -> gpu.Survey:
    """The GPUs, asked for once in a process."""
    return gpu.survey()


@cache
def environment() -> dict[str, str]:
    """Everything about the machine that a result may depend on."""
    name, features = cpu()
    seen = survey()
    return {
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": name,
        "cpu_features": " ".join(features),
        "cpus": str(processors()),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "cuda": torch_cuda(),
        "nvcc": nvcc()[1],
        "compiler": compiler()[1],
        "driver": seen.driver,
        "gpus": ", ".join(g.described for g in seen.gpus),
    }
