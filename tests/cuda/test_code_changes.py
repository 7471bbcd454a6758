"""Kernels of two trees held beside each other: what a cubin's reader finds, and what of it counts as a change."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import build, code_changes, cubin, environment, nvcc

Text = pytest.CaptureFixture[str]
Parts = dict[str, bytes]
KERNEL, OTHER = "_Z5firstPf", "_Z6secondPf"


def elf(
    kernels: Mapping[str, tuple[bytes, int]],
    variable: bytes = b"",
    calls: Mapping[str, str] | None = None,
    shared: int = 0,
) -> bytes:
    """A cubin of kernels, each its instructions and registers, laid out by the ELF standard: headers last.

    ``calls``: whose address a kernel takes; ``shared``: bytes of shared memory of each, which the file does not hold.
    """
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in kernels)
    names = list(kernels)
    where = {name: strings.index(name.encode() + b"\0") for name in names}
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", where[n], 0x12, 0, 4 + i, 0, 0) for i, n in enumerate(names))
    info = struct.pack("<BBH", 3, 0x37, 1)  # of the whole file
    info += b"".join(struct.pack("<BBHII", 4, 0x2F, 8, 1 + i, kernels[n][1]) for i, n in enumerate(names))
    info += b"".join(struct.pack("<BBHII", 4, 0x11, 8, 1 + i, 16) for i in range(len(names)))
    bodies = [("", 0, b""), (".strtab", 3, strings), (".symtab", 2, symbols), (".nv.info", 0x70000000, info)]
    bodies += [(f".text.{name}", 1, code) for name, (code, _) in kernels.items()]
    for i, name in enumerate(names):
        # The place of the kernel in the table of symbols is in its own attributes too, and lines are in debug sections.
        own = struct.pack("<BBH", 3, 0x1B, 255) + struct.pack("<BBHIHH", 4, 0x0A, 8, 1 + i, 0x210, 8)
        if calls and name in calls:
            called = 1 + names.index(calls[name])
            own += struct.pack("<BBHI", 4, 0x0F, 4, called)
            bodies.append((f".rela.text.{name}", 4, struct.pack("<QQq", 0x20, called << 32 | 7, 5)))
            bodies.append((f".rel.nv.constant0.{name}", 9, struct.pack("<QQ", 0x30, called << 32 | 9)))
        if shared:
            bodies.append((f".nv.shared.{name}", 8, bytes(shared)))
        bodies.append((f".nv.info.{name}", 0x70000000, own))
    bodies += [(".debug_line", 1, repr(names).encode()), (".nv.constant3", 1, variable), (".shstrtab", 3, b"")]
    titles = b"".join(name.encode() + b"\0" for name, _, _ in bodies)
    bodies[-1] = (".shstrtab", 3, titles)
    out, heads, title = bytearray(64), b"", 0
    for name, kind, body in bodies:
        link = 1 if name == ".symtab" else 0
        heads += struct.pack("<IIQQQQIIQQ", title, kind, 0, 0, len(out), len(body), link, 0, 1, 0)
        title += len(name) + 1
        out += body if kind != 8 else b""
    struct.pack_into("<Q", out, 40, len(out))
    struct.pack_into("<HH", out, 60, len(bodies), len(bodies) - 1)
    return bytes(out) + heads


def code(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def test_what_a_cubin_holds() -> None:
    """Instructions and registers of each kernel; a variable of the source is nobody's."""
    found = cubin.kernels(elf({KERNEL: (code(1, 2), 40), OTHER: (code(3), 255)}, b"table"))
    assert found[KERNEL][cubin.CODE] == code(1, 2)
    assert int.from_bytes(found[OTHER][cubin.REGISTERS], "little") == 255
    assert found[cubin.SHARED_BY_ALL] == {".nv.constant3": b"table"}


