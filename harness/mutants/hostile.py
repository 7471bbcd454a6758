"""Hostile files: one valid model file, broken in one way at a time, and what a loader has to say to each.

A loader refuses every one with the error class named here and a message that begins ``FILE: FIELD``; afterwards it
still opens the valid file. The files break the rules of ``docs/kdtr.md`` one by one, and those of ``docs/model.md``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.cells import Check, Verdict
from harness.compare import exactly
from harness.protocol import ConfigError, Engine, EngineError, FormatError, MissingTensor, NonFiniteError
from refs import kdtr

HEADER, FIELD, TENSOR, ALIGN = 64, 64, 144, 64
Tensors = dict[str, npt.NDArray[Any]]
Fields = dict[str, int | float]


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


def _of_format(data: bytes) -> Iterator[Hostile]:
    """Rules of the container. The entry that is edited is the second, so that others stand on both sides of it."""

    def case(name: str, field: str, edit: Callable[[Head], Head]) -> Hostile:
        return Hostile(name, edit(Head(data)).done(), FormatError, field)

    def raw(name: str, field: str, broken: bytes) -> Hostile:
        return Hostile(name, broken, FormatError, field)

    whole = Head(data)
    t, f = whole.tensor(1), whole.field(1)
    tensor = f"tensors[1] ({_name(whole, t)})"
    field = f"fields[1] ({_name(whole, f)})"
    size, shape = whole.get("<Q", t + 128), whole.get("<Q", t + 88)
    yield raw("no_bytes", "header", b"")
    yield raw("half_a_header", "header", data[:63])
    yield raw("header_alone", "header.file_size", data[:HEADER])
    yield raw("one_byte_short", "header.file_size", data[:-1])
    yield raw("one_byte_long", "header.file_size", data + b"\0")
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
    yield raw("head_beyond_the_file", "header.data_offset", head_beyond)
    flipped = bytearray(data)
    flipped[f + 56] ^= 1
    yield raw("crc", "header.crc", bytes(flipped))
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
    yield raw("bytes_after_the_last_tensor", "header.file_size", grown.done())


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


CONFIGS: Mapping[str, Mapping[str, int | float]] = {
    "hidden_size": {"hidden_size": 0},
    "num_layers": {"num_layers": -1},
    "more_layers_than_a_file": {"num_layers": 2**31 - 1},
    "n_routed_experts": {"n_routed_experts": 2**31 - 1},
    "vocab_size": {"vocab_size": (1 << 32) + 64},
    "first_k_dense": {"first_k_dense": 1000},
    "num_experts_per_tok": {"num_experts_per_tok": 1000},
    "n_group": {"n_group": 7},
    "topk_group": {"topk_group": 2},
    "norm_topk_prob": {"norm_topk_prob": 2},
    "qk_rope_head_dim": {"qk_rope_head_dim": 7},
    "eos_id": {"eos_id": 1 << 20},
    "mask_id": {"mask_id": -2},
    "rms_norm_eps": {"rms_norm_eps": 0.0},
    "inner_norm_eps": {"inner_norm_eps": -1.0},
    "rope_theta": {"rope_theta": 1.0},
    "rope_factor": {"rope_factor": 0.5},
    "rope_beta_fast": {"rope_beta_fast": 0.0, "rope_factor": 4.0},
    "ramp_without_an_edge": {"rope_beta_slow": 5e-324, "rope_factor": 4.0},
    "rope_mscale_all_dim": {"rope_mscale_all_dim": -10.0, "rope_factor": 4.0},
    "max_context": {"max_context": 0},
}
"""Fields by the name of a file, the first of which is out of range."""


def _of_model(fields: Fields, tensors: Tensors) -> Iterator[Hostile]:
    """Rules of the model: its fields, and the tensors that they ask for."""

    def with_fields(name: str, field: str, changed: Fields) -> Hostile:
        return Hostile(name, kdtr.encode(changed, tensors), ConfigError, field)

    for name, changes in CONFIGS.items():
        yield with_fields(f"config_{name}", next(iter(changes)), {**fields, **changes})
    yield with_fields("config_unknown", "head_dim", {**fields, "head_dim": 64})
    yield with_fields("config_missing", "num_heads", {n: v for n, v in fields.items() if n != "num_heads"})
    yield with_fields("config_float_for_int", "num_heads", {**fields, "num_heads": float(fields["num_heads"])})
    yield with_fields("config_int_for_float", "rope_theta", {**fields, "rope_theta": int(fields["rope_theta"])})
    last = int(fields["num_layers"]) - 1
    expert = f"layers.{last}.experts.up"
    scale = f"layers.{last}.experts.down.sc"
    changed: tuple[tuple[str, str, str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]] | None], ...] = (
        ("tensor_missing", "layers.0.attn.o.w", "fp32", None),
        ("tensor_transposed", "layers.0.attn.q_b.w", "fp32", lambda w: w.T.copy()),
        ("tensor_flat", "lm_head.w", "fp32", lambda w: w.reshape(-1)),
        ("tensor_of_f64", "final_norm.w", "fp32", lambda w: w.astype(np.float64)),
        ("experts_missing", f"{expert}.w", "fp32", None),
        ("one_expert_less", f"{expert}.w", "fp32", lambda w: w[:-1].copy()),
        ("nibbles_missing", f"{expert}.qw", "int4", None),
        ("nibbles_short", f"{expert}.qw", "int4", lambda w: w[..., :-1].copy()),
        ("scales_missing", scale, "int4", None),
        ("scales_of_another_group_size", scale, "int4", lambda w: np.repeat(w, 2, axis=-1)),
        ("scales_of_f32", scale, "int4", lambda w: w.astype(np.float32)),
    )
    for name, tensor, precision, change in changed:
        kept = {n: w for n, w in tensors.items() if n != tensor}
        if change is not None:
            kept[tensor] = change(tensors[tensor])
        yield Hostile(name, kdtr.encode(fields, kept), MissingTensor, tensor, precision)
    for name, tensor in (("nan_router", f"layers.{last}.router.w"), ("nan_logits", "lm_head.w")):
        poisoned = tensors[tensor].copy()
        poisoned[-1, 0] = np.nan
        data = kdtr.encode(fields, {**tensors, tensor: poisoned})
        yield Hostile(name, data, NonFiniteError, "", runs=True)


def corpus(bundle: Path) -> Iterator[Hostile]:
    """Every hostile file, made from the model in ``bundle`` (which has MoE layers and both precisions)."""
    fields, tensors = model_of(bundle)
    yield from _of_format(kdtr.encode(fields, tensors))
    yield from _of_model(fields, tensors)


def model_of(bundle: Path) -> tuple[Fields, Tensors]:
    """The fields and weights of a bundle, without what the harness keeps in it."""
    found = kdtr.read(bundle)
    tensors = {n: w for n, w in found.tensors.items() if not n.startswith(("golden.", "draft.", "meta."))}
    return dict(found.fields), tensors


def refusal(engine: Engine, hostile: Hostile, path: Path) -> str:
    """What is wrong with how ``engine`` meets the file ``path``; ``""`` if it refuses it as it has to."""
    wanted = f"{hostile.error.__name__}: {'' if hostile.runs else f'FILE: {hostile.field}'}"
    try:
        session = engine.load(path, hostile.precision, context=8, max_rows=4, poison=True)
        if hostile.runs:
            session.prefill([0, 1])
        session.close()
    except EngineError as error:
        said = f"{type(error).__name__}: {error}".replace(str(path), "FILE")
        return "" if said.startswith(wanted) else f"says {said!r} instead of {wanted!r}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error} instead of {wanted!r}"
    return f"opens it instead of saying {wanted!r}"


def check_files(engine: Engine, bundle: Path, folder: Path) -> Iterator[Check]:
    """One check for each hostile file, and one that the valid file still opens after all of them."""
    for hostile in corpus(bundle):
        path = folder / f"{hostile.name}.kdtr"
        path.write_bytes(hostile.data)
        wrong = refusal(engine, hostile, path)
        path.unlink()
        yield exactly(f"loader.{hostile.name}", int(bool(wrong)), Verdict.ERROR, wrong)
    missing = Hostile("file_missing", b"", FormatError, "file")
    wrong = refusal(engine, missing, folder / "not there.kdtr")
    yield exactly("loader.file_missing", int(bool(wrong)), Verdict.ERROR, wrong)
    fields, tensors = model_of(bundle)
    path = folder / "valid.kdtr"
    path.write_bytes(kdtr.encode(fields, tensors))
    session = engine.load(path, "int4", context=8, max_rows=4)
    finite = bool(np.isfinite(session.prefill([0, 1])).all())
    session.close()
    path.unlink()
    yield exactly("loader.valid", int(not finite), Verdict.ERROR, "the valid file's logits are not finite")
