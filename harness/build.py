"""Builds ``csrc/`` with ``torch.utils.cpp_extension`` into a cache keyed by everything that could change the result.

Guarantees: a library in the cache is complete and belongs to exactly these sources, flags, torch, compiler and
toolkit; it appears by rename; many processes that want the same build make it once; a build that died leaves nothing
that a later one waits for (the lock is the kernel's and ends with its process). torch's own lock file, which outlives
a killed build, only ever lies in a folder that no other process looks at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import inspect
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness import toolchain
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import DEVICE_HELP, Parser
from harness.files import said
from harness.includes import closure
from harness.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NAME = "kdtree"
NAMESPACE = {"cpu": "kdtree", "cuda": "kdtree_cuda"}  # of torch.ops, by device
TORCH_API = (
    "0x020b000000000000ULL"  # the stable ABI of torch 2.11: what is compiled runs under this torch or a newer one
)
UNUSED_SECONDS = 7 * 24 * 3600
EVERY = 10.0  # seconds between two lines of progress
AHEAD = "ahead.h"
STANDARD = (
    *("algorithm", "cmath", "condition_variable", "cstdint", "cstdlib", "cstring", "functional", "map", "memory"),
    *("mutex", "optional", "stdexcept", "string", "thread", "vector"),
)
"""Headers that most sources include, read once for all of them: a quarter of a build's time."""
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


def sources(device: str) -> list[Path]:
    """The files that are compiled for a device, in a fixed order."""
    found = sorted(CSRC.glob("*.cpp")) + sorted((CSRC / "cpu").glob("*.cpp"))
    if device == "cuda":
        found += sorted((CSRC / "cuda").glob("*.cu"))
    if not found:
        raise BuildError(f"no sources under {CSRC}: the engine is built from a checkout, not from an installed package")
    names = [(p.stem, p.suffix) for p in found]
    twice = sorted({f"{stem}{suffix}" for stem, suffix in names if names.count((stem, suffix)) > 1})
    if twice:  # cpp_extension names object files by the stem alone
        raise BuildError(f"two sources are called {twice[0]}; their object files would overwrite each other")
    return found


