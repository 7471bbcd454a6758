"""Compile every CUDA source for the target architectures without a GPU, and say what each kernel costs.

Guarantees: the flags are those of ``harness/build.py``; a warning of nvcc, of ptxas or of the host compiler is a
failure, and so is a kernel that spills registers. On Hopper the machine code is read too, where ``cuobjdump`` is found:
a write to a register that a product in flight still reads (``harness/machine_code.py``) is a failure, and so is an
arrival at a barrier ahead of the reads that it tells of (``harness/pending_reads.py``). A result is cached by all that
it depends on (the source, every header of ``csrc/``, the flags, the compiler), so a second run compiles only what
changed. A source is compiled for all its architectures in one go: its host code is read once.

``python -m harness.nvcc [--arch 9.0 12.0] [--debug] [--json]``; exit status 0 clean, 1 a warning, an error, a spill, an
operand overwritten in flight or an early arrival, 3 no nvcc. With ``--against COMMIT`` it asks another question: which
kernels' machine code is not what it was there (``harness/code_changes.py``); 0 none, 1 some, 3 nothing to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import build, code_changes, environment, machine_code, pending_reads, plain_json, toolchain
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser, ended
from harness.files import write_atomic

TARGETS = ("9.0", "12.0")
"""Hopper and Blackwell: the architectures that every change is compiled for."""
READ = "9.0a"
"""Whose machine code is read: only Hopper has products that run on beside what follows them, and rings that the copy
engine fills."""


@dataclass(frozen=True)
class Kernel:
    """One kernel on one architecture, as ptxas reports it; bytes but for registers (per thread)."""

    file: str
    arch: str
    name: str
    registers: int
    shared: int
    """Static shared memory a block."""
    stack: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0


@dataclass(frozen=True)
class Compiled:
    """One source: its kernels by architecture, or what the compiler complained of."""

    file: str
    kernels: tuple[Kernel, ...]
    complaints: Mapping[str, str]
    """By architecture, or by all of them where the compiler did not get as far as one."""


def flags(archs: Sequence[str], debug: bool) -> list[str]:
    """nvcc's arguments for architectures such as ``9.0``."""
    numbers = [toolchain.specific(arch).replace(".", "") for arch in archs]
    code = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror", "-Xptxas", "-v"]
    return [*build._flags("cuda", debug, None)["cuda"], *code, *strict]


def parse(report: str, file: str) -> tuple[Kernel, ...]:
    """The kernels of a ``ptxas -v`` report."""
    kernels = []
    arch, name, stack, stores, loads = "", "", 0, 0, 0
    for line in report.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for 'sm_(\d+)(\d)[a-z]?'", line):
            name, arch = found.group(1), f"{found.group(2)}.{found.group(3)}"
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, stores, loads = (int(n) for n in found.groups())
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            size = int(shared.group(1)) if shared else 0
            kernels.append(Kernel(file, arch, name, int(found.group(1)), size, stack, stores, loads))
    return tuple(kernels)


