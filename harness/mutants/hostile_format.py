"""Files that break the rules of ``docs/kdtr.md``, one by one, made from the bytes of a valid one."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.protocol import EngineError, FormatError

HEADER, FIELD, TENSOR, ALIGN = 64, 64, 144, 64


@dataclass(frozen=True)
class Hostile:
    """One file. ``field``: what the message names after the file; ``runs``: it opens, and a forward refuses it."""

    name: str
    data: bytes
    error: type[EngineError]
    field: str
    precision: str = "fp32"
    runs: bool = False


class Head:
    """A valid file's bytes, to be edited at the places of docs/kdtr.md."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.fields, self.tensors = self.get("<I", 24), self.get("<I", 28)
        self.start = self.get("<Q", 32)

    def get(self, kind: str, at: int) -> int:
        """An integer of the head."""
        return int(struct.unpack_from(kind, self.data, at)[0])

    def put(self, kind: str, at: int, *values: Any) -> Head:
        """Overwrite one item."""
        struct.pack_into(kind, self.data, at, *values)
        return self

    def field(self, index: int) -> int:
        """Where a field's entry begins."""
        return HEADER + FIELD * (index % self.fields)

    def tensor(self, index: int) -> int:
        """Where a tensor's entry begins."""
        return HEADER + FIELD * self.fields + TENSOR * (index % self.tensors)

    def swap(self, a: int, b: int, size: int) -> Head:
        """Exchange two entries."""
        first, second = bytes(self.data[a : a + size]), bytes(self.data[b : b + size])
        self.data[a : a + size], self.data[b : b + size] = second, first
        return self

    def done(self) -> bytes:
        """The bytes, the checksum of the head made right again."""
        crc = zlib.crc32(self.data[HEADER : self.start], zlib.crc32(self.data[:40]))
        struct.pack_into("<I", self.data, 40, crc)
        return bytes(self.data)


def _name(head: Head, entry: int) -> str:
    return bytes(head.data[entry : entry + 48]).split(b"\0")[0].decode("ascii")


def _case(data: bytes, name: str, field: str, edit: Callable[[Head], Head]) -> Hostile:
    """An edited head, its checksum made right again."""
    return Hostile(name, edit(Head(data)).done(), FormatError, field)


def _raw(name: str, field: str, broken: bytes) -> Hostile:
    return Hostile(name, broken, FormatError, field)


def of_format(data: bytes) -> Iterator[Hostile]:
    """Rules of the container. The entry that is edited is the second, so that others stand on both sides of it."""
    yield from _of_header(data)
    yield from _of_fields(data)
    yield from _of_tensors(data)


