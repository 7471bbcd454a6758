"""What ranks do together: their operations, and sessions shared by them - one rank's bits, decisions taken once."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from engine_ops import Ops
from together import Together

import engine
from engine.ranks.arena import Arena
from engine.ranks.exchange import MIB, REGISTERED, registered_bytes
from engine.ranks.member import member
from engine.session import CsrcEngine, CsrcSession
from harness.bundles import ensure
from harness.golden import Golden
from harness.matrix import PRECISIONS
from harness.protocol import F32, ConfigError, RankDiverged, RequestError, TokenError


@pytest.fixture(scope="module")
def bundle() -> Path:
    return ensure(["tiny"])["tiny"]


@pytest.fixture
def one(bundle: Path, precision: str) -> Iterator[CsrcSession]:
    with engine.create("cpu").load(bundle, precision, poison=True) as session:
        yield session  # type: ignore[misc]


def same(a: F32, b: F32) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


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
    ops.call("unshard", ops.tensor(src), outs, [0, offset], [per_row, 1], rows, ops.state(active))
    for part, out, each in ((first, outs[0], per_row), (second, outs[1], 1)):
        want = np.moveaxis(part, 0, 2).reshape(rows * each, -1)
        got = out.cpu().numpy()
        assert np.array_equal(got[: active * each], want[: active * each])
        assert (got[active * each :] == 0xFF).all()


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
    values = np.random.default_rng(3).integers(0, 2**32, (9, 613), np.uint32)
    for active in (1, 4, 9):
        out = ops.tensor(np.array([5, 0], np.int32))
        ops.call("checksum", out, ops.tensor(values.view(np.int32)), ops.state(active))
        got = out.cpu().numpy().view(np.uint32).astype(object)
        assert int(got[0] + (got[1] << 32)) == (5 + terms(values[:active])) % 2**64


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


@pytest.mark.parametrize("lend", [1 << 22, 1 << 10])
def test_memory_of_the_transport_is_used_where_it_reaches(bundle: Path, lend: int) -> None:
    golden = Golden.open(bundle, "int4")
    with Together(bundle, "int4", 2, lend=lend) as many:
        decoded = many.call("decode", golden.request("noisy"))
        assert [each.tokens for each in decoded] == [golden.tokens] * 2
        with engine.create("cpu").load(bundle, "int4") as one:
            assert same(decoded[1].logits, one.decode(golden.request("noisy")).logits)
        assert (many.exchange.arenas[0].take(lend, 2) == 0) == (lend > 1 << 10)
        with Together(bundle, "int4", 2) as plain:  # what is lent is counted as what is allocated
            plain.call("decode", golden.request("noisy"))
            assert many.sessions[0].memory()[0] == plain.sessions[0].memory()[0]


@pytest.mark.parametrize(
    ("text", "local", "mib"), [(None, "2", MIB), (None, "1", 0), ("0", "2", 0), ("64", "1", 64), ("64", "2", 64)]
)
def test_memory_that_nccl_knows(monkeypatch: pytest.MonkeyPatch, text: str | None, local: str, mib: int) -> None:
    """Only ranks of one host have it unasked."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.delenv(REGISTERED, raising=False)
    if text is not None:
        monkeypatch.setenv(REGISTERED, text)
    assert registered_bytes() == mib << 20


@pytest.mark.parametrize("text", ["", "-1", "many", "65537", "1.5", "\u0663"])
def test_memory_that_is_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(REGISTERED, text)
    with pytest.raises(ConfigError, match=REGISTERED):
        registered_bytes()


def test_an_arena_fills_its_gaps() -> None:
    arena = Arena(4096, 1024)
    first, second, third = (arena.take(size, owner) for size, owner in ((200, 1), (300, 2), (100, 3)))
    assert (first, second, third) == (4096, 4096 + 256, 4096 + 768)
    assert arena.take(300, 4) == 0
    arena.give_back(2)
    assert arena.take(512, 4) == 4096 + 256
    assert arena.take(1, 4) == 0


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
