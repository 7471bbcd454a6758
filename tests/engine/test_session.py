"""One session: AR against the goldens, DDTree against AR to the bit, commits by hand, streams, taps, memory."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from engine_files import Bundle
from engine_ops import same_bits

import engine
from engine.session import CsrcEngine, CsrcSession
from harness.protocol import OPERATION_TAPS, DecodeRequest, Draft, Engine, RequestError, Session

TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 0]


def test_the_protocol_is_met(session: CsrcSession, device: str) -> None:
    made: Engine = engine.create(device)
    assert made.device == device
    assert isinstance(session, Session)


def test_decode_agrees_with_the_goldens(session: CsrcSession, tiny2: Path, precision: str, device: str) -> None:
    bundle = Bundle(tiny2)
    ar = session.decode(bundle.request(precision))
    assert list(ar.tokens) == bundle.tokens(precision)
    assert ar.forwards == len(ar.tokens)
    assert set(ar.accepted_per_round) == {1}
    assert ar.logits is not None
    assert np.abs(ar.logits - bundle.file.tensor(f"golden.{precision}.logits")).max() < 1e-5
    counters = session.counters()
    assert all(counters.get(kernel, 0) > 0 for kernel in engine.create(device).kernels(precision, True))
    other = "experts_f32" if precision == "int4" else "experts_int4"
    assert counters.get(other, 0) == 0


@pytest.mark.parametrize("drafter", ["oracle", "noisy", "hostile"])
@pytest.mark.parametrize(("block", "budget"), [(8, 7), (8, 64), (2, 1), (1, 5), (16, 0), (4, 33)])
def test_trees_change_no_bit(
    session: CsrcSession, tiny2: Path, precision: str, drafter: str, block: int, budget: int
) -> None:
    bundle = Bundle(tiny2)
    ar = session.decode(bundle.request(precision))
    cache = [session.cache(i) for i in range(session.layers)]
    tree = session.decode(bundle.request(precision, drafter, block_size=block, budget=budget))
    assert tree.tokens == ar.tokens
    assert tree.logits is not None
    assert ar.logits is not None
    same_bits(tree.logits, ar.logits, "DDTree's logits against AR's, [step, token]")
    assert sum(tree.accepted_per_round) == len(ar.tokens)
    assert tree.forwards == len(tree.rounds) == len(tree.accepted_per_round)
    for i, (latent, k_rope) in enumerate(cache):
        after = session.cache(i)
        assert (after[0].tobytes(), after[1].tobytes()) == (latent.tobytes(), k_rope.tobytes())


def test_verify_commits_nothing_and_commit_commits_a_path(session: CsrcSession, tiny2: Path) -> None:
    bundle = Bundle(tiny2)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, bundle.vocab, len(TREE))]
    session.prefill(bundle.prompt)
    n = session.length
    got = session.verify(tokens, TREE)
    assert session.length == n
    session.commit([0, 1, 3, 6])
    assert session.length == n + 4
    caches = [session.cache(i) for i in range(session.layers)]
    after = session.step(5)
    session.reset()
    session.prefill(bundle.prompt)
    want = [session.step(tokens[row]) for row in (0, 1, 3, 6)]
    same_bits(np.stack(want), got[[0, 1, 3, 6]], "logits of a path step by step, [row, token]")
    for i, (latent, k_rope) in enumerate(caches):
        again = session.cache(i)
        assert (again[0].tobytes(), again[1].tobytes()) == (latent.tobytes(), k_rope.tobytes())
    same_bits(session.step(5), after, "logits of a step, [token]")


def test_stream_yields_what_decode_returns(session: CsrcSession, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    for drafter in ("", "noisy"):
        request = bundle.request(precision, drafter)
        want = session.decode(request)
        stream = session.stream(request)
        assert next(stream) == want.tokens[0]
        assert session.length == len(bundle.prompt) + want.accepted_per_round[0], "tokens come as rounds accept them"
        assert (want.tokens[0], *stream) == want.tokens


def test_whoever_watches_a_decode_is_told_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tiny2: Path, device: str
) -> None:
    """After every period, however short: a round at least lies between two; of one that ends in time not at all."""
    told: list[None] = []
    watched = CsrcEngine(device, progress=lambda: told.append(None))
    with watched.load(tiny2, "fp32") as session:
        request = DecodeRequest(tuple(Bundle(tiny2).prompt), 8)
        monkeypatch.setattr("engine.session.PERIOD", 0.0)
        decoded = session.decode(request)
        assert len(told) in (decoded.forwards - 1, decoded.forwards)
        told.clear()
        monkeypatch.setattr("engine.session.PERIOD", 60.0)
        assert session.decode(request).tokens == decoded.tokens
        assert told == []


def test_a_decode_hears_ctrl_c(monkeypatch: pytest.MonkeyPatch, tiny2: Path, device: str) -> None:
    """Between two rounds at the soonest, and not when it has ended; the session then goes on as ever."""
    monkeypatch.setattr("engine.session.PERIOD", 0.0)
    with engine.create(device).load(tiny2, "fp32") as session:
        request = DecodeRequest(Bundle(tiny2).prompt, session.context - 9)
        began = time.process_time()
        want = session.decode(request)
        used = time.process_time() - began  # not the wall's time, of which a busy machine takes now more, now less
        before = signal.signal(signal.SIGPROF, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_PROF, used / 4)
            with pytest.raises(KeyboardInterrupt):
                session.decode(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        assert session.length < 9 + len(want.tokens)
        assert session.decode(request).tokens == want.tokens


def test_ar_heeds_nothing_that_is_a_trees(session: CsrcSession, tiny2: Path, precision: str) -> None:
    """Costs above all, for which a decode of trees before had room or had not."""
    bundle = Bundle(tiny2)
    want = session.decode(bundle.request(precision)).tokens
    of_trees = {"block_size": 0, "budget": 10**6, "chain": True, "costs": [1.0] * 5000}
    assert session.decode(bundle.request(precision, **of_trees)).tokens == want
    assert session.decode(bundle.request(precision, "noisy", costs=[1.0] * 8, budget=7)).tokens == want
    assert session.decode(bundle.request(precision, **of_trees)).tokens == want


def test_a_stream_that_was_overtaken_says_so(session: CsrcSession, tiny2: Path) -> None:
    bundle = Bundle(tiny2)
    stream = session.stream(bundle.request())
    next(stream)
    session.step(1)
    with pytest.raises(RequestError, match="ended by another call"):
        next(stream)
    dropped = session.stream(bundle.request())
    next(dropped)
    dropped.close()
    assert session.decode(bundle.request()).tokens


def test_no_tokens_asked_for(session: CsrcSession, tiny2: Path) -> None:
    got = session.decode(Bundle(tiny2).request(max_tokens=0))
    assert (got.tokens, got.forwards, got.stopped) == ((), 0, "limit")
    assert got.logits is not None
    assert got.logits.shape == (1, session.vocab)


def test_draft_tables_that_miss_the_positions(session: CsrcSession, tiny2: Path, precision: str) -> None:
    """A table that starts late, ends early or is empty cuts the trees and changes nothing else."""
    bundle = Bundle(tiny2)
    want = session.decode(bundle.request(precision)).tokens
    oracle = bundle.draft(precision, "oracle")
    for draft in (
        Draft(oracle.logits[3:], oracle.first + 3),
        Draft(oracle.logits[:4], oracle.first),
        Draft(oracle.logits[:0], oracle.first),
        Draft(oracle.logits, oracle.first - 10**6),
        Draft(oracle.logits, -5),
    ):
        assert session.decode(bundle.request(precision, "oracle", draft=draft)).tokens == want


def test_taps(device: str, tiny2: Path, precision: str) -> None:
    """All names with their shapes, against the goldens, and the same bits in one chunk and in several."""
    bundle = Bundle(tiny2)
    tokens = [*bundle.prompt, *bundle.tokens(precision)]
    found = []
    for max_rows in (65, 4):
        with engine.create(device).load(tiny2, precision, max_rows=max_rows) as session:
            found.append(session.taps(tokens, operations=True))
            logits = session.taps(tokens)
            assert set(logits) == {"embed", "logits", *(f"layers.{i}.out" for i in range(session.layers))}
            session.reset()
            same_bits(session.prefill(tokens), logits["logits"], "logits of a prefill, [row, token]")
    assert {k: v.tobytes() for k, v in found[0].items()} == {k: v.tobytes() for k, v in found[1].items()}
    dense = int(bundle.file.fields["first_k_dense"])
    for i in range(int(bundle.file.fields["num_layers"])):
        names = {t for t in OPERATION_TAPS if t.startswith("mla.") or (t.startswith("mlp.") == (i < dense))}
        if not bundle.file.fields["n_shared_experts"]:
            names.discard("moe.shared_act")
        prefix = f"layers.{i}."
        assert {k.removeprefix(prefix) for k in found[0] if k.startswith(prefix)} == {*names, "out"}
    for name, array in found[0].items():
        golden = f"golden.{precision}.taps.{name}"
        if golden in bundle.file.tensors:
            assert np.abs(array - bundle.file.tensor(golden)).max() < 1e-5


def test_memory_is_counted_and_given_back(device: str, tiny: Path) -> None:
    with engine.create(device).load(tiny, "fp32") as session:
        held, peak = session.memory()
        assert 0 < held <= peak
        bundle = Bundle(tiny)
        session.decode(bundle.request("fp32", "oracle"))
        grown = session.memory()[0]
        session.decode(bundle.request("fp32", "oracle"))
        assert session.memory()[0] == grown, "a second decode needs no more than the first"
