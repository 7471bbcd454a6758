"""INT4, group 32, symmetric: the K2.x checkpoint's nibbles with bf16 scales (docs/model.md, INT4).

The weight is exactly ``q * scale``: a product of 4 and 8 significant bits, which float32 and float64 both hold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from refs.exact import bf16_value, rounded_to_bf16

GROUP = 32
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]


def groups(k: int) -> int:
    """Groups of a row of ``k`` weights; the last may be padded."""
    return -(-k // GROUP)


def pack(q: I8) -> U8:
    """q [..., K] in -8..7 -> nibbles [..., 16*groups(K)]; element 2j is byte j's low nibble, padding is q = 0."""
    if q.size and (q.min() < -8 or q.max() > 7):
        raise ValueError("a 4-bit integer lies in -8..7")
    k = q.shape[-1]
    padded = np.zeros((*q.shape[:-1], groups(k) * GROUP), np.int8)
    padded[..., :k] = q
    nibbles = (padded + np.int8(8)).astype(np.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def unpack(packed: U8, k: int) -> I8:
    """The inverse of `pack`, cut to ``k`` elements a row."""
    nibbles = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    flat = nibbles.reshape(*packed.shape[:-1], -1)[..., :k]
    return flat.astype(np.int8) - np.int8(8)


def quantise(w: F32) -> tuple[I8, U16]:
    """w [..., K] -> q [..., K] and bf16 scales [..., groups(K)]: scale = bf16(amax/7.5), q rounds half to even."""
    k = w.shape[-1]
    if not np.isfinite(w).all():
        raise ValueError("weights to quantise must be finite")
    padded = np.zeros((*w.shape[:-1], groups(k) * GROUP), np.float32)
    padded[..., :k] = w
    grouped = padded.reshape(*w.shape[:-1], groups(k), GROUP)
    scales = rounded_to_bf16(np.abs(grouped).max(axis=-1) / np.float32(7.5))
    step = bf16_value(scales)[..., None]
    ratio = np.divide(grouped, step, out=np.zeros_like(grouped), where=step > 0)
    q = np.minimum(np.maximum(np.rint(ratio), np.float32(-8)), np.float32(7)).astype(np.int8)
    return q.reshape(padded.shape)[..., :k].copy(), scales


def dequantise(packed: U8, scales: U16, k: int) -> F32:
    """Packed nibbles and bf16 scales -> the weights [..., k], exact."""
    step = np.repeat(bf16_value(scales), GROUP, axis=-1)[..., :k]
    return unpack(packed, k).astype(np.float32) * step