def build(
    device: str = "cpu",
    archs: Sequence[str] | None = None,
    debug: bool = False,
    sanitize: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The shared library of the engine for ``device`` (``cpu`` or ``cuda``), built if the cache lacks it.

    ``archs`` are CUDA compute capabilities such as ``12.0`` (default: those of the visible GPUs); ``sanitize`` is
    ``address`` (with undefined behaviour) or ``thread``. The cache is ``build/`` in the checkout, or ``KDTREE_BUILD``.
    Raises `BuildError`.
    """
    if device not in ("cpu", "cuda"):
        raise BuildError(f"device {device!r}: known are cpu and cuda")
    if sanitize is not None and sanitize not in SANITIZERS:
        raise BuildError(f"sanitizer {sanitize!r}: known are {', '.join(SANITIZERS)}")
    torch = toolchain.torch_build()
    compiler = toolchain.compiler()
    toolkit, capabilities = toolchain.cuda(toolchain.extension(), archs) if device == "cuda" else ("", ())
    flags = _flags(device, debug, sanitize)
    files = sources(device)
    key = _key(files, flags, torch, compiler, toolkit, capabilities)
    home = cache or Path(os.environ.get("KDTREE_BUILD") or ROOT / "build")
    final = home / f"{device}-{key}"
    library = final / f"{NAME}.so"
    if library.exists():
        with contextlib.suppress(OSError):  # a cache that this user may only read
            os.utime(final)
        return library
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _exclusive(home / f".{device}-{key}.lock"):
            if not library.exists():  # another process may have been first
                gnu = "Free Software Foundation" in compiler
                _make(files, flags, capabilities, final, precompile=gnu)
                _drop_unused(home)
    except OSError as error:
        raise BuildError(f"{said(error)}; KDTREE_BUILD names another folder than {home}") from error
    return library


def _drop_unused(home: Path) -> None:
    """Remove builds that nobody has asked for in a week, and what compilers said of those that failed."""
    oldest = time.time() - UNUSED_SECONDS
    for path in home.iterdir():
        if re.fullmatch(r"(cpu|cuda)-[0-9a-f]{20}(\.log)?", path.name):
            with contextlib.suppress(OSError):  # another run is at it, too
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _flags(device: str, debug: bool, sanitize: str | None) -> dict[str, list[str]]:
    # -ffp-contract=off: the arithmetic says fma where it wants one, everything else must not be fused.
    common = ["-std=c++17", "-ffp-contract=off", f"-DTORCH_TARGET_VERSION={TORCH_API}", "-pthread"]
    common += ["-fno-math-errno", "-Wall", "-Wextra"]
    # Both builds may live in one process: each has its own torch namespace and shares no symbol with the other.
    common += [f"-DKDTREE_LIBRARY={NAMESPACE[device]}", "-fvisibility=hidden"]
    common += ["-O1", "-g", "-DKDTREE_DEBUG"] if debug else ["-O1", "-g"] if sanitize else ["-O3"]
    link = ["-pthread"]
    if sanitize is not None:
        common += [f"-fsanitize={SANITIZERS[sanitize]}", "-fno-omit-frame-pointer"]
        link += [f"-fsanitize={SANITIZERS[sanitize]}"]
    cuda: list[str] = []
    if device == "cuda":
        common += ["-DKDTREE_CUDA", "-DUSE_CUDA"]
        # No flag may contain the letters of "arch": cpp_extension would then drop its -gencode flags.
        cuda = ["-std=c++17", "-O3", "--fmad=false", "-lineinfo", "-DKDTREE_CUDA", "-DUSE_CUDA"]
        cuda += [f"-DTORCH_TARGET_VERSION={TORCH_API}", *(["-DKDTREE_DEBUG"] if debug else [])]
    return {"cxx": common, "cuda": cuda, "link": link}


def _key(
    files: Sequence[Path],
    flags: dict[str, list[str]],
    torch: Sequence[str | None],
    compiler: str,
    toolkit: str,
    capabilities: Sequence[str],
) -> str:
    digest = hashlib.sha256()
    read = [CSRC / path for path in closure(CSRC, [path.relative_to(CSRC) for path in files])]
    for path in [*read, Path(__file__)]:
        digest.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    about = {
        "flags": flags,
        "compiler": compiler,
        "toolkit": toolkit,
        "capabilities": list(capabilities),
        "torch": list(torch),
        "machine": [platform.system(), platform.machine(), platform.libc_ver()],
        "root": str(ROOT) if "-g" in flags["cxx"] else "",  # debug information holds it, a release build nothing of it
    }
    digest.update(json.dumps(about, sort_keys=True).encode())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file. The kernel lets go of it when the process ends, however it ends."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with _progress("waiting for another process that builds the engine", lambda: "it is not done"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(what: str, state: Callable[[], str]) -> Iterator[None]:
    """Says so on stderr when something takes more than a second, its state now and then, and how long it took."""
    start, ended, lines = time.monotonic(), threading.Event(), 0

    def show() -> None:
        nonlocal lines
        while not ended.wait(EVERY if lines else 1.0):
            print(f"kdtree: {what} ... {state() if lines else ''}".rstrip(), file=sys.stderr, flush=True)
            lines += 1

    teller = threading.Thread(target=show, daemon=True)
    teller.start()
    how = "stopped after "
    try:
        yield
        how = ""
    finally:
        ended.set()
        teller.join()
        if lines:
            print(f"kdtree: {what}: {how}{time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


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


def _make(
    files: Sequence[Path],
    flags: dict[str, list[str]],
    capabilities: Sequence[str],
    final: Path,
    *,
    precompile: bool,
) -> None:
    # The caller holds the lock, so what lies here unfinished belongs to builds that died. The compilers of one that was
    # killed may still be running in its folder: hence a folder of another name for each build.
    for dead in (*final.parent.glob(f".{final.name}.*.part"), final):
        shutil.rmtree(dead, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".part"))
    folder.chmod(0o755)  # mkdtemp's 0700 would shut other users of a shared cache out
    changes = {}
    # Equal sources are equal builds wherever they lie: a release build holds no path of this checkout.
    local = [] if "-g" in flags["cxx"] else [f"-ffile-prefix-map={shlex.quote(str(ROOT))}=."]
    if local and not re.search(r"[\s,'\"]", str(ROOT)):
        # Not among the CUDA flags: a path with the letters of "arch" there would drop cpp_extension's -gencode flags.
        changes["NVCC_PREPEND_FLAGS"] = f"{os.environ.get('NVCC_PREPEND_FLAGS', '')} -Xcompiler {local[0]}"
    if capabilities:
        changes["TORCH_CUDA_ARCH_LIST"] = ";".join(capabilities)
    with contextlib.suppress(ImportError):
        import ninja

        changes["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}"
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

    try:
        with _environment(changes), ahead, _progress(f"compiling {len(files)} files of csrc/", made):
            # Importing torch takes a second and a half, in which the headers are read. load() would also load what it
            # built, which a sanitizer build or a machine without the GPU cannot.
            compile_and_link = toolchain.extension()._write_ninja_file_and_build_library
            known = inspect.signature(compile_and_link).parameters
            compile_and_link(**{name: value for name, value in values.items() if name in known})
        for made_ahead in folder.glob(f"{AHEAD}*"):
            made_ahead.unlink()
        os.rename(folder, final)  # with its objects, which harness/mutants/build.py links again
    except RuntimeError as error:
        log = final.parent / f"{final.name}.log"
        with contextlib.suppress(OSError):  # of a full disk, for one
            log.write_text(str(error))
        raise BuildError(_readable(str(error), log)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # of a build that failed; a finished one has another name


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


def main(argv: Sequence[str] | None = None) -> int:
    """``kdtree build``: compile the engine, or say in one line why it cannot be."""
    parser = Parser(
        prog="kdtree build",
        description="Compile the engine into the cache (build/ or KDTREE_BUILD) and print where the library is.",
        epilog="examples:\n  kdtree build\n  kdtree build --device cuda --arch 9.0 --arch 12.0\n\n"
        f"exit status: {PASSED} built or found, {INFRASTRUCTURE} it cannot be built here",
    )
    parser.add_argument("--device", choices=tuple(NAMESPACE), default="cpu", help=DEVICE_HELP)
    parser.add_argument(
        "--arch", action="append", metavar="N.N", help="CUDA capability, repeatable (default: the visible GPUs')"
    )
    parser.add_argument("--debug", action="store_true", help="with debug information and device-side messages")
    parser.add_argument("--sanitize", choices=tuple(SANITIZERS), help="build with sanitizers (load with LD_PRELOAD)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a line")
    options = parser.parse_args(argv)
    if options.arch and options.device != "cuda":
        parser.error("--arch goes with --device cuda")
    start = time.monotonic()
    try:
        library = build(options.device, options.arch, options.debug, options.sanitize)
    except BuildError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"kdtree build: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    seconds = time.monotonic() - start
    if options.json:
        print(json.dumps({"library": str(library), "device": options.device, "seconds": round(seconds, 3)}))
    else:
        print(library)
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
