"""The C++ KDTR reader: hand-written bytes, truncation everywhere, and the Python reader's verdict on edited files."""

from __future__ import annotations

import os
import random
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import engine
from harness import protocol
from harness.protocol import EngineError
from refs import kdtr

HEAD = 64


def small() -> bytes:
    """Two fields and three tensors; no model, so that a valid file is refused by its configuration alone."""
    tensors = {
        "a.w": np.arange(5, dtype=np.float32),
        "b": np.arange(12, dtype=np.int64).reshape(3, 4),
        "c": np.full((1, 2, 1, 3), 7, np.uint8),
    }
    return kdtr.encode({"alpha": 3, "beta": 0.5}, tensors)


def sealed(data: bytes) -> bytes:
    """The bytes with the head's CRC made right, so that what comes behind it is reached."""
    out = bytearray(data)
    end = min(max(struct.unpack_from("<Q", out, 32)[0], HEAD), len(out)) if len(out) >= HEAD else len(out)
    if len(out) >= HEAD:
        struct.pack_into("<I", out, 40, zlib.crc32(bytes(out[HEAD:end]), zlib.crc32(bytes(out[:40]))))
    return bytes(out)


class Reader:
    """Opens bytes as a file in both readers."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "file.kdtr"
        self.engine = engine.create("cpu")

    def cpp(self, data: bytes) -> str:
        """The complaint of the C++ reader, or "" if the format is right (holding no model, it still fails to load)."""
        self.path.write_bytes(data)
        with pytest.raises(EngineError) as caught:
            self.engine.load(self.path, "fp32")
        if isinstance(caught.value, protocol.FormatError):
            text = str(caught.value)
            assert text.startswith(f"{self.path}: ")
            assert len(text.removeprefix(f"{self.path}: ").split(": ")) >= 2, f"no field and reason in {text!r}"
            return text
        assert isinstance(caught.value, protocol.ConfigError)
        return ""

    def python(self, data: bytes) -> str:
        try:
            kdtr.parse(data, "file")
        except kdtr.KdtrError as error:
            return str(error)
        return ""


@pytest.fixture
def reader() -> Iterator[Reader]:
    """In memory where the system has a folder for that: thousands of files are written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Reader(Path(folder))


def test_hand_written_bytes(reader: Reader) -> None:
    """One field and one tensor by struct alone, from the tables of docs/kdtr.md."""
    field = b"size".ljust(48, b"\0") + struct.pack("<IIq", 1, 0, -2)
    tensor = b"x.w".ljust(80, b"\0") + struct.pack("<II4QQQII", 2, 1, 3, 0, 0, 0, 320, 12, 0, 0)
    body = field + tensor + bytes(320 - HEAD - len(field) - len(tensor))
    start = struct.pack("<4sIIIQIIQ", b"KDTR", 1, 0x01020304, 0, 332, 1, 1, 320)
    data = start + struct.pack("<I20x", zlib.crc32(body, zlib.crc32(start))) + body + bytes(12)
    assert (reader.cpp(data), reader.python(data)) == ("", "")
    assert "header.crc" in reader.cpp(data[:70] + b"!" + data[71:])


def test_truncated_at_every_byte(reader: Reader) -> None:
    data = small()
    assert reader.cpp(data) == ""
    for n in range(len(data)):
        assert reader.cpp(data[:n]) != "", f"{n} bytes"
        cut = bytearray(data[:n])
        if n >= HEAD:  # a file that lies about its size consistently
            struct.pack_into("<Q", cut, 16, n)
            assert reader.cpp(sealed(bytes(cut))) != "", f"{n} bytes, sealed"
    assert "header.file_size" in reader.cpp(data + b"\0")


def test_every_byte_of_the_head_matters(reader: Reader) -> None:
    data = small()
    offset = struct.unpack_from("<Q", data, 32)[0]
    for at in range(offset):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        assert reader.cpp(bytes(broken)) != "", f"byte {at}"


