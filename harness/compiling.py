"""The compilers' part of a build: ``torch.utils.cpp_extension`` in a folder of its own, and what its failure means."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import toolchain
from harness.progress import tell, told
from harness.toolchain import BuildError

NAME = "kdtree"
AHEAD = "ahead.h"
STANDARD = (
    *("algorithm", "cmath", "condition_variable", "cstdint", "cstdlib", "cstring", "functional", "map", "memory"),
    *("mutex", "optional", "stdexcept", "string", "thread", "vector"),
)
"""Headers that most sources include, read once for all of them: a quarter of a build's time."""


def compile_library(
    root: Path,
    files: Sequence[Path],
    flags: dict[str, list[str]],
    capabilities: Sequence[str],
    final: Path,
    *,
    precompile: bool,
) -> None:
    """Compile and link ``files`` of the checkout ``root`` into the folder ``final``, which appears by rename.

    ``precompile``: GCC reads the standard's headers once for all files. Raises BuildError, OSError.
    """
    # The caller holds the lock, so what lies here unfinished belongs to builds that died. The compilers of one that was
    # killed may still be running in its folder: hence a folder of another name for each build.
    for dead in (*final.parent.glob(f".{final.name}.*.part"), final):
        shutil.rmtree(dead, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".part"))
    folder.chmod(0o755)  # mkdtemp's 0700 would shut other users of a shared cache out
    # Equal sources are equal builds wherever they lie: a release build holds no path of this checkout.
    local = [] if "-g" in flags["cxx"] else [f"-ffile-prefix-map={shlex.quote(str(root))}=."]
    common = [*flags["cxx"], *local]
    ahead = _ahead(toolchain.cxx(), common, folder) if precompile else contextlib.nullcontext()
    values = {
        "name": NAME,
        "sources": [str(p) for p in files],
        "extra_cflags": [*common, *(("-include", AHEAD) if precompile else ())],
        "extra_cuda_cflags": flags["cuda"],
        "extra_sycl_cflags": [],
        "extra_ldflags": list(flags["link"]),
        "extra_include_paths": [],
        "build_directory": str(folder),
        "verbose": False,
        "with_cuda": bool(capabilities),
        "with_sycl": False,
        "is_standalone": False,
    }

    def made() -> str:
        return f"{len(list(folder.glob('*.o')))} are done"

    compiling = told(f"kdtree: compiling {len(files)} files of csrc/", tell, made)
    try:
        with _environment(_changes(root, local, capabilities)), ahead, compiling:
            # Importing torch takes a second and a half, in which the headers are read. load() would also load what it
            # built, which a sanitizer build or a machine without the GPU cannot.
            compile_and_link = toolchain.extension()._write_ninja_file_and_build_library
            known = inspect.signature(compile_and_link).parameters
            compile_and_link(**{name: value for name, value in values.items() if name in known})
        for made_ahead in folder.glob(f"{AHEAD}*"):
            made_ahead.unlink()
        if not (folder / f"{NAME}.so").is_file():
            raise BuildError(
                f"the compiler, {toolchain.cxx()}, ended without an error and has made no library; CXX names another"
            )
        os.rename(folder, final)  # with its objects, which harness/mutants/build.py links again
    except RuntimeError as error:
        log = final.parent / f"{final.name}.log"
        with contextlib.suppress(OSError):  # of a full disk, for one
            log.write_text(str(error))
        raise BuildError(_readable(str(error), log)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # of a build that failed; a finished one has another name


def _changes(root: Path, local: Sequence[str], capabilities: Sequence[str]) -> dict[str, str]:
    """Of the environment, for a build."""
    changes = {}
    if local and not re.search(r"[\s,'\"]", str(root)):
        # Not among the CUDA flags: a path with the letters of "arch" there would drop cpp_extension's -gencode flags.
        changes["NVCC_PREPEND_FLAGS"] = f"{os.environ.get('NVCC_PREPEND_FLAGS', '')} -Xcompiler {local[0]}"
    if capabilities:
        changes["TORCH_CUDA_ARCH_LIST"] = ";".join(capabilities)
    with contextlib.suppress(ImportError):
        import ninja

        changes["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
    if re.search(r"lib[a-z]+san\.so", os.environ.get("LD_PRELOAD", "")):
        changes["LD_PRELOAD"] = ""  # a sanitizer is this process's; it may be the end of a compiler
    return changes


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _ahead(compiler: str, flags: Sequence[str], folder: Path) -> Iterator[None]:
    """Reads `STANDARD` for all who include `AHEAD` in ``folder``, beside what is done meanwhile.

    Sources that are compiled before that is done, or where it fails, read the text. It changes nothing that is
    compiled: every source includes what it uses.
    """
    (folder / AHEAD).write_text("".join(f"#include <{name}>\n" for name in STANDARD))
    command = f"{compiler} -fPIC {' '.join(flags)} -x c++-header {AHEAD} -o {AHEAD}.part && mv {AHEAD}.part {AHEAD}.gch"
    quiet = subprocess.DEVNULL
    reading = subprocess.Popen(command, shell=True, cwd=folder, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        if reading.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(reading.pid, signal.SIGKILL)
            reading.wait()


def _readable(text: str, log: Path) -> str:
    """The lines a reader needs: the errors with what follows them, and where the rest is."""
    if "Ninja is required" in text:
        return "ninja is not installed; install it with: pip install ninja"
    if "build stopped: interrupted" in text:  # by a signal that reached the compilers and not this process
        return "the build was interrupted; the same command begins it again"
    if os.strerror(errno.ENOSPC) in text:
        return (
            f"no space left in {log.parent} or in the folder for temporary files: KDTREE_BUILD and TMPDIR name others"
        )
    lines = text.splitlines()
    picked: list[str] = []
    for i, line in enumerate(lines):
        if re.search(r"\b(fatal )?error\b\s*:|undefined reference|ptxas fatal", line) and len(picked) < 24:
            first = i
            while first > 0 and re.match(r"In file included from |\s+from |.*: In ", lines[first - 1]):
                first -= 1  # which source came to include what is wrong
            picked += [text for text in lines[first : i + 3] if text not in picked]
    shown = "\n".join(picked or lines[-12:])
    return f"csrc/ does not compile:\n{shown}\nThe compiler's whole output: {log}"
