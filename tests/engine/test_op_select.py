"""Argmax and sampling: ties, faults, Philox against published vectors, draws against the exact distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_operands import draw
from engine_ops import F32, Array, Ops, Rows, chain

LOGITS_NON_FINITE = 2
MASK = 0xFFFFFFFF


def choose(
    ops: Ops, logits: F32, *, temperature: float = 0.0, seed: int = 0, kv_len: int = 0, rows: Rows | None = None
) -> tuple[Array, dict[str, int]]:
    rows = rows or Rows([-1] + [0] * (len(logits) - 1))
    choice = ops.empty(len(logits), dtype=np.int32)
    state = ops.state(len(logits), kv_len=kv_len, seed_lo=seed & MASK, seed_hi=seed >> 32)
    ops.call("select", ops.tensor(logits), temperature, choice, ops.rows(rows), state)
    return choice.cpu().numpy(), ops.fields(state)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 512, 5001])
def test_argmax(ops: Ops, vocab: int) -> None:
    logits = draw(np.random.default_rng(vocab), 9, vocab)
    logits[5:] -= 20.0  # none of them above zero
    assert choose(ops, logits)[0].tolist() == [int(np.argmax(row)) for row in logits]


@pytest.mark.parametrize("where", [(0, 1), (3, 300), (16, 17), (200, 4999), (0, 4999)])
def test_first_of_equals_wins(ops: Ops, where: tuple[int, int]) -> None:
    logits = np.full((2, 5000), -1.0, np.float32)
    logits[0, list(where)] = 2.5
    logits[1, list(where)] = [0.0, -0.0]  # equal, whatever their sign
    assert choose(ops, logits)[0].tolist() == [where[0]] * 2
    assert choose(ops, np.zeros((1, 5000), np.float32))[0].tolist() == [0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 5, 4096, 5000])
def test_a_logit_that_is_not_finite_is_a_fault(ops: Ops, value: float, at: int) -> None:
    logits = draw(np.random.default_rng(1), 6, 5001)
    logits[2, at] = value
    logits[4, at] = value
    choice, state = choose(ops, logits)
    assert (state["error"], state["error_row"]) == (LOGITS_NON_FINITE, 2)
    assert ((choice >= 0) & (choice < 5001)).all()


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 with Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def test_the_oracle_knows_the_published_vectors() -> None:
    """Known answers of the Random123 distribution."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox(*digits) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def drawn(logits: F32, position: int, temperature: float, seed: int) -> int:
    best, best_value = 0, -math.inf
    for v, logit in enumerate(logits):
        u = (philox([v, position, 0, 0], [seed & MASK, seed >> 32])[0] + 0.5) / 2**32
        value = float(logit) / temperature - math.log(-math.log(u))
        if value > best_value:
            best, best_value = v, value
    return best


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 2.5])
def test_draws_are_keyed_by_seed_position_and_token(ops: Ops, seed: int, temperature: float) -> None:
    """The position of a tree row is its depth after the committed rows, not its index."""
    logits = draw(np.random.default_rng(3), 7, 90)
    logits[4:] -= 100.0  # no draw of theirs is above zero
    logits *= np.float32(min(temperature, 1.0))  # near enough to each other for a draw to matter
    rows = Rows([-1, 0, 0, 1, 1, 3, 2])
    got = choose(ops, logits, temperature=temperature, seed=seed, kv_len=11, rows=rows)[0]
    want = [drawn(logits[r], 11 + int(rows.depths[r]), temperature, seed) for r in range(7)]
    assert got.tolist() == want


def test_draws_are_decided_in_double_precision(ops: Ops) -> None:
    """Two tokens as near to a tie as f32 logits can be: a division in f32 would decide some of them otherwise."""
    temperature, seed, rows = 0.7, 5, 200
    logits = np.full((rows, 2), 3.0, np.float32)
    other = 0
    for position in range(rows):
        noise = [-math.log(-math.log((philox([v, position, 0, 0], [seed, 0])[0] + 0.5) / 2**32)) for v in (0, 1)]
        logits[position, 1] = temperature * (float(logits[position, 0]) / temperature + noise[0] - noise[1])
        narrow = [float(value / np.float32(temperature)) + g for value, g in zip(logits[position], noise, strict=True)]
        other += int(narrow[1] > narrow[0]) != drawn(logits[position], position, temperature, seed)
    assert other > 20, "the test could not tell f32 from f64"
    got = choose(ops, logits, temperature=temperature, seed=seed, rows=chain(rows))[0]
    assert got.tolist() == [drawn(logits[p], p, temperature, seed) for p in range(rows)]


def test_equal_rows_at_one_position_draw_alike(ops: Ops) -> None:
    logits = np.repeat(draw(np.random.default_rng(4), 1, 64), 5, axis=0)
    got = choose(ops, logits, temperature=1.0, seed=9, kv_len=3, rows=Rows([-1, 0, 0, 0, 0]))[0]
    assert len(set(got[1:].tolist())) == 1


def test_draws_follow_the_softmax(ops: Ops) -> None:
    """Chi-square over 12 tokens and 20000 positions; the threshold is exceeded by chance once in 10^5."""
    vocab, n, temperature = 12, 20000, 0.8
    row = np.linspace(-1.5, 1.5, vocab).astype(np.float32)
    counts = np.zeros(vocab)
    logits, rows = np.repeat(row[None], 200, axis=0), chain(200)
    for at in range(0, n, 200):
        drawn_here = choose(ops, logits, temperature=temperature, seed=77, kv_len=at, rows=rows)[0]
        counts += np.bincount(drawn_here, minlength=vocab)
    p = np.exp(row.astype(np.float64) / temperature)
    p /= p.sum()
    chi2 = float((((counts - n * p) ** 2) / (n * p)).sum())
    assert counts.sum() == n
    assert chi2 < 42.0, f"chi-square {chi2:.1f} with 11 degrees of freedom"
    uniform = float((((counts - n / vocab) ** 2) / (n / vocab)).sum())
    assert uniform > 1000, "the test could not tell another distribution"
