"""Operands overwritten while a product reads them: what is found in machine code, and what is not."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from harness import environment, machine_code, nvcc

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8], RZ, !UPT, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def sass(*lines: str, kernel: str = "wide") -> str:
    """Lines as ``cuobjdump -sass`` prints them, 16 bytes apart from address 0."""
    body = "".join(
        f"        /*{16 * i:04x}*/                   {line} ;   /* 0x00e0000838187df0 */\n"
        f"                                                       /* 0x000fe20008001818 */\n"
        for i, line in enumerate(lines)
    )
    return f'\n\tcode for sm_90a\n\t\tFunction : {kernel}\n\t.headerflags\t@"EF_CUDA_SM90"\n{body}\t\t..........\n'


def writes(*lines: str) -> list[int]:
    """Which of the lines write an operand in flight."""
    return sorted({hazard.write.address // 16 for hazard in machine_code.hazards(sass(*lines))})


def test_a_hazard_tells_kernel_address_and_instruction() -> None:
    text = sass("NOP", "EXIT", kernel="first") + sass("NOP", PRODUCT, "MOV R57, R3", WAIT, "EXIT", kernel="second")
    (hazard,) = machine_code.hazards(text)
    assert (hazard.kernel, hazard.write.address, hazard.write.text) == ("second", 0x20, "MOV R57, R3")
    assert (hazard.product.address, hazard.product.text) == (0x10, PRODUCT)
    assert str(hazard).startswith("second: 0020 MOV R57, R3 writes an operand of 0010 HGMMA")
    twice = (PRODUCT, "MOV R58, R3", "MOV R57, R3", WAIT, "EXIT")
    found = machine_code.hazards(sass(*twice, kernel="one") + sass(*twice, kernel="by_name"))
    told = [(hazard.kernel, hazard.write.address) for hazard in found]
    assert told == [("by_name", 0x10), ("by_name", 0x20), ("one", 0x10), ("one", 0x20)]


def test_only_until_the_wait() -> None:
    assert writes(PRODUCT, WAIT, "MOV R57, R3", "EXIT") == []
    assert writes("MOV R57, R3", PRODUCT, WAIT, "EXIT") == []
    assert writes(PRODUCT, f"@PT {WAIT}", "MOV R57, R3", "EXIT") == []
    assert writes(PRODUCT, f"@P0 {WAIT}", "MOV R57, R3", WAIT, "EXIT") == [2]


@pytest.mark.parametrize(("kept", "found"), [(0, []), (1, [4])])
def test_a_wait_that_lets_the_last_group_go_on(kept: int, found: list[int]) -> None:
    """The product is of the last of two groups, R88's of the one before."""
    before = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], RZ, !UPT"
    end = "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8], R24, gsb0"
    wait = f"WARPGROUP.DEPBAR.LE gsb0, {kept:#x}"
    assert writes(before, end, PRODUCT, wait, "MOV R57, R3", "MOV R88, R3", WAIT, "EXIT") == found
    assert writes(before, end, wait, "MOV R88, R3", WAIT, "EXIT") == [3] * kept, "a group is closed by its last product"
    assert writes(PRODUCT, wait, wait, "MOV R57, R3", WAIT, "EXIT") == [3] * kept, "a wait closes none"


@pytest.mark.parametrize(("groups", "found"), [(7, []), (6, [8])])
def test_as_many_groups_as_a_wait_can_leave(groups: int, found: list[int]) -> None:
    later = [f"HGMMA.64x64x16.F32.BF16 R24, R{100 + 4 * i}, gdesc[UR8], R24, gsb0" for i in range(groups)]
    assert writes(PRODUCT, *later, "WARPGROUP.DEPBAR.LE gsb0, 0x7", "MOV R57, R3", WAIT, "EXIT") == found


