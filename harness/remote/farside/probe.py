"""What a host has, found out without changing anything on it: no file is written, no module is compiled to disk."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from harness.remote.farside.tree import decode

# Runs under the host's Python, which may be another one than this program's.
_MODULES = """
import importlib, importlib.metadata, json, sys
found = {}
for module, package in json.loads(sys.argv[1]).items():
    try:
        importlib.import_module(module)
        found[package] = importlib.metadata.version(package)
    except Exception as error:
        found[package] = None if isinstance(error, ModuleNotFoundError) else "broken: %s" % error
torch = sys.modules.get("torch")
cuda = bool(torch) and torch.cuda.is_available()
print(json.dumps({
    "python": "%d.%d.%d" % sys.version_info[:3],
    "packages": found,
    "torch_cuda": (torch.version.cuda or "") if torch else "",
    "torch_archs": torch.cuda.get_arch_list() if cuda else [],
    "torch_gpus": torch.cuda.device_count() if cuda else 0,
}))
"""
_NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "yaml": "PyYAML",
    "jinja2": "Jinja2",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
    "setuptools": "setuptools",
    "ninja": "ninja",
}


def probe(workdir: bytes, python: str, env: Mapping[str, str], features: Sequence[str]) -> dict[str, Any]:
    """Facts about this host, for ``kdtree remote --doctor``.

    ``features`` are names of programs or of CPU flags; those that are neither are reported as missing.
    """
    surroundings = {**os.environ, **{k: os.path.expanduser(v) for k, v in env.items()}, "PYTHONDONTWRITEBYTECODE": "1"}
    path = surroundings.get("PATH")
    existing = workdir
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    programs = {name: shutil.which(name, path=path) or "" for name in ("g++", "clang++", "nvcc", "nvidia-smi", "pip")}
    flags = _cpu_flags()
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "free": shutil.disk_usage(existing).free,
        "workdir": decode(workdir),
        "workdir_exists": existing == workdir,
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "programs": {
            name: _first_line([where, "--version"], surroundings) for name, where in programs.items() if where
        },
        "gpus": _gpus(programs["nvidia-smi"], surroundings),
        "missing_features": [f for f in features if f not in flags and not shutil.which(f, path=path)],
        **_modules(os.path.expanduser(python), surroundings),
    }


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return {flag for line in file if line.startswith(("flags", "Features")) for flag in line.split()[2:]}
    except OSError:
        return set()


def _output(argv: Sequence[str], env: Mapping[str, str], limit: float) -> tuple[str, str]:
    """Standard output, and what went wrong."""
    try:
        done = subprocess.run(
            argv, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def _first_line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    text, trouble = _output(argv, env, 20)
    lines = [line for line in text.splitlines() if line.strip()]
    release = [line for line in lines if "release" in line]  # nvcc says its version in its fourth line
    return (release or lines or [trouble or "?"])[0].strip()


def _gpus(program: str, env: Mapping[str, str]) -> list[dict[str, str]]:
    if not program:
        return []
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    text, trouble = _output([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], env, 30)
    if trouble:
        return []
    return [
        dict(zip(fields, map(str.strip, line.split(",")), strict=False)) for line in text.splitlines() if line.strip()
    ]


def _modules(python: str, env: Mapping[str, str]) -> dict[str, Any]:
    text, trouble = _output([python, "-c", _MODULES, json.dumps(_NEEDED)], env, 180)
    try:
        facts = json.loads(text.splitlines()[-1])
    except (IndexError, ValueError):
        return {"python": "", "python_trouble": trouble or "no answer", "packages": {}}
    return {**facts, "python_trouble": ""}
