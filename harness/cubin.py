"""What a cubin, nvcc's object for one architecture, tells the device of each kernel; no tool of CUDA is needed.

A cubin is an ELF file. Guarantees: pure functions of its bytes. What depends on where a source lies and on what else it
holds is left out or spelt alike: tables of lines, places in tables of symbols, the hash that nvcc gives an unnamed
namespace. Kernels that two cubins have alike are the same to the device.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

INSTRUCTION = 16
"""Bytes of one, on every architecture since Volta."""
CODE = ".text"
REGISTERS = "registers"
SHARED_BY_ALL = "variables of the source"
"""In place of a kernel's name: variables and constants that all of them share."""

_HASHED = "_(?:GLOBAL__N__|INTERNAL_)"
_NO_BITS = 8
_RELOCATIONS = {4: struct.Struct("<QQq"), 9: struct.Struct("<QQ")}
_INDEX = struct.Struct("<I")
# Attributes (EIATTR_...) that name symbols by their places: PARAM_CBANK begins with one, EXTERNS consists of them, and
# those of the whole file, REGCOUNT among them, are a kernel's and a value.
_PARAM_CBANK, _EXTERNS, _REGCOUNT = 0x0A, 0x0F, 0x2F
_SIZED = 4
"""The format of an attribute whose value's length follows; others have two bytes of it."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    link: int
    content: bytes


def _text(table: bytes, at: int) -> str:
    return table[at : table.index(0, at)].decode()


def plain(text: str) -> str:
    """Mangled names in which unnamed namespaces, and files of static variables, have the host's compiler's name."""

    def shorter(found: re.Match[str]) -> str:
        name = found.group()
        while place := re.search(rf"(?<!\d)(\d+){_HASHED}", name):
            end = place.end(1) + int(place.group(1))
            name = f"{name[: place.start()]}12_GLOBAL__N_1{name[end:]}"
        return name

    return re.sub(rf"[\w$]*{_HASHED}[\w$]*", shorter, text)


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    heads = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * index) for index in range(count)]

    def content(head: tuple[int, ...]) -> bytes:
        return str(head[5]).encode() if head[1] == _NO_BITS else cubin[head[4] : head[4] + head[5]]

    return [_Section(_text(content(heads[names]), head[0]), head[1], head[6], content(head)) for head in heads]


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, attribute, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield attribute, content[at : at + value]
            at += value
        else:
            yield attribute, content[at - 2 : at]


def _own(attribute: int, value: bytes, symbols: list[str]) -> bytes:
    """An attribute of one kernel without places of symbols."""
    if attribute == _PARAM_CBANK:
        value = value[4:]
    elif attribute == _EXTERNS:
        value = " ".join(symbols[index] for (index,) in _INDEX.iter_unpack(value)).encode()
    return b"%02x %s\n" % (attribute, value.hex().encode())


def kernels(cubin: bytes) -> dict[str, Mapping[str, bytes]]:
    """By kernel its parts by name: instructions, registers, attributes, shared memory, constants, what is linked."""
    sections = _sections(cubin)
    table = next(section for section in sections if section.name == ".symtab")
    strings = sections[table.link].content
    entries = list(struct.iter_unpack("<IBBHQQ", table.content))
    symbols = [plain(_text(strings, name) or sections[section].name) for name, _, _, section, _, _ in entries]
    known = {section.name.removeprefix(f"{CODE}.") for section in sections if section.name.startswith(f"{CODE}.")}
    found: dict[str, dict[str, bytes]] = {plain(name): {} for name in known}
    for section in sections:
        if not re.match(r"(\.rela?)?\.(text|nv\.(info|constant|shared(?!\.reserved)|global|local))", section.name):
            continue
        owner = next((name for name in known if section.name.endswith(f".{name}")), SHARED_BY_ALL)
        part = section.name.removesuffix(f".{owner}")
        content = section.content
        if section.kind in _RELOCATIONS:
            rows = _RELOCATIONS[section.kind].iter_unpack(content)
            content = "".join(
                f"{at:x} {info & 0xFFFFFFFF:x} {symbols[info >> 32]} {more}\n" for at, info, *more in rows
            ).encode()
        elif section.name == ".nv.info":
            for attribute, value in _attributes(content):
                kernel = found.get(symbols[_INDEX.unpack_from(value)[0]]) if len(value) == 8 else None
                if kernel is not None:
                    kernel[REGISTERS if attribute == _REGCOUNT else f"attribute {attribute:02x}"] = value[4:]
            continue
        elif part == ".nv.info":
            content = b"".join(_own(attribute, value, symbols) for attribute, value in _attributes(content))
        if content:
            found.setdefault(plain(owner), {})[part] = content
    return dict(found)
