"""Reading a JSON object by name, remembering what was read, so that what nobody read can be told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.safetensors_reader import CheckpointError


class Fields:
    """One JSON object of a config, read by name; what was read is remembered."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self.prefix = file, values, prefix
        self.read: set[str] = set()

    def fail(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(self.file, f"{self.prefix}{name}", reason)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent or null."""
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**62 - 1) -> int:
        """An integer from ``least`` to ``most``; an absent one is an error unless there is a default."""
        value = self.get(name, default)
        if value is None:
            raise self.fail(name, "missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(name, f"{value!r} is no integer of at least {least} and at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, as a float."""
        value = self.get(name, default)
        if value is None:
            raise self.fail(name, "missing")
        try:
            found = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        except OverflowError:  # an integer beyond a float's range
            found = math.inf
        if not math.isfinite(found):
            raise self.fail(name, f"{value!r} is no finite number")
        return found

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, f"{value!r} is neither true nor false")
        return value

    def demand(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """The value is absent, null, or one of ``allowed``; `CheckpointError` saying ``why`` otherwise."""
        value = self.get(name, allowed[0])
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise self.fail(name, f"{value!r} is not supported: {why}")

    def inner(self, name: str) -> Fields:
        """The object ``name``, empty where it is absent or null."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.fail(name, f"{value!r} is no object")
        return Fields(self.file, value, f"{self.prefix}{name}.")

    def unread(self, inert: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields nobody read: those without effect, and the others."""
        left = {k: v for k, v in self.values.items() if k not in self.read}
        harmless = {k: v for k, v in left.items() if k in inert or v is None}
        named = {f"{self.prefix}{k}": v for k, v in harmless.items()}
        return named, {f"{self.prefix}{k}": v for k, v in left.items() if k not in harmless}
