"""What machines read: JSON that every reader takes. NaN and infinities, which JSON lacks, are strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """JSON values only, records as mappings; NaN and infinities as ``nan``, ``inf`` and ``-inf``."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def text(value: Any) -> str:
    """What ``--json`` prints or writes, without a line's end."""
    return json.dumps(plain(value), indent=1, allow_nan=False)
