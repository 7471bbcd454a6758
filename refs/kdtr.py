"""The KDTR container (docs/kdtr.md): one writer and one validating reader.

Guarantees: given contents have exactly one file; a file appears under its name complete or not at all; a broken
file raises `KdtrError` and nothing else, before any memory is asked for in proportion to an unchecked number.
A bf16 tensor is a ``uint16`` array of its bits, because numpy has no such type.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Buffer = bytes | mmap.mmap

MAGIC = b"KDTR"
VERSION = 1
ORDER = 0x01020304
HEADER = struct.Struct("<4sIIIQIIQI20s")
FIELD = struct.Struct("<48sII8s")
TENSOR = struct.Struct("<80sII4QQQII")
PART = 1 << 22  # elements written at a time
MAX_FIELDS = 256
MAX_TENSORS = 1_048_576
ALIGN = 64
FIELD_NAME = re.compile(rb"[a-z0-9_]{1,47}")
TENSOR_NAME = re.compile(rb"[a-z0-9_.]{1,79}")
KIND_I64, KIND_F64 = 1, 2

DTYPE_NAMES = {1: "f64", 2: "f32", 3: "bf16", 4: "i32", 5: "i64", 6: "u8"}
DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}
_DTYPES = {code: np.dtype(d) for code, d in {1: "<f8", 2: "<f4", 3: "<u2", 4: "<i4", 5: "<i8", 6: "|u1"}.items()}
_CODES = {"f8": 1, "f4": 2, "u2": 3, "i4": 4, "i8": 5, "u1": 6}


class KdtrError(ValueError):
    """A file, or contents to be written, break the format: ``FILE: FIELD: reason``."""

    def __init__(self, file: str, field: str, reason: str) -> None:
        super().__init__(f"{file}: {field}: {reason}")
        self.file, self.field, self.reason = file, field, reason


@dataclass(frozen=True)
class Entry:
    """One line of the tensor table; ``dtype`` as `DTYPE_NAMES` spells it, ``offset`` and ``size`` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class Kdtr:
    """A validated file. The arrays are read-only views of the mapped file and keep the mapping alive."""

    file: str
    fields: Mapping[str, int | float]
    entries: Mapping[str, Entry]
    tensors: Mapping[str, Array]
    file_size: int

    def tensor(self, name: str) -> Array:
        """The tensor ``name``; `KdtrError` if the file has none."""
        if name not in self.tensors:
            raise KdtrError(self.file, name, "the file has no such tensor")
        return self.tensors[name]


def _align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]], field_count: int, file: str) -> list[Entry]:
    """Where the tensors ``{name: (dtype, shape)}`` stand beside ``field_count`` fields; every ``crc`` is still 0."""
    if field_count > MAX_FIELDS:
        raise KdtrError(file, "header.field_count", f"{field_count} fields, at most {MAX_FIELDS}")
    if len(tensors) > MAX_TENSORS:
        raise KdtrError(file, "header.tensor_count", f"{len(tensors)} tensors, at most {MAX_TENSORS}")
    entries: list[Entry] = []
    end = HEADER.size + FIELD.size * field_count + TENSOR.size * len(tensors)
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        if not TENSOR_NAME.fullmatch(name.encode("utf-8", "replace")):
            raise KdtrError(file, f"tensor {name!r}", "a tensor name is 1 to 79 of [a-z0-9_.]")
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise KdtrError(file, f"tensor {name!r}", f"shape {shape} is not 1 to 4 dimensions of at least 1")
        size = math.prod(shape) * _DTYPES[DTYPE_CODES[dtype]].itemsize
        entries.append(Entry(name, dtype, shape, _align(end), size, 0))
        end = entries[-1].offset + size
    return entries


