"""Philox against its published vectors, the noise against math, the draws against the distribution they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from refs import sampling
from refs.errors import NonFiniteError
from refs.philox import philox


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(counter: str, key: str, want: str) -> None:
    """The known-answer vectors of Random123 for philox4x32 with 10 rounds."""
    c, k, words = ([int(w, 16) for w in text.split()] for text in (counter, key, want))
    assert [int(word) for word in philox((c[0], c[1], c[2], c[3]), k[0] | k[1] << 32)] == words
    spread = philox((np.array([5, c[0]]), np.full((3, 1), c[1]), c[2], c[3]), k[0] | k[1] << 32)
    assert [word[:, 1].tolist() for word in spread] == [[word] * 3 for word in words]


def test_noise_is_keyed_by_token_position_and_both_halves_of_the_seed() -> None:
    seed = 0x0123456789ABCDEF
    noise = sampling.gumbel(5, 77, seed)
    for v in range(5):
        word = int(philox((v, 77, 0, 0), seed)[0])
        u = (word + 0.5) / 2**32
        assert noise[v] == pytest.approx(-math.log(-math.log(u)), rel=1e-14, abs=1e-14)
    for other in (sampling.gumbel(5, 78, seed), sampling.gumbel(5, 77, seed + 1), sampling.gumbel(5, 77, seed + 2**32)):
        assert (other != noise).all()
    np.testing.assert_array_equal(sampling.gumbel(9, 77, seed)[:5], noise)


def test_greedy_takes_the_lowest_of_equals_and_refuses_what_is_not_finite() -> None:
    assert sampling.choose(np.array([1.0, 5.0, 5.0, 2.0]), 3, 0.0, 9) == 1
    for bad in (np.nan, np.inf, -np.inf):
        for temperature in (0.0, 1.0):
            with pytest.raises(NonFiniteError, match="position 3"):
                sampling.choose(np.array([1.0, bad]), 3, temperature, 9)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 6 tokens: 20.5 is the 0.1 % point for 5 degrees of freedom."""
    logits, n = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -0.5]), 2000
    counts = np.zeros(6)
    for position in range(n):
        counts[sampling.choose(logits, position, temperature, 12345)] += 1
    p = np.exp(logits / temperature)
    expected = n * p / p.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5
