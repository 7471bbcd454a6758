"""The container against bytes written by hand, and against everything that is not a valid file."""

from __future__ import annotations

import re
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refs import kdtr
from refs.kdtr import KdtrError

DOC = Path(__file__).parents[2] / "docs" / "kdtr.md"
FIELDS: dict[str, int | float] = {"rms_norm_eps": 0.5, "eos_id": -1}
TENSORS = {
    "b": np.array([7, 8, 9], np.uint8),
    "a.w": np.array([[1, 2, 3], [4, 5, -0.5]], np.float32),
}


def documented_bytes() -> bytes:
    """The hexdump of docs/kdtr.md, its ``*`` lines expanded."""
    dump = re.search(r"```hexdump\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)
    assert dump is not None
    out = bytearray()
    for line in dump[1].splitlines():
        if line == "*":
            continue
        at = int(line[:8], 16)
        out += bytes(at - len(out))
        out += bytes.fromhex(line[8:].split("|")[0])
    return bytes(out)


def reseal(data: bytearray) -> bytes:
    """Make the head's CRC right again, so that the check behind it is the one that speaks."""
    (offset,) = struct.unpack_from("<Q", data, 32)
    struct.pack_into("<I", data, 40, zlib.crc32(data[64:offset], zlib.crc32(data[:40])))
    return bytes(data)


def patched(at: int, new: bytes, *, seal: bool = True) -> bytes:
    data = bytearray(documented_bytes())
    data[at : at + len(new)] = new
    return reseal(data) if seal else bytes(data)


def test_writer_gives_the_documented_bytes() -> None:
    assert kdtr.encode(FIELDS, TENSORS) == documented_bytes()


def test_reader_understands_the_documented_bytes() -> None:
    got = kdtr.parse(documented_bytes(), verify=True)
    assert dict(got.fields) == FIELDS
    assert [type(v) for v in got.fields.values()] == [int, float]
    assert list(got.tensors) == ["a.w", "b"]
    for name, want in TENSORS.items():
        assert got.tensor(name).dtype == want.dtype
        np.testing.assert_array_equal(got.tensor(name), want)
    assert got.entries["a.w"] == kdtr.Entry("a.w", "f32", (2, 3), 512, 24, 0xFFC1DDE7)


def test_file_round_trip_maps_and_is_read_only(tmp_path: Path) -> None:
    path = tmp_path / "x.kdtr"
    kdtr.write(path, FIELDS, TENSORS)
    got = kdtr.read(path, verify=True)
    assert path.read_bytes() == documented_bytes()
    assert not got.tensor("b").flags.writeable
    assert not got.tensor("b").flags.owndata
    with pytest.raises(KdtrError, match="no such tensor"):
        got.tensor("c")


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.kdtr"
    kdtr.write(path, FIELDS, TENSORS)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(KeyboardInterrupt):
        kdtr.write(path, {}, {})
    assert path.read_bytes() == documented_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["x.kdtr"]


def test_an_empty_container_is_64_bytes() -> None:
    data = kdtr.encode({}, {})
    assert len(data) == 64
    assert kdtr.parse(data, verify=True).tensors == {}


def test_truncation_at_every_byte(tmp_path: Path) -> None:
    whole = documented_bytes()
    path = tmp_path / "cut.kdtr"
    for n in range(len(whole)):
        with pytest.raises(KdtrError):
            kdtr.parse(whole[:n])
        path.write_bytes(whole[:n])
        with pytest.raises(KdtrError, match=r"cut\.kdtr: header"):
            kdtr.read(path)
    with pytest.raises(KdtrError, match="file_size"):
        kdtr.parse(whole + b"\0")


def test_every_single_bit_matters() -> None:
    """With verification on there is no byte of a file that may be changed."""
    whole = documented_bytes()
    for i in range(len(whole) * 8):
        data = bytearray(whole)
        data[i // 8] ^= 1 << (i % 8)
        with pytest.raises(KdtrError):
            kdtr.parse(bytes(data), verify=True)


F1, F2, T1, T2 = 64, 128, 192, 336  # where the example's fields and tensors stand


@pytest.mark.parametrize(
    ("at", "new", "field", "reason"),
    [
        (0, b"GGUF", "header.magic", "no KDTR file"),
        (4, b"\2\0\0\0", "header.version", "this reader knows 1"),
        (8, b"\1\2\3\4", "header.order", "big-endian"),
        (8, b"\1\1\1\1", "header.order", "is not 0x01020304"),
        (12, b"\1\0\0\0", "header.flags", "must be 0"),
        (16, b"\x44", "header.file_size", "has 579 bytes"),
        (24, struct.pack("<I", 257), "header.field_count", "at most 256"),
        (28, struct.pack("<I", 2**20 + 1), "header.tensor_count", "at most"),
        (28, struct.pack("<I", 3), "header.data_offset", "counts ask"),
        (32, struct.pack("<Q", 2**63), "header.data_offset", "counts ask"),
        (63, b"\1", "header.reserved", "not zero"),
        (F1, b"Eos_id", "fields[0].name", "no zero-padded name"),
        (F1 + 8, b"x", "fields[0].name", "no zero-padded name"),
        (F1, b"x" * 48, "fields[0].name", "no zero-padded name"),
        (F1, bytes(48), "fields[0].name", "no zero-padded name"),
        (F1, b"z", "fields[1].name", "does not come after"),
        (F1, b"rms_norm_eps", "fields[1].name", "does not come after"),
        (F1 + 48, b"\3", "fields[0] (eos_id).kind", "known are"),
        (F1 + 52, b"\1", "fields[0] (eos_id).reserved", "not zero"),
        (F2 + 56, struct.pack("<d", float("nan")), "fields[1] (rms_norm_eps).value", "not finite"),
        (F2 + 56, struct.pack("<d", float("-inf")), "fields[1] (rms_norm_eps).value", "not finite"),
        (T1, b"A", "tensors[0].name", "no zero-padded name"),
        (T1, b"b\0\0", "tensors[1].name", "does not come after"),
        (T1 + 80, b"\0", "tensors[0] (a.w).dtype", "known are"),
        (T1 + 80, b"\7", "tensors[0] (a.w).dtype", "known are"),
        (T1 + 80, b"\1", "tensors[0] (a.w).size", "ask for 48"),
        (T1 + 84, b"\0", "tensors[0] (a.w).ndim", "1 to 4"),
        (T1 + 84, b"\5", "tensors[0] (a.w).ndim", "1 to 4"),
        (T1 + 84, b"\1", "tensors[0] (a.w).shape", "exactly 1 dimensions"),
        (T1 + 84, b"\3", "tensors[0] (a.w).shape", "exactly 3 dimensions"),
        (T1 + 88, struct.pack("<Q", 2**63), "tensors[0] (a.w).size", "ask for"),
        (T1 + 88, struct.pack("<QQ", 2**63, 2**63), "tensors[0] (a.w).size", "ask for"),
        (T1 + 120, b"\x40", "tensors[0] (a.w).offset", "must be 512"),
        (T1 + 120, struct.pack("<Q", 2**64 - 64), "tensors[0] (a.w).offset", "must be 512"),
        (T1 + 128, b"\x17", "tensors[0] (a.w).size", "ask for 24"),
        (T1 + 140, b"\1", "tensors[0] (a.w).reserved", "not zero"),
        (T2 + 120, b"\0", "tensors[1] (b).offset", "must be 576"),
        (T2 + 88, b"\2\0\0\0\0\0\0\0", "tensors[1] (b).size", "ask for 2"),
        (500, b"\1", "tensors", "between the tensor table and the data"),
    ],
)
def test_each_rule_has_its_own_message(at: int, new: bytes, field: str, reason: str) -> None:
    # A head whose offset is hostile cannot be resealed over its real extent; those rules come before the CRC.
    with pytest.raises(KdtrError) as caught:
        kdtr.parse(patched(at, new, seal=at >= 40), "some.kdtr")
    assert (caught.value.file, caught.value.field) == ("some.kdtr", field)
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"some.kdtr: {field}: ")


def test_size_and_shape_that_agree_but_exceed_the_file() -> None:
    data = bytearray(documented_bytes())
    struct.pack_into("<Q", data, T2 + 88, 2**40)
    struct.pack_into("<Q", data, T2 + 128, 2**40)
    with pytest.raises(KdtrError, match=r"\(b\)\.size: ends at .* beyond"):
        kdtr.parse(reseal(data))
    struct.pack_into("<Q", data, T2 + 88, 2)
    struct.pack_into("<Q", data, T2 + 128, 2)
    with pytest.raises(KdtrError, match="file_size: 579, but the last tensor ends at 578"):
        kdtr.parse(reseal(data))


def test_head_crc_is_checked_without_verify_and_data_only_with_it() -> None:
    with pytest.raises(KdtrError, match=r"header\.crc"):
        kdtr.parse(patched(F1 + 56, b"\0", seal=False))
    for at, match in ((512, r"a\.w\.crc"), (540, "gap"), (578, r"b\.crc")):
        data = patched(at, b"\x55", seal=False)
        kdtr.parse(data)
        with pytest.raises(KdtrError, match=match):
            kdtr.parse(data, verify=True)


def test_hostile_counts_and_sizes_ask_for_no_memory() -> None:
    hostile = [
        patched(28, struct.pack("<I", 2**20), seal=False),
        patched(24, struct.pack("<II", 256, 2**20), seal=False),
        patched(16, struct.pack("<Q", 2**62), seal=False),
        patched(T1 + 88, struct.pack("<QQ", 2**40, 2**40)),
    ]
    data = bytearray(documented_bytes())
    struct.pack_into("<QQ", data, T2 + 88, 2**50, 0)
    struct.pack_into("<Q", data, T2 + 128, 2**50)
    hostile.append(reseal(data))
    tracemalloc.start()
    try:
        for case in hostile:
            with pytest.raises(KdtrError):
                kdtr.parse(case)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_unreadable_paths_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.kdtr", tmp_path):
        with pytest.raises(KdtrError, match="file: cannot be read"):
            kdtr.read(path)


@pytest.mark.parametrize(
    ("fields", "tensors", "match"),
    [
        ({"Bad": 1}, {}, "field name"),
        ({"x" * 48: 1}, {}, "field name"),
        ({"": 1}, {}, "field name"),
        ({"é": 1}, {}, "field name"),
        ({"a": True}, {}, "neither"),
        ({"a": float("inf")}, {}, "neither"),
        ({"a": 2**63}, {}, "i64"),
        ({f"f{i}": 1 for i in range(257)}, {}, "at most 256"),
        ({}, {"a b": np.zeros(1)}, "tensor name"),
        ({}, {"x" * 80: np.zeros(1)}, "tensor name"),
        ({}, {"a": np.zeros(0)}, "shape"),
        ({}, {"a": np.float64(1.0)}, "shape"),
        ({}, {"a": np.zeros((1, 1, 1, 1, 1))}, "shape"),
        ({}, {"a": np.zeros(1, np.complex64)}, "no type"),
        ({}, {"a": np.zeros(1, np.float16)}, "no type"),
        ({}, {"a": np.zeros(1, np.uint32)}, "no type"),
    ],
)
def test_writer_refuses_what_the_format_cannot_hold(fields: Any, tensors: Any, match: str) -> None:
    with pytest.raises(KdtrError, match=match):
        kdtr.encode(fields, tensors)


FIELD_SETS = st.dictionaries(
    st.from_regex(r"[a-z0-9_]{1,47}", fullmatch=True),
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    max_size=5,
)
TENSOR_SETS = st.dictionaries(
    st.from_regex(r"[a-z0-9_.]{1,79}", fullmatch=True),
    st.sampled_from(["<f8", "<f4", ">f4", "<u2", "<i4", ">i4", "<i8", "|u1"]).flatmap(
        lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    ),
    max_size=4,
)


@settings(max_examples=100)
@given(FIELD_SETS, TENSOR_SETS)
def test_valid_contents_survive_the_round_trip(fields: dict[str, int | float], tensors: dict[str, Any]) -> None:
    data = kdtr.encode(fields, tensors)
    got = kdtr.parse(data, verify=True)
    assert {k: (type(v), repr(v)) for k, v in got.fields.items()} == {k: (type(v), repr(v)) for k, v in fields.items()}
    assert list(got.tensors) == sorted(tensors)
    for name, want in tensors.items():
        assert got.tensors[name].shape == want.shape
        assert got.tensors[name].tobytes() == want.astype(want.dtype.newbyteorder("<")).tobytes()
    assert kdtr.encode(got.fields, got.tensors) == data


@settings(max_examples=250)
@given(st.lists(st.tuples(st.integers(0, 578), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_mutations_parse_or_raise_the_named_error(changes: list[tuple[int, int]], seal: bool) -> None:
    data = bytearray(documented_bytes())
    for at, value in changes:
        data[at] = value
    if seal:
        data[32:40] = struct.pack("<Q", 512)
        data = bytearray(reseal(data))
    for verify in (False, True):
        try:
            got = kdtr.parse(bytes(data), verify=verify)
        except KdtrError:
            continue
        assert sum(t.nbytes for t in got.tensors.values()) <= len(data)


@settings(max_examples=200)
@given(st.binary(max_size=700), st.booleans())
def test_any_bytes_raise_the_named_error(tail: bytes, with_header: bool) -> None:
    data = documented_bytes()[:64] + tail if with_header else tail
    if data != documented_bytes():
        with pytest.raises(KdtrError):
            kdtr.parse(data)
