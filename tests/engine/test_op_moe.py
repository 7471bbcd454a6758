"""Router and experts against float64; ties, groups, non-finite scores; the same bits whatever the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from engine_operands import draw, int4, normed
from engine_ops import F32, Array, Ops, same_bits, within

from engine.library import library
from harness.protocol import F32 as Rows32

NON_FINITE = 1
SCALING = 2.5  # of the weights, in most tests


def route(
    ops: Ops,
    logits: F32,
    bias: F32,
    k: int,
    *,
    groups: tuple[int, int] = (1, 1),
    norm: bool = True,
    scaling: float = SCALING,
) -> tuple[Array, Rows32, dict[str, int]]:
    m = logits.shape[0]
    ids, weights, state = ops.empty(m, k, dtype=np.int32), ops.empty(m, k), ops.state(m)
    ops.call("router", ops.tensor(logits), ops.tensor(bias), ids, weights, *groups, norm, scaling, 7, state)
    return ids.cpu().numpy(), weights.cpu().numpy(), ops.fields(state)


def expected_route(
    logits: Sequence[float], bias: Sequence[float], k: int, groups: tuple[int, int], norm: bool
) -> tuple[list[int], list[float]]:
    """docs/model.md with plain lists and stable sorts."""
    s = [1 / (1 + np.exp(-np.float64(v))) for v in logits]
    c = [a + np.float64(b) for a, b in zip(s, bias, strict=True)]
    size = len(c) // groups[0]
    score = [sum(sorted(c[g * size : (g + 1) * size])[-2:]) for g in range(groups[0])]
    kept = sorted(range(groups[0]), key=lambda g: -score[g])[: groups[1]] if groups[0] > 1 else range(groups[0])
    open_ = [e for e in range(len(c)) if e // size in kept]
    ids = sorted(open_, key=lambda e: -c[e])[:k]
    total = sum(s[e] for e in ids) + 1e-20 if norm else 1.0
    return ids, [s[e] / total * SCALING for e in ids]


@pytest.mark.parametrize(
    ("experts", "k", "groups"),
    [(1, 1, (1, 1)), (7, 3, (1, 1)), (384, 8, (1, 1)), (32, 6, (8, 3)), (256, 8, (8, 4)), (12, 12, (3, 3))],
)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shift", [0.0, -0.5, -3.0])  # some and all biased scores below zero
def test_router(ops: Ops, experts: int, k: int, groups: tuple[int, int], norm: bool, shift: float) -> None:
    rng = np.random.default_rng(experts)
    logits, bias = draw(rng, 17, experts) * 2, draw(rng, experts) * 0.3 + np.float32(shift)
    ids, weights, state = route(ops, logits, bias, k, groups=groups, norm=norm)
    assert state["error"] == 0
    for row in range(17):
        want_ids, want = expected_route(logits[row].tolist(), bias.tolist(), k, groups, norm)
        assert ids[row].tolist() == want_ids
        np.testing.assert_allclose(weights[row], want, rtol=2e-6)


@pytest.mark.parametrize("score", [-42.0, -46.0, -70.0])  # their sum is above, near and far below the 1e-20 beside it
def test_weights_of_scores_that_are_next_to_nothing(ops: Ops, score: float) -> None:
    logits, bias = draw(np.random.default_rng(6), 17, 9) + np.float32(score), np.arange(9, dtype=np.float32)
    ids, weights, _ = route(ops, logits, bias, 4)
    for row in range(17):
        want_ids, want = expected_route(logits[row].tolist(), bias.tolist(), 4, (1, 1), True)
        assert ids[row].tolist() == want_ids
        np.testing.assert_allclose(weights[row], want, rtol=2e-6)


def test_ties_go_to_the_lowest_id(ops: Ops) -> None:
    logits = np.zeros((1, 12), np.float32)
    bias = np.zeros(12, np.float32)
    assert route(ops, logits, bias, 4)[0][0].tolist() == [0, 1, 2, 3]
    assert route(ops, logits, bias, 4, groups=(4, 2))[0][0].tolist() == [0, 1, 2, 3]
    bias[5] = 1.0  # its group comes first; within it the tie of the others goes to the lowest
    assert route(ops, logits, bias, 3, groups=(4, 1))[0][0].tolist() == [5, 3, 4]


def test_weights_come_from_unbiased_scores(ops: Ops) -> None:
    logits = np.array([[0.0, 2.0, -1.0]], np.float32)
    bias = np.array([5.0, 0.0, 0.0], np.float32)
    ids, weights, _ = route(ops, logits, bias, 2, scaling=1.0)
    s = 1 / (1 + np.exp(-logits[0].astype(np.float64)))
    assert ids[0].tolist() == [0, 1]
    np.testing.assert_allclose(weights[0], [s[0] / (s[0] + s[1]), s[1] / (s[0] + s[1])], rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_are_a_fault_and_leave_valid_ids(ops: Ops, value: float) -> None:
    logits = np.zeros((5, 9), np.float32)
    logits[3, 4] = value
    logits[4, 4] = value
    ids, _, state = route(ops, logits, np.zeros(9, np.float32), 4)
    assert (state["error"], state["error_row"], state["error_detail"]) == (NON_FINITE, 3, 7)
    assert ((ids >= 0) & (ids < 9)).all()
    assert ids[0].tolist() == [0, 1, 2, 3]


def test_non_finite_bias_is_a_fault(ops: Ops) -> None:
    bias = np.zeros(9, np.float32)
    bias[8] = np.nan
    assert route(ops, np.zeros((2, 9), np.float32), bias, 2)[2]["error"] == NON_FINITE


@dataclass
class Case:
    """Experts and rows; `exact` holds gate, up, down in float64."""

    x: F32
    norm: F32
    ids: Array
    weights: F32
    experts: list[Array]
    scales: list[Array]
    exact: list[Array]
    shared: list[F32]

    @staticmethod
    def make(kind: str, m: int, dim: int, inner: int, experts: int, k: int, shared: int) -> Case:
        rng = np.random.default_rng(dim + m)
        shapes = [(inner, dim), (inner, dim), (dim, inner)]
        if kind == "f32":
            stored: list[Array] = [draw(rng, experts, *s) for s in shapes]
            scales: list[Array] = [np.empty(0, np.uint8)] * 3
            exact = [w.astype(np.float64) for w in stored]
        else:
            parts = [[int4(rng, *s) for _ in range(experts)] for s in shapes]
            stored = [np.stack([p[0] for p in part]) for part in parts]
            scales = [np.stack([p[1] for p in part]).view(np.uint8) for part in parts]
            exact = [np.stack([p[2] for p in part]) for part in parts]
        ids = np.stack([rng.permutation(experts)[:k] for _ in range(m)]).astype(np.int32)
        both = [draw(rng, shared, dim), draw(rng, shared, dim), draw(rng, dim, shared)] if shared else []
        return Case(
            draw(rng, m, dim), draw(rng, dim), ids, rng.random((m, k)).astype(np.float32), stored, scales, exact, both
        )

    def run(self, ops: Ops, rows: Sequence[int] | None = None) -> tuple[F32, F32, F32]:
        """out (the residual stream after), act and shared_act of the chosen rows."""
        at = list(range(len(self.x))) if rows is None else list(rows)
        m, k, inner = len(at), self.ids.shape[1], self.exact[0].shape[1]
        shared = self.shared[0].shape[0] if self.shared else 0
        act, shared_act, x = ops.empty(m, k, inner), ops.empty(m, shared), ops.tensor(self.x[at])
        ops.call(
            "moe", x, ops.tensor(self.norm), 1e-5, ops.tensor(self.ids[at]), ops.tensor(self.weights[at]),
            [ops.tensor(w) for w in self.experts], [ops.tensor(s) for s in self.scales],
            [ops.tensor(w) for w in self.shared], act, shared_act, x, ops.state(m),
        )  # fmt: skip
        return x.cpu().numpy(), act.cpu().numpy(), shared_act.cpu().numpy()

    def want(self, row: int) -> Array:
        b = normed(self.x[row : row + 1], self.norm, 1e-5)[0]

        def mlp(gate: Array, up: Array, down: Array) -> Array:
            g = gate @ b
            return np.asarray(down @ (g / (1 + np.exp(-g)) * (up @ b)))

        gate, up, down = self.exact
        out = self.x[row].astype(np.float64)
        for e, w in zip(self.ids[row], self.weights[row], strict=True):
            out = out + w * mlp(gate[e], up[e], down[e])
        return out + mlp(*(w.astype(np.float64) for w in self.shared)) if self.shared else out


CASES = [(1, 8, 4, 3, 1, 0), (5, 33, 17, 9, 3, 20), (70, 40, 24, 6, 2, 0), (65, 64, 48, 30, 6, 48)]


@pytest.mark.parametrize("kind", ["f32", "int4"])
@pytest.mark.parametrize("sizes", CASES)
def test_experts(ops: Ops, kind: str, sizes: tuple[int, int, int, int, int, int]) -> None:
    case = Case.make(kind, *sizes)
    out, _, _ = case.run(ops)
    for row in range(len(case.x)):
        want = case.want(row)
        within(out[row], want, 3e-5 * (np.abs(want).max() + 1), f"experts, row {row}, [element]")
    assert ops.counters().get("experts_int4" if kind == "int4" else "experts_f32") == 1
    assert ops.counters().get("experts_f32" if kind == "int4" else "experts_int4") is None


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_routed_is_the_product_the_choice_and_the_experts(ops: Ops, kind: str) -> None:
    """One operation in place of three: the same bits of everything that they leave, and the same kernels."""
    case = Case.make(kind, 5, 64, 48, 30, 6, 48)
    router, bias = draw(np.random.default_rng(1), 30, 64), draw(np.random.default_rng(2), 30) * 0.1
    x, norm, none = ops.tensor(case.x), ops.tensor(case.norm), ops.tensor(np.empty(0, np.uint8))
    stored = [[ops.tensor(w) for w in part] for part in (case.experts, case.scales, case.shared)]
    left, counts = [], []
    for routed in (False, True):
        logits, ids, weights = ops.empty(5, 30), ops.empty(5, 6, dtype=np.int32), ops.empty(5, 6)
        act, shared_act, out, state = ops.empty(5, 6, 48), ops.empty(5, 48), ops.tensor(case.x), ops.state(5)
        how, around = [2, 1, True, 2.5, 7], [act, shared_act, out, state]
        before = ops.counters()
        if routed:
            ops.call(
                "routed_moe",
                x,
                norm,
                1e-5,
                ops.tensor(router),
                ops.tensor(bias),
                logits,
                ids,
                weights,
                *how,
                *stored,
                *around,
            )
        else:
            ops.call("linear", x, norm, 1e-5, [ops.tensor(router)], [none], [logits], 0, state)
            ops.call("router", logits, ops.tensor(bias), ids, weights, *how, state)
            ops.call("moe", x, norm, 1e-5, ids, weights, *stored, *around)
        left.append([made.cpu().numpy().tobytes() for made in (logits, ids, weights, act, shared_act, out)])
        counts.append({name: count - before.get(name, 0) for name, count in ops.counters().items()})
    assert left[0] == left[1]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_rows_do_not_depend_on_each_other(ops: Ops, kind: str) -> None:
    case = Case.make(kind, *CASES[3])
    whole = case.run(ops)
    for m in range(1, 66):
        part = case.run(ops, range(m))
        for got, want in zip(part, whole, strict=True):
            same_bits(got, want[:m], f"at width {m}, [row, element]")
    order = np.random.default_rng(0).permutation(65)
    for got, want in zip(case.run(ops, order.tolist()), whole, strict=True):
        same_bits(got, want[order], "rows in another order, [row, element]")


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_all_rows_on_one_expert(ops: Ops, kind: str) -> None:
    """The opposite of a spread batch: one expert has every row, the others none."""
    case = Case.make(kind, 65, 40, 24, 6, 1, 0)
    case.ids[:] = 4
    out = case.run(ops)[0]
    for row in (0, 1, 31, 63, 64):
        want = case.want(row)
        within(out[row], want, 3e-5 * (np.abs(want).max() + 1), f"experts, row {row}, [element]")


@pytest.mark.parametrize("kind", ["f32", "int4"])
def test_threads_and_instruction_sets_do_not_show(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    case = Case.make(kind, 40, 64, 200, 30, 6, 48)
    results = set()
    for threads, isa in [(n, "") for n in (1, 2, 3)] + [(1, name) for name in library("cpu").isa_names().split()]:
        monkeypatch.setenv("KDTREE_THREADS", str(threads))
        monkeypatch.setenv("KDTREE_ISA", isa)
        with Ops("cpu") as ops:
            results.add(b"".join(array.tobytes() for array in case.run(ops)))
    assert len(results) == 1
