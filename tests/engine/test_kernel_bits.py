"""Every instruction set has the bits pinned on x86-64 (plain, AVX2, AVX-512; gcc and clang) and aarch64 (NEON)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from harness.build import CSRC, cache_folder
from harness.environment import compiler
from harness.toolchain import extension

PINNED = "b1002f5ee24d8003"
"""Of the hashes on a line of kernel_bits.cpp. Another value means that the order of a reduction changed: then every
golden tolerance and every CUDA kernel that follows the same order is concerned."""


def built() -> Path:
    """The program, compiled if it is not there yet: what it was compiled from and with is in its name."""
    cpu = CSRC / "cpu"
    sources = [Path(__file__).with_name("kernel_bits.cpp"), cpu / "dispatch.cpp", *sorted(cpu.glob("isa_*.cpp"))]
    command = [*str(extension().get_cxx_compiler()).split(), "-std=c++17", "-O1", "-ffp-contract=off"]
    key = hashlib.sha256(" ".join([*command, *compiler()]).encode())
    for path in [*sources, *sorted(CSRC.rglob("*.h"))]:
        key.update(path.read_bytes())
    program = cache_folder() / f"kernel_bits-{key.hexdigest()[:20]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        part = program.with_name(f".{program.name}.{os.getpid()}")
        subprocess.run([*command, *map(str, sources), "-o", str(part)], check=True)
        part.rename(program)
    return program


def test_every_instruction_set_has_the_pinned_bits() -> None:
    program = built()
    environment = {name: value for name, value in os.environ.items() if name != "KDTREE_ISA"}
    lines = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines
    got = {line.split()[0]: hashlib.sha256(" ".join(line.split()[1:]).encode()).hexdigest()[:16] for line in lines}
    assert got == dict.fromkeys(got, PINNED)