def encode_head(fields: Mapping[str, int | float], entries: list[Entry], file: str) -> bytes:
    """All that precedes the data (header, fields, table, padding) for `layout`'s entries with their CRCs filled in."""
    lines = [_encode_field(name, fields[name], file) for name in sorted(fields)]
    for e in entries:
        shape = e.shape + (0,) * (4 - len(e.shape))
        code = DTYPE_CODES[e.dtype]
        lines.append(TENSOR.pack(e.name.encode(), code, len(e.shape), *shape, e.offset, e.size, e.crc, 0))
    body = b"".join(lines)
    data_offset = _align(HEADER.size + len(body))
    body += b"\0" * (data_offset - HEADER.size - len(body))
    end = entries[-1].offset + entries[-1].size if entries else data_offset
    fixed = HEADER.pack(MAGIC, VERSION, ORDER, 0, end, len(fields), len(entries), data_offset, 0, b"")[:40]
    return b"".join([fixed, struct.pack("<I20s", zlib.crc32(body, zlib.crc32(fixed)), b""), body])


def encode(fields: Mapping[str, int | float], tensors: Mapping[str, Array], file: str = "<memory>") -> bytes:
    """The one valid file for these contents; `KdtrError` if the format cannot hold them."""
    dtypes = {name: (_dtype_name(name, array, file), array.shape) for name, array in tensors.items()}
    parts: list[bytes] = []
    entries: list[Entry] = []
    for e in layout(dtypes, len(fields), file):
        data = np.ascontiguousarray(tensors[e.name]).astype(_DTYPES[DTYPE_CODES[e.dtype]], copy=False).tobytes()
        gap = e.offset - entries[-1].offset - entries[-1].size if entries else 0
        parts += [b"\0" * gap, data]
        entries.append(replace(e, crc=zlib.crc32(data)))
    return b"".join([encode_head(fields, entries, file), *parts])


def _encode_field(name: str, value: int | float, file: str) -> bytes:
    where = f"field {name!r}"
    raw = name.encode("utf-8", "replace")
    if not FIELD_NAME.fullmatch(raw):
        raise KdtrError(file, where, "a field name is 1 to 47 of [a-z0-9_]")
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise KdtrError(file, where, f"{value} does not fit an i64")
        return FIELD.pack(raw, KIND_I64, 0, struct.pack("<q", value))
    if isinstance(value, float) and math.isfinite(value):
        return FIELD.pack(raw, KIND_F64, 0, struct.pack("<d", value))
    raise KdtrError(file, where, f"{value!r} is neither an integer nor a finite float")


def _dtype_name(name: str, array: Array, file: str) -> str:
    code = _CODES.get(f"{array.dtype.kind}{array.dtype.itemsize}")
    if code is None:
        raise KdtrError(file, f"tensor {name!r}", f"no type for numpy's {array.dtype}")
    return DTYPE_NAMES[code]


def write(path: str | os.PathLike[str], fields: Mapping[str, int | float], tensors: Mapping[str, Array]) -> None:
    """Write the file under a temporary name beside ``path`` and rename it, so that it is there whole or not at all."""
    declared = {name: (_dtype_name(name, array, os.fspath(path)), array.shape) for name, array in tensors.items()}

    def parts(name: str) -> Iterator[Array]:
        array = np.ascontiguousarray(tensors[name]).reshape(-1)
        for at in range(0, array.size, PART):
            yield array[at : at + PART]

    write_parts(path, fields, declared, parts)


