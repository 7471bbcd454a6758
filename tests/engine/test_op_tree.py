"""The draft tree against enumeration of every path, lse against numpy to the bit, the walk, compaction and the logs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_operands import draw
from engine_ops import F32, Array, Ops, Rows, same_bits

DRAFT_NON_FINITE = 3
F = np.float32
EDGE = np.linspace(-0.88139, -0.88136, 60, dtype=F)
"""Logits around ln(sqrt(2) - 1), -0.8813736."""


def exp32(x: F32) -> F32:
    """docs/model.md, operation by operation; numpy does not fuse."""
    below = x < F(-87)
    x = np.where(below, F(0), x)
    n = np.rint(x * F(1.44269504))
    r = x - n * F(0.693359375)
    r = r - n * F(-2.12194440e-4)
    p = np.full_like(x, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(c)
    y = p * (r * r)
    y = y + r
    y = y + F(1)
    return np.where(below, F(0), np.ldexp(y, n.astype(np.int32))).astype(F)


def log32(s: F) -> F:
    f, e = np.frexp(F(s))
    if f < F(0.707106781186547524):
        f, e = f + f, e - 1
    z = F(f - F(1))
    p = F(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        p = F(p * z) + F(c)
    q = F(z * z)
    y = F(F(z * q) * p)
    y = y + F(F(e) * F(-2.12194440e-4))
    y = y - F(F(0.5) * q)
    return F(F(z + y) + F(F(e) * F(0.693359375)))


def lse32(row: F32) -> F:
    segments = [row[i : i + 4096] for i in range(0, len(row), 4096)]
    tops = [s.max() for s in segments]
    top, total = max(tops), F(0)
    for segment, m in zip(segments, tops, strict=True):
        if m == -np.inf:
            continue
        lane = np.zeros(256, F)
        for i in range(0, len(segment), 256):
            part = segment[i : i + 256]
            lane[: len(part)] += exp32(part - m)
        for h in (128, 64, 32, 16, 8, 4, 2, 1):
            lane[:h] += lane[h : 2 * h]
        total = F(total + F(lane[0] * exp32(np.array([m - top], F))[0]))
    return F(top + log32(total))


def test_the_oracle_is_a_log_sum_exp() -> None:
    for n in (1, 7, 300, 5000, 9000):
        row = draw(np.random.default_rng(n), n) * 4
        want = np.log(np.exp(row.astype(np.float64)).sum())
        assert abs(float(lse32(row)) - want) < 2e-6 * max(1, abs(want))


class Built:
    """What tree_build wrote."""

    def __init__(
        self,
        ops: Ops,
        draft: F32,
        budget: int,
        *,
        block: int | None = None,
        max_rows: int | None = None,
        chain: bool = False,
        costs: Sequence[float] = (),
        **state: int,
    ) -> None:
        block = block or len(draft) + 1
        size = max_rows or budget + 1
        stride = max(block, size)
        fields = {"kv_len": 10, "bonus": 3, "limit": 1000, "draft_first": 11, "draft_rows": len(draft), **state}
        eos = fields.pop("eos", -1)
        rows = [ops.empty(size, dtype=np.int32) for _ in range(3)] + [ops.empty(size, stride, dtype=np.int32)]
        scores, on_device = ops.empty(size, dtype=np.float64), ops.state(0, **fields)
        table = draft if len(draft) else np.zeros((1, draft.shape[1]), F)
        price = ops.tensor(np.array(costs, np.float64))
        ops.call("tree_build", ops.tensor(table), block, budget, eos, chain, price, rows, scores, on_device)
        self.state = ops.fields(on_device)
        n = self.n = self.state["n_rows"]
        self.tokens, self.parents, self.depths, self.path = (t.cpu().numpy()[:n] for t in rows)
        self.scores = scores.cpu().numpy()[:n]


def enumerate_tree(draft: F32, budget: int) -> tuple[list[int], list[int], list[float]]:
    """Every path of ranks, sorted by score and then by ranks: the best `budget` of them, which always form a tree."""
    k = min(budget, draft.shape[1])
    levels = []
    for row in draft:
        order = [t for t in sorted(range(len(row)), key=lambda t: (-row[t], t))[:k] if row[t] > -np.inf]
        if not order:
            break
        levels.append([(t, np.float64(F(row[t] - lse32(row)))) for t in order])
    paths = []
    for depth in range(1, len(levels) + 1):
        for ranks in itertools.product(*(range(len(level)) for level in levels[:depth])):
            score = np.float64(0)
            for level, rank in zip(levels, ranks, strict=False):
                score = score + level[rank][1]
            paths.append((-score, ranks))
    paths.sort()
    chosen = [ranks for _, ranks in paths[:budget]]
    row = {(): 0, **{ranks: i + 1 for i, ranks in enumerate(chosen)}}
    tokens = [levels[len(r) - 1][r[-1]][0] for r in chosen]
    return tokens, [row[r[:-1]] for r in chosen], [-s for s, _ in paths[:budget]]


def check(built: Built, draft: F32, budget: int) -> None:
    tokens, parents, scores = enumerate_tree(draft, budget)
    assert built.state["error"] == 0
    assert built.tokens.tolist() == [3, *tokens]
    assert built.parents.tolist() == [-1, *parents]
    assert built.scores.tolist() == [0.0, *scores], "scores differ in their bits"
    rows = Rows(built.parents.tolist())
    assert built.depths.tolist() == rows.depths.tolist()
    for i in range(built.n):
        assert built.path[i, : rows.depths[i] + 1].tolist() == rows.ancestors(i)


@pytest.mark.parametrize(
    ("vocab", "depths", "budget"), [(2, 1, 1), (5, 3, 7), (9, 4, 20), (300, 3, 12), (3, 6, 40), (6, 2, 64)]
)
@pytest.mark.parametrize("seed", range(4))
def test_build(ops: Ops, vocab: int, depths: int, budget: int, seed: int) -> None:
    draft = draw(np.random.default_rng(seed), depths, vocab) * 2
    draft[1:] -= 40.0  # none of their logits above zero
    check(Built(ops, draft, budget), draft, budget)


@pytest.mark.parametrize("overlap", ["1", "0"])
def test_build_of_several_segments(monkeypatch: pytest.MonkeyPatch, device: str, overlap: str) -> None:
    """Their best tokens meet in a cluster, or, where the GPU has none or launches do not overlap, in a launch."""
    monkeypatch.setenv("KDTREE_CUDA_OVERLAP", overlap)
    draft = draw(np.random.default_rng(5), 2, 9000)
    draft[:, [4000, 8000, 8900]] += 5.0
    with Ops(device) as ops:
        check(Built(ops, draft, 40), draft, 40)


@pytest.mark.parametrize("vocab", [7, 9000])
def test_chain(ops: Ops, vocab: int) -> None:
    """The best token of each depth, one below the other, as many as the budget lets be."""
    draft = draw(np.random.default_rng(1), 6, vocab)
    for budget in (1, 4, 6, 30):
        built = Built(ops, draft, budget, chain=True)
        assert built.tokens.tolist() == [3, *draft.argmax(1)[:budget].tolist()]
        assert built.parents.tolist() == list(range(-1, min(budget, 6)))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_cut_where_tokens_over_cost_are_greatest(ops: Ops, seed: int) -> None:
    """Against every size tried in turn, with probabilities by numpy's exp; ties are far away here."""
    rng = np.random.default_rng(seed)
    draft = draw(rng, 4, 30) * 3
    whole = Built(ops, draft, 20)
    expected = np.cumsum(np.exp(whole.scores))  # the root's score is 0: it is always accepted
    for costs in (np.ones(21), 1 + 0.02 * np.arange(21), 1 + 0.5 * np.arange(21), np.sort(1 + rng.random(21))):
        built = Built(ops, draft, 20, costs=costs.tolist())
        assert built.n == 1 + int((expected / costs).argmax())
        assert built.tokens.tolist() == whole.tokens[: built.n].tolist()
    assert Built(ops, draft, 20, costs=[1.0] * 21).n == 21
    assert Built(ops, draft, 20, costs=[1.0] + [1e9] * 20).n == 1