def readable(names: Sequence[str]) -> list[str]:
    """C++ names without parameters and namespaces, by c++filt where it is installed."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return list(names)
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    short = []
    for line in done.stdout.splitlines():
        plain = re.sub(r"\(kdtree::WeightKind\)", "", line).replace("(anonymous namespace)::", "")
        plain = re.sub(r"^void ", "", plain)
        short.append(re.sub(r"\b\w+::", "", plain).split("(")[0])
    return short


def _path(cuobjdump: str) -> str:
    """Where cuobjdump finds nvdisasm, to which it leaves the disassembling: it looks on PATH alone."""
    return os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])


def misordered(cuobjdump: str, compiled: Path, expected: Sequence[Kernel]) -> str:
    """What is wrong in an object's machine code, a line a write to an operand in flight and a line an early arrival;
    ``""`` for nothing."""
    command = [cuobjdump, "-arch", f"sm_{READ.replace('.', '')}", "-sass", str(compiled)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": _path(cuobjdump)}
    )
    if done.returncode != 0:
        return f"cuobjdump ended with status {done.returncode}: {done.stderr.strip()[:400]}"
    shown = machine_code.kernels(done.stdout)
    if missing := [kernel.name for kernel in expected if not shown.get(kernel.name)]:
        return f"cuobjdump shows no machine code of {readable(missing)[0]}"
    hazards, early = machine_code.hazards(done.stdout), pending_reads.early_arrivals(done.stdout)
    names = dict(zip(shown, readable(list(shown)), strict=True))
    return "\n".join(
        [str(replace(hazard, kernel=names[hazard.kernel])) for hazard in hazards]
        + [str(replace(arrival, kernel=names[arrival.kernel])) for arrival in early]
    )


@dataclass(frozen=True)
class Compiler:
    """nvcc with what a result depends on beside the source."""

    nvcc: str
    version: str
    debug: bool
    cache: Path
    cuobjdump: str = ""

    def _kept(self, source: Path, arch: str) -> Path:
        """Where the kernels of a source that passed are."""
        # That the code was looked at is part of the key: it was not on a machine without cuobjdump, which has put its
        # result into the same cache.
        looked, read = self._looks(arch), (machine_code.__file__, pending_reads.__file__)
        judges = [Path(name).read_text("utf-8") for name in (__file__, *(read if looked else []))]
        digest = hashlib.sha256(json.dumps([self.version, flags([arch], self.debug), judges]).encode())
        for path in [source, *sorted(p for p in build.CSRC.rglob("*.*h") if p.suffix in (".h", ".cuh"))]:
            digest.update(f"{path.relative_to(build.ROOT)}\0".encode() + path.read_bytes())
        return self.cache / f"{source.stem}-{digest.hexdigest()[:24]}.json"

    def _looks(self, arch: str) -> bool:
        return bool(self.cuobjdump) and toolchain.specific(arch) == READ

    def compile(self, source: Path, archs: Sequence[str]) -> Compiled:
        """One source for some architectures, those of the cache apart for which nothing has changed."""
        files = {arch: self._kept(source, arch) for arch in archs}
        found = {a: json.loads(path.read_text("utf-8")) for a, path in files.items() if path.exists()}
        known = [Kernel(**kernel) for arch in found for kernel in found[arch]]
        if not (missing := [arch for arch in archs if arch not in found]):
            return Compiled(source.name, tuple(known), {})
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.o"
            command = [self.nvcc, *flags(missing, self.debug), "-c", str(source), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            report = done.stdout + done.stderr
            # Of matrix instructions that it takes one by one, as too few registers are left, ptxas only informs: any
            # small change of a kernel can have it.
            warned = [
                line for line in report.splitlines() if re.search(r"\bwarning\b|Potential Performance Loss", line)
            ]
            if done.returncode != 0 or warned:
                plain = [line for line in report.splitlines() if not line.startswith("ptxas info")]
                lines = list(dict.fromkeys([*plain, *warned]))[:40]
                said = "\n".join(lines) or f"nvcc ended with status {done.returncode}"
                return Compiled(source.name, tuple(known), {" and ".join(missing): said})
            made = parse(report, source.name)
            complaints = {}
            for arch in missing:
                here = [kernel for kernel in made if kernel.arch == arch]
                if self._looks(arch) and (wrong := misordered(self.cuobjdump, out, here)):
                    complaints[arch] = wrong
                else:
                    write_atomic(files[arch], json.dumps([asdict(k) for k in here]).encode())
        return Compiled(source.name, (*known, *made), complaints)


def table(kernels: Sequence[Kernel]) -> str:
    """Aligned columns, a line a kernel."""
    names = readable([k.name for k in kernels])
    head = ("file", "arch", "registers", "shared", "stack", "spills", "kernel")
    rows = [
        (k.file, k.arch, str(k.registers), str(k.shared), str(k.stack), str(k.spill_stores + k.spill_loads), name)
        for k, name in zip(kernels, names, strict=True)
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]
    return "\n".join("  ".join([*(row[i].ljust(w) for i, w in enumerate(widths)), row[-1]]) for row in [head, *rows])


def _against(commit: str, nvcc: tuple[str, str], cuobjdump: str, options: argparse.Namespace, cache: Path) -> int:
    """Print which kernels' machine code is not what it was, judge."""
    built = {arch: flags([arch], options.debug) for arch in dict.fromkeys(options.arch)}
    disassembler = (shutil.which("nvdisasm", path=_path(cuobjdump)) or "") if cuobjdump else ""
    try:
        compared = code_changes.against(commit, build.ROOT, nvcc, built, cache, disassembler)
    except code_changes.CannotCompare as error:
        print(error, file=sys.stderr)
        return INFRASTRUCTURE
    names = readable([change.name for change in compared.changes])
    changed = sum(change.what != "moved" for change in compared.changes)
    if options.json:
        named = [asdict(c) | {"kernel": n} for c, n in zip(compared.changes, names, strict=True)]
        content = {"nvcc": nvcc[1], "against": commit, "kernels": compared.kernels, "changes": named}
        plain_json.give(content, options.json)
    if options.json != plain_json.PRINTED:
        for change, name in zip(compared.changes, names, strict=True):
            where = f"{change.what:7}  {change.file}  {change.arch}  {name}"
            print(f"{where}\n         {change.detail}" if change.detail else where)
        print(
            f"nvcc {nvcc[1]}: {changed} kernels changed since {commit}, of {compared.kernels} compared;"
            f" {compared.sources} sources read other files"
        )
    return FAILED if changed else PASSED


