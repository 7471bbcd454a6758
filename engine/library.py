"""Builds and loads the extension once per process and device, and turns its errors into the protocol's classes."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import protocol
from harness.build import NAMESPACE, build

_ERRORS: dict[str, type[protocol.EngineError]] = {
    cls.__name__: cls
    for cls in (
        protocol.FormatError,
        protocol.ConfigError,
        protocol.MissingTensor,
        protocol.TokenError,
        protocol.ContextOverflow,
        protocol.RequestError,
        protocol.DrafterError,
        protocol.NonFiniteError,
        protocol.DeviceError,
        protocol.OutOfMemory,
        protocol.RankError,
        protocol.RankDiverged,
    )
}


_prebuilt: dict[str, Path] = {}


def use(kind: str, path: Path) -> None:
    """Let this process load ``path`` as the build of ``kind`` (``cpu`` or ``cuda``); before its first session."""
    _prebuilt[kind] = path


@functools.cache
def _built(kind: str) -> Path:
    return _prebuilt.get(kind) or build(kind, sanitize=os.environ.get("KDTREE_SANITIZE") or None)


@functools.cache
def _loaded(kind: str) -> Any:
    path = _built(kind)
    import torch

    torch.ops.load_library(str(path))
    return getattr(torch.ops, NAMESPACE[kind])


def _kind(device: str) -> str:
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", device) is None:
        raise protocol.DeviceError(f"device {device!r}: known are cpu, cuda and cuda:N")
    return device.partition(":")[0]


def library(device: str) -> Any:
    """The ``torch.ops`` namespace of the build for ``device``; `harness.build.BuildError` if it cannot be built.

    ``KDTREE_SANITIZE`` (address, thread) asks for an instrumented build, whose runtime must be preloaded.
    """
    return _loaded(_kind(device))


def library_path(device: str) -> Path:
    """The file that `library` loads; its folder is named after the sources and all else that went into it."""
    return _built(_kind(device))


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Raises the protocol's class for an error text of the form ``Name: text``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        name, _, rest = text.partition(": ")
        if name in _ERRORS:
            raise _ERRORS[name](rest) from None
        if isinstance(error, MemoryError) or "bad_alloc" in text:
            raise protocol.OutOfMemory(f"the host has no memory left: {text}") from error
        raise
