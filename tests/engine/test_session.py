"""Sessions: AR against the goldens, DDTree against AR to the bit, trees and commits by hand, streams, many at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import Array, Bundle, changed

import engine
from engine.library import library
from engine.session import CsrcEngine, CsrcSession
from harness.bundles import ensure
from harness.protocol import F32, OPERATION_TAPS, DecodeRequest, DeviceError, Draft, Engine, RequestError, Session
from refs.model import Model
from refs.sampling import choose
from tests import processes
from tests.fuzz.seeds import CORPUS
from tests.waiting import until

TREE = [-1, 0, 0, 1, 1, 2, 3, 6, 0]


@pytest.fixture(params=["fp32", "int4"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(device: str, tiny2: Path, precision: str) -> Iterator[CsrcSession]:
    """`tiny2` with poisoned memory, whose guards must be whole at the end."""
    with engine.create(device).load(tiny2, precision, poison=True) as opened:
        yield opened
        assert opened.broken_guard() == ""


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
    assert tree.logits.tobytes() == ar.logits.tobytes()
    assert sum(tree.accepted_per_round) == len(ar.tokens)
    assert tree.forwards == len(tree.rounds) == len(tree.accepted_per_round)
    for i, (latent, k_rope) in enumerate(cache):
        after = session.cache(i)
        assert (after[0].tobytes(), after[1].tobytes()) == (latent.tobytes(), k_rope.tobytes())


def test_prefill_in_one_go_or_in_pieces_or_by_steps(device: str, tiny2: Path, precision: str) -> None:
    """The same bits for max_rows 1, 3 and 65, and for prefill, step and verify with commit."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, Bundle(tiny2).vocab, 70)]
    results = set()
    for max_rows in (1, 3, 65):
        with engine.create(device).load(tiny2, precision, max_rows=max_rows, poison=True) as session:
            results.add(session.prefill(tokens).tobytes())
            session.reset()
            first = session.prefill(tokens[:40])
            results.add(np.concatenate([first, session.prefill(tokens[40:])]).tobytes())
            session.reset()
            results.add(np.stack([session.step(t) for t in tokens]).tobytes())
            assert session.length == 70
    assert len(results) == 1


def test_a_decode_does_not_depend_on_how_its_prompt_is_cut(device: str, tiny2: Path) -> None:
    """Pieces of one row, of several with a shorter last one, of as many as fill the prompt exactly, and all at once."""
    bundle = Bundle(tiny2)
    assert len(bundle.prompt) == 9
    results = set()
    for max_rows in (1, 3, 4, 9, 65):
        with engine.create(device).load(tiny2, "int4", max_rows=max_rows, poison=True) as session:
            done = session.decode(bundle.request("int4"))
            assert done.logits is not None
            results.add((done.tokens, done.logits.tobytes()))
    assert len(results) == 1


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
    assert np.stack(want).tobytes() == got[[0, 1, 3, 6]].tobytes()
    for i, (latent, k_rope) in enumerate(caches):
        again = session.cache(i)
        assert (again[0].tobytes(), again[1].tobytes()) == (latent.tobytes(), k_rope.tobytes())
    assert session.step(5).tobytes() == after.tobytes()


@pytest.mark.parametrize("committed", [0, 1, 63, 64])
def test_every_verify_width_has_ars_bits(device: str, tiny2: Path, precision: str, committed: int) -> None:
    """Widths 1..65 as random trees; every row against a session that ran its path token by token."""
    rng = np.random.default_rng(committed)
    vocab = Bundle(tiny2).vocab
    prompt = rng.integers(0, vocab, committed).tolist()
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, 65))]
    tokens = rng.integers(0, vocab, 65).tolist()
    with engine.create(device).load(tiny2, precision, poison=True) as session:
        if prompt:
            session.prefill(prompt)
        want = session.verify(tokens, parents)
        for width in range(1, 66):
            assert session.verify(tokens[:width], parents[:width]).tobytes() == want[:width].tobytes(), f"width {width}"
        for row in (0, 1, 2, 17, 40, 64):
            path = [row]
            while path[0]:
                path.insert(0, parents[path[0]])
            session.reset()
            if prompt:
                session.prefill(prompt)
            for r in path:
                last = session.step(tokens[r])
            assert last.tobytes() == want[row].tobytes(), f"row {row}"


def test_graphs_and_poison_do_not_show(device: str, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    results = set()
    for graphs in (True, False):
        for poison in (True, False):
            with engine.create(device).load(tiny2, precision, poison=poison, graphs=graphs) as session:
                for _ in range(2):
                    got = session.decode(bundle.request(precision, "noisy"))
                    assert got.logits is not None
                    results.add(got.logits.tobytes())
    assert len(results) == 1


def test_threads_and_instruction_sets_do_not_show(monkeypatch: pytest.MonkeyPatch, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    results = set()
    for threads, isa in [(n, "") for n in (1, 2, 3)] + [(1, name) for name in library("cpu").isa_names().split()]:
        monkeypatch.setenv("KDTREE_THREADS", str(threads))
        monkeypatch.setenv("KDTREE_ISA", isa)
        with engine.create("cpu").load(tiny2, precision) as session:
            got = session.decode(bundle.request(precision, "noisy", max_tokens=6))
            assert got.logits is not None
            results.add(got.logits.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "4x", " "])
def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch, tiny2: Path, text: str) -> None:
    monkeypatch.setenv("KDTREE_THREADS", text)
    with pytest.raises(DeviceError, match=f"KDTREE_THREADS={text}: is no number of threads"):
        engine.create("cpu").load(tiny2, "int4")


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


