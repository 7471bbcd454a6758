"""The benched calls compute what their case says: results of the tiny cases against float64 in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.bench.cases import KINDS, Case, cases, choose
from harness.bench.operands import Bench
from harness.environment import survey

F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module", params=["cpu"] if survey().reason else ["cpu", "cuda"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    with Bench(str(request.param)) as opened:
        yield opened


def one(pattern: str) -> Case:
    found = choose(cases("cpu"), [pattern])
    assert len(found) == 1, pattern
    return found[0]


def run(bench: Bench, case: Case) -> list[Any]:
    """The arguments of the second copy after its call, as numpy arrays in float64 where they were f32."""
    made = bench.calls(case, 1)
    assert len(made.calls) == 2
    made.calls[1]()
    return [_numpy(item) for item in made.arguments[1]]


def _numpy(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return [_numpy(part) for part in item]
    if not hasattr(item, "cpu"):
        return item
    array = item.cpu().numpy()
    if array.dtype == np.uint16:  # the bits of bf16 numbers
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype == np.float32 else array


def unpacked(nibbles: npt.NDArray[np.uint8]) -> F64:
    """docs/model.md by hand; every scale is 1/64."""
    q = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(*nibbles.shape[:-1], -1).astype(np.float64) - 8
    return np.asarray(q / 64)


def close(got: Any, want: Any) -> None:
    assert np.abs(want).max() > 1e-3, "the result has to be there to be compared"
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 8])
def test_linear(bench: Bench, kind: str, m: int) -> None:
    x, _, _, [w], _, [out], *_ = run(bench, one(f"tiny-linear-{kind}-k64-n128-m{m}"))
    close(out, x @ (unpacked(w) if kind.startswith("int4") else w).T)


def moe(given: list[Any], kind: str) -> F64:
    """What moe adds, from its own arguments; rounded where docs/model.md says so."""
    x, norm, eps, ids, weights, experts, _, shared, *_ = given
    gate, up, down = (unpacked(w) if kind.startswith("int4") else w for w in experts)
    rounded = to_bf16 if kind.endswith("bf16") else np.asarray
    b = rounded(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm)

    def mlp(g: F64, u: F64, d: F64, row: F64) -> F64:
        z = g @ row
        return np.asarray(d @ rounded(z / (1 + np.exp(-z)) * (u @ row)))

    return np.stack(
        [
            mlp(*shared, b[row])
            + sum(w * mlp(gate[e], up[e], down[e], b[row]) for e, w in zip(ids[row], weights[row], strict=True))
            for row in range(8)
        ]
    )


def to_bf16(x: F64) -> F64:
    """The nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def near(got: Any, want: Any, kind: str, share: float = 2e-3) -> None:
    """As `close`; with bf16, f32 sums a rounding away from another bf16 are allowed to be there."""
    if not kind.endswith("bf16"):
        return close(got, want)
    assert np.abs(want).max() > 1e-3
    assert np.linalg.norm(got - want) < share * np.linalg.norm(want)