def _of_header(data: bytes) -> Iterator[Hostile]:
    """How many bytes there are, and what the first 64 say."""
    case, whole = partial(_case, data), Head(data)
    yield _raw("no_bytes", "header", b"")
    yield _raw("half_a_header", "header", data[:63])
    yield _raw("header_alone", "header.file_size", data[:HEADER])
    yield _raw("one_byte_short", "header.file_size", data[:-1])
    yield _raw("one_byte_long", "header.file_size", data + b"\0")
    yield case("magic", "header.magic", lambda h: h.put("<4s", 0, b"KDTS"))
    yield case("version", "header.version", lambda h: h.put("<I", 4, 2))
    yield case("big_endian", "header.order", lambda h: h.put(">I", 8, 0x01020304))
    yield case("order", "header.order", lambda h: h.put("<I", 8, 0x01020305))
    yield case("flags", "header.flags", lambda h: h.put("<I", 12, 1))
    yield case("reserved", "header.reserved", lambda h: h.put("<B", 63, 1))
    yield case("file_size", "header.file_size", lambda h: h.put("<Q", 16, len(data) + 64))
    yield case("many_fields", "header.field_count", lambda h: h.put("<I", 24, 257))
    yield case("many_tensors", "header.tensor_count", lambda h: h.put("<I", 28, 1048577))
    yield case("fields_counted_wrong", "header.data_offset", lambda h: h.put("<I", 24, whole.fields + 4))
    yield case("data_offset", "header.data_offset", lambda h: h.put("<Q", 32, whole.start + 64))
    beyond = (len(data) - HEADER) // TENSOR + 8
    wanted = -(-(HEADER + FIELD * whole.fields + TENSOR * beyond) // ALIGN) * ALIGN
    head_beyond = bytes(Head(data).put("<I", 28, beyond).put("<Q", 32, wanted).data)
    yield _raw("head_beyond_the_file", "header.data_offset", head_beyond)
    flipped = bytearray(data)
    flipped[whole.field(1) + 56] ^= 1
    yield _raw("crc", "header.crc", bytes(flipped))


def _of_fields(data: bytes) -> Iterator[Hostile]:
    case, whole = partial(_case, data), Head(data)
    f = whole.field(1)
    field = f"fields[1] ({_name(whole, f)})"
    last = f"fields[{whole.fields - 1}].name"  # where a name that comes late in the order breaks no other rule
    yield case("field_name", last, lambda h: h.put("<c", h.field(-1), b"~"))
    yield case("field_name_unending", last, lambda h: h.put("<48s", h.field(-1), b"z" * 48))
    yield case("field_name_padding", "fields[1].name", lambda h: h.put("<c", f + 47, b"a"))
    yield case("field_kind", f"{field}.kind", lambda h: h.put("<I", f + 48, 3))
    yield case("field_reserved", f"{field}.reserved", lambda h: h.put("<I", f + 52, 1))
    floats = [at for i in range(whole.fields) if whole.get("<I", (at := whole.field(i)) + 48) == 2]
    for name, value in (("field_nan", float("nan")), ("field_infinite", float("inf"))):
        where = f"fields[{(floats[0] - HEADER) // FIELD}] ({_name(whole, floats[0])}).value"
        yield case(name, where, lambda h, value=value: h.put("<d", floats[0] + 56, value))  # type: ignore[misc]
    yield case("field_order", "fields[2].name", lambda h: h.swap(h.field(1), h.field(2), FIELD))
    first = bytes(whole.data[f : f + 48])
    yield case("field_twice", "fields[2].name", lambda h: h.put("<48s", h.field(2), first))


def _of_tensors(data: bytes) -> Iterator[Hostile]:
    case, whole = partial(_case, data), Head(data)
    t = whole.tensor(1)
    tensor = f"tensors[1] ({_name(whole, t)})"
    size, shape = whole.get("<Q", t + 128), whole.get("<Q", t + 88)
    last = f"tensors[{whole.tensors - 1}].name"
    yield case("tensor_name", last, lambda h: h.put("<c", h.tensor(-1), b"~"))
    yield case("tensor_name_unending", last, lambda h: h.put("<80s", h.tensor(-1), b"z" * 80))
    yield case("tensor_name_empty", "tensors[1].name", lambda h: h.put("<80s", t, b""))
    yield case("dtype", f"{tensor}.dtype", lambda h: h.put("<I", t + 80, 7))
    yield case("dtype_none", f"{tensor}.dtype", lambda h: h.put("<I", t + 80, 0))
    yield case("ndim_none", f"{tensor}.ndim", lambda h: h.put("<I", t + 84, 0))
    yield case("ndim", f"{tensor}.ndim", lambda h: h.put("<I", t + 84, 5))
    yield case("dimension_none", f"{tensor}.shape", lambda h: h.put("<Q", t + 88, 0).put("<Q", t + 128, 0))
    yield case("dimension_unused", f"{tensor}.shape", lambda h: h.put("<Q", t + 112, 1))
    yield case("size", f"{tensor}.size", lambda h: h.put("<Q", t + 128, size - 4))
    yield case("shape_larger_than_data", f"{tensor}.size", lambda h: h.put("<Q", t + 88, shape + 1))
    yield case(
        "size_beyond_the_file",
        f"{tensor}.size",
        lambda h: h.put("<I4Q", t + 84, 1, 1 << 40, 0, 0, 0).put("<I", t + 80, 6).put("<Q", t + 128, 1 << 40),
    )
    yield case(
        "size_wraps",  # 2^62 f32 are 2^64 bytes, which 64 bits hold as 0
        tensor,
        lambda h: h.put("<I4Q", t + 84, 1, 1 << 62, 0, 0, 0).put("<I", t + 80, 2).put("<Q", t + 128, 0),
    )
    yield _wrapping_end(data)
    yield case("offset_overlaps", f"{tensor}.offset", lambda h: h.put("<Q", t + 120, h.get("<Q", t + 120) - ALIGN))
    yield case("offset_leaves_a_gap", f"{tensor}.offset", lambda h: h.put("<Q", t + 120, h.get("<Q", t + 120) + ALIGN))
    yield case("offset_unaligned", f"{tensor}.offset", lambda h: h.put("<Q", t + 120, h.get("<Q", t + 120) + 4))
    yield case("tensor_reserved", f"{tensor}.reserved", lambda h: h.put("<I", t + 140, 1))
    twin = bytes(whole.data[t : t + 80])
    yield case("tensor_twice", "tensors[2].name", lambda h: h.put("<80s", h.tensor(2), twin))
    yield case("tensor_order", "tensors[1]", lambda h: h.swap(h.tensor(1), h.tensor(-1), TENSOR))
    if whole.start > whole.tensor(-1) + TENSOR:
        yield case("table_padding", "tensors", lambda h: h.put("<B", whole.start - 1, 1))
    grown = Head(data + b"\0" * ALIGN).put("<Q", 16, len(data) + ALIGN)
    yield _raw("bytes_after_the_last_tensor", "header.file_size", grown.done())


def _wrapping_end(data: bytes) -> Hostile:
    """A tensor whose end wraps around 2^64 to lie before its start, and the next one where that end is."""
    head = Head(data)
    at, following = head.tensor(-2), head.tensor(-1)
    offset = head.get("<Q", at + 120)
    huge = (1 << 64) - ALIGN
    head.put("<I", at + 80, 6).put("<I4Q", at + 84, 1, huge, 0, 0, 0).put("<Q", at + 128, huge)
    rest = len(data) - (offset - ALIGN)
    head.put("<I", following + 80, 6).put("<I4Q", following + 84, 1, rest, 0, 0, 0)
    head.put("<Q", following + 120, offset - ALIGN).put("<Q", following + 128, rest)
    return Hostile("end_wraps", head.done(), FormatError, f"tensors[{head.tensors - 2}] ({_name(head, at)}).size")