def test_sessions_side_by_side(device: str, tiny: Path, tiny2: Path) -> None:
    """Two files, both precisions, interleaved streams and concurrent threads: nobody disturbs the other."""
    made = engine.create(device)
    opened = [(made.load(p, precision), Bundle(p), precision) for p in (tiny, tiny2) for precision in ("fp32", "int4")]
    want = [session.decode(bundle.request(precision, "noisy")) for session, bundle, precision in opened]
    streams = [session.stream(bundle.request(precision, "noisy")) for session, bundle, precision in opened]
    got: list[list[int]] = [[] for _ in streams]
    for _ in range(40):
        for tokens, stream in zip(got, streams, strict=True):
            tokens += [token for _, token in zip(range(1), stream, strict=False)]
    assert [tuple(tokens) for tokens in got] == [w.tokens for w in want]

    def work(i: int) -> bool:
        session, bundle, precision = opened[i % 4]
        results = [session.decode(bundle.request(precision, "noisy")).logits for _ in range(5)]
        return all(np.array_equal(got, want[i % 4].logits) for got in results if got is not None) and len(results) == 5

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    for session, _, _ in opened:
        session.close()
        with pytest.raises(RequestError, match="closed"):
            session.reset()


def test_a_session_may_be_closed_while_others_wait_for_their_turn(device: str, tiny: Path) -> None:
    """A call that found the session and then waited for the one before it still has it; the next one has it no more."""
    ops = library(device)

    def work(handle: int) -> str:
        try:
            while True:
                ops.session_length(handle)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            session = engine.create(device).load(tiny, "fp32", context=8, max_rows=1)
            said = [pool.submit(work, session._handle) for _ in range(4)]
            session.close()
            assert all("the session is closed" in future.result() for future in said)


def test_a_cache_is_read_in_one_turn(device: str, tiny: Path) -> None:
    """Its length belongs to its rows: who wants to forget them meanwhile waits."""
    with engine.create(device).load(tiny, "fp32", context=32, max_rows=8) as session:
        session.prefill([1, 2, 3])
        want = session.cache(0)[0].tobytes()
        ops = session._ops
        other = threading.Thread(target=session.reset)

        class Between:
            """The engine's calls; after one for the length another thread asks for a reset."""

            def __getattr__(self, name: str) -> Any:
                return getattr(ops, name)

            def session_length(self, handle: int) -> int:
                length = int(ops.session_length(handle))
                other.start()
                other.join(0.1)
                return length

        session._ops = Between()
        assert session.cache(0)[0].tobytes() == want
        session._ops = ops
        other.join()
        assert session.length == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.skipif(os.environ.get("KDTREE_SANITIZE") == "thread", reason="ThreadSanitizer follows no fork")
def test_a_forked_process_may_go_on_with_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads of its own, as those of the parent are not there; and it may close them."""
    monkeypatch.setenv("KDTREE_THREADS", "2")
    path = ensure(["text"])["text"]
    prompt = Bundle(path).prompt
    with engine.create("cpu").load(path, "fp32", max_rows=16) as session:
        want = session.prefill(prompt[:16]).tobytes()
        if (child := os.fork()) == 0:
            session.reset()
            same = session.prefill(prompt[:16]).tobytes() == want
            session.close()
            os._exit(0 if same else 1)
        try:
            until(lambda: not processes.alive(child))
        finally:
            processes.tell(child)
            status = os.waitpid(child, 0)[1]
        assert status == 0, "other bits"
        session.reset()
        assert session.prefill(prompt[:16]).tobytes() == want


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
            assert session.prefill(tokens).tobytes() == logits["logits"].tobytes()
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


@pytest.mark.parametrize(
    ("fast", "slow", "why"),
    [
        (11.0, 10.5, "both ends round to pair 0: they are equal"),
        (32.0, 1e-7, "the upper end lies beyond the last dimension"),
        (4e-7, 1e-7, "both ends lie beyond it"),
    ],
)
def test_the_ramp_of_yarn_at_its_edges(
    device: str, tiny: Path, tmp_path: Path, fast: float, slow: float, why: str
) -> None:
    path = changed(tiny, tmp_path / "yarn.kdtr", fields={"rope_beta_fast": fast, "rope_beta_slow": slow})
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, Bundle(tiny).vocab, 40)]
    want = Model.open(path, "fp32").taps(tokens, operations=True)["layers.0.mla.k_rope"]
    usual = Model.open(tiny, "fp32").taps(tokens, operations=True)["layers.0.mla.k_rope"]
    assert np.abs(want - usual).max() > 0.1, "the test could not tell this ramp from the usual one"
    with engine.create(device).load(path, "fp32") as session:
        got = session.taps(tokens, operations=True)["layers.0.mla.k_rope"]
    np.testing.assert_allclose(got, want, atol=5e-5, err_msg=why)


@pytest.mark.slow
def test_positions_far_out_rotate_by_their_angle(device: str, tmp_path: Path) -> None:
    """A context beyond what the host computes angles for at a time: the cached keys tell every position's angle."""
    length = 8192 + 40
    fields: dict[str, float] = {"max_context": length, "rope_factor": 1.0}
    path = changed(CORPUS / "seed-dense", tmp_path / "long.kdtr", fields=fields)
    with engine.create(device).load(path, "fp32", max_rows=512) as session:
        session.prefill([1] * length)
        k_rope = session.cache(0)[1].astype(np.float64)
    pairs = k_rope[:, 0] + 1j * k_rope[:, 1]  # one pair, whose frequency is 1
    want = pairs[0] * np.exp(1j * np.arange(length))  # every row of the embedding is alike
    assert abs(pairs[0]) > 0.1
    assert np.abs(pairs - want).max() < 2e-6 * abs(pairs[0])
