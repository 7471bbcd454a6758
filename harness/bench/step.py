"""``kdtree bench step``: AR steps and DDTree rounds of whole models, in the engine's own loop.

A step's time is the decode's wall time over its forwards, the host's share included, prefill and load not. A round of
width M is the bonus and M - 1 drafted nodes. Bytes are what a forward must read (``work.forward_bytes``), with experts
as even routing expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from harness.bench import clock, k26, targets, turns
from harness.bench.ceilings import Ceilings
from harness.bench.work import forward_bytes
from harness.golden import Golden
from harness.matrix import F32_PRECISIONS
from harness.protocol import Decoded, DecodeRequest, Engine, Session
from refs.config import ModelConfig
from refs.drafter_config import split
from refs.kdtr import read

Say = Callable[[str], None]
RUNS = 9
BLOCK = 8
WIDTHS = (2, 4, 8, 16, 32, 64)
K26 = "k26"


@dataclass(frozen=True)
class Step:
    """One decoder of one model at one width M. ``us``: a forward, median and quartiles over decodes."""

    case: str
    config: str
    precision: str
    decoder: str
    M: int
    device: str
    us: float
    q1: float
    q3: float
    runs: int
    forwards: int
    tokens: int
    rows: float
    """Rows of a forward, on average; trees may be smaller than M near the end."""
    tokens_per_second: float
    bytes: int
    """Of one forward of M rows at the decode's middle."""
    tokens_per_gigabyte: float
    x_floor: float
    """Against reading those bytes once and doing nothing else."""
    targets: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """One decoder of one model at one width: a name and what to time."""

    config: str
    precision: str
    decoder: str
    M: int

    @property
    def name(self) -> str:
        return f"step-{self.precision}-{self.decoder}-{self.config}-m{self.M}"


def plans(configs: Sequence[str], widths: Sequence[int], patterns: Sequence[str]) -> list[Plan]:
    """Every plan whose name a pattern chooses (none: all); AR is width 1. K2.6 has the precision it is deployed in."""
    found = [
        Plan(config, precision, "ar" if m == 1 else "ddtree", m)
        for config in configs
        for precision in (F32_PRECISIONS if config != K26 else ("int4-bf16",))
        for m in (1, *widths)
    ]
    return [p for p in found if not patterns or any(t in p.name or fnmatchcase(p.name, t) for t in patterns)]


def recorded(path: Path, precision: str, drafter: str, widths: Sequence[int]) -> dict[int, DecodeRequest]:
    """A bundle's own run by width: AR, and DDTree with a drafter that it records. Greedy, and without a log."""
    golden = Golden.open(path, precision)
    greedy: Any = {"temperature": 0.0, "record": False}
    found = {1: golden.request(**greedy)}
    if drafter in golden.meta["run"]["drafters"]:
        found |= {m: golden.request(drafter, **greedy, block_size=BLOCK, budget=m - 1) for m in widths if m > 1}
    return found


def measure(session: Session, request: DecodeRequest, runs: int = RUNS) -> tuple[clock.Timing, Decoded, float]:
    """Microseconds a forward over ``runs`` decodes, after one that warms caches and graphs; and its mean rows."""
    logged = session.decode(replace(request, record=True))
    rows = [len(r.tokens) for r in logged.rounds] or [1]
    session.decode(request)
    decodes = [session.decode(request) for _ in range(runs)]
    samples = [1e6 * d.decode_seconds / max(d.forwards, 1) for d in decodes]
    return clock.summarise(samples), decodes[0], sum(rows) / len(rows)


def line(
    plan: Plan, device: str, model: ModelConfig, prompt: int, measured: tuple[clock.Timing, Decoded, float],
    limits: Ceilings,
) -> Step:  # fmt: skip
    """The figures of one measurement."""
    timing, decoded, rows = measured
    tokens, forwards = len(decoded.tokens), max(decoded.forwards, 1)
    size = forward_bytes(model, plan.precision, plan.M, prompt + tokens // 2)
    x_floor = timing.us / limits.floor_us(size)
    return Step(
        case=plan.name,
        config=plan.config,
        precision=plan.precision,
        decoder=plan.decoder,
        M=plan.M,
        device=device,
        us=timing.us,
        q1=timing.q1,
        q3=timing.q3,
        runs=timing.samples,
        forwards=forwards,
        tokens=tokens,
        rows=rows,
        tokens_per_second=tokens / (1e-6 * timing.us * forwards),
        bytes=size,
        tokens_per_gigabyte=tokens / (1e-9 * size * forwards),
        x_floor=x_floor,
        targets=targets.verdicts(device, plan.name, plan.M, timing.us, x_floor, {}),
    )


def text(s: Step) -> str:
    """The line for a reader."""
    goals = [f"target {goal}: {how}" for goal, how in s.targets.items()]
    figures = (
        f"{s.case:<36} {s.us:>9.1f} us a forward [{s.q1:.1f}, {s.q3:.1f}]  {s.tokens} tokens in {s.forwards} forwards"
        f" of {s.rows:.1f} rows  {s.tokens_per_second:>9.0f} tokens/s  {s.tokens_per_gigabyte:>9.0f} tokens/GB read"
        f"  {s.x_floor:.2f}x the floor"
    )
    return "  ".join([figures, *goals])


def run(
    engine: Engine, files: dict[str, Path], chosen: Sequence[Plan], drafter: str, limits: Ceilings, say: Say
) -> list[Step]:
    """Every plan in turn; one whose bundle does not record ``drafter`` has no line. Raises EngineError."""
    found: list[Step] = []
    for config, precision in dict.fromkeys((p.config, p.precision) for p in chosen):
        path, mine = files[config], [p for p in chosen if (p.config, p.precision) == (config, precision)]
        model = ModelConfig.of(split(read(path).fields)[0], str(path))
        widths = tuple(p.M for p in mine if p.M > 1)
        given = k26.requests(model, widths, BLOCK) if config == K26 else recorded(path, precision, drafter, widths)
        say(f"{config}: loading in {precision}")
        session = engine.load(path, precision, max_rows=max(p.M for p in mine))
        try:
            for plan in mine:
                if plan.M not in given:
                    say(f"{plan.name}: the bundle records no drafter {drafter}")
                    continue
                request = given[plan.M]
                turns.rest(engine.device)
                measured = measure(session, request)
                turns.rest(engine.device)  # for the floor, that it is of a cool card as well
                found.append(line(plan, engine.device, model, len(request.prompt), measured, limits))
                say(text(found[-1]))
        finally:
            session.close()
    return found
