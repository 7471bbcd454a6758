"""From a checkpoint's tensors to a KDTR file's: which bytes become which; every mismatch is an error naming the tensor.

Guarantees: an accepted plan reads every tensor of the chosen layers and experts exactly once per tensor written, writes
exactly the tensors that docs/model.md asks for, and leaves out only what `Plan.left_out` names. Nothing is read here
but headers, the ``weight_shape`` of packed experts and, where the config ties them, embedding and head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from engine.convert import QUANTISE_COPIES, TO_BF16, TO_F32, Convert, Piece, copy, pad_nibbles, quantise
from engine.hf_config import HfConfig
from engine.hf_quantization import FP8_REMEDY, read_packing
from engine.hf_slice import Selection, sliced
from engine.safetensors_reader import Checkpoint, CheckpointError, Source
from refs.config import ModelConfig
from refs.quant import groups

TOP = {"embed.w": "embed_tokens.weight", "final_norm.w": "norm.weight"}
LAYER = {
    "attn_norm.w": "input_layernorm.weight",
    "mlp_norm.w": "post_attention_layernorm.weight",
    "attn.q_a.w": "self_attn.q_a_proj.weight",
    "attn.q_a_norm.w": "self_attn.q_a_layernorm.weight",
    "attn.q_b.w": "self_attn.q_b_proj.weight",
    "attn.kv_a.w": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_a_norm.w": "self_attn.kv_a_layernorm.weight",
    "attn.kv_b.w": "self_attn.kv_b_proj.weight",
    "attn.o.w": "self_attn.o_proj.weight",
    "router.w": "mlp.gate.weight",
    "router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.{p}.w": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    **{f"shared.{p}.w": f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down")},
}
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True)
class Plan:
    """What will be written: the config, and for every KDTR tensor its type, shape and the pieces that fill it."""

    config: ModelConfig
    precisions: tuple[str, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    pieces: dict[str, list[Piece]]
    layers: tuple[int, ...]
    experts: tuple[int, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    """Why tensors are left out, and how many."""


class Planner:
    """Builds the plan of one checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, hf: HfConfig, selection: Selection, quantise_to: str | None, matrices: str = "f32"
    ) -> None:
        """``quantise_to``: ``int4`` or ``both``, of float experts; ``matrices``: ``f32``, or ``bf16`` as ``.bw``."""
        self.checkpoint, self.hf, self.matrices = checkpoint, hf, matrices
        self.packing = read_packing(hf.quantization) if hf.quantization else None
        self.config, chosen = sliced(hf.fields, selection, str(hf.file))
        self.layers, self.experts = chosen.layers or (), chosen.experts or ()
        self.used: set[str] = set()
        self.prefix = self._prefix()
        self.stacks_packed = self._stacks_packed()
        if self.stacks_packed and quantise_to:
            raise CheckpointError(hf.file, "--quantize", "the checkpoint's experts are INT4 already")
        self.precisions = {
            None: ("int4",) if self.stacks_packed else ("fp32",),
            "int4": ("int4",),
            "both": ("fp32", "int4"),
        }[quantise_to]

    def plan(self) -> Plan:
        """Everything checked, nothing written."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for precision in self.precisions:
            for name, (shape, dtype) in self.config.stored(precision).items():
                narrow = self.matrices == "bf16" and dtype == "f32" and len(shape) > 1
                tensors[name.removesuffix("w") + "bw" if narrow else name] = ("bf16" if narrow else dtype, shape)
        pieces = {name: list(self._pieces(name, shape)) for name, (_, shape) in sorted(tensors.items())}
        left_out = self._left_out()
        names = {"fp32": "bf16", "int4": "int4-bf16"} if self.matrices == "bf16" else {}
        precisions = tuple(names.get(precision, precision) for precision in self.precisions)
        return Plan(self.config, precisions, tensors, pieces, self.layers, self.experts, left_out)

    def _fail(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.listing, name, reason)

    def _prefix(self) -> str:
        for prefix in PREFIXES:
            if prefix + TOP["embed.w"] in self.checkpoint.shards:
                return prefix
        raise self._fail(PREFIXES[0] + TOP["embed.w"], f"no embedding under any of {', '.join(PREFIXES)}")

    def _module(self, layer: int, name: str) -> str:
        return f"{self.prefix}layers.{layer}.{name}"

    def _stacks_packed(self) -> bool:
        """Whether the experts of the kept layers are packed; the first of them decides, the others must agree."""
        if self.config.first_k_dense == self.config.num_layers:
            return False
        first = self._module(self.layers[self.config.first_k_dense], f"mlp.experts.{self.experts[0]}.down_proj")
        return f"{first}.weight_packed" in self.checkpoint.shards

    def _source(self, name: str, shape: tuple[int, ...]) -> Source:
        source = self.checkpoint.source(name)
        self.used.add(name)
        if source.dtype.startswith("F8"):
            raise CheckpointError(source.path, name, f"{source.dtype}: {FP8_REMEDY}")
        if source.shape != shape:
            raise CheckpointError(source.path, name, f"shape {list(source.shape)}, the config asks for {list(shape)}")
        return source

    def _floats(self, module: str, source: Source, *, narrow: bool = False) -> Convert:
        if source.dtype not in TO_F32:
            raise CheckpointError(source.path, source.name, f"{source.dtype}, must be one of {', '.join(TO_F32)}")
        self._check_packing(module, packed=False)
        return (TO_BF16 if narrow else TO_F32)[source.dtype]

    def _check_packing(self, module: str, *, packed: bool) -> None:
        """The quantisation config and the tensors must say the same of every Linear module."""
        stored = "packed" if packed else "as plain weights"
        if self.packing is None:
            if packed:
                raise self._fail(f"{module}.weight_packed", "packed, but config.json has no quantization_config")
        elif _is_linear(module) and self.packing.covers(module, module.removeprefix("language_model.")) != packed:
            says = "left as it is (ignore)" if packed else "quantised (targets, and not in ignore)"
            name = f"{module}.{'weight_packed' if packed else 'weight'}"
            raise self._fail(name, f"stored {stored}, but quantization_config says that this module is {says}")

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """What fills KDTR tensor ``name``."""
        narrow = name.endswith(".bw")
        name = name.removesuffix("bw") + "w" if narrow else name
        if name == "lm_head.w":
            yield self._whole(self._head(shape), shape, narrow)
        elif name in TOP:
            yield self._whole(self.prefix + TOP[name], shape, narrow)
        else:
            _, index, rest = name.split(".", 2)
            layer = self.layers[int(index)]
            if rest.startswith("experts."):
                _, part, kind = rest.split(".")
                for expert in self.experts:
                    module = self._module(layer, f"mlp.experts.{expert}.{part}_proj")
                    yield self._packed(module, kind) if self.stacks_packed else self._plain(module, kind, narrow)
            elif rest.startswith("router."):
                yield from self._router(self._module(layer, LAYER[rest]), shape, narrow)
            else:
                yield self._whole(self._module(layer, LAYER[rest]), shape, narrow)

    def _whole(self, name: str, shape: tuple[int, ...], narrow: bool) -> Piece:
        if f"{name}_packed" in self.checkpoint.shards:
            raise self._fail(f"{name}_packed", "packed; only the routed experts can be INT4 in a KDTR model")
        source = self._source(name, shape)
        convert = self._floats(name.rsplit(".", 1)[0], source, narrow=narrow)
        return _rows(source, shape[-1], (2 if narrow else 4) * shape[-1], convert)

    def _head(self, shape: tuple[int, ...]) -> str:
        embed = self.prefix + TOP["embed.w"]
        head = next((n for n in HEADS if n in self.checkpoint.shards), None)
        if head is None:
            if self.hf.tied:
                return embed
            raise self._fail(HEADS[0], "missing, and tie_word_embeddings is not set")
        if self.hf.tied:
            self._require_equal(self._source(embed, shape), self._source(head, shape))
        return head

    def _require_equal(self, one: Source, other: Source) -> None:
        reason = f"tie_word_embeddings is set, but this differs from {one.name}"
        if one.dtype != other.dtype:
            raise CheckpointError(other.path, other.name, reason)
        blocks = [memoryview(bytearray(1 << 22)) for _ in range(2)]
        for at in range(0, one.size, 1 << 22):
            size = min(1 << 22, one.size - at)
            for source, block in zip((one, other), blocks, strict=True):
                self.checkpoint.read(source.path, source.offset + at, block[:size])
            if blocks[0][:size] != blocks[1][:size]:
                raise CheckpointError(other.path, other.name, reason)

    def _router(self, name: str, shape: tuple[int, ...], narrow: bool) -> Iterator[Piece]:
        """The kept experts' rows, consecutive ones in one piece."""
        whole = (int(self.hf.fields["n_routed_experts"]), *shape[1:])
        source = self._source(name, whole)
        if source.dtype not in TO_F32:
            raise CheckpointError(source.path, name, f"{source.dtype}, must be one of {', '.join(TO_F32)}")
        columns = shape[1] if len(shape) > 1 else 1
        convert = (TO_BF16 if narrow else TO_F32)[source.dtype]
        piece = _rows(source, columns, (2 if narrow else 4) * columns, convert)
        ids = np.array(self.experts)
        for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
            yield replace(piece, first_row=int(run[0]), rows=len(run))

    def _plain(self, module: str, kind: str, narrow: bool) -> Piece:
        """One expert's matrix stored as floats: as it is (``w``), or quantised (``qw``, ``sc``)."""
        n, k = self._expert_shape(module)
        if f"{module}.weight_packed" in self.checkpoint.shards:
            raise self._fail(f"{module}.weight_packed", "packed, while other experts are not")
        source = self._source(f"{module}.weight", (n, k))
        if kind == "w":
            return _rows(source, k, (2 if narrow else 4) * k, self._floats(module, source, narrow=narrow))
        to_f32 = self._floats(module, source)
        out = 16 * groups(k) if kind == "qw" else 2 * groups(k)
        return replace(_rows(source, k, out, quantise(k, kind, to_f32)), copies=QUANTISE_COPIES)

    def _packed(self, module: str, kind: str) -> Piece:
        """One expert's nibbles (``qw``) or scales (``sc``)."""
        n, k = self._expert_shape(module)
        if f"{module}.weight" in self.checkpoint.shards:
            raise self._fail(f"{module}.weight", "stored as plain weights, while other experts are packed")
        self._check_packing(module, packed=True)
        if kind == "sc":
            source = self._source(f"{module}.weight_scale", (n, groups(k)))
            if source.dtype not in TO_BF16:
                raise CheckpointError(source.path, source.name, f"{source.dtype}, must be one of {', '.join(TO_BF16)}")
            return _rows(source, groups(k), 2 * groups(k), TO_BF16[source.dtype])
        source = self._source(f"{module}.weight_packed", (n, -(-k // 8)))
        if source.dtype != "I32":
            raise CheckpointError(source.path, source.name, f"{source.dtype}, must be I32")
        self._check_shape(f"{module}.weight_shape", (n, k))
        return _rows(source, source.shape[1], 16 * groups(k), copy if k % 32 == 0 else pad_nibbles(k))

    def _expert_shape(self, module: str) -> tuple[int, int]:
        d, i = self.config.hidden_size, self.config.moe_intermediate_size
        return (d, i) if module.endswith(".down_proj") else (i, d)

    def _check_shape(self, name: str, shape: tuple[int, int]) -> None:
        source = self._source(name, (2,))
        if source.dtype not in ("I32", "I64"):
            raise CheckpointError(source.path, name, f"{source.dtype}, must be I32 or I64")
        raw = bytearray(source.size)
        self.checkpoint.read(source.path, source.offset, memoryview(raw))
        stored = tuple(np.frombuffer(raw, "<i4" if source.dtype == "I32" else "<i8").tolist())
        if stored != shape:
            raise CheckpointError(source.path, name, f"{list(stored)}, the config asks for {list(shape)}")

    def _left_out(self) -> dict[str, int]:
        """Count the unused tensors by reason; one without a good reason is an error."""
        reasons: dict[str, int] = {}
        for name in self.checkpoint.shards:
            if name not in self.used:
                reason = self._why_unused(name)
                reasons[reason] = reasons.get(reason, 0) + 1
        return reasons

    def _why_unused(self, name: str) -> str:
        if not name.startswith(self.prefix) and name not in HEADS:
            if self.hf.nested:
                return "outside the text model"
            raise self._fail(name, "nothing in a DeepSeek-V3 model has this name")
        match = re.match(r"layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?", name.removeprefix(self.prefix))
        if match:
            layer = int(match[1])
            if layer >= self.hf.fields["num_layers"]:
                if self.hf.has_mtp:
                    return "layers for multi-token prediction"
                raise self._fail(name, f"the config has {self.hf.fields['num_layers']} layers, and none for prediction")
            if layer not in self.layers:
                return "layers that --layers leaves out"
            if match[2] and int(match[2]) not in self.experts and int(match[2]) < self.hf.fields["n_routed_experts"]:
                return "experts that --experts leaves out"
        if name.endswith("rotary_emb.inv_freq"):
            return "RoPE frequencies, which follow from the config"
        if (
            ".mlp.shared_experts." in name
            and not self.config.n_shared_experts
            and self.checkpoint.source(name).size == 0
        ):
            return "shared experts of size 0"
        raise self._fail(name, "the config does not account for this tensor")


def _is_linear(module: str) -> bool:
    return module.endswith(("_proj", "kv_a_proj_with_mqa", "lm_head"))


def _rows(source: Source, columns: int, out_bytes: int, convert: Convert) -> Piece:
    rows = int(np.prod(source.shape)) // columns
    return Piece(source, 0, rows, source.size // rows, out_bytes, convert)