@pytest.mark.parametrize("kind", KINDS)
def test_moe(bench: Bench, kind: str) -> None:
    given = run(bench, one(f"tiny-moe-{kind}-k64-n32-e16-m8"))
    near(given[10], moe(given, kind), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_moe_block(bench: Bench, kind: str) -> None:
    given = run(bench, one(f"tiny-moe_block-{kind}-k64-n32-e16-m8"))
    x, norm, eps, w, _, logits, ids, weights = given[:8]
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    near(logits, (to_bf16(normed) if kind.endswith("bf16") else normed) @ w.T, kind)
    assert ids.tolist() == np.argsort(-logits, axis=-1)[:, :4].tolist()
    near(given[18], moe([*given[:3], ids, weights, *given[13:]], kind), kind)


def test_a_sequence_is_its_calls(bench: Bench) -> None:
    """Noted calls do nothing until the sequence runs, as often as it runs; a second one cannot begin meanwhile."""
    case = one("tiny-linear-f32-k64-n128-m8")
    made = bench.calls(case, 1)
    for given in made.arguments:
        given[6] = 1  # the product is added to what is there
    sequence = bench.lib.sequence_begin(bench.handle)
    for call in made.calls:
        call()
    with pytest.raises(RuntimeError, match="another sequence"):
        bench.lib.sequence_begin(bench.handle)
    bench.lib.sequence_end(bench.handle)
    outs = [given[5][0] for given in made.arguments]
    assert not any(out.any() for out in outs)
    once = []
    for times in (1, 2):
        bench.lib.sequence_run(bench.handle, sequence)
        bench.calls(one("tiny-tree_root-m1"), 1).calls[0]()  # waits for what was launched before
        now = [_numpy(out) for out in outs]
        once = once or now
        for first, out in zip(once, now, strict=True):
            close(out, times * first)
    bench.lib.sequence_drop(bench.handle, sequence)
    with pytest.raises(RuntimeError, match="there is none such"):
        bench.lib.sequence_run(bench.handle, sequence)


@pytest.mark.parametrize("kind", ["", "bf16-"])
def test_mla_attention_over_the_tree(bench: Bench, kind: str) -> None:
    case = one(f"tiny-mla_attention-{kind}t64-h4-m8")
    _, scale, q, q_rope, latent, k_rope, out, _, rows, _ = run(bench, case)
    for row in range(8):
        path = [int(at) for at in rows[3][row, : rows[2][row] + 1]]
        seen = [*range(64), *(64 + at for at in path)]
        score = scale * (q[row] @ latent[seen].T + q_rope[row] @ k_rope[seen].T)
        p = np.exp(score - score.max(-1, keepdims=True))
        near(out[row], p / p.sum(-1, keepdims=True) @ latent[seen], kind.rstrip("-"), 4e-3)


@pytest.mark.parametrize("kind", ["", "bf16-"])
def test_mla_attention_without_its_tree(bench: Bench, kind: str) -> None:
    """The same number of keys in `no-tree` as in the tree, none of the step's rows' own keys in either."""
    case = one(f"tiny-mla_attention-{kind}t64-h4-m8")
    made = bench.calls(case, 1)
    _, scale, q, q_rope, latent, k_rope, _, _, rows, _ = (_numpy(item) for item in made.arguments[1])
    seen = {"no-tree": 64 + rows[2] + 1, "dense": np.full(8, 64)}
    bare = bench.without_tree(case, made)
    assert list(bare) == list(seen)
    for name, calls in bare.items():
        calls[1]()
        out = _numpy(made.arguments[1][6])
        for row, keys in enumerate(seen[name]):
            score = scale * (q[row] @ latent[:keys].T + q_rope[row] @ k_rope[:keys].T)
            p = np.exp(score - score.max(-1, keepdims=True))
            near(out[row], p / p.sum(-1, keepdims=True) @ latent[:keys], kind.rstrip("-"), 4e-3)
    assert not bench.without_tree(one("tiny-mla_attention-t64-h4-m1"), made)
    assert not bench.without_tree(one("tiny-linear-f32-k64-n128-m8"), made)


def test_mla_prepare_absorbs_the_query(bench: Bench) -> None:
    case = one("tiny-mla_prepare-t64-h4-m8")
    given = run(bench, case)
    q = given[1].reshape(8, case.heads, case.nope + case.rope)[..., : case.nope]
    up = given[5].reshape(case.heads, case.nope + case.v, case.rank)[:, : case.nope]
    close(given[7], np.einsum("mhn,hnr->mhr", q, up))


def test_mla_value(bench: Bench) -> None:
    case = one("tiny-mla_value-h4-m8")
    _, o_lat, up, out, _ = run(bench, case)
    w = up.reshape(case.heads, case.nope + case.v, case.rank)[:, case.nope :]
    close(out, np.einsum("mhr,hvr->mhv", o_lat, w).reshape(8, -1))


def test_select_embed_and_norm(bench: Bench) -> None:
    logits, _, choice, *_ = run(bench, one("tiny-select-n512-m8"))
    assert choice.tolist() == logits.argmax(-1).tolist()
    out, table, rows, _ = run(bench, one("tiny-embed-k64-m8"))
    assert np.array_equal(out, table[rows[0]])
    out, x, w, eps, _ = run(bench, one("tiny-rms_norm-k64-m8"))
    close(out, x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w)


def test_router_chooses_the_best(bench: Bench) -> None:
    logits, bias, ids, weights, *_ = run(bench, one("tiny-router-e16-m8"))
    score = 1 / (1 + np.exp(-logits))
    best = np.argsort(-(score + bias), axis=-1)[:, :4]
    assert ids.tolist() == best.tolist()
    close(weights.sum(-1), np.full(8, 2.827))


def test_draft_attention_over_context_and_block(bench: Bench) -> None:
    case = one("tiny-draft_attention-t64-h8-m8")
    (heads, groups, w), q, keys, values, out, _ = run(bench, case)
    k, v = (np.repeat(x.reshape(72, groups, w), heads // groups, axis=1) for x in (keys, values))
    score = np.einsum("mhw,thw->mht", q.reshape(8, heads, w), k) / np.sqrt(w)
    p = np.exp(score - score.max(-1, keepdims=True))
    close(out.reshape(8, heads, w), np.einsum("mht,thw->mhw", p / p.sum(-1, keepdims=True), v))


def test_a_drafters_rows(bench: Bench) -> None:
    out, _, src, index, _ = run(bench, one("tiny-gather_rows-k64-m8"))
    assert np.array_equal(out, src[index])
    tokens, mask, _ = run(bench, one("tiny-draft_block-m8"))
    assert tokens.tolist() == [0] + [mask] * 7
    (heads, _, w), q, *_ = run(bench, one("tiny-draft_prepare-t64-h8-m8"))
    assert np.isfinite(q).all()
    assert q.shape == (8, heads * w)


def test_the_tree_is_as_large_as_its_budget(bench: Bench) -> None:
    *_, rows, scores, state = run(bench, one("tiny-tree_build-n512-l7-b7-m8"))
    assert state[1] == 8
    assert (np.diff(scores[1:]) <= 0).all()
    assert (rows[1][1:] < np.arange(1, 8)).all()


def test_accept_walks_down_and_the_other_logs_write(bench: Bench) -> None:
    _, _, _, accepted, out, state = run(bench, one("tiny-accept-m8"))
    assert (out[0], accepted[:4].tolist()) == (4, [0, 1, 3, 7])
    assert (state[8], state[5]) == (0, 0), "no fault, and not done"
    dst, src, *_ = run(bench, one("tiny-record-n512-m8"))
    assert np.array_equal(dst, src)
    log, *_ = run(bench, one("tiny-record_tree-m8"))
    assert log[0, :2].tolist() == [8, 8]
    [tokens, *_], _ = run(bench, one("tiny-tree_root-m1"))
    assert tokens.tolist() == [0]


def test_kv_commit_moves_rows(bench: Bench) -> None:
    case = one("tiny-kv_commit-t64-layers6-m8")
    made = bench.calls(case, 1)
    before = [_numpy(latent) for latent in made.arguments[1][0]]
    made.calls[1]()
    for was, now in zip(before, made.arguments[1][0], strict=True):
        assert np.array_equal(_numpy(now)[64:68], was[64:72:2])
        assert np.array_equal(_numpy(now)[:64], was[:64])


def test_copies_exceed_what_they_have_to(bench: Bench) -> None:
    case = one("tiny-linear-f32-k64-n128-m1")
    made = bench.calls(case, 10 * made_bytes(case) + 1)
    assert len(made.calls) == 11
    weights = {arguments[3][0].data_ptr() for arguments in made.arguments}
    assert len(weights) == 11, "each call has memory of its own"


def made_bytes(case: Case) -> int:
    return case.K * case.N * 4


@pytest.mark.parametrize("case", choose(cases("cpu"), ["tiny"]), ids=lambda case: case.name)
def test_every_tiny_case_runs_twice_without_a_fault(bench: Bench, case: Case) -> None:
    made = bench.calls(case, 1)
    for _ in range(2):
        for call in made.calls:
            call()
    for arguments in made.arguments:
        last = arguments[-1] if hasattr(arguments[-1], "shape") else arguments[-2]  # what follows is the numerics
        state = _numpy(last)
        assert state.shape == (16,)
        assert (state[8], state[5]) == (0, 0)
