"""Which files a C++ or CUDA source reads: itself and everything it includes in quotation marks, directly or not.

Conditions around an include do not matter, so the answer may be too large and is never too small: a build that is kept
by these files' content is not stale. An include whose name is a macro would escape; csrc/ has none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def closure(folder: Path, sources: Iterable[Path]) -> list[Path]:
    """``sources`` and the files of ``folder`` that they include, relative to it as ``sources`` are, sorted."""
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for name in _INCLUDE.findall((folder / path).read_text("utf-8")):
            target = Path(os.path.normpath(path.parent / name))
            if target.parts[0] != os.pardir and (folder / target).is_file():
                waiting.append(target)
    return sorted(found)