def test_what_stands_beside_a_kernel_does_not_count() -> None:
    """Neither other kernels, nor the order, nor lines; nor the hash that an unnamed namespace has."""
    alone = cubin.kernels(elf({OTHER: (code(3), 255)}))
    both = cubin.kernels(elf({KERNEL: (code(1, 2), 40), OTHER: (code(3), 255)}))
    assert alone[OTHER] == both[OTHER]
    hashed = "_GLOBAL__N__45bee365_4_a_cu_k", "_GLOBAL__N__0_5_ab_cu_k", "_INTERNAL_45bee365_4_a_cu_0"
    assert {cubin.plain(f"_ZN{len(name)}{name}1kEPf") for name in hashed} == {"_ZN12_GLOBAL__N_11kEPf"}


def test_what_a_kernel_reserves_and_refers_to_counts_by_name() -> None:
    """Attributes, shared memory and addresses: not where a symbol stands, but which it is."""
    both = {KERNEL: (code(1), 40), OTHER: (code(3), 255)}
    found = cubin.kernels(elf(both, calls={OTHER: KERNEL}, shared=1024))[OTHER]
    name = KERNEL.encode().hex().encode()
    assert found == {
        cubin.CODE: code(3),
        cubin.REGISTERS: struct.pack("<I", 255),
        "attribute 11": struct.pack("<I", 16),
        ".rela.text": f"20 7 {KERNEL} [5]\n".encode(),
        ".rel.nv.constant0": f"30 9 {KERNEL} []\n".encode(),
        ".nv.shared": b"1024",
        ".nv.info": b"1b ff00\n0a 10020800\n0f " + name + b"\n",
    }
    turned = cubin.kernels(elf(dict(reversed(both.items())), calls={OTHER: KERNEL}, shared=1024))
    assert turned[OTHER] == found


def kernels(file: str, made: Mapping[str, tuple[bytes, int]]) -> dict[tuple[str, str], Mapping[str, bytes]]:
    return {(file, name): parts for name, parts in cubin.kernels(elf(made)).items()}


def test_changes() -> None:
    """Differing, new, gone and moved kernels by name; an instruction and a register are said."""
    before = kernels("a.cu", {KERNEL: (code(1, 2, 3), 40), OTHER: (code(5), 9), "gone": (code(7), 1)})
    after = kernels("a.cu", {KERNEL: (code(1, 4), 42), "new": (code(8), 1)}) | kernels("b.cu", {"o": (code(5), 9)})
    found = code_changes.compare(before, after, "9.0")
    assert [(c.what, c.file, c.name) for c in found] == [
        ("differs", "a.cu", KERNEL),
        ("gone", "a.cu", "gone"),
        ("new", "a.cu", "new"),
        ("moved", "b.cu", "o"),
    ]
    assert found[0].detail == "2 instructions, were 3; the first that differs is at 0x0010; 42 registers, were 40"
    assert code_changes.compare(before, before, "9.0") == []
    said = [{("a.cu", name): parts for name, parts in cubin.kernels(elf({}, value)).items()} for value in (b"1", b"2")]
    (variable,) = code_changes.compare(*said, "9.0")
    assert nvcc.readable([variable.name]) == ["variables of the source"]
    assert variable.detail == ".nv.constant3 differs"
    shorter = kernels("a.cu", {KERNEL: (code(1, 2), 40), OTHER: (code(5), 9), "gone": (code(7), 1)})
    (cut,) = code_changes.compare(before, shorter, "9.0")
    assert cut.detail == "2 instructions, were 3; the first that differs is at 0x0020"


def test_a_kernel_that_moves_and_changes_is_no_other_kernel() -> None:
    before, after = kernels("a.cu", {KERNEL: (code(1, 2), 40)}), kernels("b.cu", {KERNEL: (code(1, 3), 40)})
    assert code_changes.compare(before, after, "9.0") == [
        code_changes.Change(
            "differs", "b.cu", "9.0", KERNEL, "was in a.cu; 2 instructions; the first that differs is at 0x0010"
        )
    ]


