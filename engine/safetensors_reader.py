"""A Hugging Face checkpoint's tensors as byte ranges: one safetensors file, or shards with an index.

Guarantees: every header is checked against its file's size before anything is read by it; a broken or hostile file
raises `CheckpointError` naming file and tensor; no tensor data is touched here, and nothing is mapped. The data is read
into the caller's buffer (`engine.direct_read`) and not through the ``safetensors`` library, because the library maps
whole shards, whose pages count as this process's memory (560 MB resident after slicing through a 512 MB file), and its
numpy face has no bf16. The format is public: https://huggingface.co/docs/safetensors (u64 header length, JSON header,
data).
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from engine.direct_read import DirectRead

MAX_HEADER = 100_000_000  # the format's own limit
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """The checkpoint cannot be imported as asked: ``FILE: TENSOR OR FIELD: reason``."""

    def __init__(self, file: str | os.PathLike[str], where: str, reason: str) -> None:
        super().__init__(f"{os.fspath(file)}: {where}: {reason}")
        self.file, self.where, self.reason = os.fspath(file), where, reason


@dataclass(frozen=True, slots=True)  # a large checkpoint has 200 000 of them
class Source:
    """One tensor on disk: ``size`` bytes of ``dtype`` (safetensors' spelling) from byte ``offset`` of ``path``."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass
class Checkpoint:
    """The tensors of a directory. A shard is opened when a tensor of it is asked for: a slice needs only its own."""

    directory: Path
    shards: Mapping[str, str]
    """Tensor name -> file name."""
    listing: Path
    """The file that lists the tensors: the index or the only shard."""
    _headers: dict[str, dict[str, Source]] = field(default_factory=dict)
    _files: dict[Path, DirectRead] = field(default_factory=dict)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def source(self, name: str) -> Source:
        """Where tensor ``name`` stands; `CheckpointError` if the checkpoint, or the shard its index names, lacks it."""
        if name not in self.shards:
            raise CheckpointError(self.listing, name, "the checkpoint has no such tensor")
        shard = self.shards[name]
        if shard not in self._headers:
            self._headers[shard] = read_header(self.directory / shard)
        if name not in self._headers[shard]:
            reason = f"{self.listing.name} says that this file holds it, but it does not"
            raise CheckpointError(self.directory / shard, name, reason)
        return self._headers[shard][name]

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill ``target`` from byte ``offset`` of a shard, in any thread; `CheckpointError` if the file ends before."""
        with self._opening:
            if path not in self._files:
                self._files[path] = DirectRead(path)
        missing = self._files[path].read(offset, target)
        if missing:
            end = offset + len(target) - missing
            raise CheckpointError(path, f"byte {end}", "the file became shorter while it was read")

    def close(self) -> None:
        """Close the shards."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Find the weights of ``directory``: the index if there is one, else the only safetensors file."""
    index = directory / INDEX
    if index.is_file():
        return Checkpoint(directory, _read_index(index), index)
    found = sorted(p.name for p in directory.glob("*.safetensors"))
    if SINGLE in found:
        found = [SINGLE]
    if len(found) != 1:
        if found:
            reason = f"{len(found)} safetensors files and no {INDEX}: fetch the index too"
        elif any(directory.glob("*.bin")):
            reason = "only .bin weights: save the model again with safe_serialization=True"
        else:
            reason = "no safetensors file is beside it; HF_DIR is the folder of a checkpoint, config.json and weights"
        raise CheckpointError(directory, INDEX, reason)
    path = directory / found[0]
    header = read_header(path)
    return Checkpoint(directory, dict.fromkeys(header, path.name), path, {path.name: header})


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `CheckpointError` if it is unreadable, malformed, or says something twice."""
    try:
        return parse_json(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be read: {error.strerror or error}") from error


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """As `load_json`, for bytes that came from ``path``."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(path, key, "stands twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, or an integer of absurd length
        raise CheckpointError(path, "JSON", f"malformed: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "JSON", f"an object is wanted, this is a {type(value).__name__}")
    return value


def _read_index(index: Path) -> dict[str, str]:
    table = load_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(index, "weight_map", "missing, empty, or no object")
    for name, shard in table.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w.+-]+\.safetensors", shard):
            raise CheckpointError(index, name, f"{shard!r} is no name of a safetensors file in this directory")
    return table


def read_header(path: Path) -> dict[str, Source]:
    """The tensors of one safetensors file, every entry checked; `CheckpointError` otherwise."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    path, "header", f"{length} bytes announced, the file has {size} in all: truncated?"
                )
            header = parse_json(path, file.read(length))
    except OSError as error:
        raise CheckpointError(path, "file", f"cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    sources = [_entry(path, name, raw, 8 + length) for name, raw in header.items()]
    end = 8 + length
    for source in sorted(sources, key=lambda s: (s.offset, s.size)):
        if source.offset != end:
            reason = f"its data begin at byte {source.offset}, the data before end at {end}: gap or overlap"
            raise CheckpointError(path, source.name, reason)
        end += source.size
    if end != size:
        raise CheckpointError(path, "data", f"the tensors end at byte {end}, the file at {size}: truncated or extended")
    return {source.name: source for source in sources}


def _entry(path: Path, name: str, raw: object, base: int) -> Source:
    def fail(reason: str) -> CheckpointError:
        return CheckpointError(path, name, reason)

    if not isinstance(raw, dict):
        raise fail("its header entry is no object")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise fail(f"dtype {dtype!r} is unknown, known are {', '.join(sorted(ITEM_BYTES))}")
    if not _are_sizes(shape):
        raise fail(f"shape {shape!r} is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"data_offsets {offsets!r} are no begin and end")
    wanted = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != wanted:
        raise fail(f"{offsets[1] - offsets[0]} bytes of data, {dtype} {shape} needs {wanted}")
    return Source(name, path, dtype, tuple(shape), base + offsets[0], wanted)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list):
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**62 for n in value)


def fingerprint(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Name, size and modification time of each file: whether a resumed import still reads the same checkpoint."""
    return [(p.name, s.st_size, s.st_mtime_ns) for p in sorted(set(paths)) for s in [p.stat()]]
