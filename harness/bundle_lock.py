"""refs/bundles.lock: what every bundle's bytes are, and how a bundle differs from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refs import kdtr

LOCK = Path(__file__).resolve().parent.parent / "refs" / "bundles.lock"
UPDATE = "python -m harness bundles --update-lock"

Pins = Mapping[str, Any]


class BundleError(Exception):
    """A bundle cannot be made, or is not the one that the lock pins."""


class LockDiffers(BundleError):
    """The sources make another bundle than the lock pins; the text names the first tensor that differs."""


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_lock(path: Path = LOCK) -> dict[str, Any]:
    """The pinned bundles by name; `BundleError` if the file cannot be used."""
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))["bundles"]
        return {
            str(name): {**pin, "sha256": str(pin["sha256"]), "tensors": dict(pin["tensors"])}
            for name, pin in pins.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(
            f"{path}: not a lock of bundles ({type(error).__name__}: {error}); {UPDATE} writes it"
        ) from error


def pin_of(path: Path) -> dict[str, Any]:
    """What the lock says of one bundle: its SHA-256, its fields, and the CRC of each tensor."""
    found = kdtr.read(path)
    tensors = {name: f"{entry.crc:08x} {entry.dtype} {list(entry.shape)}" for name, entry in found.entries.items()}
    return {"sha256": sha256(path), "fields": dict(found.fields), "tensors": tensors}


def first_difference(name: str, got: Pins, want: Pins) -> str:
    """A sentence that names the first field or tensor, in the file's order, in which two pins of a bundle differ."""
    for kind in ("fields", "tensors"):
        for key in sorted({*got[kind], *want[kind]}):
            here, there = got[kind].get(key, "absent"), want[kind].get(key, "absent")
            if here != there:
                return f"bundle {name}: {kind[:-1]} {key} is the first that differs: made {here}, pinned {there}"
    return f"bundle {name}: the same fields and tensors, but other bytes: made {got['sha256']}, pinned {want['sha256']}"
