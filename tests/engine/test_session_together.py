"""Sessions side by side: threads, closing, and a forked process."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import Bundle

import engine
from engine.library import library
from harness.bundles import ensure
from harness.protocol import RequestError
from tests import processes
from tests.waiting import until


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
