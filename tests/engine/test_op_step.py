"""What a step was captured with may move between requests: a later request must not run on where it used to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import create
from harness.golden import Golden
from harness.protocol import Draft

MANY = 9000
"""Rows of a draft table that fits nowhere near a small one: 18 MB at 512 tokens."""


def test_a_draft_table_that_moves(device: str, tiny: Path) -> None:
    small = Golden.open(tiny, "fp32").request("noisy")
    assert isinstance(small.draft, Draft)
    other = np.zeros((MANY, small.draft.logits.shape[1]), np.float32)
    other[:, 7] = 1  # another drafter, so that a tree made from the small table is another tree
    large = replace(small, draft=Draft(other, small.draft.first))
    with create(device).load(tiny, "fp32", poison=True) as session:
        alone = session.decode(large)
    with create(device).load(tiny, "fp32", poison=True) as session:
        first = session.decode(small)
        assert session.decode(large).rounds == alone.rounds != first.rounds
        assert session.decode(small).rounds == first.rounds
        assert session.decode(large).tokens == alone.tokens == first.tokens
        assert session.broken_guard() == ""
