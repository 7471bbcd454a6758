"""A name that is none, told with the ones it may have been meant for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def meant(word: str, known: Iterable[str], before: str = ", ") -> str:
    """``", did you mean A or B?"`` with the names of ``known`` that are like ``word``; ``""`` where none is."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.75)
    return f"{before}did you mean {' or '.join(near)}?" if near else ""
