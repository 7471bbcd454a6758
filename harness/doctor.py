"""``kdtree doctor``: what this machine can run, what is missing, and how to get it.

Exit status 0 when the CPU path works (build, bundles, matrix), 3 when something that it needs is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import environment as machine
from harness import plain_json
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser
from harness.progress import tell, told
from harness.toolchain import TORCH_MINIMUM, release

HARNESS = {"numpy": (1, 26), "PyYAML": (6, 0), "Jinja2": (3, 1), "pytest": (8, 0), "pytest-xdist": (3, 5)}
"""Packages without which no cell can be judged, whatever the engine."""
_PIP = f"{shlex.quote(sys.executable)} -m pip install"


@dataclass(frozen=True)
class Finding:
    """One thing looked for. ``needed_for`` is what does not work without it, ``remedy`` is ``""`` when it is fine."""

    name: str
    ok: bool
    found: str
    needed_for: str
    remedy: str = ""

    @property
    def blocks_cpu(self) -> bool:
        return not self.ok and self.needed_for == "cpu"


def _package(name: str, needed_for: str, minimum: tuple[int, ...] = ()) -> Finding:
    have = machine.version(name)
    ok = bool(have) and release(have) >= minimum
    wanted = f"{name}>={'.'.join(map(str, minimum))}" if minimum else name
    return Finding(name, ok, have or "not installed", needed_for, "" if ok else f"{_PIP} '{wanted}'")


def _torch() -> Finding:
    """One that is installed may lack what it needs: a library of CUDA, a numpy of its own age."""
    finding = _package("torch", "cpu", TORCH_MINIMUM)
    if not finding.ok or "torch" in sys.modules:
        return finding
    with told("doctor: importing torch", tell):
        done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return finding
    why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return replace(finding, ok=False, found=f"{finding.found} cannot be imported: {why}", remedy=f"{_PIP} torch")


def advice(findings: Sequence[Finding]) -> list[str]:
    """How Python packages that are missing come here at once, in lines; none where nothing has to be installed."""
    if not any(_PIP in finding.remedy for finding in findings):
        return []
    lines = ["the Python packages: `nox -s test` installs them all, into an environment of its own"]
    own = sys.prefix != sys.base_prefix
    if not own and (Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED").exists():
        lines += [
            f"pip adds nothing to {sys.executable}, whose packages are the system's; for nox and pip alike, first:",
            f"  {shlex.quote(sys.executable)} -m venv ~/kdtree-python && . ~/kdtree-python/bin/activate",
        ]
    return lines


def lacking() -> list[str]:
    """What the harness itself needs of Python and this machine has not."""
    return [name for name, minimum in HARNESS.items() if not _package(name, "cpu", minimum).ok]


def _program(name: str, needed_for: str, package: str, *, places: Sequence[str] = ()) -> Finding:
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *places])) or ""
    remedy = "" if path else f"apt-get install {package}, or what your system calls it"
    return Finding(name, bool(path), path or "not found", needed_for, remedy)


def _cuda() -> list[Finding]:
    """The CUDA toolkit against torch's CUDA, and the GPUs. torch refuses a toolkit of another major version."""
    path, toolkit = machine.nvcc()
    built_for = machine.torch_cuda()
    survey = machine.survey()
    gpus = ", ".join(g.described for g in survey.gpus)
    found = [
        Finding("GPU", bool(gpus), gpus or survey.reason, "cuda", "" if gpus else "cells on cuda need an NVIDIA GPU"),
        Finding(
            "nvcc",
            bool(path),
            f"{toolkit} ({path})" if path else "not found",
            "cuda",
            "" if path else "install the CUDA toolkit 13.0 and set CUDA_HOME to it",
        ),
        Finding(
            "torch's CUDA",
            bool(built_for),
            built_for or "none: this torch is for the CPU",
            "cuda",
            "" if built_for else "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        ),
    ]
    if path and built_for:
        fits = toolkit.split(".")[0] == built_for.split(".")[0]
        remedy = "" if fits else f"install CUDA toolkit {built_for}, or a torch built for CUDA {toolkit}"
        found.append(Finding("toolkit fits torch", fits, f"nvcc {toolkit}, torch {built_for}", "cuda", remedy))
    return found


def examine() -> list[Finding]:
    """Everything looked for, in the order in which it is shown."""
    python = sys.version_info[:2]
    path, said = machine.compiler()
    return [
        Finding(
            "Python",
            python >= (3, 10),
            machine.environment()["python"],
            "cpu",
            "" if python >= (3, 10) else "install Python 3.10 or newer",
        ),
        *(_package(name, "cpu", minimum) for name, minimum in HARNESS.items()),
        _torch(),
        _package("setuptools", "cpu"),
        _package("ninja", "cpu"),
        _package("hypothesis", "tests"),
        _package("paramiko", "remote", (3, 4)),
        Finding(
            "C++ compiler",
            bool(said),
            f"{said} ({path})" if said else "not found",
            "cpu",
            "" if said else "apt-get install g++ (macOS: xcode-select --install), or set CXX",
        ),
        _program("clang++", "fuzz", "clang"),
        _program("git", "tests", "git"),
        _program("sshd", "tests of remote", "openssh-server", places=("/usr/sbin", "/usr/local/sbin")),
        *_cuda(),
    ]


def main(argv: Sequence[str]) -> int:
    """See ``kdtree doctor --help``."""
    parser = Parser(
        prog="kdtree doctor",
        description="Say what this machine can run, what is missing, and how to get it.",
        epilog="examples:\n  kdtree doctor\n  kdtree doctor --json\n\n"
        "exit status: 0 the CPU path works, 3 something that it needs is missing",
    )
    parser.add_json("one JSON object")
    json = parser.parse_args(argv).json
    findings = examine()
    works = not any(finding.blocks_cpu for finding in findings)
    cuda = all(finding.ok for finding in findings if finding.needed_for == "cuda")
    content = {"cpu": works, "cuda": cuda and works, "environment": machine.environment()}
    plain_json.give({**content, "findings": findings}, json)
    if json == plain_json.PRINTED:
        return PASSED if works else INFRASTRUCTURE
    for name in ("os", "cpu", "cpu_features"):
        print(f"{name:<20} {machine.environment()[name]}")
    for finding in findings:
        mark = "ok" if finding.ok else "MISSING" if finding.blocks_cpu else "absent"
        print(f"{finding.name:<20} {mark:<8} {finding.found}")
        if finding.remedy:
            print(f"{'':<20} {'':<8} for {finding.needed_for}: {finding.remedy}")
    print("", *advice(findings), sep="\n")
    print(f"cpu  {'works' if works else 'does not work: see MISSING'}")
    print(f"cuda {'works' if cuda and works else 'does not work here: see the lines marked for cuda'}")
    return PASSED if works else INFRASTRUCTURE
