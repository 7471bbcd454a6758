"""Sampled decodes: trees as AR, samples as the reference's, and exact in distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from engine_files import Array, Bundle

import engine
from engine.session import CsrcSession
from harness.protocol import F32, DecodeRequest, Draft
from refs.sampling import choose


def test_sampled_trees_equal_sampled_ar(session: CsrcSession, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    some = 0
    seen = set()
    for seed in (0, 1, 12345, 2**64 - 1):
        ar = session.decode(bundle.request(precision, temperature=1.3, seed=seed))
        seen.add(ar.tokens)
        for drafter in ("oracle", "noisy", "hostile"):
            tree = session.decode(bundle.request(precision, drafter, temperature=1.3, seed=seed))
            assert tree.tokens == ar.tokens
            some += sum(tree.accepted_per_round) - tree.forwards
    assert len(seen) == 4
    assert some > 0, "no tree was ever accepted, so nothing was compared"


def test_samples_are_the_references(session: CsrcSession, tiny2: Path, precision: str) -> None:
    """Token by token from the recorded logits, by refs/sampling.py; both halves of the seed count."""
    bundle = Bundle(tiny2)
    for seed in (7, 7 + 2**32, 2**64 - 1):
        got = session.decode(bundle.request(precision, temperature=1.3, seed=seed))
        assert got.logits is not None
        start = len(bundle.prompt) - 1
        want = [choose(row, start + i, 1.3, seed) for i, row in enumerate(got.logits[:-1])]
        assert list(got.tokens) == want


def softmax(row: F32, temperature: float) -> Array:
    p = np.exp((row.astype(np.float64) - row.max()) / temperature)
    return np.asarray(p / p.sum())


def chi_square(counts: Counter[int], p: Array) -> float:
    """Over the nine likeliest tokens and all others together: 9 degrees of freedom."""
    order, n = np.argsort(-p, kind="stable"), counts.total()
    cells = [[int(t)] for t in order[:9]] + [[int(t) for t in order[9:]]]
    expected = [n * float(p[cell].sum()) for cell in cells]
    return sum((sum(counts[t] for t in cell) - e) ** 2 / e for cell, e in zip(cells, expected, strict=True))


def test_sampling_is_exact_in_distribution(device: str, tiny: Path) -> None:
    """DDTree over many seeds: the first token, and the second one given the first, against the target's softmax.

    The draft favours some of the likely second tokens, so that it is sometimes accepted; were acceptance to bend the
    distribution towards the draft, the second test would see it. 38 is exceeded by chance once in 50000.
    """
    bundle, temperature, seeds = Bundle(tiny), 0.25, 700
    with engine.create(device).load(tiny, "fp32") as session:
        p = softmax(session.prefill(bundle.prompt)[-1], temperature)
        likely = int(np.argmax(p))
        p_next = softmax(session.step(likely), temperature)
        table = np.full((1, bundle.vocab), -9.0, np.float32)
        table[0, np.argsort(-p_next)[[1, 3, 5]]] = [3.0, 2.0, 1.0]
        draft = Draft(table, len(bundle.prompt) + 1)
        first: Counter[int] = Counter()
        second: Counter[int] = Counter()
        accepted = 0
        for seed in range(seeds):
            got = session.decode(DecodeRequest(bundle.prompt, 2, draft, 2, 3, temperature=temperature, seed=seed))
            first[got.tokens[0]] += 1
            if got.tokens[0] == likely:
                second[got.tokens[1]] += 1
                accepted += got.forwards == 1
    assert chi_square(first, p) < 38.0
    assert chi_square(second, p_next) < 38.0
    assert 20 < accepted < second.total() - 20, "drafts were always or never accepted, so acceptance was not tested"
    assert chi_square(second, softmax(table[0], 1.0)) > 1000, "the test could not tell another distribution"