def test_what_one_of_two_kernels_has_alone_is_named() -> None:
    without, has = (
        {("a.cu", name): parts for name, parts in cubin.kernels(elf({KERNEL: (code(1), 40)}, shared=size)).items()}
        for size in (0, 1024)
    )
    assert [change.detail for change in code_changes.compare(without, has, "9.0")] == [".nv.shared differs"]
    assert [change.detail for change in code_changes.compare(has, without, "9.0")] == [".nv.shared differs"]


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def checkout(root: Path, monkeypatch: pytest.MonkeyPatch, sources: Mapping[str, str]) -> Path:
    """Committed sources, of which a test changes some; gives back their folder."""
    csrc = root / "csrc" / "cuda"
    csrc.mkdir(parents=True)
    for name, text in sources.items():
        (csrc / name).write_text(text)
    git(root, "init", "-q", "-b", "main", "--template=")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")
    monkeypatch.setattr(build, "ROOT", root)
    monkeypatch.setattr(build, "CSRC", root / "csrc")
    monkeypatch.setenv("KDTREE_BUILD", str(root / "build"))
    return csrc


def stands_for_nvcc(compiler: Path, calls: Path) -> None:
    """A script that notes its stages in ``calls``: `//!` lines are the code, and begin with the name of the file beside
    the script that they compile to; for 12.0 all is `one`."""
    compiler.write_text(f"""#!/bin/sh
for last in "$@"; do :; done
case "$*" in
  *-ptx*) stage=ptx;;
  *-cubin*) stage=cubin;;
  *) grep "//!" "$last"; echo "# 1 \\"$PWD/$last\\""; exit;;
esac
echo "$stage $last" >> {calls}
case "$*" in *compute_120*) fixed=one;; esac
while [ "$1" != -o ]; do shift; done
made=$(sed -n "s|//! \\([a-z]*\\).*|\\1|p" "$last")
made=${{fixed:-$made}}
if [ $stage = ptx ]; then echo ".loc $PWD/$last" > "$2"; echo $made >> "$2"; else cp "{compiler.parent}/$made" "$2"; fi
""")
    compiler.chmod(0o755)


