"""Ledgers for the tests of reports and of the gate: plausible runs, the same on every call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.cells import BadRound, Cell, Check, Divergence, Ledger, Tree, Verdict
from harness.ledger import complete
from harness.matrix import Point, expected
from harness.sources import Sources

DRAFTERS = ("hostile", "noisy", "oracle")
TABLE = {"tiny": DRAFTERS, "tiny2": DRAFTERS, "ties": ("oracle",)}
LARGE = {f"config_{i:02}": DRAFTERS for i in range(19)}
"""152 cells on one device: the size of the whole matrix."""
SOURCES = Sources("c" * 40, (), "e" * 64, "b" * 64, "a" * 64)
HOST = "box"
ENVIRONMENT = {"os": "Linux 6.1", "cpu": "A CPU", "gpus": "", "python": "3.11.7", "torch": "2.13.0+cpu"}
TOLERANCE = 4e-6
LAYERS, STEPS = 6, 25


def passing(point: Point, host: str = HOST, steps: int = STEPS) -> Cell:
    """A cell as the runner records it when everything is in order."""
    random_ = random.Random(point.id)
    errors = tuple(TOLERANCE * random_.uniform(0.02, 0.8) for _ in range(steps))
    checks = [Check(f"exact.{i}", 0.0, 0.0, Verdict.FAIL_TOKENS) for i in range(steps // 2)]
    checks.append(Check("logits.max_abs", max(errors), TOLERANCE, Verdict.FAIL_LOGITS))
    checks.append(Check("logits.kl", 1e-13 * random_.random(), 8e-12, Verdict.FAIL_LOGITS))
    if point.decoder == "ar":
        for tap in ("embed", *(f"layers.{i}.out" for i in range(LAYERS))):
            allowed = 1e-6 * (1 + len(checks))
            checks.append(
                Check(f"taps.{tap}.max_abs", allowed * random_.uniform(0.05, 0.7), allowed, Verdict.FAIL_LOGITS)
            )
    return Cell(
        id=point.id,
        verdict=Verdict.PASS,
        checks=tuple(checks),
        kernels={"linear_f32": 120, "attention": 48},
        times={"load": 0.01, "prefill": 0.002, "decode": random_.uniform(0.02, 0.05), "total": 0.4},
        seed=point.seed,
        host=host,
        worker="gw0",
        rerun=f"nox -s test -- -k {point.id}",
        step_errors=errors,
        acceptance=tuple(random_.choice((1, 3, 8)) for _ in range(6)) if point.drafter else (),
    )


def run(
    table: dict[str, Sequence[str]] = TABLE,  # type: ignore[assignment]
    *,
    devices: Sequence[str] = ("cpu",),
    sources: Sources = SOURCES,
    run_id: str = "20300101T000000Z-abcdef",
    hosts: Sequence[str] = (HOST,),
    ranks: Sequence[int] = (1,),
    steps: int = STEPS,
) -> Ledger:
    """A run in which every cell passed; several hosts ran all of them each."""
    points = expected(devices, table, ranks=ranks)
    blank = Ledger(
        run_id=run_id,
        started="2030-01-01T00:00:00Z",
        finished="2030-01-01T00:01:00Z",
        engine="csrc",
        command="pytest -n 2",
        sources=sources,
        environments=dict.fromkeys(hosts, ENVIRONMENT),
        expected=tuple(sorted(point.id for point in points)),
        cells=(),
        per_host=len(hosts) > 1,
    )
    return complete(blank, [passing(point, host, steps) for host in hosts for point in points])


def light(*arguments: Any, **options: Any) -> Ledger:
    """A run whose cells decoded little, for tests that write and read many."""
    return run(*arguments, steps=3, **options)


def change(ledger: Ledger, id: str, cell: Cell | None) -> Ledger:
    """``ledger`` with another record for one cell, or none, on the host that the record names."""
    others = [c for c in ledger.cells if c.id != id or (ledger.per_host and cell is not None and c.host != cell.host)]
    return complete(ledger, [*others, *([cell] if cell else [])])


def find(ledger: Ledger, id: str) -> Cell:
    """The record of a cell."""
    return next(cell for cell in ledger.cells if cell.id == id)


def failing(cell: Cell, verdict: Verdict, name: str, value: float, allowed: float, detail: str) -> Cell:
    """``cell`` with one check that does not hold, judged as the runner would."""
    check = Check(name, value, allowed, verdict, detail)
    return replace(cell, verdict=verdict, detail=f"{name}: {detail}", checks=(check, *cell.checks))


WANT = Tree((7, 11, 12, 21, 30), (-1, 0, 0, 1, 3), (0, 1, 3))
GOT = Tree((7, 11, 99, 21, 30), (-1, 0, 0, 1, 3), (0, 1))


PARTED = "layer 3, mla.q_rope, row 5, head 2: got 0.25, want 0.125, allowed 1e-06; everything before it agrees"


def broken() -> Ledger:
    """A run with a cell of each way to fail: tree, logits, NaN, error, not run."""
    ledger = run()
    tree = find(ledger, "fp32-ddtree-tiny-noisy-cpu")
    tree = failing(tree, Verdict.FAIL_TREE, "tree", 1, 0, "round 2, row 2: got token 99 under row 0, golden token 12")
    ledger = change(ledger, tree.id, replace(tree, bad_round=BadRound(2, GOT, WANT)))
    logits = find(ledger, "int4-ar-tiny2-cpu")
    logits = failing(logits, Verdict.FAIL_LOGITS, "logits.max_abs", 1.2e-3, TOLERANCE, "3 elements beyond 4e-06")
    divergence = Divergence("layers.3.mla.q_rope", (5, 2, 7), 0.25, 0.125, 1e-6, 40, PARTED)
    errors = (*logits.step_errors[:20], 1e-4, 3e-4, 5e-4, 1.2e-3, 9e-4)
    ledger = change(ledger, logits.id, replace(logits, divergence=divergence, step_errors=errors))
    nan = find(ledger, "int4-ddtree-tiny2-oracle-cpu")
    nan = failing(nan, Verdict.FAIL_NONFINITE, "logits.finite", 2, 0, "2 of 12800 elements, first at [3, 9]: got nan")
    ledger = change(ledger, nan.id, replace(nan, step_errors=(*nan.step_errors[:4], float("nan"), float("inf"))))
    error = find(ledger, "fp32-ar-ties-cpu")
    detail = "DeviceError: <b>launch</b> failed | `x` \x1b[31mred\x1b[0m & more"
    error = replace(error, verdict=Verdict.ERROR, detail=detail, checks=(), step_errors=(), acceptance=(), kernels={})
    ledger = change(ledger, error.id, error)
    return change(ledger, "int4-ddtree-ties-oracle-cpu", None)
