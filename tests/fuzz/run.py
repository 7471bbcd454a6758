"""``python -m tests.fuzz.run``: coverage-guided fuzzing of the C++ KDTR reader under AddressSanitizer and UBSan.

Needs clang with its fuzzer runtime; says what to install if that is missing. The committed corpus is only read; what is
found new goes to ``build/fuzz/``, and ``--keep`` adds the inputs that reach code which the committed ones do not.
Exit status: 0 nothing found, 1 an input broke the reader, 3 a tool is missing or the target does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.build import cache_folder
from harness.cli import ended
from harness.environment import processors

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WORK = cache_folder() / "fuzz"
SOURCES = [
    "kdtr.cpp",
    "config.cpp",
    "weights.cpp",
    "dflash.cpp",
    "model.cpp",
    *(f"cpu/{p.name}" for p in sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))),
]
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-omit-frame-pointer", "-pthread"]
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
MAX_BYTES = 16384  # room for the least model and some more; longer inputs find nothing new and run slower


class Missing(Exception):
    """A tool is not there."""


def compiler() -> str:
    """A clang that can link a fuzz target."""
    names = ["clang++", *(f"clang++-{n}" for n in range(30, 9, -1))]
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        raise Missing("clang++ is not on PATH; install clang (on Debian and Ubuntu: apt-get install clang)")
    probe = (
        "#include <cstddef>\n#include <cstdint>\n"
        + 'extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }\n'
    )
    for path in found:
        command = [path, "-x", "c++", "-", "-fsanitize=fuzzer,address,undefined", "-o", os.devnull]
        if subprocess.run(command, input=probe, text=True, capture_output=True, check=False).returncode == 0:
            return path
    version = subprocess.run([found[0], "--version"], capture_output=True, text=True, check=False).stdout
    major = (re.search(r"version (\d+)", version) or ["", "N"])[1]
    raise Missing(f"{found[0]} has no fuzzer runtime; install libclang-rt-{major}-dev (compiler-rt)")


def compile_target(cxx: str) -> Path:
    """Compiles target and reader; objects that are newer than every source are kept."""
    WORK.mkdir(parents=True, exist_ok=True)
    sources = [ROOT / "csrc" / name for name in SOURCES]
    inputs = [
        *(ROOT / "csrc").rglob("*.h"),
        *sources,
        HERE / "kdtr_fuzzer.cpp",
        Path(__file__),
    ]
    target = WORK / "kdtr_fuzzer"
    if target.exists() and target.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return target
    print(f"compiling the fuzz target with {cxx} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        part = Path(folder) / "fuzzer"

        def made(*arguments: str) -> None:
            command = [cxx, *FLAGS, *CHECKS, "-fsanitize=fuzzer,address,undefined", *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Missing(f"the target does not compile:\n{done.stderr[-4000:]}")

        with ThreadPoolExecutor(processors()) as pool:
            list(pool.map(lambda source: made("-c", str(source)), [HERE / "kdtr_fuzzer.cpp", *sources]))
        made(*(str(path) for path in sorted(Path(folder).glob("*.o"))), "-o", str(part))
        part.rename(target)
    return target


def fuzz(target: Path, seconds: int, seed: int) -> int:
    """Runs for so long; the fuzzer's own exit status."""
    found, crashes = WORK / "found", WORK / "crashes"
    for folder in (found, crashes):
        folder.mkdir(exist_ok=True)
    command = [
        str(target), str(found), str(HERE / "corpus"), f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}",
        f"-dict={HERE / 'kdtr.dict'}", f"-artifact_prefix={crashes}/", "-rss_limit_mb=1024", "-malloc_limit_mb=64",
        "-timeout=5", "-print_final_stats=1", f"-seed={seed}",
    ]  # fmt: skip
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    interesting = [
        line for line in done.stderr.splitlines() if line.startswith(("stat::", "==", "SUMMARY", "Test unit"))
    ]
    covered = [line for line in done.stderr.splitlines() if "cov:" in line]
    print("\n".join([*covered[-1:], *interesting]))
    if done.returncode != 0:
        print(done.stderr[-6000:], file=sys.stderr)
        print(f"an input broke the reader; run it again: {target} {crashes}/<the file named above>", file=sys.stderr)
    return done.returncode


def keep(target: Path) -> None:
    """Adds to the committed corpus what reaches new code."""
    command = [str(target), "-merge=1", f"-max_len={MAX_BYTES}", str(HERE / "corpus"), str(WORK / "found")]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzer (0: another one each time)")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the committed corpus")
    options = parser.parse_args(arguments)
    try:
        target = compile_target(compiler())
    except Missing as missing:
        print(f"tests.fuzz.run: {missing}", file=sys.stderr)
        return 3
    status = fuzz(target, options.seconds, options.seed)
    if status == 0 and options.keep:
        keep(target)
    return 0 if status == 0 else 1


if __name__ == "__main__":
    sys.exit(ended("python -m tests.fuzz.run", main))
