"""Ledgers and cell records as JSON with a checksum, and back, every field checked against its declared type.

The types in ``harness.cells`` are the schema: a field that is missing, unknown or of another type is an error that
names it. NaN and infinities are the strings ``nan``, ``inf`` and ``-inf``.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, NoReturn, TypeVar

from harness.cells import SCHEMA, Cell, Check, Ledger, Verdict, judge
from harness.plain_json import plain

T = TypeVar("T")


class LedgerError(Exception):
    """A ledger or a cell record is damaged, inconsistent or does not fit another one: ``FILE: FIELD: reason``."""


def canonical(content: Mapping[str, Any]) -> bytes:
    """The bytes a checksum is taken over: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(content: Mapping[str, Any]) -> bytes:
    """``content`` with its checksum, as a file's bytes."""
    body = {key: value for key, value in content.items() if key != "checksum"}
    checksum = hashlib.sha256(canonical(body)).hexdigest()
    return _laid_out({**body, "checksum": checksum}).encode("ascii") + b"\n"


def _laid_out(value: Any, margin: str = "") -> str:
    """JSON with sorted keys, a line for whatever holds no other object or list: a check, a cell's step errors."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if not any(isinstance(item, (Mapping, list)) for item in inner):
        return json.dumps(value, sort_keys=True, allow_nan=False)
    deeper = f"{margin} "
    if isinstance(value, Mapping):
        lines = [f"{json.dumps(key)}: {_laid_out(item, deeper)}" for key, item in sorted(value.items())]
        begin, end = "{}"
    else:
        lines = [_laid_out(item, deeper) for item in value]
        begin, end = "[]"
    body = ",\n".join(f"{deeper}{line}" for line in lines)
    return f"{begin}\n{body}\n{margin}{end}"


def _cell_content(cell: Cell) -> dict[str, Any]:
    content = plain(cell)
    for check, written in zip(cell.checks, content["checks"], strict=True):
        written["ok"] = check.ok
    return dict(content)


def ledger_bytes(ledger: Ledger) -> bytes:
    """The ledger's file."""
    return seal({**plain(replace(ledger, cells=())), "cells": [_cell_content(cell) for cell in ledger.cells]})


def cell_bytes(cell: Cell) -> bytes:
    """One cell's file."""
    return seal(_cell_content(cell))


def _decode(kind: Any, value: Any, where: str) -> Any:
    """``value`` as ``kind``: a dataclass, ``tuple[X, ...]``, ``Mapping[str, X]``, ``X | None``, an enum or plain."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(next(a for a in arguments if a is not type(None)), value, where)
    if is_dataclass(kind):
        return _decode_fields(typing.cast(type, kind), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise LedgerError(f"{where}: is {type(value).__name__}, not a list")
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise LedgerError(f"{where}: is {type(value).__name__}, not an object")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise LedgerError(f"{where}: {value!r} is not one of {', '.join(str(k.value) for k in kind)}") from None
    if kind is float:
        if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return float(value)
        raise LedgerError(f"{where}: {value!r} is not a number")
    if type(value) is not kind:
        raise LedgerError(f"{where}: {value!r} is not of type {kind.__name__}")
    return value


def _inside(where: str, name: str) -> str:
    return f"{where}{name}" if where.endswith(" ") else f"{where}.{name}"


@cache
def _field_types(kind: type) -> dict[str, Any]:
    """Types by field; kept, for resolving annotations costs more than all the rest of reading a history."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _decode_fields(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise LedgerError(f"{where}: is {type(value).__name__}, not an object")
    declared = _field_types(kind)
    known = {*declared, "ok"} if kind is Check else set(declared)
    for name in sorted(known ^ set(value)):
        raise LedgerError(f"{_inside(where, name)}: {'missing' if name in known else 'unknown field'}")
    decoded = kind(**{name: _decode(of, value[name], _inside(where, name)) for name, of in declared.items()})
    if isinstance(decoded, Check) and value["ok"] is not decoded.ok:
        raise LedgerError(
            f"{where}.ok: says {value['ok']!r}, but {decoded.value} against {decoded.allowed} is {decoded.ok}"
        )
    return decoded


