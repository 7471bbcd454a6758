"""The forward pass of docs/model.md in numpy, in float64 or float32, with a KV cache.

Guarantee: a row's results are the same in every bit whether it is computed alone, in a prefill or in a tree, because
each sum's order depends on that row alone: matrix products sum over K in a fixed order, and attention adds up its
keys in logical order in chunks of 64, where a key that is not there counts as an exact zero.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from refs import kdtr
from refs.attention import CHUNK, Index, attend
from refs.config import BF16_PRECISIONS, PRECISIONS, ModelConfig
from refs.dflash import Drafter
from refs.drafter_config import of_file, split
from refs.elementary import F
from refs.errors import ContextOverflow, DrafterError, NonFiniteError, RequestError, TokenError
from refs.exact import SUMMATIONS, bf16_nearest, contract, silu, sum_last
from refs.rope import cos_sin, rotate, softmax_scale
from refs.router import route
from refs.streamed import StreamedWeights
from refs.weights import Weights

M = TypeVar("M", bound="Model")
HELD_WEIGHTS = 1 << 28  # a larger model's weights are converted as they are used; the results are the same


class Model:
    """A model with its cache, and its drafter if the file holds one. ``length`` rows are committed, at 0 .. length-1.

    ``dtype`` is the type of all arithmetic and of all results; ``summation`` names an order of `refs.exact`;
    ``absorbed`` chooses between the two forms of MLA, which agree but for rounding. ``rounding`` applies the
    roundings of docs/model.md, bf16, which belong to the absorbed form; without it the same weights are used exactly.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        tensors: Mapping[str, npt.NDArray[Any]],
        precision: str,
        dtype: type[np.floating[Any]] = np.float64,
        *,
        summation: str = "tree",
        absorbed: bool = True,
        rounding: bool = False,
        context: int | None = None,
        file: str = "<memory>",
    ) -> None:
        if precision not in PRECISIONS:
            raise RequestError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
        if rounding and (precision not in BF16_PRECISIONS or not absorbed):
            raise RequestError(f"rounding is for {' and '.join(BF16_PRECISIONS)}, in the absorbed form")
        self._held: Callable[[F], F] = bf16_nearest if rounding else lambda x: x
        own, draft = split(fields)
        self.config = ModelConfig.of(own, file)
        self.context = self.config.max_context if context is None else context
        if not 1 <= self.context <= self.config.max_context:
            raise RequestError(f"context {self.context} is not in 1..{self.config.max_context}")
        self.precision, self.absorbed = precision, absorbed
        self.dtype: np.dtype[np.floating[Any]] = np.dtype(dtype)
        self._sum = SUMMATIONS[summation]
        weights = sum(math.prod(shape) for shape in self.config.shapes().values())
        kind: type[StreamedWeights | Weights] = StreamedWeights if weights > HELD_WEIGHTS else Weights
        self._w = kind(self.config, tensors, precision, self.dtype, file)
        self._scale = softmax_scale(self.config)
        self._rope = cos_sin(self.config, 0).astype(self.dtype)
        self._latent = [np.zeros((0, self.config.kv_lora_rank), self.dtype) for _ in range(self.config.num_layers)]
        self._k_rope = [np.zeros((0, self.config.qk_rope_head_dim), self.dtype) for _ in range(self.config.num_layers)]
        self._tap: dict[str, F] | None = None
        self._given: Mapping[str, F] = {}
        self.drafter: Drafter | None = None
        if draft:
            config = of_file(draft, tensors, self.config, file)
            embed, head = self._w["embed"], self._w["lm_head"]
            self.drafter = Drafter(config, self.config, tensors, embed, head, self._sum, file)
        self.reset()

    @classmethod
    def open(
        cls: type[M], path: str | os.PathLike[str], precision: str, dtype: type[np.floating[Any]] = np.float64,
        **options: Any,
    ) -> M:  # fmt: skip
        """A model from a KDTR file; options as for the constructor. `KdtrError` or a `RefError` names what is wrong."""
        found = kdtr.read(path)
        return cls(found.fields, found.tensors, precision, dtype, file=found.file, **options)

    def reset(self) -> None:
        """Forget all rows."""
        self.length = 0
        self._pending: tuple[int, ...] = ()  # parents of the last verify's rows
        self._tapped: list[F] = []  # of the last verify's rows: the drafter's layers
        self._undrafted: list[F] = []  # features of committed rows that the drafter has not been given yet
        if self.drafter:
            self.drafter.reset()

    def prefill(self, tokens: Sequence[int]) -> F:
        """Commit ``tokens`` after what is there; logits [n, V] of each."""
        n = len(tokens)
        logits = self.verify(tokens, range(-1, n - 1))
        self.commit(range(n))
        return logits

    def step(self, token: int) -> F:
        """Commit one token; logits [V] after it."""
        row: F = self.prefill([token])[0]
        return row

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> F:
        """Run a tree (row 0 the root, ``parents[0] == -1``, a parent before its children); logits [M, V].

        Commits nothing.
        """
        self._check_rows(tokens, parents)
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if self.length + max(depths) >= self.context:
            raise ContextOverflow(
                f"a row at position {self.length + max(depths)} does not fit a context of {self.context}"
            )
        self._pending = ()  # an error on the way leaves nothing to commit
        logits = self._forward(np.array(tokens, np.int64), np.array(depths, np.int64), self._keys(parents, depths))
        self._pending = tuple(parents)
        return logits

    def commit(self, path: Sequence[int]) -> None:
        """Commit rows of the last verify: ascending, starting with 0, each the child of the one before."""
        rows = list(path)
        if not rows or rows[0] != 0 or any(not 0 <= r < len(self._pending) for r in rows):
            raise RequestError(f"path {rows} does not start at row 0 of the last verify, or leaves its rows")
        for before, row in itertools.pairwise(rows):
            if self._pending[row] != before:
                raise RequestError(f"path {rows}: row {row} is not a child of row {before}")
        source = self.length + np.array(rows, np.int64)
        target = slice(self.length, self.length + len(rows))
        for cache in (*self._latent, *self._k_rope):
            cache[target] = cache[source]
        self.length += len(rows)
        self._pending = ()
        if self.drafter:
            self._undrafted.append(np.concatenate(self._tapped, axis=1)[rows])

    def draft(self, bonus: int) -> F:
        """The drafter's logits [L, V] for the positions after ``bonus``, which follows the committed rows."""
        if self.drafter is None:
            raise DrafterError("the model has no drafter of its own")
        if self._undrafted:
            self.drafter.extend(np.concatenate(self._undrafted))
            self._undrafted = []
        logits = self.drafter.draft(bonus)
        if not np.isfinite(logits).all():
            raise DrafterError("a draft logit is NaN or infinite")
        return logits

    def cache(self, layer: int) -> tuple[F, F]:
        """Committed cache rows of a layer: latent [length, R], rotated k_rope [length, P]."""
        if not 0 <= layer < self.config.num_layers:
            raise RequestError(f"layer {layer} is not in 0..{self.config.num_layers - 1}")
        return self._latent[layer][: self.length].copy(), self._k_rope[layer][: self.length].copy()

    def taps(
        self,
        tokens: Sequence[int],
        *,
        operations: bool = False,
        reset: bool = True,
        given: Mapping[str, F] | None = None,
    ) -> dict[str, F]:
        """Reset, prefill ``tokens``; ``embed``, ``layers.I.out``, ``logits`` and, asked for, every operation's rows.

        Without ``reset`` the tokens follow those that are there. With ``given``, another engine's taps, each operation
        goes on from what that engine gave: the result is what every operation should have made of its own inputs there.
        """
        if reset:
            self.reset()
        self._tap, self._given = {}, given or {}
        try:
            logits = self.prefill(tokens)
            found = self._tap
        finally:
            self._tap, self._given = None, {}
        inside = (".mla.", ".mlp.", ".moe.")
        kept = {k: v for k, v in found.items() if operations or not any(part in k for part in inside)}
        return kept | {"logits": logits}

    def router_bias(self, layer: int) -> F:
        """The bias [E] of a MoE layer's router."""
        return self._w[f"layers.{layer}.router.bias"]

    def _check_rows(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        if not tokens or len(tokens) != len(parents):
            raise RequestError(f"{len(tokens)} tokens with {len(parents)} parents: need as many, and at least one")
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if not 0 <= token < self.config.vocab_size:
                raise TokenError(f"token {token} of row {row} is not in 0..{self.config.vocab_size - 1}")
            if (row == 0 and parent != -1) or (row > 0 and not 0 <= parent < row):
                raise RequestError(f"parent {parent} of row {row} is not an earlier row")

    def _keys(self, parents: Sequence[int], depths: Sequence[int]) -> Index:
        """[M, whole chunks]: the cache slots each row sees, in logical order; -1 where there is none."""
        width = -(-(self.length + max(depths) + 1) // CHUNK) * CHUNK
        keys = np.full((len(parents), width), -1, np.int64)
        keys[:, : self.length] = np.arange(self.length)
        for row, parent in enumerate(parents):
            if parent >= 0:
                keys[row] = keys[parent]
            keys[row, self.length + depths[row]] = self.length + row
        return keys

    def _reserve(self, slots: int) -> None:
        have = self._latent[0].shape[0]
        if slots <= have:
            return
        size = max(slots, 2 * have)
        for caches in (self._latent, self._k_rope):
            for i, old in enumerate(caches):
                caches[i] = np.zeros((size, old.shape[1]), self.dtype)
                caches[i][: self.length] = old[: self.length]

    def _note(self, name: str, value: F) -> None:
        if self._tap is not None:
            self._tap[name] = value.reshape(value.shape[0], -1).copy()

    def _take(self, name: str, value: F) -> F:
        """What the next operation reads: ``value``, or what was given for it."""
        if name in self._given:
            return self._given[name].reshape(value.shape).astype(value.dtype)
        return value

    def _pass(self, name: str, value: F) -> F:
        self._note(name, value)
        return self._take(name, value)

    def _rms(self, x: F, name: str, eps: float) -> F:
        t = self.dtype.type
        mean = sum_last(x * x, self._sum) / t(x.shape[-1])
        out: F = x / np.sqrt(mean + t(eps))[:, None] * self._w[name]
        return out

    def _linear(self, x: F, name: str) -> F:
        return self._w.linear(x, name, self._sum)

    def _forward(self, tokens: Index, depths: Index, keys: Index) -> F:
        c, m = self.config, tokens.size
        self._reserve(self.length + m)
        positions = self.length + depths
        if int(positions.max()) >= self._rope.shape[0]:
            count = min(self.context, 2 * (int(positions.max()) + 1))
            self._rope = cos_sin(c, count).astype(self.dtype)
        x: F = self._pass("embed", self._w.embed(tokens))
        self._tapped = []
        for layer in range(c.num_layers):
            at = f"layers.{layer}."
            a = self._held(self._rms(x, at + "attn_norm", c.rms_norm_eps))
            x = self._pass(at + "mla.out", x + self._attention(a, layer, positions, keys))
            b = self._held(self._rms(x, at + "mlp_norm", c.rms_norm_eps))
            if c.is_dense(layer):
                act = self._held(silu(self._linear(b, at + "mlp.gate")) * self._linear(b, at + "mlp.up"))
                act = self._pass(at + "mlp.act", act)
                x = x + self._linear(act, at + "mlp.down")
            else:
                x = x + self._experts(b, layer)
            x = self._pass(at + "out", x)
            if self.drafter and layer in self.drafter.config.taps:
                self._tapped.append(x)
        logits = self._linear(self._held(self._rms(x, "final_norm", c.rms_norm_eps)), "lm_head")
        if not np.isfinite(logits).all():
            raise NonFiniteError("a logit is NaN or infinite")
        return logits

    def _attention(self, a: F, layer: int, positions: Index, keys: Index) -> F:
        c, m, at = self.config, a.shape[0], f"layers.{layer}."
        q_a = self._pass(at + "mla.q_a", self._linear(a, at + "attn.q_a"))
        kv = self._pass(at + "mla.kv", self._linear(a, at + "attn.kv_a"))
        q_a = self._held(self._rms(q_a, at + "attn.q_a_norm", c.inner_norm_eps))
        q = self._pass(at + "mla.q", self._linear(q_a, at + "attn.q_b"))
        q = q.reshape(m, c.num_heads, -1)
        q_nope, q_rope = self._held(q[..., : c.qk_nope_head_dim]), q[..., c.qk_nope_head_dim :]
        table = self._rope[positions]
        q_rope, k_rope = self._held(rotate(q_rope, table)), self._held(rotate(kv[:, c.kv_lora_rank :], table))
        latent = self._held(self._rms(kv[:, : c.kv_lora_rank], at + "attn.kv_a_norm", c.inner_norm_eps))
        rows = slice(self.length, self.length + m)
        self._latent[layer][rows] = self._take(at + "mla.latent", latent)
        self._k_rope[layer][rows] = self._take(at + "mla.k_rope", k_rope)
        read = self._take(at + "mla.q_rope", q_rope)
        if self.absorbed:
            q_lat = contract(np.moveaxis(q_nope, 2, 0)[..., None], self._w[at + "attn.w_uk"][:, None], self._sum)
            q_lat = self._pass(at + "mla.q_lat", self._held(q_lat))
            o_lat = self._attend(q_lat, read, self._latent[layer], self._latent[layer], layer, keys)
            o_lat = self._pass(at + "mla.o_lat", self._held(o_lat))
            o = contract(np.moveaxis(o_lat, 2, 0)[..., None], self._w[at + "attn.w_uv"][:, None], self._sum)
        else:
            known = np.moveaxis(self._latent[layer][: rows.stop], 1, 0)[:, :, None, None]
            w_uk = np.moveaxis(self._w[at + "attn.w_uk"], 2, 0).swapaxes(1, 2)  # [R, H, N]
            k_nope = contract(known, w_uk[:, None], self._sum)
            v = contract(known, self._w[at + "attn.w_uv"][:, None], self._sum)
            o = self._attend(q_nope, read, k_nope, v, layer, keys)
        for name, value in (("q_rope", q_rope), ("latent", latent), ("k_rope", k_rope)):
            self._note(at + "mla." + name, value)
        o = self._pass(at + "mla.o", self._held(o))
        return self._linear(o.reshape(m, -1), at + "attn.o")

    def _attend(self, q: F, q_rope: F, k: F, v: F, layer: int, keys: Index) -> F:
        return attend(q, q_rope, k, v, self._k_rope[layer], keys, self._scale, self._sum, self._held)

    def _experts(self, b: F, layer: int) -> F:
        c, at, m = self.config, f"layers.{layer}.", b.shape[0]
        k = c.num_experts_per_tok
        logits = self._pass(at + "moe.router_logits", self._linear(b, at + "router"))
        ids, weights = route(c, logits, self._w[at + "router.bias"], layer, self._sum)
        ids = self._pass(at + "moe.ids", ids.astype(self.dtype)).astype(np.int64)
        weights = self._pass(at + "moe.weights", weights)
        chosen, rows = ids.reshape(-1), np.repeat(b, k, axis=0)
        gate = self._w.chosen(rows, at + "experts.gate", chosen, self._sum)
        act = self._held(silu(gate) * self._w.chosen(rows, at + "experts.up", chosen, self._sum))
        act = self._pass(at + "moe.act", act.reshape(m, -1)).reshape(m * k, -1)
        down = self._w.chosen(act, at + "experts.down", chosen, self._sum).reshape(m, k, -1)
        out = np.zeros_like(b)
        for j in range(k):
            out = out + weights[:, j, None] * down[:, j]
        if c.n_shared_experts:
            act = self._held(silu(self._linear(b, at + "shared.gate")) * self._linear(b, at + "shared.up"))
            act = self._pass(at + "moe.shared_act", act)
            out = out + self._linear(act, at + "shared.down")
        return out