def test_of_equal_values_the_smallest_tree_is_kept(ops: Ops) -> None:
    """Costs that are the expected tokens themselves, to the bit, make every size worth exactly 1."""
    draft = draw(np.random.default_rng(0), 4, 30) * 3
    scores = Built(ops, draft, 20).scores
    expected = np.cumsum([1.0, *exp32(scores[1:].astype(F)).astype(np.float64)])
    assert Built(ops, draft, 20, costs=expected.tolist()).n == 1
    costs = 2 * expected
    costs[[5, 9, 20]] = expected[[5, 9, 20]]
    assert Built(ops, draft, 20, costs=costs.tolist()).n == 6


def test_a_logarithm_on_both_sides_of_its_branch(ops: Ops) -> None:
    """Sums within 5e-6 of the square root of two, at half of which log32 changes its exponent."""
    parts = [np.frexp(F(F(1) + exp32(np.array([x], F))[0]))[0] for x in EDGE]
    assert min(parts) < F(0.707106781186547524) - F(1e-6) < F(0.707106781186547524) + F(1e-6) < max(parts)
    for x in EDGE:
        row = np.array([0, x], F)
        assert Built(ops, row[None], 1).scores[1] == np.float64(F(0 - lse32(row))), x


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 4096, 4097, 9000])
def test_lse_in_segments_and_lanes(ops: Ops, vocab: int) -> None:
    draft = draw(np.random.default_rng(vocab), 2, vocab) * 3
    check(Built(ops, draft, 3), draft, 3)