def write_parts(
    path: str | os.PathLike[str],
    fields: Mapping[str, int | float],
    declared: Mapping[str, tuple[str, tuple[int, ...]]],
    parts: Callable[[str], Iterable[Array]],
) -> None:
    """As `write`, for tensors that never are in memory whole: ``declared`` by type and shape, made part by part."""
    target = Path(path)
    entries = layout(declared, len(fields), str(target))
    data_offset = len(encode_head(fields, entries, str(target)))
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name.removeprefix('.')}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as out:
            end = data_offset
            out.seek(end)
            for i, e in enumerate(entries):
                out.write(b"\0" * (e.offset - end))
                crc = size = 0
                for part in parts(e.name):
                    data = (
                        np.ascontiguousarray(part)
                        .astype(_DTYPES[DTYPE_CODES[e.dtype]], copy=False)
                        .reshape(-1)
                        .view(np.uint8)
                    )
                    crc, size = zlib.crc32(data.data, crc), size + data.size
                    out.write(data.data)
                if size != e.size:
                    raise KdtrError(str(target), f"tensor {e.name!r}", f"its parts have {size} bytes, not {e.size}")
                entries[i], end = replace(e, crc=crc), e.offset + e.size
            out.seek(0)
            out.write(encode_head(fields, entries, str(target)))
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from other users of a shared cache
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str], *, verify: bool = False) -> Kdtr:
    """Map and validate a file; with ``verify`` also read all data and check every CRC and gap."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            if size < HEADER.size:
                raise KdtrError(name, "header", f"the file has {size} bytes, a header alone has {HEADER.size}")
            mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise KdtrError(name, "file", f"cannot be read: {error.strerror or error}") from error
    return parse(mapped, name, verify=verify)


def parse(data: Buffer, file: str = "<memory>", *, verify: bool = False) -> Kdtr:
    """Validate a whole file held in ``data``; see `read`."""
    field_count, tensor_count, data_offset = _check_header(data, file)
    fields: dict[str, int | float] = {}
    last = ""
    for i in range(field_count):
        name, value = _parse_field(data, HEADER.size + i * FIELD.size, f"fields[{i}]", file)
        if name <= last:
            raise KdtrError(file, f"fields[{i}].name", f"{name!r} does not come after {last!r}")
        fields[name], last = value, name
    entries: dict[str, Entry] = {}
    table, end, last = HEADER.size + field_count * FIELD.size, data_offset, ""
    for i in range(tensor_count):
        entry = _parse_tensor(data, table + i * TENSOR.size, f"tensors[{i}]", end, file)
        if entry.name <= last:
            raise KdtrError(file, f"tensors[{i}].name", f"{entry.name!r} does not come after {last!r}")
        entries[entry.name], last, end = entry, entry.name, entry.offset + entry.size
    used = table + tensor_count * TENSOR.size
    if any(data[used:data_offset]):
        raise KdtrError(file, "tensors", "the bytes between the tensor table and the data are not zero")
    if end != len(data):
        raise KdtrError(file, "header.file_size", f"{len(data)}, but the last tensor ends at {end}")
    arrays: dict[str, Array] = {}
    for e in entries.values():
        flat = np.frombuffer(data, _DTYPES[DTYPE_CODES[e.dtype]], math.prod(e.shape), e.offset)
        arrays[e.name] = flat.reshape(e.shape)
    result = Kdtr(file, fields, entries, arrays, len(data))
    if verify:
        _check_data(data, result, data_offset)
    return result


def _check_header(data: Buffer, file: str) -> tuple[int, int, int]:
    size = len(data)
    if size < HEADER.size:
        raise KdtrError(file, "header", f"the file has {size} bytes, a header alone has {HEADER.size}")
    magic, version, order, flags, file_size, n_fields, n_tensors, data_offset, crc, reserved = HEADER.unpack(
        data[: HEADER.size]
    )
    wanted = _align(HEADER.size + FIELD.size * n_fields + TENSOR.size * n_tensors)
    swapped = int.from_bytes(ORDER.to_bytes(4, "little"), "big")
    checks = (
        (magic == MAGIC, "magic", f"{magic!r} is not {MAGIC!r}: this is no KDTR file"),
        (order != swapped, "order", "the file is big-endian, the format is little-endian"),
        (version == VERSION, "version", f"{version}, this reader knows {VERSION}"),
        (order == ORDER, "order", f"{order:#010x} is not {ORDER:#010x}"),
        (flags == 0, "flags", f"{flags:#x}, must be 0"),
        (not any(reserved), "reserved", "not zero"),
        (file_size == size, "file_size", f"{file_size}, but the file has {size} bytes"),
        (n_fields <= MAX_FIELDS, "field_count", f"{n_fields}, at most {MAX_FIELDS}"),
        (n_tensors <= MAX_TENSORS, "tensor_count", f"{n_tensors}, at most {MAX_TENSORS}"),
        (data_offset == wanted, "data_offset", f"{data_offset}, the counts ask for {wanted}"),
        (data_offset <= size, "data_offset", f"{data_offset} lies beyond the file's {size} bytes"),
    )
    for good, field, reason in checks:
        if not good:
            raise KdtrError(file, f"header.{field}", reason)
    real = zlib.crc32(data[HEADER.size : data_offset], zlib.crc32(data[:40]))
    if real != crc:
        raise KdtrError(file, "header.crc", f"{crc:#010x}, the head's bytes give {real:#010x}")
    return n_fields, n_tensors, data_offset


def _parse_name(raw: bytes, pattern: re.Pattern[bytes], where: str, file: str) -> str:
    name = raw.rstrip(b"\0")
    if not pattern.fullmatch(name):
        raise KdtrError(file, f"{where}.name", f"{raw!r} is no zero-padded name of {pattern.pattern.decode()}")
    return name.decode("ascii")


def _parse_field(data: Buffer, at: int, where: str, file: str) -> tuple[str, int | float]:
    raw, kind, reserved, bits = FIELD.unpack(data[at : at + FIELD.size])
    name = _parse_name(raw, FIELD_NAME, where, file)
    where = f"{where} ({name})"
    if reserved:
        raise KdtrError(file, f"{where}.reserved", "not zero")
    if kind == KIND_I64:
        return name, int.from_bytes(bits, "little", signed=True)
    if kind != KIND_F64:
        raise KdtrError(file, f"{where}.kind", f"{kind}, known are 1 (i64) and 2 (f64)")
    value: float = struct.unpack("<d", bits)[0]
    if not math.isfinite(value):
        raise KdtrError(file, f"{where}.value", f"{value} is not finite")
    return name, value


def _parse_tensor(data: Buffer, at: int, where: str, end: int, file: str) -> Entry:
    raw, code, ndim, d0, d1, d2, d3, offset, size, crc, reserved = TENSOR.unpack(data[at : at + TENSOR.size])
    name = _parse_name(raw, TENSOR_NAME, where, file)
    where = f"{where} ({name})"
    if code not in _DTYPES:
        raise KdtrError(file, f"{where}.dtype", f"{code}, known are 1 to 6")
    if not 1 <= ndim <= 4:
        raise KdtrError(file, f"{where}.ndim", f"{ndim}, must be 1 to 4")
    dims = (d0, d1, d2, d3)
    if min(dims[:ndim]) < 1 or any(dims[ndim:]):
        raise KdtrError(file, f"{where}.shape", f"{dims} does not have exactly {ndim} dimensions of at least 1")
    wanted = math.prod(dims[:ndim]) * _DTYPES[code].itemsize
    if size != wanted:
        raise KdtrError(file, f"{where}.size", f"{size}, shape and type ask for {wanted}")
    if offset != _align(end):
        raise KdtrError(file, f"{where}.offset", f"{offset}, the tensor before ends at {end}: must be {_align(end)}")
    if offset + size > len(data):
        raise KdtrError(file, f"{where}.size", f"ends at {offset + size}, beyond the file's {len(data)} bytes")
    if reserved:
        raise KdtrError(file, f"{where}.reserved", "not zero")
    return Entry(name, DTYPE_NAMES[code], dims[:ndim], offset, size, crc)


def _check_data(data: Buffer, parsed: Kdtr, end: int) -> None:
    for e in parsed.entries.values():
        if any(data[end : e.offset]):
            raise KdtrError(parsed.file, f"tensor {e.name}", "the gap before its data is not zero")
        real = zlib.crc32(memoryview(data)[e.offset : e.offset + e.size])
        if real != e.crc:
            raise KdtrError(parsed.file, f"tensor {e.name}.crc", f"{e.crc:#010x}, its data give {real:#010x}")
        end = e.offset + e.size
