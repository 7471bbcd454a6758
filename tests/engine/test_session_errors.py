"""Bad input has an error by name that says what and where, and the next call works as if nothing had been."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import Bundle, changed, poisoned
from engine_ops import same_bits

import engine
from engine.session import CsrcSession
from harness import protocol
from harness.protocol import DecodeRequest, Draft, EngineError

CONTEXT, MAX_ROWS = 60, 12


@pytest.fixture
def session(device: str, tiny2: Path) -> Iterator[CsrcSession]:
    with engine.create(device).load(tiny2, "fp32", context=CONTEXT, max_rows=MAX_ROWS, poison=True) as opened:
        yield opened
        assert opened.broken_guard() == ""


def draft(rows: int = 20, width: int | None = None, first: int = 5) -> Callable[[int], Draft]:
    return lambda vocab: Draft(np.zeros((rows, width or vocab), np.float32), first)


BAD_REQUESTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("empty prompt", {"prompt": []}, "RequestError", "prompt is empty"),
    ("token -1", {"prompt": [1, -1]}, "TokenError", "token -1 at index 1"),
    ("token V", {"prompt": [100000]}, "TokenError", "token 100000 at index 0 is not in 0.."),
    ("token 2^31", {"prompt": [2**31]}, "TokenError", "2147483648"),
    ("token 1.5", {"prompt": [1.5]}, "TokenError", "1.5"),
    ("negative max_tokens", {"max_tokens": -1}, "RequestError", "max_tokens -1 is negative"),
    ("too many tokens", {"max_tokens": CONTEXT}, "ContextOverflow", "exceed the session's context of 60"),
    ("max_tokens 2^62", {"max_tokens": 2**62}, "ContextOverflow", "context of 60"),
    ("max_tokens 2^70", {"max_tokens": 2**70}, "RequestError", "exceeds 64 bits"),
    ("long prompt", {"prompt": [1] * 61}, "ContextOverflow", "prompt of 61"),
    ("negative temperature", {"temperature": -0.1}, "RequestError", "temperature"),
    ("NaN temperature", {"temperature": float("nan")}, "RequestError", "temperature"),
    ("infinite temperature", {"temperature": float("inf")}, "RequestError", "temperature"),
    ("negative seed", {"seed": -1}, "RequestError", "seed -1"),
    ("negative budget", {"draft": draft(), "block_size": 4, "budget": -1}, "RequestError", "budget -1 is negative"),
    ("negative block", {"draft": draft(), "block_size": -3, "budget": 3}, "RequestError", "block_size -3 is below 1"),
    ("block 0", {"draft": draft(), "block_size": 0, "budget": 3}, "RequestError", "block_size 0 is below 1"),
    ("budget of max_rows", {"draft": draft(), "block_size": 4, "budget": 12}, "RequestError", "max_rows is 12"),
    ("budget 2^40", {"draft": draft(), "block_size": 4, "budget": 2**40}, "RequestError", "max_rows"),
    ("narrow draft", {"draft": draft(width=7), "block_size": 4, "budget": 3}, "DrafterError", "7 wide"),
    ("far draft", {"draft": draft(first=2**60), "block_size": 4, "budget": 3}, "DrafterError", "positions"),
    ("draft at 2^70", {"draft": draft(first=2**70), "block_size": 4, "budget": 3}, "RequestError", "exceeds 64 bits"),
    ("draft of words", {"draft": lambda _: Draft([["a"]], 5)}, "DrafterError", "no matrix of numbers"),  # type: ignore[arg-type]
    ("a number for a draft", {"draft": lambda _: 3}, "DrafterError", "draft 3 is no Draft"),
    ("no prompt", {"prompt": None}, "TokenError", "token: None is no list"),
    ("max_tokens 3.5", {"max_tokens": 3.5}, "RequestError", "max_tokens 3.5 is no integer"),
    ("budget '3'", {"draft": draft(), "block_size": 4, "budget": "3"}, "RequestError", "budget '3' is no integer"),
    ("block 2.0", {"draft": draft(), "block_size": 2.0, "budget": 3}, "RequestError", "block_size 2.0 is no integer"),
    ("seed 0.5", {"seed": 0.5}, "RequestError", "seed 0.5"),
    ("temperature '1'", {"temperature": "1"}, "RequestError", "temperature '1' is no number"),
    ("temperature 10^400", {"temperature": 10**400}, "RequestError", "is no number"),
    ("a cost of text", {"costs": ["a"]}, "RequestError", "cost 'a' is no number"),
    ("no costs", {"costs": None}, "RequestError", "costs: None is no list"),
]


@pytest.mark.parametrize(("changes", "name", "text"), [c[1:] for c in BAD_REQUESTS], ids=[c[0] for c in BAD_REQUESTS])
def test_bad_requests(session: CsrcSession, tiny2: Path, changes: dict[str, Any], name: str, text: str) -> None:
    bundle = Bundle(tiny2)
    good = bundle.request(max_tokens=5)
    want = session.decode(good).tokens
    given = dict(changes)
    if "draft" in given:
        given["draft"] = given["draft"](bundle.vocab)
    bad = bundle.request(**{"max_tokens": 5, **given})
    with pytest.raises(EngineError) as caught:
        session.decode(bad)
    assert type(caught.value) is getattr(protocol, name)
    assert text in str(caught.value)
    with pytest.raises(getattr(protocol, name)):
        next(session.stream(bad))
    assert session.decode(good).tokens == want


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_drafts_that_cannot_be_ranked(session: CsrcSession, tiny2: Path, value: float) -> None:
    bundle = Bundle(tiny2)
    hostile = bundle.draft("fp32", "hostile")  # never accepted, so every row of it is looked at
    for row in (0, 5):
        logits = np.array(hostile.logits)
        logits[row, 3] = value
        bad = bundle.request("fp32", "hostile", draft=Draft(logits, hostile.first))
        with pytest.raises(protocol.DrafterError, match=r"a draft logit of depth [1-7] is NaN or"):
            session.decode(bad)
        assert session.length == 0
        assert list(session.decode(bundle.request("fp32", "hostile")).tokens) == bundle.tokens("fp32")


def test_draft_of_another_shape_or_type(session: CsrcSession, tiny2: Path) -> None:
    bundle = Bundle(tiny2)
    flat = Draft(np.zeros(bundle.vocab, np.float32), 5)
    with pytest.raises(protocol.DrafterError, match="not \\[rows, "):
        session.decode(bundle.request(draft=flat, block_size=2, budget=1))
    oracle = bundle.draft("fp32", "oracle")
    wide = Draft(oracle.logits.astype(np.float64), oracle.first)  # type: ignore[arg-type]
    got = session.decode(bundle.request("fp32", "oracle", draft=wide))
    assert list(got.tokens) == bundle.tokens("fp32")


CALLS: list[tuple[str, Callable[[CsrcSession], Any], str, str]] = [
    ("prefill nothing", lambda s: s.prefill([]), "RequestError", "no tokens"),
    ("prefill a bad token", lambda s: s.prefill([1, 10**6]), "TokenError", "1000000 at index 1"),
    ("prefill too much", lambda s: s.prefill([1] * (CONTEXT - 9)), "ContextOverflow", "51 positions after 10"),
    ("step a bad token", lambda s: s.step(-5), "TokenError", "-5"),
    ("step a token of 2^40", lambda s: s.step(2**40), "TokenError", "1099511627776"),
    ("verify nothing", lambda s: s.verify([], []), "RequestError", "no rows"),
    ("verify a bad token", lambda s: s.verify([1, -2], [-1, 0]), "TokenError", "-2 at index 1"),
    ("verify too many rows", lambda s: s.verify([1] * 13, [-1] + [0] * 12), "RequestError", "max_rows is 12"),
    ("missing parents", lambda s: s.verify([1, 2], [-1]), "RequestError", "2 tokens but 1 parents"),
    ("root with a parent", lambda s: s.verify([1, 2], [0, 0]), "RequestError", "parents[0] is 0"),
    ("second root", lambda s: s.verify([1, 2], [-1, -1]), "RequestError", "parents[1] is -1"),
    ("own parent", lambda s: s.verify([1, 2], [-1, 1]), "RequestError", "parents[1] is 1"),
    ("later parent", lambda s: s.verify([1, 2, 3], [-1, 2, 0]), "RequestError", "parents[1] is 2"),
    ("commit unverified", lambda s: s.commit([0]), "RequestError", "without a verify"),
    ("cache of no layer", lambda s: s.cache(99), "RequestError", "layer 99"),
    ("cache of layer -1", lambda s: s.cache(-1), "RequestError", "layer -1"),
    ("cache of layer 'a'", lambda s: s.cache("a"), "RequestError", "layer 'a' is no integer"),  # type: ignore[arg-type]
    ("prefill of a number", lambda s: s.prefill(5), "TokenError", "token: 5 is no list"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "name", "text"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_bad_calls(session: CsrcSession, call: Callable[[CsrcSession], Any], name: str, text: str) -> None:
    """The rows committed before stay as they are."""
    tokens = list(range(10))
    session.prefill(tokens)
    before = session.cache(0)[0].tobytes()
    with pytest.raises(EngineError) as caught:
        call(session)
    assert type(caught.value) is getattr(protocol, name)
    assert text in str(caught.value)
    assert session.length == 10
    assert session.cache(0)[0].tobytes() == before
    after = session.step(3)
    session.reset()
    session.prefill(tokens)
    same_bits(session.step(3), after, "logits of a step, [token]")


@pytest.mark.parametrize(
    ("path", "text"),
    [([], "empty"), ([1], "starts with row 0"), ([0, 2, 1], "path[2] is 1"), ([0, 3], "path[1] is 3"),
     ([0, 9], "path[1] is 9"), ([0, -1], "path[1] is -1"), ([0, 1, 1], "path[2] is 1")],
)  # fmt: skip
def test_bad_paths(session: CsrcSession, path: list[int], text: str) -> None:
    session.prefill([1, 2])
    session.verify([5, 6, 7, 8], [-1, 0, 0, 1])
    with pytest.raises(protocol.RequestError) as caught:
        session.commit(path)
    assert text in str(caught.value)
    session.commit([0, 1, 3])  # the verify still stands
    assert session.length == 5
    with pytest.raises(protocol.RequestError, match="without a verify"):
        session.commit([0])


def test_the_context_can_be_filled_to_the_last_position(device: str, tiny2: Path) -> None:
    with engine.create(device).load(tiny2, "fp32", context=20, max_rows=8, poison=True) as session:
        session.prefill([1] * 18)
        session.verify([3, 4, 4, 4, 4, 4, 4, 4], [-1] + [0] * 7)
        with pytest.raises(protocol.ContextOverflow):
            session.verify([3, 4, 5], [-1, 0, 1])
        session.step(1)
        session.step(1)
        with pytest.raises(protocol.ContextOverflow, match="1 positions after 20"):
            session.step(1)
        assert len(session.decode(DecodeRequest([1] * 5, 15)).tokens) == 15
        with pytest.raises(protocol.ContextOverflow):
            session.decode(DecodeRequest([1] * 5, 16))
        assert session.broken_guard() == ""


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"context": 0}, "RequestError", "context 0"),
        ({"context": -4}, "RequestError", "context -4"),
        ({"context": 10**9}, "RequestError", "context 1000000000 is not in"),
        ({"max_rows": 0}, "RequestError", "max_rows 0"),
        ({"max_rows": 10**6}, "RequestError", "max_rows 1000000"),
        ({"max_rows": 2**70}, "RequestError", "max_rows 1180591620717411303424 exceeds 64 bits"),
        ({"context": 2**70}, "RequestError", "exceeds 64 bits"),
        ({"context": "all"}, "RequestError", "context 'all' is no integer"),
        ({"max_rows": 2.5}, "RequestError", "max_rows 2.5 is no integer"),
        ({"precision": "int8"}, "RequestError", "precision 'int8'"),
    ],
)
def test_bad_loads(device: str, tiny2: Path, changes: dict[str, Any], name: str, text: str) -> None:
    with pytest.raises(EngineError) as caught:
        engine.create(device).load(tiny2, **{"precision": "fp32", **changes})
    assert type(caught.value) is getattr(protocol, name)
    assert text in str(caught.value)


def test_unknown_devices() -> None:
    for device in ("tpu", "cuda:x", "cpu:0", "", "cuda:"):
        with pytest.raises(protocol.DeviceError, match="known are cpu, cuda and cuda:N"):
            engine.create(device)


def test_more_memory_than_there_is(device: str, tiny: Path, tmp_path: Path) -> None:
    huge = changed(tiny, tmp_path / "huge.kdtr", fields={"max_context": 2**31 - 1 - 65})
    with pytest.raises(protocol.OutOfMemory, match=r"cache.latent|rope|scratch"):
        engine.create(device).load(huge, "fp32")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on a process's memory is Linux's")
@pytest.mark.skipif("KDTREE_SANITIZE" in os.environ, reason="a sanitizer ends a process that finds no memory")
def test_a_request_that_finds_no_memory_leaves_the_session_whole(tiny: Path) -> None:
    """The system refuses the scratch of a tree of 4095 nodes; what ran before runs again."""
    bundle = Bundle(tiny)
    with engine.create("cpu").load(tiny, "fp32", max_rows=4096) as session:
        want = session.decode(bundle.request()).tokens
        held = session.memory()[0]
        limit = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (48 << 20), limit[1]))
        try:
            with pytest.raises(protocol.OutOfMemory, match="scratch: "):
                session.decode(bundle.request("fp32", "oracle", block_size=4096, budget=4095))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)
        assert session.memory()[0] >= held
        assert session.decode(bundle.request()).tokens == want
        assert session.decode(bundle.request("fp32", "oracle")).tokens == want
        assert session.broken_guard() == ""


NAN_WEIGHTS = [
    ("layers.2.router.w", "a router score of layer 2 is NaN or infinite"),
    ("layers.2.router.bias", "a router score of layer 2 is NaN or infinite"),
    ("layers.0.attn.q_b.w", "a router score of layer 1 is NaN or infinite"),
    ("layers.0.mlp.down.w", "a router score of layer 1 is NaN or infinite"),
    ("layers.1.attn.kv_a_norm.w", "a router score of layer 1 is NaN or infinite"),
    ("final_norm.w", "a logit is NaN or infinite"),
    ("lm_head.w", "a logit is NaN or infinite"),
]


@pytest.mark.parametrize(("tensor", "text"), NAN_WEIGHTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(
    device: str, tiny: Path, tmp_path: Path, tensor: str, text: str, value: float
) -> None:
    bundle = Bundle(tiny)
    broken = poisoned(tiny, tmp_path / "broken.kdtr", tensor, 5, value)
    with engine.create(device).load(broken, "fp32") as session:
        for call in (
            lambda: session.prefill(bundle.prompt),
            lambda: session.step(1),
            lambda: session.verify([1, 2], [-1, 0]),
            lambda: session.decode(bundle.request()),
            lambda: session.decode(bundle.request("fp32", "noisy")),
        ):
            with pytest.raises(protocol.NonFiniteError) as caught:
                call()
            assert text in str(caught.value)
            assert session.length == 0
        taps = session.taps(bundle.prompt, operations=True)  # these are to show where it began
        assert np.isfinite(taps["embed"]).all()
        shown = not all(np.isfinite(rows).all() for rows in taps.values())
        assert shown == (not tensor.endswith("router.bias"))  # biased scores are no tap


def test_a_session_outlives_a_token_that_breaks_it(device: str, tiny: Path, tmp_path: Path) -> None:
    """One embedding row is NaN: requests that touch it fail by name, the others give what they always gave."""
    bundle = Bundle(tiny)
    bad = next(t for t in range(bundle.vocab) if t not in (*bundle.prompt, *bundle.tokens("fp32")))
    hidden = int(bundle.file.fields["hidden_size"])
    broken = poisoned(tiny, tmp_path / "broken.kdtr", "embed.w", bad * hidden + 3)
    with engine.create(device).load(broken, "fp32", max_rows=4, poison=True) as session:
        want = session.decode(bundle.request()).tokens
        assert list(want) == bundle.tokens("fp32")
        with pytest.raises(protocol.NonFiniteError, match=r"decode|prefill"):
            session.decode(bundle.request(prompt=[*bundle.prompt, bad]))
        assert session.decode(bundle.request()).tokens == want
        session.reset()
        session.prefill(bundle.prompt)
        logits = session.step(7)
        session.reset()
        session.prefill(bundle.prompt)
        with pytest.raises(protocol.NonFiniteError):
            session.step(bad)
        with pytest.raises(protocol.NonFiniteError, match="row 1"):
            session.verify([7, bad], [-1, 0])
        with pytest.raises(protocol.NonFiniteError):  # in the second piece, of which the first is taken back too
            session.prefill([7, 7, 7, 7, bad])
        assert session.length == len(bundle.prompt)
        same_bits(session.step(7), logits, "logits of a step, [token]")