def test_only_what_the_compiler_reads_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    """A comment costs a look at the preprocessed text, an untouched source nothing; what was made is kept.

    Of the same PTX nothing is assembled.
    """
    csrc = checkout(
        tmp_path, monkeypatch, {"a.cu": '#include "h.cuh"\n//! one\n', "b.cu": "//! one\n", "h.cuh": "// comment\n"}
    )
    for number, name in enumerate(("one", "two"), start=1):
        (tmp_path / name).write_bytes(elf({KERNEL: (code(number), 40)}))
    calls, compiler = tmp_path / "calls", tmp_path / "nvcc"
    stands_for_nvcc(compiler, calls)
    monkeypatch.setattr(environment, "nvcc", lambda: (str(compiler), "13.0"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: "")

    def against(commit: str = "HEAD") -> tuple[int, str, list[str]]:
        calls.write_text("")
        status = nvcc.main(["--arch", "9.0", "--against", commit])
        return status, capsys.readouterr().out, calls.read_text().splitlines()

    status, said, compiled = against()
    assert (status, compiled) == (0, [])
    assert "0 sources read other files" in said
    (csrc / "h.cuh").write_text("// another comment\n")
    status, said, compiled = against()
    assert (status, compiled) == (0, [])
    assert "1 sources read other files" in said
    (csrc / "a.cu").write_text("//! one in other words\n")
    status, said, compiled = against()
    assert (status, compiled) == (0, ["ptx csrc/cuda/a.cu"] * 2)
    (csrc / "a.cu").write_text("//! two\n")
    status, said, compiled = against()
    assert (status, compiled) == (1, ["ptx csrc/cuda/a.cu"] + ["cubin csrc/cuda/a.cu"] * 2)
    assert re.search(r"differs +a\.cu +9\.0 +\S*first", said)
    assert against()[::2] == (1, [])
    assert nvcc.main(["--arch", "9.0", "--against", "HEAD", "--json"]) == 1
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["what"], change["file"], change["name"]) == ("differs", "a.cu", KERNEL)
    (csrc / "b.cu").rename(csrc / "c.cu")
    status, said, compiled = against()
    assert (status, sorted(compiled)) == (1, ["cubin csrc/cuda/b.cu", "cubin csrc/cuda/c.cu"])
    assert re.search(r"moved +c\.cu +9\.0 +first\n +was \S*first\S* in b\.cu", said)
    assert "2 kernels changed since HEAD" not in said, "what has moved is no change"
    assert "of 2 compared; 3 sources" in said
    assert nvcc.main(["--arch", "9.0", "12.0", "--against", "HEAD", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(change["what"], change["file"], change["arch"]) for change in found["changes"]] == [
        ("differs", "a.cu", "9.0"),
        ("moved", "c.cu", "9.0"),
        ("moved", "c.cu", "12.0"),
    ]


def test_nothing_to_compare_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text) -> None:
    """An unknown commit, and a tree that does not compile, are no verdict; the message says which."""
    csrc = checkout(tmp_path, monkeypatch, {"a.cu": "//\n"})
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\ngrep -v fails csrc/cuda/a.cu || { echo 'a.cu(1): error: no' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(environment, "nvcc", lambda: (str(compiler), "13.0"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: "")
    assert nvcc.main(["--against", "nowhere"]) == 3
    assert "--against nowhere: not a commit of this checkout" in capsys.readouterr().err
    (csrc / "a.cu").write_text("fails\n")
    assert nvcc.main(["--arch", "9.0", "--against", "HEAD"]) == 3
    assert "this checkout's a.cu does not compile for 9.0:\na.cu(1): error: no" in capsys.readouterr().err
    git(tmp_path, "commit", "-q", "-a", "-m", "broken")
    (csrc / "a.cu").write_text("mended\n")
    assert nvcc.main(["--arch", "9.0", "--against", "HEAD"]) == 3
    assert "the commit's a.cu does not compile for 9.0" in capsys.readouterr().err


SOURCE = """
#include "row.cuh"
namespace {
template <int N>
__global__ void scale(float* p, float by) { p[row() + N] *= by; }
__global__ void fill(float* p) { p[row()] = 1.f; }
}
void run(float* p) { scale<1><<<1, 1>>>(p, 2.f), scale<2><<<1, 1>>>(p, 2.f), fill<<<1, 1>>>(p); }
"""
ROW = "__device__ __forceinline__ int row() { return threadIdx.x; }\n"

if environment.nvcc()[0]:

    @pytest.mark.slow
    def test_one_instruction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text) -> None:
        """By nvcc itself: a helper that moves to another header changes nothing, an addition in one kernel is named.

        What is read of a cubin is what ptxas says of it.
        """
        csrc = checkout(tmp_path, monkeypatch, {"kernel.cu": SOURCE, "row.cuh": ROW})
        compiler = environment.nvcc()[0]
        out = tmp_path / "out.cubin"
        command = [compiler, *nvcc.flags(["9.0"], False), "-cubin", "-o", str(out), str(csrc / "kernel.cu")]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        read = cubin.kernels(out.read_bytes())
        told = {cubin.plain(k.name): k.registers for k in nvcc.parse(report, "kernel.cu")}
        assert {name: int.from_bytes(parts[cubin.REGISTERS], "little") for name, parts in read.items()} == told
        assert len(told) == 3

        (csrc / "moved.cuh").write_text(ROW)
        (csrc / "row.cuh").write_text('#include "moved.cuh"\n// and a comment\n\n\n')
        (csrc / "kernel.cu").write_text(SOURCE.replace("namespace {", "inline int unused() { return 1; }\nnamespace {"))
        assert nvcc.main(["--arch", "9.0", "--against", "HEAD"]) == 0
        assert "0 kernels changed since HEAD" in capsys.readouterr().out
        (csrc / "kernel.cu").write_text(SOURCE.replace("+ N] *= by;", "+ N] *= N == 1 ? by : by + 1.f;"))
        assert nvcc.main(["--arch", "9.0", "--against", "HEAD", "--json"]) == 1
        (change,) = json.loads(capsys.readouterr().out)["changes"]
        assert (change["what"], change["kernel"].split("(")[0]) == ("differs", "scale<2>")
        assert "the first that differs is at 0x" in change["detail"]
