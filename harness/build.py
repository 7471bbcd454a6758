"""Builds ``csrc/`` with ``torch.utils.cpp_extension`` into a cache keyed by everything that could change the result.

Guarantees: a library in the cache is complete and belongs to exactly these sources, flags, torch, compiler and
toolkit; it appears by rename; many processes that want the same build make it once; a build that died leaves nothing
that a later one waits for (the lock is the kernel's and ends with its process). torch's own lock file, which outlives
a killed build, only ever lies in a folder that no other process looks at.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import plain_json, toolchain
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import DEVICE_HELP, Parser
from harness.compiling import NAME, compile_library
from harness.files import said
from harness.includes import closure
from harness.progress import tell, told
from harness.toolchain import BuildError

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
NAMESPACE = {"cpu": "kdtree", "cuda": "kdtree_cuda"}  # of torch.ops, by device
TORCH_API = (
    "0x020b000000000000ULL"  # the stable ABI of torch 2.11: what is compiled runs under this torch or a newer one
)
UNUSED_SECONDS = 7 * 24 * 3600
SCRIPTS = ("build.py", "compiling.py")  # as much a part of a build as its sources
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


def sources(device: str) -> list[Path]:
    """The files that are compiled for a device, in a fixed order.

    Raises BuildError where there are none, or two would have one object file.
    """
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
    home = cache or cache_folder()
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
                compile_library(ROOT, files, flags, capabilities, final, precompile=gnu)
                _drop_unused(home)
    except OSError as error:
        raise BuildError(f"{said(error)}; KDTREE_BUILD names another folder than {home}") from error
    return library


def cache_folder() -> Path:
    """Where whatever is compiled is kept: ``build/`` in the checkout, or ``KDTREE_BUILD``."""
    return Path(os.environ.get("KDTREE_BUILD") or ROOT / "build")


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
    for path in [*read, *(ROOT / "harness" / name for name in SCRIPTS)]:
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
            with told("kdtree: waiting for another process that builds the engine", tell):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
    parser.add_json("one JSON object")
    options = parser.parse_args(argv)
    if options.arch and options.device != "cuda":
        parser.error("--arch goes with --device cuda")
    start = time.monotonic()
    try:
        library = build(options.device, options.arch, options.debug, options.sanitize)
    except BuildError as error:
        plain_json.give({"error": str(error)}, options.json)
        if options.json != plain_json.PRINTED:
            print(f"kdtree build: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    seconds = time.monotonic() - start
    content = {"library": str(library), "device": options.device, "seconds": round(seconds, 3)}
    plain_json.give(content, options.json)
    if options.json != plain_json.PRINTED:
        print(library)
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