def _refuse_constant(text: str) -> NoReturn:
    raise LedgerError(f"{text} is not JSON; a ledger writes it as a string")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise LedgerError(f"{next(n for n in names if names.count(n) > 1)}: occurs twice in one object")
    return content


def _open(data: bytes, where: str) -> dict[str, Any]:
    """The checked content without its checksum."""
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{where}: is not JSON: {error}") from None
    except LedgerError as error:
        raise LedgerError(f"{where}: {error}") from None
    if not isinstance(content, dict):
        raise LedgerError(f"{where}: is {type(content).__name__}, not an object")
    if "checksum" not in content:
        raise LedgerError(f"{where}: checksum: missing, so this is no ledger")
    checksum = content.pop("checksum")
    try:
        actual = hashlib.sha256(canonical(content)).hexdigest()
    except ValueError as error:  # a number like 1e999 parses as infinity
        raise LedgerError(f"{where}: {error}") from None
    if checksum != actual:
        raise LedgerError(f"{where}: checksum: {checksum!r} does not fit the content ({actual}): edited or damaged")
    return content


def _check_cell(cell: Cell, where: str) -> None:
    for i, check in enumerate(cell.checks):
        if not check.verdict.value.startswith("FAIL_"):
            raise LedgerError(f"{_inside(where, f'checks[{i}]')}.verdict: {check.verdict.value} is no failure")
    verdict, _ = judge(cell.checks)
    if cell.verdict is Verdict.PASS and not cell.checks:
        raise LedgerError(f"{_inside(where, 'verdict')}: PASS without a check")
    if cell.verdict not in (verdict, Verdict.ERROR, Verdict.TIMEOUT, Verdict.NOT_RUN):
        raise LedgerError(f"{_inside(where, 'verdict')}: {cell.verdict.value}, but its checks say {verdict.value}")
    for name, seconds in cell.times.items():
        if not math.isfinite(seconds) or seconds < 0:
            raise LedgerError(f"{_inside(where, 'times')}.{name}: {seconds} is not a duration")


def parse_cell(data: bytes, where: str) -> Cell:
    """A cell from its file's bytes; ``where`` names the file in errors. Raises LedgerError."""
    cell = typing.cast(Cell, _decode(Cell, _open(data, where), f"{where}: "))
    _check_cell(cell, f"{where}: ")
    return cell


def parse_ledger(data: bytes, where: str) -> Ledger:
    """A ledger from its file's bytes; ``where`` names the file in errors. Raises LedgerError."""
    content = _open(data, where)
    if content.get("schema") != SCHEMA:
        raise LedgerError(f"{where}: schema: {content.get('schema')!r}, this harness reads {SCHEMA}")
    ledger = typing.cast(Ledger, _decode(Ledger, content, f"{where}: "))
    if list(ledger.expected) != sorted(set(ledger.expected)):
        raise LedgerError(f"{where}: expected: not sorted, or an id occurs twice")
    hosts = tuple(ledger.environments) if ledger.per_host else (None,)
    wanted = {(id, host) for id in ledger.expected for host in hosts}
    seen = set()
    for i, cell in enumerate(ledger.cells):
        _check_cell(cell, f"{where}: cells[{i}]")
        key = (cell.id, cell.host if ledger.per_host else None)
        if key in seen:
            raise LedgerError(f"{where}: cells[{i}].id: {cell.id} occurs twice")
        if key not in wanted:
            raise LedgerError(f"{where}: cells[{i}].id: {cell.id} is not expected")
        if cell.verdict is not Verdict.NOT_RUN and cell.host not in ledger.environments:
            raise LedgerError(f"{where}: cells[{i}].host: {cell.host!r} is not among the environments")
        seen.add(key)
    for id, _ in sorted(wanted - seen, key=str):
        raise LedgerError(f"{where}: cells: {id} is expected and missing")
    return ledger