def _compiled(compiler: Compiler, sources: Sequence[Path], archs: Sequence[str]) -> list[Compiled]:
    """Every source, by name; each is told of as it is done."""

    def one(source: Path) -> Compiled:
        result = compiler.compile(source, archs)
        for arch in archs:
            failed = any(arch in named.split(" and ") for named in result.complaints)
            print(f"{source.name} for {arch}: {'failed' if failed else 'ok'}", file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(environment.processors()) as pool:  # the long ones first, so that none is waited for alone
        ordered = sorted(sources, key=lambda source: source.stat().st_size, reverse=True)
        return sorted(pool.map(one, ordered), key=lambda result: result.file)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table, judge."""
    parser = Parser(
        prog="python -m harness.nvcc",
        description="Compile csrc/cuda for every target architecture; registers, shared memory and spills per kernel.",
        epilog=f"exit status: {PASSED} clean,"
        f" {FAILED} a warning, an error, a spill, an operand overwritten in flight or an arrival ahead of reads"
        f" (with --against: a kernel changed), {INFRASTRUCTURE} no usable nvcc, or nothing to compare with",
    )
    parser.add_argument("--arch", nargs="+", default=list(TARGETS), metavar="N.N", help="CUDA capabilities")
    parser.add_argument("--debug", action="store_true", help="the debug build, with device-side messages")
    parser.add_json("one JSON object")
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="list the kernels whose machine code is not what it was in COMMIT, in place of the check",
    )
    options = parser.parse_args(argv)
    nvcc, version = environment.nvcc()
    if not nvcc:
        print(
            "no nvcc: install the CUDA toolkit 13 and put nvcc on PATH, or set CUDA_HOME to its folder", file=sys.stderr
        )
        return INFRASTRUCTURE
    wrong = [arch for arch in options.arch if not re.fullmatch(r"\d{1,2}\.\d", arch)]
    if wrong:
        print(f"--arch {wrong[0]}: not of the form 12.0", file=sys.stderr)
        return INFRASTRUCTURE
    sources = sorted((build.CSRC / "cuda").glob("*.cu"))
    if not sources:
        print(f"no .cu under {build.CSRC / 'cuda'}: run this in a checkout", file=sys.stderr)
        return INFRASTRUCTURE
    cache = build.cache_folder() / "nvcc"
    cuobjdump = environment.cuobjdump(nvcc)
    if not cuobjdump:
        lost = "instructions that differ are not shown" if options.against else "machine code is not looked at"
        print(f"no cuobjdump with nvdisasm: {lost}", file=sys.stderr)
    if options.against:
        return _against(options.against, (nvcc, version), cuobjdump, options, cache)
    archs = list(dict.fromkeys(options.arch))
    compiler = Compiler(nvcc, version, options.debug, cache, cuobjdump)

    results = _compiled(compiler, sources, archs)
    kernels = [k for r in results for k in r.kernels]
    complaints = {f"{r.file} for {named}": text for r in results for named, text in r.complaints.items()}
    spilling = [k for k in kernels if k.spills]
    if options.json:
        named = [asdict(k) | {"kernel": n} for k, n in zip(kernels, readable([k.name for k in kernels]), strict=True)]
        content = {"nvcc": version, "kernels": named, "complaints": complaints, "machine_code": bool(cuobjdump)}
        plain_json.give(content, options.json)
    if options.json != plain_json.PRINTED:
        print(table(kernels))
        for where, text in complaints.items():
            print(f"\n{where}:\n{text}")
        print(
            f"\nnvcc {version}: {len(kernels)} kernels, {len(complaints)} sources failed, {len(spilling)} kernels spill"
        )
    return FAILED if complaints or spilling else PASSED


if __name__ == "__main__":
    sys.exit(ended("python -m harness.nvcc", main))
