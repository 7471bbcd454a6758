"""The tools a build needs: torch's cpp_extension, a C++ compiler, and for CUDA a toolkit that fits torch.

Whatever is missing or does not fit is a `BuildError` whose one line says what to install.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TORCH_MINIMUM = (2, 11)
"""The first with the stable ABI that the engine uses; ``pyproject.toml`` asks for it too."""


class BuildError(Exception):
    """The engine cannot be built here; the message says what is missing or wrong. Exit status 3 at the command line."""


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, to be compared; one that is not released yet, ``2.11rc1``, comes before."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def torch_build() -> list[str | None]:
    """Version, commit and CUDA version of the torch that would be imported: read, not imported, as that takes seconds.

    Raises BuildError where there is none, or one that is too old.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if source is not None and source.is_file():
        said = runpy.run_path(str(source))
        version, commit, cuda = said["__version__"], said["git_version"], said["cuda"]
    else:
        try:
            import torch
        except ImportError as error:
            raise BuildError(f"torch is not installed ({error}); install it with: pip install torch") from error
        version = str(torch.__version__)
        commit, cuda = getattr(torch.version, "git_version", None), torch.version.cuda
    if release(version) < TORCH_MINIMUM:
        newer = ".".join(map(str, TORCH_MINIMUM))
        raise BuildError(f"torch {version} is too old; {newer} or newer has the stable ABI that the engine uses")
    return [version, commit, cuda]


def extension() -> Any:
    """``torch.utils.cpp_extension`` of a torch that is new enough."""
    torch_build()
    log = logging.getLogger("torch.utils.cpp_extension")
    level = log.level
    log.setLevel(logging.ERROR)  # with a toolkit and no GPU it warns of that, in builds for the CPU too
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise BuildError(f"torch.utils.cpp_extension needs setuptools ({error}); pip install setuptools") from error
    finally:
        log.setLevel(level)
    return cpp_extension


@functools.lru_cache
def version_of(program: str) -> str:
    """What ``program --version`` prints."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{program} --version fails: {error}") from error
    return done.stdout.strip()


def cxx() -> str:
    """The C++ compiler that cpp_extension will call, as a command."""
    return os.environ.get("CXX", "c++")


def compiler() -> str:
    """Command, path and version of that compiler."""
    name = cxx()
    found = shutil.which(name.split()[0] if name else "c++")
    if found is None:
        raise BuildError(
            f"no C++ compiler: {name or 'c++'!r} is not on PATH; install g++ (9 or newer) or clang, or set CXX"
        )
    return f"{name} {os.path.realpath(found)} {version_of(found)}"


def specific(arch: str) -> str:
    """The target with all of an architecture's instructions: Hopper's matrix instructions are in ``9.0a`` alone."""
    return "9.0a" if arch == "9.0" else arch


def cuda(cpp_extension: Any, archs: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    """Version text of the CUDA toolkit, and the capabilities to compile for."""
    import torch

    wanted = torch.version.cuda
    if wanted is None:
        raise BuildError(
            f"torch {torch.__version__} has no CUDA; install a CUDA build of it "
            "(https://pytorch.org/get-started) or use the CPU"
        )
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home) / "bin" / "nvcc" if home else None
    if nvcc is None or not nvcc.exists():
        raise BuildError(f"no CUDA toolkit: install nvcc {wanted.split('.')[0]}.x and set CUDA_HOME to its folder")
    version = version_of(str(nvcc))
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or release.group(1) != wanted.split(".")[0]:
        have = f"{release.group(1)}.{release.group(2)}" if release else "unknown"
        raise BuildError(
            f"the CUDA toolkit in {home} is {have}, torch is built for {wanted}; "
            f"install a toolkit {wanted.split('.')[0]}.x"
        )
    capabilities = tuple(sorted({specific(arch) for arch in (archs or _visible_capabilities(torch))}))
    listed = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    for arch in capabilities:
        if not re.fullmatch(r"\d{1,2}\.\d[af]?", arch):
            raise BuildError(f"architecture {arch!r} is not of the form 12.0")
        if f"compute_{arch.replace('.', '').rstrip('af')}" not in listed.split():
            raise BuildError(
                f"architecture {arch}: nvcc {release.group(1)}.{release.group(2)} knows {' '.join(listed.split())}"
            )
    return version, capabilities


def _visible_capabilities(torch: Any) -> set[str]:
    count = torch.cuda.device_count()  # is_available() can be true with no device visible
    if count == 0:
        raise BuildError(
            "no GPU is visible here, `kdtree doctor` says why; to build for another machine's, "
            "say which: kdtree build --device cuda --arch 12.0"
        )
    return {"{}.{}".format(*torch.cuda.get_device_capability(i)) for i in range(count)}
