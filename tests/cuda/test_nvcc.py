"""The compile check: what it reads from ptxas, and what it fails on."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from harness import build, environment, nvcc

Text = pytest.CaptureFixture[str]
REPORT = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_90a'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2128 bytes smem
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_120a'
ptxas info    : Function properties for _Z6secondPf
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def test_parse() -> None:
    """Every figure of a report, each with its own kernel and architecture."""
    first, second = nvcc.parse(REPORT, "x.cu")
    assert first == nvcc.Kernel("x.cu", "9.0", "_Z5firstPf", 40, 2128, 0, 0, 0)
    assert second == nvcc.Kernel("x.cu", "12.0", "_Z6secondPf", 255, 0, 16, 12, 8)
    assert not first.spills
    assert second.spills
    lines = nvcc.table([first, second]).splitlines()
    assert lines[0].split() == ["file", "arch", "registers", "shared", "stack", "spills", "kernel"]
    assert lines[2].split()[2:6] == ["255", "0", "16", "20"]


def test_flags_are_those_of_the_build() -> None:
    """And no flag for an architecture hides in them, which cpp_extension would take for a request of its own."""
    built = build._flags("cuda", False, None)["cuda"]
    flags = nvcc.flags(["9.0", "12.0"], False)
    assert flags[: len(built)] == built
    assert not any("arch" in flag for flag in built)
    code = ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_120,code=sm_120"]
    assert [flag for flag in flags if flag.startswith("-gencode")] == code


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says what to install."""
    monkeypatch.setattr(environment, "nvcc", lambda: ("", ""))
    assert nvcc.main([]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused before anything is compiled."""
    assert nvcc.main(["--arch", "sm_90"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_one_compilation_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text) -> None:
    """All architectures that the cache lacks are compiled together, each kept by itself; the longest source first."""
    csrc = tmp_path / "csrc" / "cuda"
    csrc.mkdir(parents=True)
    (csrc / "a.cu").write_text("//\n")
    (csrc / "b.cu").write_text("// longer\n")
    compiler, calls = tmp_path / "nvcc", tmp_path / "calls"
    said = "ptxas info : Compiling entry function 'k' for '${a##*code=}'\\nptxas info : Used 9 registers\\n"
    each = f'for a in "$@"; do case $a in *code=*) printf "{said}";; esac; done'
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{each}\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(environment, "nvcc", lambda: (str(compiler), "13.0"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: "")
    monkeypatch.setattr(environment, "processors", lambda: 1)

    def compiled(*archs: str) -> list[list[str]]:
        calls.write_text("")
        assert nvcc.main(["--arch", *archs, "--json"]) == 0
        kernels = json.loads(capsys.readouterr().out)["kernels"]
        assert sorted((k["file"], k["arch"]) for k in kernels) == sorted(itertools.product(("a.cu", "b.cu"), archs))
        lines = [line.split() for line in calls.read_text().splitlines()]
        return [[Path(word).name for word in line if re.search(r"code=sm_|\.cu$", word)] for line in lines]

    hopper, blackwell = (flag for flag in nvcc.flags(["9.0", "12.0"], False) if "code=sm_" in flag)
    assert compiled("9.0") == [[hopper, "b.cu"], [hopper, "a.cu"]]
    (csrc / "a.cu").write_text("// \n")
    assert compiled("9.0", "12.0") == [[blackwell, "b.cu"], [hopper, blackwell, "a.cu"]]
    assert compiled("12.0", "9.0") == []


def test_products_taken_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text) -> None:
    """ptxas gives it as information, and the code is right: here it is a complaint."""
    csrc = tmp_path / "csrc" / "cuda"
    csrc.mkdir(parents=True)
    (csrc / "a.cu").write_text("//\n")
    compiler = tmp_path / "nvcc"
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(environment, "nvcc", lambda: (str(compiler), "13.0"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: "")
    entry = "ptxas info : Compiling entry function 'k' for 'sm_90a'"
    told = "ptxas info : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized in 'k'"
    for said, status in (
        ([entry, told, "ptxas info : Used 9 registers"], 1),
        ([entry, "ptxas info : Used 9 registers"], 0),
    ):
        compiler.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in said))
        compiler.chmod(0o755)
        assert nvcc.main(["--arch", "9.0"]) == status
        assert ("C7511" in capsys.readouterr().out) == bool(status)


CLEAN = "__global__ void fill(float* p) { p[threadIdx.x] = 1.f; }\n"
SPILLS = """
__global__ __launch_bounds__(1024, 2) void spills(float* p) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
  for (int k = 0; k < 64; ++k)
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 3) % 64] + p[k];
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i];
}
"""
WARNS = "__global__ void warns(float* p) { int unused; p[0] = 1.f; }\n"

VERDICTS = [(CLEAN, 0, "0 kernels spill"), (SPILLS, 1, "1 kernels spill"), (WARNS, 1, "unused")]

if environment.nvcc()[0]:  # where there is none, the test above is what can be shown

    @pytest.mark.slow
    @pytest.mark.parametrize(("source", "status", "word"), VERDICTS, ids=["clean", "spills", "warns"])
    def test_verdicts(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text, source: str, status: int, word: str
    ) -> None:
        """Clean code passes, a spill and a warning fail by name, and do so again when asked again."""
        (tmp_path / "csrc" / "cuda").mkdir(parents=True)
        (tmp_path / "csrc" / "cuda" / "kernel.cu").write_text(source)
        monkeypatch.setattr(build, "ROOT", tmp_path)
        monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
        monkeypatch.setenv("KDTREE_BUILD", str(tmp_path / "build"))
        assert nvcc.main(["--arch", "9.0"]) == status
        assert word in capsys.readouterr().out
        assert nvcc.main(["--arch", "9.0", "--json"]) == status
        said = json.loads(capsys.readouterr().out)
        assert bool(said["complaints"]) == (source == WARNS)
        assert len(said["kernels"]) == (0 if source == WARNS else 1)