def test_branches_are_followed_by_both_ends() -> None:
    """A loop's next turn, which waits only after it has loaded; and what stands behind a branch that is not taken."""
    assert writes("LDS.128 R56, [R3]", WAIT, PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT") == [0]
    assert writes(WAIT, "LDS.128 R56, [R3]", PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT") == []
    assert writes(PRODUCT, "@!P1 BRA 0x40", WAIT, "EXIT", "MOV R59, R3", "EXIT") == [4]
    assert writes(PRODUCT, "BRA 0x40", "MOV R59, R3", "EXIT", WAIT, "EXIT") == []
    assert writes(PRODUCT, "BRA.DIV UR4, 0x40", "MOV R59, R3", "EXIT", WAIT, "EXIT") == [2]
    assert writes(PRODUCT, "@P0 EXIT", "MOV R59, R3", WAIT, "EXIT") == [2]
    assert writes(PRODUCT, "EXIT", "MOV R59, R3", "EXIT") == []
    assert writes(PRODUCT, "BRA.ANY 0x40", "MOV R59, R3", "EXIT", WAIT, "EXIT") == [2]
    assert writes(PRODUCT, "BRA UP0, 0x40", "MOV R59, R3", "EXIT", WAIT, "EXIT") == [2]
    assert writes(PRODUCT, "WARPSYNC.COLLECTIVE R3, 0x40", WAIT, "EXIT", "MOV R59, R3", "EXIT") == [4]
    for end in ("RET.REL.NODEC R2 0x0", "BRX R2 -0x20", "JMX R2 -0x20", "KILL"):
        assert writes(PRODUCT, end, "MOV R59, R3", "EXIT") == []
    assert writes(PRODUCT, "CALL.REL.NOINC 0x40", WAIT, "EXIT", "MUFU.RCP R58, R3", "RET.REL.NODEC R2 0x0") == [4]


@pytest.mark.parametrize(
    "line",
    [
        "@P3 MOV R56, R3",
        "@!P3 IMAD.X R59, RZ, RZ, R3, P1",
        "LDS.64 R55, [R3]",
        "LDS.128 R53, [R3]",
        "@P0 LDG.E.128.STRONG.GPU R56, desc[UR16][R14.64]",
        "LDSM.16.M88.4 R53, [R3]",
        "IMAD.WIDE.U32 R55, R11.reuse, R3, R100",
        "CS2R R55, SRZ",
        "HMMA.16816.F32.BF16 R53, R4, R8, R12",
        "DADD R55, R2, R4",
        "DMUL R55, R2, R4",
        "DFMA R55, R2, R4, R6",
        "LEPC R55",
        "GETLMEMBASE R55",
        "FRND.F64 R55, R2",
        "I2F.F64 R55, R2",
        "F2F.F64.F32 R55, R2",
        "F2I.S64.F64.TRUNC R55, R2",
        "F2I.U64.F64.TRUNC R55, R2",
        "SHFL.BFLY PT, R58, R47, 0x10, 0x1f",
        "ATOMG.E.ADD.STRONG.GPU PT, R59, desc[UR16][R2.64], R5",
        "LOP3.LUT P0, R56, R3, 0x1, RZ, 0xc0, !PT",
        "IADD3 R58, P1, R93, R2, RZ",
    ],
)
def test_writes(line: str) -> None:
    assert writes(PRODUCT, line, WAIT, "EXIT") == [1]


@pytest.mark.parametrize(
    "line",
    [
        "FADD R24, R24, R56",
        "MOV R60, R56",
        "MOV R55, R3",
        "IMAD.WIDE.U32 R54, R11.reuse, R3, R100",
        "CS2R R54, SRZ",
        "HMMA.16816.F32.BF16 R52, R4, R8, R12",
        "F2F.F64.F32 R54, R2",
        "I2F.F64 R54, R2",
        "F2I.S64.F64.TRUNC R54, R2",
        "LDSM.16.M88.4 R52, [R3]",
        "LDS.64 R54, [R56]",
        "LDS.128 R52, [R56]",
        "LDSM.16.M88.2 R54, [R3]",
        "SHF.L.U64.HI R55, R56, 0x1, R57",
        "F2F.F32.F64 R55, R2",
        "F2I.F64.TRUNC R55, R2",
        "I2F.S64 R55, R2",
        "CS2R.32 R55, SR_CLOCKLO",
        "STS.128 [R56], R56",
        "STG.E desc[UR16][R56.64], R57",
        "LDGSTS.E.BYPASS.LTC128B.128 [R56], desc[UR16][R56.64], P0",
        "ISETP.GE.AND P0, PT, R56, 0x1, PT",
        "FCHK P0, R56, R57",
        "@P2 R2UR P0, UR4, R56",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R56+URZ], R57",
        "BAR.SYNC.DEFER_BLOCKING R56, R57",
        "WARPSYNC R56",
        "NANOSLEEP R56",
        "CALL.ABS.NOINC R56",
        "@P0 BRX R56 -0x20",
        "@P0 RET.ABS.NODEC R56 0x0",
        "VOTE.ALL P0, P1",
        "R2P PR, R56, 0x7f",
        "QSPC.E.S P0, RZ, [R56]",
        "@!PT LDS R56, [R56]",
        "HGMMA.64x64x16.F32.BF16 R24, R60, gdesc[UR12], R24, gsb0",
        "UMOV UR56, 0x1",
    ],
)
def test_other_registers_and_reads_are_no_hazards(line: str) -> None:
    assert writes(PRODUCT, line, WAIT, "EXIT") == []


def test_operands_in_shared_memory_are_never_overwritten() -> None:
    product = "HGMMA.64x16x16.F32.BF16 R88, gdesc[UR24], R88, gsb0"
    assert machine_code.operand(product) == frozenset()
    assert writes(product, *(f"MOV R{r}, R3" for r in (8, 24, 56)), WAIT, "EXIT") == []
    for text in (PRODUCT, PRODUCT.replace("R56", "R56.reuse"), PRODUCT.replace("[UR8]", "[UR8].tnspB")):
        assert machine_code.operand(text) == {56, 57, 58, 59}


def program(path: Path, text: str) -> Path:
    """A shell script that prints a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_disassembler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside nvcc, in CUDA_HOME, on PATH, and nowhere without nvdisasm."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    compiler, found = str(tmp_path / "bin" / "nvcc"), str(tmp_path / "bin" / "cuobjdump")
    program(tmp_path / "bin" / "cuobjdump", "")
    assert environment.cuobjdump(compiler) == ""
    program(tmp_path / "bin" / "nvdisasm", "")
    assert environment.cuobjdump(compiler) == found
    assert environment.cuobjdump("/elsewhere/nvcc") == ""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert environment.cuobjdump("/elsewhere/nvcc") == found
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert environment.cuobjdump("/elsewhere/nvcc") == found


def test_the_compile_check_fails_on_hazards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a compiler that makes nothing: only Hopper is read, failures are not kept, a line says what is missing."""
    source = tmp_path / "csrc" / "cuda" / "kernel.cu"
    source.parent.mkdir(parents=True)
    source.touch()
    monkeypatch.setattr(nvcc.build, "ROOT", tmp_path)
    monkeypatch.setattr(nvcc.build, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path / "build"))
    monkeypatch.setattr(environment, "nvcc", lambda: (str(program(tmp_path / "bin" / "nvcc", "")), "13.0"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: "")
    assert nvcc.main(["--arch", "9.0"]) == 0
    assert "machine code is not looked at\n" in capsys.readouterr().err
    dump = program(tmp_path / "bin" / "cuobjdump", sass(PRODUCT, "MOV R57, R3", WAIT, "EXIT"))
    monkeypatch.setattr(environment, "cuobjdump", lambda _: str(dump))
    for _ in range(2):
        assert nvcc.main(["--arch", "9.0", "12.0"]) == 1
        said = capsys.readouterr()
        assert "kernel.cu for 9.0:\nwide: 0010 MOV R57, R3 writes an operand of 0000 HGMMA" in said.out
        assert "kernel.cu for 12.0: ok" in said.err
    program(dump, sass(PRODUCT, WAIT, "MOV R57, R3", "EXIT"))
    assert nvcc.main(["--arch", "9.0"]) == 0
    dump.write_text("#!/bin/sh\nexit 7\n")
    capsys.readouterr()
    source.write_text("// another\n")
    assert nvcc.main(["--arch", "9.0"]) == 1
    assert "cuobjdump ended with status 7" in capsys.readouterr().out
    program(dump, "no code")
    report = "ptxas info : Compiling entry function 'wide' for 'sm_90a'\nptxas info : Used 40 registers"
    monkeypatch.setattr(environment, "nvcc", lambda: (str(program(tmp_path / "bin" / "nvcc", report)), "13.0"))
    assert nvcc.main(["--arch", "9.0"]) == 1
    assert "cuobjdump shows no machine code of wide" in capsys.readouterr().out
