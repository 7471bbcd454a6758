"""First divergence: where an engine's numbers first leave the ones they should be, so that a failure says where.

Stages, each of which rests on the ones before: *prefill* (residual stream and cache against the golden, layer by layer;
where a layer is off, operation by operation against the reference); then, each against one prefill of the same tokens,
*steps*, the golden *trees*, *decode*, *sampling* and trees of all *widths* (`harness.trace.steps`). The first
divergence of the first stage that has one is the answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import plain_json
from harness.cells import DEVICES, FAILED, INFRASTRUCTURE, PASSED, Divergence
from harness.cli import Parser
from harness.describe import filled
from harness.engines import create
from harness.filters import remedy
from harness.golden import Golden, GoldenError
from harness.matrix import MatrixError, expected, parse, rankable
from harness.prepare import Infrastructure, prepare
from harness.progress import tell, told
from harness.protocol import EngineError, NonFiniteError, Session
from harness.rounding import operations
from harness.trace import steps as trace_steps
from harness.trace import taps as trace_taps
from harness.trace.taps import Expected
from harness.widths import rows_of

BEFORE = "; everything before it agrees"


@dataclass(frozen=True)
class Stage:
    """What one stage found."""

    name: str
    divergence: Divergence | None


def prefill(session: Session, golden: Golden, against: Expected | None = None) -> Divergence | None:
    """The first tap of one prefill of prompt and golden tokens that is not the golden one.

    With ``against``, another engine's taps, every operation is compared with those.
    """
    tokens = (*golden.prompt, *golden.tokens)
    taps = session.taps(tokens, operations=True)
    if against is not None:
        return trace_taps.first(golden, taps, against)
    if golden.rounding:  # numbers wander from engine to engine; an operation does not, given its own inputs
        return operations(golden, tokens, taps)[1]
    bound = golden.tolerance("logits")
    beyond = trace_taps.first(golden, taps, trace_taps.stored(golden))
    if beyond is None and "logits" in taps:
        rows = taps["logits"][len(golden.prompt) - 1 :]
        beyond = trace_taps.differ(golden, "logits", rows, golden.logits, bound, "by step")
    if beyond is None:
        session.reset()
        rows = session.prefill(tokens)[len(golden.prompt) - 1 :]
        what = "prefill, whose taps agree, by step"
        return trace_taps.differ(golden, "logits", rows, golden.logits, bound, what)
    return trace_taps.first(golden, taps, trace_taps.reference(golden, tokens)) or beyond


def stages(
    session: Session,
    golden: Golden,
    drafter: str = "",
    seed: int = 0,
    against: Expected | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Stage]:
    """One stage after the other, up to the first that diverges; ``say`` hears of one that takes long.

    Raises what the engine raises.
    """
    steps: list[tuple[str, Callable[[], Divergence | None]]] = [
        ("prefill", lambda: prefill(session, golden, against)),
        ("steps", lambda: trace_steps.stepping(session, golden)),
    ]
    if drafter:
        steps.append(("trees", lambda: trace_steps.trees(session, golden, drafter)))
    steps.append(("decode", lambda: trace_steps.decoding(session, golden, drafter)))
    if drafter:
        steps.append(("sampling", lambda: trace_steps.sampling(session, golden, drafter, seed)))
        steps.append(("widths", lambda: trace_steps.widths(session, golden, seed)))
    for name, run in steps:
        with told(f"trace: {name}", say) if say else contextlib.nullcontext():
            found = run()
        if found is not None:
            found = replace(found, detail=f"{found.detail}{BEFORE}")
        yield Stage(name, found)
        if found is not None:
            return


def first_divergence(session: Session, golden: Golden, drafter: str = "", seed: int = 0) -> Divergence | None:
    """Where a cell's numbers first left the golden ones, or None where none of the stages sees it.

    ``drafter`` is ``""`` for AR. Raises what the engine raises, but for NonFiniteError, which ends the search.
    """
    try:
        for stage in stages(session, golden, drafter, seed):
            if stage.divergence is not None:
                return stage.divergence
    except NonFiniteError:
        pass
    return None


def other_engine(name: str, golden: Golden) -> Expected:
    """The taps of another engine as the yardstick: both may be off by the noise, so twice the bound is allowed."""
    device = name if name in DEVICES else "cpu"
    engine = create("csrc" if name in DEVICES else name, device)
    session = engine.load(Path(golden.file.file), golden.precision)
    tokens = (*golden.prompt, *golden.tokens)
    rows = session.taps(tokens, operations=True)
    bounds = trace_taps.reference(golden, tokens).allowed
    kept = {tap: rows[tap].copy() for tap in rows if tap in bounds}
    session.close()
    return Expected(name, kept, {tap: 2 * bounds[tap] for tap in kept})


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree trace",
        description="Name the first tap, row and element of a cell that is not what it should be.",
        epilog="examples:\n  kdtree trace int4-ddtree-tiny-noisy-cpu\n"
        "  kdtree trace fp32-ar-tiny-cuda --against cpu\n\n"
        f"exit status: {PASSED} nothing diverges, {FAILED} something does, {INFRASTRUCTURE} the cell, an engine or its "
        "bundle is not there",
    )
    parser.add_argument("cell", help="a cell's id, as `kdtree matrix --list` prints it")
    parser.add_argument("--engine", default="csrc", help="the engine to trace (default: csrc)")
    parser.add_argument("--against", default="reference", help="reference, cpu, cuda or an engine's name")
    parser.add_json("stages and divergence as one object")
    return parser


def main(argv: Sequence[str]) -> int:
    """``kdtree trace CELL``: 0 nothing diverges, 1 something does, 3 the engine or the bundle is not there."""
    options = _parser().parse_args(argv)

    def say(line: str) -> None:
        print(line, file=plain_json.beside(options.json), flush=True)

    try:
        point = parse(options.cell)
        ranked = {point.ranks: rankable(point.ranks, scale=True)}
        known = expected(DEVICES, ranks=[point.ranks], ranked=ranked, scale=True)
        if point not in known:
            raise MatrixError(f"{point.id} is no cell of the matrix{remedy(point.id, known)}")
        path = prepare(options.engine, [point], say)[point.config]
        golden = Golden.open(path, point.precision)
        session = create(options.engine, point.device, point.ranks).load(
            path, point.precision, max_rows=rows_of(golden)
        )
        against = None if options.against == "reference" else other_engine(options.against, golden)
        done: list[Stage] = []
        for stage in stages(session, golden, point.drafter, point.seed, against, tell):
            done.append(stage)
            found = "agrees" if stage.divergence is None else f"DIVERGES: {stage.divergence.detail}"
            say(filled(f"{stage.name:<9} {found}", " " * 10))
    except (MatrixError, Infrastructure, EngineError, GoldenError) as error:
        named = f"{type(error).__name__}: " if isinstance(error, EngineError) else ""  # which of the protocol's it is
        print(f"kdtree trace: {named}{error}", file=sys.stderr)
        return INFRASTRUCTURE
    divergence = done[-1].divergence
    if options.json:
        report = {
            "cell": point.id,
            "engine": options.engine,
            "against": options.against,
            "stages": [{"name": stage.name, "agrees": stage.divergence is None} for stage in done],
            "divergence": None if divergence is None else asdict(divergence),
        }
        plain_json.give(report, options.json)
    return PASSED if divergence is None else FAILED
