"""Builds and loads the extension once per process, and turns its errors into the protocol's classes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from harness import protocol
from harness.build import build

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
    )
}


@functools.lru_cache(maxsize=1)
def _loaded(kind: str) -> Any:
    import torch

    torch.ops.load_library(str(build(kind)))
    return torch.ops.kdtree


_kind: str | None = None


def library(device: str) -> Any:
    """``torch.ops.kdtree`` with the backend of ``device`` in it; `harness.build.BuildError` if it cannot be built.

    A process holds one build: the CUDA build serves both devices, so it must be asked for first if both are wanted.
    """
    global _kind
    wanted = "cuda" if device.startswith("cuda") else "cpu"
    if _kind is None:
        _kind = wanted
    elif _kind == "cpu" and wanted == "cuda":
        raise protocol.DeviceError("this process has loaded the CPU build of the engine; create the cuda engine first")
    return _loaded(_kind)


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
