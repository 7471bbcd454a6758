"""Arrivals ahead of the reads that they tell of: what is found in machine code, and what is not."""

from __future__ import annotations

from harness import machine_code, pending_reads

ARRIVAL = "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9], RZ"
READ = "LDS.128 R20, [R6]"


def sass(*lines: tuple[str, int, tuple[int, ...]]) -> str:
    """Lines as ``cuobjdump -sass`` prints them: text, the scoreboard that tells of the result (7: none), those waited
    for. Bits 46 to 48 of an encoding's upper half are the first, 52 to 57 the second."""
    body = ""
    for i, (text, told, waited) in enumerate(lines):
        upper = told << 46 | sum(1 << 52 + board for board in waited)
        body += f"        /*{16 * i:04x}*/                   {text} ;   /* 0x00e0000838187df0 */\n"
        body += f"                                                       /* 0x{upper:016x} */\n"
    return f"\n\t\tFunction : tiles\n{body}\t\t..........\n"


def early(*lines: tuple[str, int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """(arrival, read), numbers of lines."""
    return [(e.arrival.address // 16, e.read.address // 16) for e in pending_reads.early_arrivals(sass(*lines))]


def other(text: str = "NOP", *waited: int) -> tuple[str, int, tuple[int, ...]]:
    return (text, 7, waited)


END = other("EXIT")


def test_control_bits_of_code_that_nvcc_made() -> None:
    """LDS.128 R4, [R21] and the PRMT that waits for it, as CUDA 13.0 encodes them."""
    line = "        /*86d0*/                   LDS.128 R4, [R21] ;   /* 0x0000000015047984 */\n"
    line += "                                                         /* 0x000e220000000c00 */\n"
    line += "        /*87c0*/                   PRMT R32, R4, 0x5410, R6 ;   /* 0x0000541004207816 */\n"
    line += "                                                         /* 0x001fc60000000006 */\n"
    read, used = machine_code.kernels("Function : f\n" + line)["f"]
    assert pending_reads.scoreboard(read) == 0
    assert pending_reads.waits_for(read) == 0
    assert pending_reads.scoreboard(used) == pending_reads.NO_SCOREBOARD
    assert pending_reads.waits_for(used) == 1 << 0


def test_a_read_under_way_is_told_with_kernel_and_addresses() -> None:
    (found,) = pending_reads.early_arrivals(sass((READ, 2, ()), other(), other(ARRIVAL), other("HMMA", 2), END))
    assert (found.kernel, found.arrival.address, found.read.address) == ("tiles", 0x20, 0)
    assert str(found).startswith("tiles: 0020 @P0 SYNCS.ARRIVE")
    assert "0000 LDS.128 R20, [R6] is under way" in str(found)


def test_a_wait_before_the_arrival_or_at_it() -> None:
    assert early((READ, 2, ()), other("HMMA", 2), other(ARRIVAL), END) == []
    assert early((READ, 2, ()), other(ARRIVAL, 2), END) == []
    assert early((READ, 2, ()), other("HMMA", 1), other(ARRIVAL), END) == [(2, 0)]
    assert early((READ, 2, ()), other("HMMA", 2), (READ, 2, ()), other(ARRIVAL), END) == [(3, 2)]


def test_every_way_is_followed() -> None:
    """Round a loop to an arrival above the read, and by a branch past the wait."""
    assert early(other(ARRIVAL), (READ, 3, ()), other("@P1 BRA 0x0"), other("HMMA", 3), END) == [(0, 1)]
    assert early((READ, 3, ()), other("@P1 BRA 0x30"), other("HMMA", 3), other(ARRIVAL), END) == [(3, 0)]
    assert early(other(ARRIVAL), (READ, 3, ()), other("HMMA", 3), other("@P1 BRA 0x0"), END) == []


def test_what_counts() -> None:
    for read in ("LDS.64 R2, [R3]", "LDSM.16.M88.4 R4, [R8]", "@P2 LDS.128 R20, [R6+0x400]", "LDS.U.128 R4, [R5]"):
        assert early((read, 0, ()), other(ARRIVAL), END) == [(1, 0)], read
    for read in ("LDS.U8 R10, [UR5+0x3840e]", "LDS R4, [R5]", "LDG.E.128 R4, desc[UR4][R2.64]"):
        assert early((read, 0, ()), other(ARRIVAL), END) == [], read
    for arrival in ("SYNCS.ARRIVE.TRANS64 RZ, [R42+URZ], R47", "BAR.SYNC.DEFER_BLOCKING 0x0"):
        assert early((READ, 0, ()), other(arrival), END) == [], arrival
