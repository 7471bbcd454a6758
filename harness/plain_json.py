"""What machines read: JSON that every reader takes. NaN and infinities, which JSON lacks, are strings.

``--json`` of every command (``harness/cli.py``) prints it, ``--json OUT.json`` writes it. What is printed stands alone
on stdout; beside a file people get the same text as without.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from harness.files import write_atomic

PRINTED = Path("-")
"""What ``--json`` holds that names no file; without the option it holds None."""


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


def give(value: Any, target: Path | None) -> None:
    """To where ``--json`` says: stdout, a file, or nowhere. Raises OSError."""
    if target == PRINTED:
        print(text(value))
    elif target is not None:
        write_atomic(target, (text(value) + "\n").encode())


def beside(target: Path | None) -> TextIO:
    """The stream of what people read: stderr where stdout is a machine's."""
    return sys.stderr if target == PRINTED else sys.stdout
