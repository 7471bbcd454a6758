"""Every instruction set has the bits pinned on x86-64 (plain, AVX2, AVX-512; gcc and clang) and aarch64 (NEON)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from harness.build import CSRC
from harness.toolchain import extension

PINNED = "345670bfb66be15e"
"""Of the hashes on a line of kernel_bits.cpp. Another value means that the order of a reduction changed: then every
golden tolerance and every CUDA kernel that follows the same order is concerned."""


def test_every_instruction_set_has_the_pinned_bits(tmp_path: Path) -> None:
    cpu = CSRC / "cpu"
    sources = [Path(__file__).with_name("kernel_bits.cpp"), cpu / "dispatch.cpp", *sorted(cpu.glob("isa_*.cpp"))]
    program = tmp_path / "kernel_bits"
    command = str(extension().get_cxx_compiler()).split()
    command += ["-std=c++17", "-O1", "-ffp-contract=off", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "KDTREE_ISA"}
    lines = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines
    got = {line.split()[0]: hashlib.sha256(" ".join(line.split()[1:]).encode()).hexdigest()[:16] for line in lines}
    assert got == dict.fromkeys(got, PINNED)