CASES = [
    (0, "4s", b"RTDK", "header.magic"),
    (4, "I", 2, "header.version"),
    (8, "I", 0x04030201, "header.order: the file is big-endian"),
    (8, "I", 7, "header.order"),
    (12, "I", 1, "header.flags"),
    (16, "Q", 10**15, "header.file_size"),
    (24, "I", 257, "header.field_count"),
    (24, "I", 2**32 - 1, "header.field_count"),
    (28, "I", 2**20 + 1, "header.tensor_count"),
    (28, "I", 2**20, "header.data_offset"),
    (32, "Q", 2**63, "header.data_offset"),
    (44, "B", 1, "header.reserved"),
    (63, "B", 1, "header.reserved"),
    (HEAD, "B", ord("A"), "fields[0].name"),
    (HEAD, "B", 0, "fields[0].name"),
    (HEAD, "B", ord("z"), "fields[1].name: 'beta' does not come after 'zlpha'"),
    (HEAD + 47, "B", 97, "fields[0].name"),
    (HEAD + 48, "I", 3, "fields[0] (alpha).kind"),
    (HEAD + 52, "I", 1, "fields[0] (alpha).reserved"),
    (HEAD + 64 + 56, "d", float("nan"), "fields[1] (beta).value"),
    (HEAD + 64 + 56, "d", float("inf"), "fields[1] (beta).value"),
    (HEAD + 128, "B", ord("/"), "tensors[0].name"),
    (HEAD + 128, "B", ord("b"), "tensors[1].name: 'b' does not come after 'b.w'"),
    (HEAD + 128 + 80, "I", 0, "tensors[0] (a.w).dtype"),
    (HEAD + 128 + 80, "I", 7, "tensors[0] (a.w).dtype"),
    (HEAD + 128 + 84, "I", 0, "tensors[0] (a.w).ndim"),
    (HEAD + 128 + 84, "I", 5, "tensors[0] (a.w).ndim"),
    (HEAD + 128 + 84, "I", 2, "tensors[0] (a.w).shape"),
    (HEAD + 128 + 88, "Q", 0, "tensors[0] (a.w).shape"),
    (HEAD + 128 + 88, "Q", 2**62, "tensors[0] (a.w).s"),
    (HEAD + 128 + 88, "Q", 6, "tensors[0] (a.w).size"),
    (HEAD + 128 + 96, "Q", 1, "tensors[0] (a.w).shape"),
    (HEAD + 128 + 120, "Q", 0, "tensors[0] (a.w).offset"),
    (HEAD + 128 + 120, "Q", 2**64 - 64, "tensors[0] (a.w).offset"),
    (HEAD + 128 + 128, "Q", 24, "tensors[0] (a.w).size"),
    (HEAD + 128 + 140, "I", 9, "tensors[0] (a.w).reserved"),
    (HEAD + 128 + 144 + 88, "Q", 2**61, "tensors[1] (b).shape"),
]


@pytest.mark.parametrize(("at", "kind", "value", "where"), CASES)
def test_each_check_names_its_field(reader: Reader, at: int, kind: str, value: bytes | float, where: str) -> None:
    data = bytearray(small())
    struct.pack_into(f"<{kind}", data, at, value)
    got = reader.cpp(sealed(bytes(data)))
    assert got.removeprefix(f"{reader.path}: ").startswith(where), got


def test_both_readers_agree(reader: Reader) -> None:
    """Random edits of the head with the CRC made right: accepted by both or refused by both."""
    rng = random.Random(5)
    data = small()
    offset = struct.unpack_from("<Q", data, 32)[0]
    interesting = [0, 1, 2, 3, 4, 6, 7, 8, 12, 63, 64, 65, 127, 255, 256, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    refused = 0
    for case in range(600):
        edited = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(16, offset)
            size = rng.choice([1, 1, 4, 8])
            value = rng.choice([*interesting, rng.getrandbits(64)]) & (256**size - 1)
            edited[at : at + size] = value.to_bytes(size, "little")
        edited = edited[: len(data)] if rng.random() < 0.8 else edited + bytes(rng.choice([1, 63, 64]))
        if rng.random() < 0.5:
            struct.pack_into("<Q", edited, 16, len(edited))
        blob = sealed(bytes(edited))
        cpp, python = reader.cpp(blob), reader.python(blob)
        assert (cpp == "") == (python == ""), f"case {case}: C++ {cpp!r}, Python {python!r}"
        refused += cpp != ""
    assert 100 < refused < 600, "the edits tell nothing apart"


def test_hostile_counts_cost_no_memory(reader: Reader) -> None:
    """A head that claims a million tensors in a short file is refused before anything is allocated for them."""
    import resource

    data = bytearray(small())
    struct.pack_into("<I", data, 28, 2**20)
    struct.pack_into("<Q", data, 32, (HEAD + 128 + 144 * 2**20 + 63) // 64 * 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        assert "header.data_offset" in reader.cpp(sealed(bytes(data)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kilobytes