@pytest.mark.parametrize("vocab", [300, 4097, 8193, 9000, 20000])
def test_log_probability_to_the_bit(ops: Ops, vocab: int) -> None:
    """Enough rows that another order of summation, other lanes or other segments would show."""
    for seed in range(12):
        draft = draw(np.random.default_rng(seed), 1, vocab) * (seed + 1)
        want = np.float64(F(draft[0].max() - lse32(draft[0])))
        assert Built(ops, draft, 1).scores[1] == want, f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_exact_ties(ops: Ops, seed: int) -> None:
    """Logits from three values alone: equal logits in a depth, equal scores between branches."""
    rng = np.random.default_rng(seed)
    draft = rng.integers(0, 3, (4, 6)).astype(F)
    check(Built(ops, draft, 25), draft, 25)
    flat = np.zeros((3, 4), F)
    check(Built(ops, flat, 30), flat, 30)


def test_minus_infinity_is_never_drafted(ops: Ops) -> None:
    draft = draw(np.random.default_rng(2), 4, 8)
    draft[0, 2:] = -np.inf
    draft[1, 1:] = -np.inf  # one token of probability 1: a child as good as its parent
    check(Built(ops, draft, 20), draft, 20)
    draft[2, :] = -np.inf  # ends the tree at depth 2
    built = Built(ops, draft, 20)
    check(built, draft, 20)
    assert built.depths.max() == 2
    draft[0, :] = -np.inf
    assert Built(ops, draft, 20).n == 1


def test_far_apart_segments(ops: Ops) -> None:
    draft = np.full((1, 9000), -200.0, F)
    draft[0, 5000:] = 3.0
    draft[0, 8192:] = -np.inf
    check(Built(ops, draft, 4), draft, 4)


