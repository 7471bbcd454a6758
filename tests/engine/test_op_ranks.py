"""What ranks do together: their operations, and sessions shared by them - one rank's bits, decisions taken once."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_ops import Ops, devices
from together import Together

import engine
from engine.library import named_errors
from engine.ranks.exchange import MIB, MOST, WINDOW, gpus_of_ranks, window_bytes
from engine.ranks.member import member
from engine.session import CsrcEngine, CsrcSession
from harness.bench.share import COUNTERS, own_window
from harness.bundles import ensure
from harness.golden import Golden
from harness.gpu_share import SHARE
from harness.matrix import PRECISIONS
from harness.protocol import F32, ConfigError, DeviceError, RankDiverged, RankError, RequestError, TokenError


@pytest.fixture(scope="module")
def bundle() -> Path:
    return ensure(["tiny"])["tiny"]


@pytest.fixture
def one(bundle: Path, precision: str) -> Iterator[CsrcSession]:
    with engine.create("cpu").load(bundle, precision, poison=True) as session:
        yield session  # type: ignore[misc]


def same(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_a_window_is_for_as_many_ranks_as_the_engine_has_places() -> None:
    """Where windows are chosen and where they are opened, the limit is one number."""
    with Ops("cpu") as ops:
        window = ops.empty(64, dtype=np.uint8)
        ops.call("open_window", 0, [window.data_ptr()] * MOST, 64, 1.0)
        with pytest.raises(RequestError, match=rf"windows: {MOST + 1} ranks, .* {MOST} at most: set {WINDOW}=0"):
            ops.call("open_window", 0, [window.data_ptr()] * (MOST + 1), 64, 1.0)


@pytest.mark.parametrize(
    ("ranks", "bytes", "per_row", "active"), [(2, 32, 1, 5), (3, 6, 4, 3), (4, 20, 2, 7), (8, 1024, 1, 1)]
)
def test_unshard_puts_the_ranks_rows_side_by_side(ops: Ops, ranks: int, bytes: int, per_row: int, active: int) -> None:
    """Two parts of other sizes, against numpy; rows that do not count keep what they had."""
    rows, other = 7, 2 * bytes
    rng = np.random.default_rng(ranks)
    first = rng.integers(0, 256, (ranks, rows, per_row, bytes), np.uint8)
    second = rng.integers(0, 256, (ranks, rows, 1, other), np.uint8)
    src = np.concatenate([part.reshape(ranks, -1) for part in (first, second)], axis=1)
    outs = [ops.empty(rows * per_row, ranks * bytes, dtype=np.uint8), ops.empty(rows, ranks * other, dtype=np.uint8)]
    offset = rows * per_row * bytes
    ops.call("unshard", ops.tensor(src), outs, [0, offset], [per_row, 1], rows, ops.state(active), ranks, 0)
    for part, out, each in ((first, outs[0], per_row), (second, outs[1], 1)):
        want = np.moveaxis(part, 0, 2).reshape(rows * each, -1)
        got = out.cpu().numpy()
        assert np.array_equal(got[: active * each], want[: active * each])
        assert (got[active * each :] == 0xFF).all()


OWN, LEAD = 1, 2


class Peers:
    """Ranks of an exchange as backends of one GPU, a thread each, as a launch waits for those of the others."""

    def __init__(self, count: int, size: int, seconds: float) -> None:
        import torch

        self.ranks = [Ops("cuda", poison=False) for _ in range(count)]
        self.windows = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self.state = self.ranks[0].state(1)
        self._pool, self._synchronize = ThreadPoolExecutor(count), torch.cuda.synchronize
        for rank, ops in enumerate(self.ranks):
            ops.call("open_window", rank, [window.data_ptr() for window in self.windows], size, seconds)

    def exchange(self, calls: Sequence[tuple[Any, ...]], which: Sequence[int] | None = None) -> None:
        """``calls``: of every rank, the arguments of as many `unshard` as there are; ``which`` ranks take part."""
        self._synchronize()

        def made(rank: int) -> None:
            with named_errors():
                for call in calls[rank]:
                    self.ranks[rank].lib.unshard(self.ranks[rank].handle, *call)

        for done in [self._pool.submit(made, rank) for rank in which or range(len(self.ranks))]:
            done.result()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for ops in self.ranks:
            ops.close()


@pytest.mark.skipif("cuda" not in devices(), reason="exchanges by kernels are the CUDA backend's")
@pytest.mark.parametrize("count", [2, 3])
def test_cuda_ranks_exchange_through_their_windows(count: int) -> None:
    """Rows of two parts, in units of 16, 4 and 2 bytes, more than the grid has threads, and the lead's alone; often, so
    that both halves of the windows are used over and over by exchanges of other sizes."""
    rng = np.random.default_rng(count)
    with Peers(count, 8 << 20, 20.0) as peers:
        make = peers.ranks[0]
        calls: list[list[tuple[Any, ...]]] = [[] for _ in range(count)]
        wanted: list[tuple[Any, npt.NDArray[np.uint8]]] = []
        for rows, each, first, second in [
            (1, 1, 16, 32),
            (5, 3, 6, 2),
            (7, 2, 20, 12),
            (33, 9, 2048, 1024),
            (1, 1, 4, 4),
        ]:
            parts = [
                rng.integers(0, 256, (count, rows * n, width), np.uint8) for n, width in ((each, first), (1, second))
            ]
            for rank in range(count):
                src = make.tensor(np.concatenate([part[rank].reshape(1, -1) for part in parts], axis=1))
                outs = [make.empty(p.shape[1], count * p.shape[2], dtype=np.uint8) for p in parts]
                calls[rank].append((src, outs, [0, parts[0][rank].size], [each, 1], rows, peers.state, count, OWN))
                wanted += [
                    (out, np.moveaxis(p, 0, 1).reshape(p.shape[1], -1)) for out, p in zip(outs, parts, strict=True)
                ]
        told = rng.integers(0, 256, (count, 1, 1348), np.uint8)
        for rank in range(count):
            both = make.tensor(told[rank])  # in place, as a broadcast is
            calls[rank].append((both, [both], [0], [1], 1, peers.state, count, LEAD))
            wanted.append((both, told[0]))
        for _ in range(20):
            for out, _want in wanted[:-count]:
                out.fill_(0xFF)
            peers.exchange(calls)
            assert [i for i, (out, want) in enumerate(wanted) if not np.array_equal(out.cpu().numpy(), want)] == []


@pytest.mark.skipif("cuda" not in devices(), reason="exchanges by kernels are the CUDA backend's")
def test_cuda_a_rank_that_does_not_come_to_an_exchange() -> None:
    """The others give up, and at once from then on; what they had stays."""
    with Peers(2, 1 << 20, 0.5) as peers:
        out = peers.ranks[0].empty(1, 64, dtype=np.uint8)
        call = (peers.ranks[0].tensor(np.zeros((1, 32), np.uint8)), [out], [0], [1], 1, peers.state, 2, OWN)
        for least, most in ((0.4, 10.0), (0.0, 0.4)):
            start = time.monotonic()
            with pytest.raises(RankError, match="rank 0 of 2: another rank is gone, or did not come"):
                peers.exchange([[call]], [0])
            assert least <= time.monotonic() - start <= most
        assert out.cpu().numpy()[0].tolist() == [0] * 32 + [0xFF] * 32


def terms(words: npt.NDArray[np.uint32]) -> int:
    """The checksum as csrc/checksum.h has it, in Python's integers."""
    total = 0
    for place, word in enumerate(words.reshape(-1).tolist()):
        h = (word + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        for _ in range(2):
            h = ((h ^ h >> 32) * 0xD6E8FEB86659FD93) % 2**64
        total += h ^ h >> 32
    return total % 2**64


def test_a_checksum_is_that_of_the_rows_that_count(ops: Ops) -> None:
    """Two spans, the second of one row whatever counts."""
    values = np.random.default_rng(3).integers(0, 2**32, (9, 613), np.uint32)
    for active in (1, 4, 9):
        out = ops.tensor(np.array([5, 0], np.int32))
        ops.call("checksum", out, ops.tensor(values.view(np.int32)), ops.state(active))
        got = out.cpu().numpy().view(np.uint32).astype(object)
        assert int(got[0] + (got[1] << 32)) == (5 + terms(values[:active]) + terms(values[:1])) % 2**64


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_rank_has_the_bits_of_one(bundle: Path, one: CsrcSession, precision: str, count: int) -> None:
    golden = Golden.open(bundle, precision)
    request = golden.request("noisy")
    with Together(bundle, precision, count) as many:
        alone = one.decode(request)
        caches = [one.cache(layer) for layer in range(one.layers)]
        for decoded, rank in zip(many.call("decode", request), many.sessions, strict=True):
            assert (decoded.tokens, decoded.rounds) == (alone.tokens, alone.rounds)
            assert same(decoded.logits, alone.logits)
            for layer, (latent, k_rope) in enumerate(caches):
                assert same(rank.cache(layer)[0], latent)
                assert same(rank.cache(layer)[1], k_rope)
            assert rank.broken_guard() == ""
        taps = one.taps(golden.prompt, operations=True)
        for found in many.call("taps", golden.prompt, operations=True):
            assert found.keys() == taps.keys()
            assert [name for name in taps if not same(found[name], taps[name])] == []


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_have_their_part_and_nothing_else(bundle: Path, one: CsrcSession, precision: str) -> None:
    """Block by block the ranks' bytes, one after the other, are the tensor's; what is whole is the same everywhere."""
    with Together(bundle, precision, 2) as many:
        parts = many.call("weights")
        for name, (at, size, count, pitch) in one.weights().items():
            tensor = b"".join(ctypes.string_at(at + block * pitch, size) for block in range(count))
            (first, part, blocks, step), (second, *_) = parts[0][name], parts[1][name]
            if part * blocks == len(tensor):
                assert any(word in name for word in ("norm", "router", "q_a", "kv_a")), name
                assert ctypes.string_at(first, len(tensor)) == ctypes.string_at(second, len(tensor)) == tensor
                continue
            pieces = [ctypes.string_at(rank + b * step, part) for b in range(blocks) for rank in (first, second)]
            assert b"".join(pieces) == tensor, name


def test_a_model_that_cannot_be_shared_is_refused_before_it_is_loaded(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="num_heads: 3 ranks cannot share 4 evenly"):
        Together(bundle, "fp32", 3)


def test_errors_of_a_request_leave_the_ranks_usable(bundle: Path) -> None:
    golden = Golden.open(bundle, "int4")
    with Together(bundle, "int4", 2) as many:
        with pytest.raises(TokenError):
            many.call("step", 10**6)
        with pytest.raises(RequestError):
            many.call("prefill", [])
        assert many.call("decode", golden.request())[1].tokens == golden.tokens


def test_other_logits_on_one_rank_are_noticed_in_their_round(bundle: Path) -> None:
    """A gather that gives one rank other logits: nothing but the checksums of the round can show it."""
    golden = Golden.open(bundle, "int4")
    size = 4 * golden.field("vocab_size")
    armed: list[int] = []

    def spoil(rank: int, at: int, part: int) -> None:
        if rank == 1 and armed and part == size // 2:  # one row of logits, half from each rank
            word = ctypes.c_uint32.from_address(at + 40)
            word.value ^= 1

    with Together(bundle, "int4", 2, spoil=spoil) as many:
        many.call("decode", golden.request())
        armed.append(1)
        with pytest.raises(RankDiverged, match="round 0: the checksum over tokens and logits of rank 1 is not that"):
            many.call("decode", golden.request())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_alone_finds_what_it_sends_as_that_of_all(ranks: int) -> None:
    size = 1 << 20
    window = own_window(4096, size, ranks)
    share = window.addresses[1] - window.addresses[0]
    assert share % 16 == 0
    for rank, to in enumerate(window.addresses):
        assert to == window.addresses[0] + rank * share  # rank 0's words there are rank's words here
    assert 4096 + size - 2 * ranks * 16 < window.addresses[-1] + COUNTERS + (ranks + 1) * share <= 4096 + size


@pytest.mark.skipif("cuda" not in devices(), reason="exchanges by kernels are the CUDA backend's")
@pytest.mark.parametrize("count", [2, 4])
def test_cuda_a_rank_alone_gathers_its_own_part(count: int) -> None:
    import torch

    size, sent = 1 << 20, np.random.default_rng(count).integers(0, 256, (1, 1024), np.uint8)
    ops = Ops("cuda", poison=False)
    room = torch.zeros(size, dtype=torch.uint8, device="cuda")
    window = own_window(room.data_ptr(), size, count)
    torch.cuda.synchronize()
    ops.call("open_window", 0, list(window.addresses), size, 1.0)
    for _ in range(5):
        out = ops.empty(1, count * sent.size, dtype=np.uint8)
        ops.call("unshard", ops.tensor(sent), [out], [0], [1], 1, ops.state(1), count, OWN)
        assert np.array_equal(out.cpu().numpy(), np.tile(sent, count))
    ops.close()


@pytest.mark.parametrize(
    ("text", "local", "mib"), [(None, "2", MIB), (None, "1", 0), ("0", "2", 0), ("64", "1", 0), ("48", "2", 48)]
)
def test_memory_that_all_ranks_write(monkeypatch: pytest.MonkeyPatch, text: str | None, local: str, mib: int) -> None:
    """Only ranks of one host have it unasked."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.delenv(WINDOW, raising=False)
    if text is not None:
        monkeypatch.setenv(WINDOW, text)
    assert window_bytes() == mib << 20


@pytest.mark.parametrize("text", ["", "-1", "many", "65537", "1.5", "\u0663"])
def test_a_window_of_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(WINDOW, text)
    with pytest.raises(ConfigError, match=WINDOW):
        window_bytes()


def test_ranks_share_gpus_only_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv(SHARE, raising=False)
    assert gpus_of_ranks(4) == gpus_of_ranks(8) == (0, 1, 2, 3)
    for allowed, gpus in [("", 3), ("0", 1), ("1", 0)]:
        monkeypatch.setenv(SHARE, allowed)
        with pytest.raises(DeviceError, match=f"4 ranks need 4 GPUs, {gpus} visible; {SHARE}=1"):
            gpus_of_ranks(gpus)
    monkeypatch.setenv(SHARE, "1")
    assert gpus_of_ranks(1) == (0, 0, 0, 0)
    assert gpus_of_ranks(2) == (0, 1, 0, 1)
    assert gpus_of_ranks(4) == (0, 1, 2, 3)


def test_exchanges_of_a_step(bundle: Path) -> None:
    """Four a layer, one for the embedding, one for the logits, one for the checksums; two decisions are handed over."""
    golden = Golden.open(bundle, "int4")
    with Together(bundle, "int4", 2) as many:
        layers = golden.field("num_layers")
        many.call("decode", golden.request(max_tokens=4))
        before = many.exchange.gathers, many.exchange.broadcasts
        many.call("decode", golden.request(max_tokens=5))
        gathers, broadcasts = many.exchange.gathers - before[0], many.exchange.broadcasts - before[1]
        prefill = 1 + 4 * layers + 1, 1
        assert (gathers, broadcasts) == (prefill[0] + 5 * (4 * layers + 3), prefill[1] + 5 * 2)


def test_a_session_keeps_what_it_calls(bundle: Path) -> None:
    """The engine that opened it may go, and with it nobody else holds the functions of the exchanges."""

    def repeat(recv: int, send: int, size: int, stream: int) -> None:
        ctypes.memmove(recv, ctypes.string_at(send, size) * 2, 2 * size)

    place = member(0, 2, repeat, lambda data, size, stream: None)
    seen = weakref.ref(place)
    session = CsrcEngine("cpu", place).load(bundle, "fp32")
    del place
    gc.collect()
    assert seen() is not None
    assert session.prefill([1, 2]).shape == (2, session.vocab)
    session.close()
    del session
    gc.collect()
    assert seen() is None
