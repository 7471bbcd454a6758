"""DDTree emits what AR emits, in every bit; bundles hold the rounds that the model really takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_models import model

from harness import bundles
from harness.golden import Golden
from refs import recipe
from refs.decode import Decoded, Request, decode, rounds
from refs.drafters import DRAFTERS
from refs.errors import ContextOverflow, DrafterError, RequestError, TokenError
from refs.exact import Draws
from refs.model import Model

PROMPT = (3, 41, 7, 7, 0, 12)


def drafted(tokens: tuple[int, ...], name: str, step: float = 0.0) -> Any:
    return DRAFTERS[name](tokens[1:], 48, Draws("test", name), step)


def same(a: Decoded, b: Decoded) -> None:
    assert (a.tokens, a.stopped) == (b.tokens, b.stopped)
    assert a.logits.tobytes() == b.logits.tobytes()


@pytest.mark.parametrize(
    ("block", "budget", "temperature"),
    [*((b, n, 0.9) for b, n in ((8, 7), (4, 20), (6, 1), (1, 5), (5, 0), (16, 40))), (8, 7, 0.0), (16, 40, 0.0)],
)
def test_ddtree_is_ar_whatever_the_drafter(block: int, budget: int, temperature: float) -> None:
    m = model()
    ar = decode(m, Request(PROMPT, 12, temperature=temperature, seed=7))
    assert ar.forwards == len(ar.tokens) == 12
    assert [r.accepted for r in ar.rounds] == [(0,)] * 12
    for name in DRAFTERS:
        table = drafted(ar.tokens, name)
        request = Request(PROMPT, 12, table, 7, block, budget, temperature, 7)
        got = decode(m, request)
        same(got, ar)
        assert all(r.tree.size <= budget + 1 and max(r.tree.depths) < block for r in got.rounds)
        if name == "hostile":
            assert got.forwards == 12
        if name == "oracle":
            assert got.forwards == -(-12 // min(block, budget + 1))


def test_sampling_is_not_greedy_and_depends_on_the_seed() -> None:
    m = model()
    cases = [(0.0, 0), (0.3, 0), (1.0, 0), (1.0, 1)]
    outputs = {decode(m, Request(PROMPT, 12, temperature=t, seed=s)).tokens for t, s in cases}
    assert len(outputs) == 4


@pytest.mark.parametrize("index", [0, 1, 3, 6, 7, 8])
def test_eos_ends_the_output_wherever_it_falls_in_a_path(index: int) -> None:
    free = decode(model(), Request(PROMPT, 16, temperature=1.0, seed=3)).tokens
    eos = free[index]
    cut = free.index(eos) + 1
    stopping = model(changes=(("eos_id", eos),))
    ar = decode(stopping, Request(PROMPT, 16, temperature=1.0, seed=3))
    assert (ar.tokens, ar.stopped, ar.forwards) == (free[:cut], "eos", cut)
    for name in DRAFTERS:
        got = decode(stopping, Request(PROMPT, 16, drafted(free, name), 7, 5, 9, 1.0, 3))
        same(got, ar)
        assert stopping.length == len(PROMPT) + cut


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9])
def test_no_more_tokens_than_allowed(limit: int) -> None:
    free = decode(model(), Request(PROMPT, 16)).tokens
    got = decode(model(), Request(PROMPT, limit, drafted(free, "oracle"), 7, 8, 7))
    assert (got.tokens, got.stopped) == (free[:limit], "limit")
    assert got.forwards == -(-limit // 8)
    assert got.logits.shape == (limit + 1, 48)


def test_a_table_for_other_positions_is_cut() -> None:
    free = decode(model(), Request(PROMPT, 16)).tokens
    table = drafted(free, "oracle")
    got = decode(model(), Request(PROMPT, 16, table[:5], 7, 8, 7))
    assert [len(r.accepted) for r in got.rounds] == [6, *[1] * 10]
    late = decode(model(), Request(PROMPT, 16, table[3:], 10, 8, 7))
    assert [len(r.accepted) for r in late.rounds] == [1, 1, 1, 8, 5]
    assert got.tokens == late.tokens == free


def test_every_token_can_be_had_as_it_comes() -> None:
    items = rounds(model(), Request(PROMPT, 6))
    assert next(items).tokens == ()
    assert len(next(items).tokens) == 1


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (Request((), 4), RequestError, "prompt is empty"),
        (Request((1,), -1), RequestError, "max_tokens -1"),
        (Request((1,), 4, budget=-1), RequestError, "budget -1"),
        (Request((1,), 4, block_size=0), RequestError, "block_size 0"),
        (Request((1,), 4, temperature=-0.5), RequestError, "temperature -0.5"),
        (Request((1,), 4, temperature=float("nan")), RequestError, "temperature nan"),
        (Request((1,), 256), ContextOverflow, "context of 256"),
        (Request((48,), 4), TokenError, "token 48"),
        (Request((1,), 4, np.zeros((3, 47), np.float32), 2, 4, 4), DrafterError, r"\[rows, 48\]"),
        (Request((1,), 4, np.full((3, 48), np.nan, np.float32), 2, 4, 4), DrafterError, "NaN"),
    ],
)
def test_bad_requests_are_named(request_: Request, error: type[Exception], match: str) -> None:
    m = model()
    with pytest.raises(error, match=match):
        decode(m, request_)
    assert len(decode(m, Request(PROMPT, 3)).tokens) == 3


REPLAYED = [
    ("budget0", "fp32", "noisy"),
    ("budget1", "int4", "oracle"),
    ("budget_vocab", "fp32", "noisy"),
    ("eos_first", "int4", "oracle"),
    ("eos_mid", "fp32", "oracle"),
    ("past_end", "int4", "hostile"),
    ("prompt1", "fp32", "hostile"),
    ("sampled", "int4", "noisy"),
    ("ties", "fp32", "noisy"),
]


@pytest.mark.parametrize(("name", "precision", "drafter"), REPLAYED)
def test_bundles_hold_the_rounds_that_the_model_takes(name: str, precision: str, drafter: str) -> None:
    """Generation derives rounds from AR's tokens; here the model verifies every tree for itself."""
    path = bundles.ensure([name])[name]
    golden, run = Golden.open(path, precision), recipe.load(name).run
    m = Model.open(path, precision)
    ar = decode(m, Request(golden.prompt, run.max_tokens, temperature=run.temperature, seed=run.seed))
    assert ar.tokens == golden.tokens
    assert ar.logits.tobytes() == golden.logits.tobytes()
    table = golden.file.tensor(f"draft.{precision}.{drafter}")
    limits = (run.block_size, run.budget, run.temperature, run.seed)
    got = decode(m, Request(golden.prompt, run.max_tokens, table, len(golden.prompt) + 1, *limits))
    same(got, ar)
    taken = [(r.tree.tokens, r.tree.parents, r.accepted) for r in got.rounds]
    assert taken == [(r.tokens, r.parents, r.accepted) for r in golden.rounds(drafter)]
