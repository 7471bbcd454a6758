"""What a run is made of, as plain values: verdicts, checks, cells, the whole of a run, and its exit status.

A check is a number against a bound, fine when it lies within; a NaN or infinite number never does. A cell's verdict
is that of its first check that is not fine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from harness.sources import Sources

SCHEMA = 1

PASSED, FAILED, INCOMPLETE, INFRASTRUCTURE = 0, 1, 2, 3
"""Exit statuses of a run and of everything that judges one."""
DEVICES = ("cpu", "cuda")
"""What cells run on."""


class Verdict(str, Enum):
    """What became of a cell."""

    PASS = "PASS"
    FAIL_TOKENS = "FAIL_TOKENS"
    FAIL_LOGITS = "FAIL_LOGITS"
    FAIL_NONFINITE = "FAIL_NONFINITE"
    FAIL_SHAPE = "FAIL_SHAPE"
    FAIL_TREE = "FAIL_TREE"
    FAIL_ACCEPTANCE = "FAIL_ACCEPTANCE"
    FAIL_BITWISE = "FAIL_BITWISE"
    FAIL_KERNEL = "FAIL_KERNEL"
    TIMEOUT = "TIMEOUT"
    ERROR = "ERROR"
    NOT_RUN = "NOT_RUN"


@dataclass(frozen=True)
class Check:
    """One measured number against its bound: fine when ``value <= allowed``, so never when it is NaN."""

    name: str
    value: float
    allowed: float
    verdict: Verdict
    """The cell's verdict if this check is the first that is not fine."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.allowed and math.isfinite(self.value) and math.isfinite(self.allowed)

    @property
    def sentence(self) -> str:
        """Its name with what it says of itself, or with its numbers."""
        return f"{self.name}: {self.detail or f'{self.value:.6g}, allowed {self.allowed:.6g}'}"

    @property
    def margin(self) -> float:
        """``value / allowed``: 1 is the bound. A bound of 0 gives 0 when met and infinity when not."""
        if self.allowed > 0:
            return self.value / self.allowed
        return 0.0 if self.ok else math.inf


@dataclass(frozen=True)
class Divergence:
    """Where a cell's numbers first left the golden ones; everything computed before it agrees."""

    tap: str
    """``logits``, ``embed``, ``layers.3.out`` or ``layers.3.mla.q_rope``."""
    index: tuple[int, ...]
    """The worst element of the tap, row first."""
    got: float
    want: float
    allowed: float
    count: int
    """Elements of the tap beyond ``allowed``."""
    detail: str = ""


@dataclass(frozen=True)
class Tree:
    """One draft tree and the rows accepted from it; row 0 is the root and its parent is -1."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class BadRound:
    """The first DDTree round that differs from the golden one."""

    round: int
    got: Tree
    want: Tree


@dataclass(frozen=True)
class Cell:
    """What one cell gave."""

    id: str
    verdict: Verdict
    checks: tuple[Check, ...] = ()
    detail: str = ""
    """One line: the first check that is not fine, or the error."""
    kernels: Mapping[str, int] = field(default_factory=dict)
    """Launches by name."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    seed: int = 0
    host: str = ""
    worker: str = ""
    rerun: str = ""
    """The line that runs this cell alone."""
    divergence: Divergence | None = None
    step_errors: tuple[float, ...] = ()
    """Greatest logit difference from the golden, per step."""
    acceptance: tuple[int, ...] = ()
    """Rows committed by each DDTree round."""
    bad_round: BadRound | None = None

    @property
    def margin(self) -> float:
        """The worst of the checks' margins among those with a bound above zero; 0 without any."""
        bounded = [check.margin for check in self.checks if check.allowed > 0]
        return max(bounded, key=lambda m: math.inf if math.isnan(m) else m, default=0.0)


@dataclass
class Findings:
    """What a cell's checks gave, to be put into its record."""

    checks: list[Check] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    step_errors: tuple[float, ...] = ()
    acceptance: tuple[int, ...] = ()
    divergence: Divergence | None = None
    bad_round: BadRound | None = None


@dataclass(frozen=True)
class Ledger:
    """A run. ``expected`` is sorted; ``cells`` has each expected id exactly once (once per host when ``per_host``)."""

    run_id: str
    started: str
    finished: str
    engine: str
    command: str
    sources: Sources
    environments: Mapping[str, Mapping[str, str]]
    """By host; every host that took part is here."""
    expected: tuple[str, ...]
    cells: tuple[Cell, ...]
    filter: str = ""
    """The expression that chose ``expected`` among the matrix, ``""`` for the whole of it."""
    per_host: bool = False
    problems: tuple[str, ...] = ()
    """Faults of configuration or infrastructure; any makes the exit status 3."""
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    @property
    def passed(self) -> int:
        return sum(cell.verdict is Verdict.PASS for cell in self.cells)

    @property
    def wanted(self) -> int:
        """How many cells have to pass."""
        return len(self.expected) * (len(self.environments) if self.per_host else 1)


def judge(checks: Iterable[Check]) -> tuple[Verdict, str]:
    """The verdict over ``checks`` and the detail of the check that decided it."""
    for check in checks:
        if not check.ok:
            return check.verdict, check.sentence
    return Verdict.PASS, ""


def exit_status(ledger: Ledger) -> int:
    """0 all expected cells passed, 1 a cell failed, 2 a cell did not run, 3 configuration or infrastructure."""
    if ledger.problems or not ledger.expected:
        return INFRASTRUCTURE
    if any(cell.verdict not in (Verdict.PASS, Verdict.NOT_RUN) for cell in ledger.cells):
        return FAILED
    return PASSED if ledger.passed == ledger.wanted else INCOMPLETE
