"""Operations with exact answers, against the CPU backend in every bit: routing, choices, trees, accept, compaction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda.operations import Array, Operations, Tree, random_tree, read, same_bits, state

SENTINEL = np.int32(-77)


def _both(cuda: Operations, cpu: Operations, name: str, make: Any, *, equal: tuple[int, ...]) -> list[list[Any]]:
    """Run an operation on both backends over the arguments that ``make()`` gives; those at ``equal`` must agree."""
    results = []
    for ops in (cpu, cuda):
        arguments = make()
        ops(name, *arguments)
        results.append(arguments)
    for i in equal:
        want, got = (list(r[i]) if isinstance(r[i], list) else [r[i]] for r in results)
        for a, b in zip(want, got, strict=True):
            assert same_bits(a, b), f"{name}, argument {i}: {b.ravel()[:20]} for {a.ravel()[:20]}"
    return results


ROUTERS = [  # experts, top k, groups, groups kept
    (16, 4, 1, 1),
    (384, 8, 1, 1),
    (256, 8, 8, 4),
    (12, 3, 4, 2),
    (7, 7, 1, 1),
    (1024, 8, 1, 1),
    (33, 2, 11, 3),
]


@pytest.mark.parametrize(("experts", "k", "groups", "kept"), ROUTERS)
@pytest.mark.parametrize("ties", [False, True])
def test_router(cuda: Operations, cpu: Operations, experts: int, k: int, groups: int, kept: int, ties: bool) -> None:
    """The same experts in the same order; weights to the last few bits (the two exponentials differ)."""
    rng = np.random.default_rng(experts)
    m = 33
    logits = rng.standard_normal((m, experts)).astype(np.float32)
    bias = rng.uniform(-0.1, 0.1, experts).astype(np.float32)
    if ties:  # few distinct values; sums exact in both, so that only the tie rule decides
        logits, bias = rng.integers(0, 2, (m, experts)).astype(np.float32) * 40, np.zeros(experts, np.float32)
    for norm in (False, True):

        def make(norm: bool = norm) -> list[Any]:
            ids, weights = np.full((m, k), SENTINEL), np.zeros((m, k), np.float32)
            return [logits, bias, ids, weights, groups, kept, norm, 2.5, 3, state(n_rows=m - 1)]

        (want, got) = _both(cuda, cpu, "router", make, equal=(2,))
        np.testing.assert_allclose(got[3], want[3], rtol=2e-6)
        assert np.all(got[2][-1] == SENTINEL)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_router_fault_names_the_lowest_row(cuda: Operations, poison: float) -> None:
    """Whichever block comes first; an earlier fault stays; ids stay in range."""
    logits = np.zeros((65, 16), np.float32)
    logits[[7, 20, 64], 5] = poison
    for earlier in (0, 2):
        step = state(n_rows=65, error=earlier)
        ids, weights = np.full((65, 4), SENTINEL), np.zeros((65, 4), np.float32)
        cuda("router", logits, np.zeros(16, np.float32), ids, weights, 1, 1, True, 1.0, 9, step)
        found = read(step)
        wanted = (2, 0, 0) if earlier else (1, 7, 9)
        assert (found["error"], found["error_row"], found["error_detail"]) == wanted
        assert ids.min() >= 0
        assert ids.max() < 16


@pytest.mark.parametrize("vocab", [1, 5, 512, 8192, 8193, 20000, 163840])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 30.0])
def test_select(cuda: Operations, cpu: Operations, vocab: int, temperature: float) -> None:
    """The same choices, ties included; a draw depends on the row's position and not on its place in the step."""
    rng = np.random.default_rng(vocab)
    m = 9
    logits = rng.standard_normal((m, vocab)).astype(np.float32) * 3
    logits[1] = np.float32(1.5)
    logits[2, rng.integers(0, vocab, 3)] = 99
    tree = random_tree(rng, m)
    step = state(n_rows=m, kv_len=11)
    step[14:16] = 123, 456
    _both(
        cuda, cpu, "select", lambda: [logits, temperature, np.zeros(m, np.int32), tree.rows, step.copy()], equal=(2, 4)
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab", [512, 20000])
def test_select_fault(cuda: Operations, cpu: Operations, poison: float, vocab: int) -> None:
    """A logit that is not finite is an error of its row, the lowest one, and the choice is 0."""
    logits = np.random.default_rng(1).standard_normal((9, vocab)).astype(np.float32)
    logits[[4, 6, 8], vocab - 1] = poison
    rows = random_tree(np.random.default_rng(2), 9).rows
    for temperature in (0.0, 1.0):
        arguments = [logits, temperature]
        _both(cuda, cpu, "select", lambda a=arguments: [*a, np.zeros(9, np.int32), rows, state(n_rows=9)], equal=(2, 4))


def _draft(rng: np.random.Generator, rows: int, vocab: int, style: str) -> Array:
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 4
    if style == "ties":
        logits = rng.integers(-2, 3, (rows, vocab)).astype(np.float32)
        logits[0, ::3] = -0.0
    elif style == "flat":
        logits[:] = 1.25
    elif style == "sparse":  # most of a depth is -inf, the third one wholly
        logits[rng.random((rows, vocab)) < 0.9] = -np.inf
        logits[min(2, rows - 1)] = -np.inf
    elif style == "steep":
        logits *= 30
    return logits


TREES = [  # V, block size, B
    (512, 8, 7),
    (512, 8, 8),
    (2, 5, 30),
    (1, 6, 9),
    (7, 4, 100),
    (100, 2, 3),
    (4096, 16, 64),
    (512, 8, 40),
    (4096, 16, 31),
    (4096, 8, 127),
    (4096, 8, 128),
    (7, 9, 65),
    (9000, 12, 33),
    (30000, 16, 127),
    (240000, 3, 17),
    (4097, 5, 20),
    (5000, 16, 300),
    (9000, 3, 1024),
    (163840, 16, 64),
    (163840, 4, 1024),
]


def _same_tree(cuda: Operations, cpu: Operations, style: str, vocab: int, block: int, budget: int) -> None:
    """The same rows, order, parents, paths and scores, bit for bit."""
    rng = np.random.default_rng(vocab + block)
    draft = _draft(rng, block - 1, vocab, style)
    rows = budget + 1
    chain, costs = vocab == 5000, 1 + np.arange(rows) / 50 if block == 5 else np.zeros(0)

    def make() -> list[Any]:
        tree = [np.full(rows, SENTINEL) for _ in range(3)] + [np.full((rows, max(block, 2)), SENTINEL)]
        step = state(kv_len=20, bonus=3, limit=1000, draft_first=21, draft_rows=block - 1)
        return [draft, block, budget, -1, chain, costs, tree, np.zeros(rows), step]

    want, got = _both(cuda, cpu, "tree_build", make, equal=(8,))
    n = read(want[8])["n_rows"]
    assert n > 1 or style == "sparse" or len(costs)
    for a, b in zip([*want[6][:3], want[7]], [*got[6][:3], got[7]], strict=True):  # rows that were cut off are nobody's
        assert same_bits(a[:n], b[:n])
    for row in range(n):
        depth = want[6][2][row]
        assert same_bits(want[6][3][row, : depth + 1], got[6][3][row, : depth + 1])


STYLES = ["plain", "ties", "flat", "sparse", "steep"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("vocab", "block", "budget"), TREES)
def test_tree(cuda: Operations, cpu: Operations, style: str, vocab: int, block: int, budget: int) -> None:
    _same_tree(cuda, cpu, style, vocab, block, budget)


@pytest.mark.parametrize("style", STYLES)
def test_tree_on_a_device_without_clusters(monkeypatch: pytest.MonkeyPatch, cpu: Operations, style: str) -> None:
    """Depths are ranked and merged by launches that follow each other."""
    monkeypatch.setenv("KDTREE_CUDA_OVERLAP", "0")
    with Operations("cuda") as plain:
        for shape in [(9000, 5, 20), (30000, 16, 100), (163840, 4, 64)]:
            _same_tree(plain, cpu, style, *shape)


LIMITS: list[dict[str, int]] = [
    {"draft_rows": 0},
    {"draft_rows": 2},
    {"draft_first": 22},
    {"draft_first": 15},
    {"draft_first": 19},
    {"limit": 2},
    {"limit": 3},
    {"bonus": 5},
    {"committed": 999},
]


@pytest.mark.parametrize("change", LIMITS, ids=str)
def test_tree_limits(cuda: Operations, cpu: Operations, change: dict[str, int]) -> None:
    """Depth is cut by the table, by the tokens still allowed and by EOS (5), as on the CPU."""
    draft = _draft(np.random.default_rng(3), 7, 64, "plain")

    def make() -> list[Any]:
        tree = [np.full(9, SENTINEL) for _ in range(3)] + [np.full((9, 9), SENTINEL)]
        step = {"kv_len": 20, "bonus": 3, "limit": 1000, "draft_first": 21, "draft_rows": 7, **change}
        return [draft, 8, 8, 5, False, np.zeros(0), tree, np.zeros(9), state(**step)]

    want, got = _both(cuda, cpu, "tree_build", make, equal=(8,))
    n = read(want[8])["n_rows"]
    assert all(same_bits(a[:n], b[:n]) for a, b in zip(want[6][:3], got[6][:3], strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("vocab", [64, 9000])
def test_tree_fault(cuda: Operations, cpu: Operations, value: float, vocab: int) -> None:
    """NaN or +inf anywhere in the draft: the lowest depth is named and the step is the root alone."""
    draft = _draft(np.random.default_rng(3), 7, vocab, "plain")
    draft[3, vocab - 1] = draft[5, 0] = value
    rows = [np.zeros(9, np.int32) for _ in range(3)] + [np.zeros((9, 9), np.int32)]
    step = state(kv_len=20, bonus=3, limit=1000, draft_first=21, draft_rows=7)

    def make() -> list[Any]:
        return [draft, 8, 8, -1, False, np.zeros(0), [r.copy() for r in rows], np.zeros(9), step.copy()]

    want, _ = _both(cuda, cpu, "tree_build", make, equal=(8,))
    assert read(want[8])["error_detail"] == 4


@pytest.mark.parametrize("seed", range(30))
def test_accept_and_commit(cuda: Operations, cpu: Operations, seed: int) -> None:
    """Random trees and choices: the walk, the state, what the host learns, the compacted cache and both logs."""
    rng = np.random.default_rng(seed)
    m, vocab, kv_len = int(rng.integers(1, 80)), 6, int(rng.integers(0, 50))
    parents = random_tree(rng, m).parents
    tokens = np.zeros(m, np.int32)
    for row in range(1, m):  # siblings have distinct tokens as long as there are any
        used = {int(tokens[r]) for r in range(1, row) if parents[r] == parents[row]}
        tokens[row] = rng.choice([t for t in range(vocab) if t not in used] or [99])
    tree = Tree(parents.tolist(), tokens.tolist())
    choice = rng.integers(0, vocab, m).astype(np.int32)
    for row in range(m):  # mostly follow a child
        below = np.flatnonzero(parents == row)
        if len(below) and rng.random() < 0.8:
            choice[row] = tokens[rng.choice(below)]
    limit = int(rng.integers(1, 12)) + 4
    error = 2 if seed == 7 else 0

    def make() -> list[Any]:
        step = state(kv_len=kv_len, n_rows=m, bonus=0, committed=4, limit=limit, rounds=2, error=error, error_row=1)
        return [tree.rows, choice, 5 if seed % 2 else -1, np.full(m, SENTINEL), np.full(10 + m, SENTINEL), step]

    want, got = _both(cuda, cpu, "accept", make, equal=(5,))
    n = read(want[5])["n_accepted"]
    assert same_bits(want[3][:n], got[3][:n])
    assert same_bits(want[4][: 10 + n], got[4][: 10 + n])

    layers = 70 if seed == 3 else 3
    latent = [rng.standard_normal((kv_len + m, 20)).astype(np.float32) for _ in range(layers)]
    k_rope = [rng.standard_normal((kv_len + m, 6)).astype(np.float32) for _ in range(layers)]
    accepted = np.where(np.arange(m) < n, want[3], 0).astype(np.int32)
    _both(
        cuda,
        cpu,
        "kv_commit",
        lambda: [[a.copy() for a in latent], [a.copy() for a in k_rope], accepted, want[5].copy()],
        equal=(0, 1),
    )
    source = rng.standard_normal((m, 37)).astype(np.float32)
    _both(
        cuda, cpu, "record", lambda: [np.zeros((9, 37), np.float32), source, -2, accepted, want[5].copy()], equal=(0,)
    )
    _both(
        cuda,
        cpu,
        "record_tree",
        lambda: [np.full((4, 2 + 3 * m), SENTINEL), tree.rows, accepted, want[5].copy()],
        equal=(0,),
    )


def test_root(cuda: Operations, cpu: Operations) -> None:
    """One row: the bonus."""
    rows = [np.full(3, SENTINEL) for _ in range(3)] + [np.full((3, 3), SENTINEL)]
    _both(cuda, cpu, "tree_root", lambda: [[r.copy() for r in rows], state(bonus=42, kv_len=9)], equal=(0, 1))