@pytest.mark.parametrize(
    ("fields", "depth"),
    [
        ({}, 6),
        ({"block": 4}, 3),
        ({"block": 1}, 0),
        ({"limit": 50, "committed": 46}, 3),
        ({"limit": 50, "committed": 49}, 0),
        ({"limit": 50, "committed": 48}, 1),
        ({"eos": 3}, 0),
        ({"draft_first": 8}, 3),
        ({"draft_first": 12}, 0),
        ({"draft_first": 4}, 0),
        ({"draft_rows": 2}, 2),
        ({"draft_rows": 0}, 0),
    ],
)
def test_depth_is_cut(ops: Ops, fields: dict[str, int], depth: int) -> None:
    """By the block, the tokens still allowed, a bonus that is EOS, and the reach of the draft table."""
    draft = draw(np.random.default_rng(9), 6, 5)
    draft[:, 2] += 5  # so that the budget reaches the last depth
    built = Built(ops, draft, 64, **fields)
    first = 11 - fields.get("draft_first", 11)
    assert built.depths.max(initial=0) == depth
    if depth:
        check(built, draft[first : first + depth], 64)
    else:
        assert (built.n, built.tokens.tolist(), built.parents.tolist()) == (1, [3], [-1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_draft_that_cannot_be_ranked_is_a_fault(ops: Ops, value: float) -> None:
    draft = draw(np.random.default_rng(3), 3, 300)
    draft[1, 299] = value
    built = Built(ops, draft, 5)
    assert (built.state["error"], built.state["error_detail"]) == (DRAFT_NON_FINITE, 2)
    assert Built(ops, draft, 5, block=2).state["error"] == 0, "a depth that is not used is not looked at"


def test_budget_zero(ops: Ops) -> None:
    assert Built(ops, draw(np.random.default_rng(1), 3, 9), 0).n == 1


def test_root(ops: Ops) -> None:
    rows = [ops.empty(2, dtype=np.int32) for _ in range(3)] + [ops.empty(2, 2, dtype=np.int32)]
    state = ops.state(0, bonus=42, kv_len=5)
    ops.call("tree_root", rows, state)
    assert [t.cpu().flatten()[0].item() for t in rows] == [42, -1, 0, 0]
    assert ops.fields(state)["n_rows"] == 1


class Accepted:
    """What accept wrote, beside a plain walk."""

    def __init__(self, ops: Ops, rows: Rows, choice: Sequence[int], eos: int = -1, **fields: int) -> None:
        m = len(rows.tokens)
        accepted, out = ops.empty(m, dtype=np.int32), ops.empty(10 + m, dtype=np.int32)
        given = {"kv_len": 20, "limit": 100, "committed": 7, "rounds": 2, "n_accepted": 1, "base": 19, **fields}
        state = ops.state(rows.active, **given)
        full = np.full(m, -55, np.int32)
        full[: len(choice)] = choice
        ops.call("accept", ops.rows(rows), ops.tensor(full), eos, accepted, out, state)
        self.state, self.given = ops.fields(state), given
        self.rows = accepted.cpu().numpy()[: self.state["n_accepted"]].tolist()
        self.out = out.cpu().tolist()

    def agrees(self, path: list[int], tokens: list[int], bonus: int, done: int) -> None:
        n = len(path)
        assert self.rows == path
        assert self.state["kv_len"] == self.given["kv_len"] + n
        assert self.state["base"] == self.given["kv_len"]
        assert self.state["committed"] == self.given["committed"] + n
        assert self.state["rounds"] == self.given["rounds"] + 1
        assert (self.state["bonus"], self.state["done"], self.state["n_accepted"]) == (bonus, done, n)
        head = [n, done, bonus, self.state["committed"], self.state["kv_len"], self.state["n_rows"], 0, 0, 0, 0]
        assert self.out[: 10 + n] == [*head, *tokens]


PARENTS = [-1, 0, 0, 1, 2, 2, 5]
TOKENS = [9, 4, 0, 6, 4, 8, 1]


def test_walk(ops: Ops) -> None:
    rows = Rows(PARENTS, TOKENS)
    Accepted(ops, rows, [0, 6, 8, 2, 2, 1, 5]).agrees([0, 2, 5, 6], [9, 0, 8, 1], 5, 0)  # token id 0 counts
    Accepted(ops, rows, [4, 6, 8, 2, 2, 1, 5]).agrees([0, 1, 3], [9, 4, 6], 2, 0)
    Accepted(ops, rows, [7, 6, 8, 2, 2, 1, 5]).agrees([0], [9], 7, 0)
    Accepted(ops, rows, [6, 6, 8, 2, 2, 1, 5]).agrees([0], [9], 6, 0)  # 6 is in the tree, but no child of the root
    Accepted(ops, Rows([-1], [9], max_rows=7), [3]).agrees([0], [9], 3, 0)


def test_walk_ignores_rows_past_the_active_ones(ops: Ops) -> None:
    rows = Rows(PARENTS, TOKENS)
    rows.active = 5
    Accepted(ops, rows, [0, 6, 8, 2, 2, 1, 5]).agrees([0, 2], [9, 0], 8, 0)


def test_walk_stops_at_eos_and_at_the_limit(ops: Ops) -> None:
    rows = Rows(PARENTS, TOKENS)
    choice = [0, 6, 8, 2, 2, 1, 5]
    Accepted(ops, rows, choice, eos=8).agrees([0, 2, 5], [9, 0, 8], 1, 2)
    Accepted(ops, rows, choice, eos=9).agrees([0], [9], 0, 2)
    Accepted(ops, rows, choice, eos=4).agrees([0, 2, 5, 6], [9, 0, 8, 1], 5, 0)  # not taken
    Accepted(ops, rows, choice, limit=9).agrees([0, 2], [9, 0], 8, 1)
    Accepted(ops, rows, choice, limit=11).agrees([0, 2, 5, 6], [9, 0, 8, 1], 5, 1)
    Accepted(ops, rows, choice, limit=8, eos=9).agrees([0], [9], 0, 2)


def test_a_fault_accepts_nothing(ops: Ops) -> None:
    got = Accepted(ops, Rows(PARENTS, TOKENS), [0, 6, 8, 2, 2, 1, 5], error=2, error_row=3, error_detail=4)
    assert got.rows == []
    assert got.out[0] == 0
    assert got.out[6:9] == [2, 3, 4]
    assert [got.state[f] for f in ("kv_len", "committed", "rounds")] == [20, 7, 2]


PATHS = [[0], [0, 1, 2], [0, 2, 5], [0, 3, 4, 5, 6, 7, 8, 9], [0, 9], [0, 1, 5, 6], [0, *range(2, 65)]]
"""Rows that were accepted; the last of them as many as the widest tree can give, one place behind where they belong."""


@pytest.mark.parametrize("accepted", PATHS)
def test_compaction(ops: Ops, accepted: list[int]) -> None:
    """Targets overlap sources; slots before and after are not touched; every layer."""
    rng, rows = np.random.default_rng(0), max(10, accepted[-1] + 1)
    latents, ropes = ([draw(rng, 30 + rows, w) for _ in range(3)] for w in (17, 6))
    on_device = [[ops.tensor(a) for a in group] for group in (latents, ropes)]
    full = np.full(rows + 2, -9, np.int32)
    full[: len(accepted)] = accepted
    state = ops.state(rows, base=21, n_accepted=len(accepted), kv_len=21 + len(accepted))
    ops.call("kv_commit", *on_device, ops.tensor(full), state)
    for before, after in zip([*latents, *ropes], [*on_device[0], *on_device[1]], strict=True):
        want, got = before.copy(), after.cpu().numpy()
        n = len(accepted)
        want[21 : 21 + n] = before[[21 + r for r in accepted]]
        live = [*range(21 + n), *range(21 + rows, 30 + rows)]  # what lies between is dead: rows that were not accepted
        same_bits(got[live], want[live], "the cache, [live slot, element]")


def test_record(ops: Ops) -> None:
    src = draw(np.random.default_rng(0), 8, 5)
    accepted = np.array([0, 2, 7, -1, -1, -1, -1, -1], np.int32)
    for offset, rows in ((0, [4, 5, 6]), (1, [5, 6, 7]), (4, [8, 9])):  # the last one's end does not fit and is dropped
        dst = ops.tensor(np.full((10, 5), 7.0, F))
        ops.call("record", dst, ops.tensor(src), offset, ops.tensor(accepted), ops.state(8, committed=7, n_accepted=3))
        want = np.full((10, 5), 7.0, F)
        want[rows] = src[[0, 2, 7]][: len(rows)]
        same_bits(dst.cpu().numpy(), want, "recorded rows, [row, element]")


def test_record_tree(ops: Ops) -> None:
    rows = Rows(PARENTS, TOKENS, max_rows=9)
    accepted = ops.tensor(np.array([0, 2, 5, 88, 88, 88, 88, 88, 88], np.int32))
    dst = ops.tensor(np.full((3, 2 + 3 * 9), 5, np.int32))
    ops.call("record_tree", dst, ops.rows(rows), accepted, ops.state(7, rounds=2, n_accepted=3))
    got: Array = dst.cpu().numpy()
    pad = [-1, -1]
    assert got[1].tolist() == [7, 3, *TOKENS, *pad, *PARENTS, *pad, 0, 2, 5, *[-1] * 6]
    assert (got[[0, 2]] == 5).all()
    ops.call("record_tree", dst, ops.rows(rows), accepted, ops.state(7, rounds=4, n_accepted=3))
    assert torch.equal(dst.cpu(), torch.from_numpy(got)), "an entry past the log was written"


def test_embed(ops: Ops) -> None:
    table = draw(np.random.default_rng(0), 11, 7)
    rows = Rows([-1, 0, 1], [10, 0, 4], max_rows=5)
    out = ops.empty(5, 7)
    ops.call("embed", out, ops.tensor(table), ops.rows(rows), ops.state(3))
    got = out.cpu().numpy()
    same_bits(got[:3], table[[10, 0, 4]], "embedding rows, [row, element]")
    assert np.isnan(got[3:]).all()
