"""The DFlash drafter of docs/model.md in numpy, in float64 or float32 (Chen et al., arXiv 2602.06036).

Keys and values of the context are projected once from the target's taps and kept; those of a block are not. A row's
bits depend on its own inputs alone, as in `refs.model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from refs.config import ModelConfig
from refs.drafter_config import DrafterConfig
from refs.elementary import F, exp
from refs.errors import MissingTensor
from refs.exact import Summation, matmul, silu, sum_last
from refs.rope import table


class Drafter:
    """A drafter with its context. ``length`` rows of features are in it, at positions 0 .. length-1."""

    def __init__(
        self,
        config: DrafterConfig,
        model: ModelConfig,
        tensors: Mapping[str, npt.NDArray[Any]],
        embed: F,
        head: F,
        summation: Summation,
        file: str,
    ) -> None:
        """``embed`` [V, D] and ``head`` [D, V] are the target's; their type is that of all arithmetic."""
        self.config, self._mask = config, model.mask_id
        self._embed, self._head, self._sum = embed, head, summation
        self._w: dict[str, F] = {}
        for name, shape in config.shapes(model).items():
            found = tensors.get(name)
            if found is None or found.shape != shape or found.dtype != np.dtype("<f4"):
                what = "is not there" if found is None else f"is {found.dtype} {found.shape}"
                raise MissingTensor(f"{file}: {name}: {what}, must be f32 {shape}")
            wide = found.astype(embed.dtype)
            self._w[name.removeprefix("drafter.").removesuffix(".w")] = np.ascontiguousarray(wide.T)
        self.reset()

    def reset(self) -> None:
        """Forget the context."""
        c, empty = self.config, (0, self.config.num_kv_heads, self.config.head_dim)
        self.length = 0
        self._k = [np.zeros(empty, self._embed.dtype) for _ in range(c.num_layers)]
        self._v = [np.zeros(empty, self._embed.dtype) for _ in range(c.num_layers)]

    def extend(self, features: F) -> None:
        """Add rows [n, taps * D] of the target's residual stream, the tapped layers side by side, to the context."""
        n = features.shape[0]
        h = self._rms(matmul(features, self._w["fc"], self._sum), "hidden_norm")
        angles = self._angles(n)
        for layer in range(self.config.num_layers):
            k, v = self._keys_values(h, layer, angles)
            self._k[layer] = np.concatenate([self._k[layer], k])
            self._v[layer] = np.concatenate([self._v[layer], v])
        self.length += n

    def draft(self, bonus: int) -> F:
        """Logits [block_size - 1, V] for the positions after the bonus, which stands at position ``length``."""
        c = self.config
        x: F = self._embed[[bonus] + [self._mask] * (c.block_size - 1)]
        angles = self._angles(c.block_size)
        for layer in range(c.num_layers):
            at = f"layers.{layer}."
            a = self._rms(x, at + "attn_norm")
            q = self._heads(a, at + "attn.q")
            q = self._rotate(self._rms(q, at + "attn.q_norm"), angles)
            k, v = self._keys_values(a, layer, angles)
            o = self._attend(q, np.concatenate([self._k[layer], k]), np.concatenate([self._v[layer], v]))
            x = x + self._linear(o, at + "attn.o")
            b = self._rms(x, at + "mlp_norm")
            x = x + self._linear(
                silu(self._linear(b, at + "mlp.gate")) * self._linear(b, at + "mlp.up"), at + "mlp.down"
            )
        return matmul(self._rms(x[1:], "norm"), self._head, self._sum)

    def _linear(self, x: F, name: str) -> F:
        return matmul(x, self._w[name], self._sum)

    def _heads(self, x: F, name: str) -> F:
        return self._linear(x, name).reshape(x.shape[0], -1, self.config.head_dim)

    def _rms(self, x: F, name: str) -> F:
        t = x.dtype.type
        mean = sum_last(x * x, self._sum) / t(x.shape[-1])
        out: F = x / np.sqrt(mean + t(self.config.rms_norm_eps))[..., None] * self._w[name]
        return out

    def _angles(self, n: int) -> F:
        """cos and sin of the next ``n`` positions, [n, 1, W/2, 2]."""
        rows = table(self.config.rotation(), self.length + n)[self.length :]
        return rows.astype(self._embed.dtype)[:, None]

    def _keys_values(self, x: F, layer: int, angles: F) -> tuple[F, F]:
        at = f"layers.{layer}.attn."
        k = self._rms(self._heads(x, at + "k"), at + "k_norm")
        return self._rotate(k, angles), self._heads(x, at + "v")

    def _rotate(self, x: F, angles: F) -> F:
        """Pairs (i, i + W/2) of x [n, heads, W]."""
        c, s = angles[..., 0], angles[..., 1]
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    def _attend(self, q: F, k: F, v: F) -> F:
        """Every query of q [n, H, W] over all keys of k, v [T, G, W]: no mask, no causality -> [n, H * W]."""
        t = q.dtype.type
        group = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        keys, values = np.moveaxis(k[:, group], 2, 0), v[:, group]  # [W, T, H], [T, H, W]
        scale = t(1) / np.sqrt(t(q.shape[2]))
        out = np.empty_like(q)
        for row in range(q.shape[0]):
            scores = self._sum(keys * q[row].T[:, None]) * scale  # [T, H]
            p = exp(scores - scores.max(axis=0))
            out[row] = self._sum(p[..., None] * values) / self._sum(p.copy())[:, None]
        return out.reshape(q.shape[0], -1)
