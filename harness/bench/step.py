"""``kdtree bench step``: AR steps and DDTree rounds of whole models, in the engine's own loop.

A step's time is the decode's wall time over its forwards, the host's share included, prefill and load not. A round of
width M is the bonus and M - 1 drafted nodes. Bytes are what a forward must read (``work.forward_bytes``), with experts
as even routing expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.bench import clock
from harness.bench.work import forward_bytes
from harness.golden import Golden
from harness.protocol import Decoded, DecodeRequest, Engine, Session
from refs.config import ModelConfig

Say = Callable[[str], None]
RUNS = 9
BLOCK = 8
WIDTHS = (2, 4, 8, 16, 32, 64)


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def requests(golden: Golden, drafter: str, widths: Sequence[int]) -> list[tuple[str, int, DecodeRequest]]:
    """Decoder, width and request: AR, then DDTree at every width. Greedy; recording would cost what is timed."""
    greedy: Any = {"temperature": 0.0, "record": False}
    found = [("ar", 1, golden.request(**greedy))]
    if drafter in golden.meta["run"]["drafters"]:
        found += [("ddtree", m, golden.request(drafter, **greedy, block_size=BLOCK, budget=m - 1)) for m in widths]
    return found


def measure(session: Session, request: DecodeRequest, runs: int = RUNS) -> tuple[clock.Timing, Decoded, float]:
    """Microseconds a forward over ``runs`` decodes, after one that warms caches and graphs; and its mean rows."""
    recorded = session.decode(replace(request, record=True))
    rows = [len(r.tokens) for r in recorded.rounds] or [1]
    session.decode(request)
    decodes = [session.decode(request) for _ in range(runs)]
    samples = [1e6 * d.decode_seconds / max(d.forwards, 1) for d in decodes]
    return clock.summarise(samples), decodes[0], sum(rows) / len(rows)


def line(
    config: str, precision: str, decoder: str, m: int, device: str, model: ModelConfig, prompt: int,
    measured: tuple[clock.Timing, Decoded, float],
) -> Step:  # fmt: skip
    """The figures of one measurement."""
    timing, decoded, rows = measured
    tokens, forwards = len(decoded.tokens), max(decoded.forwards, 1)
    size = forward_bytes(model, precision, m, prompt + tokens // 2)
    return Step(
        case=f"step-{precision}-{decoder}-{config}-m{m}",
        config=config,
        precision=precision,
        decoder=decoder,
        M=m,
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
    )


def text(s: Step) -> str:
    """The line for a reader."""
    return (
        f"{s.case:<36} {s.us:>9.1f} us a forward [{s.q1:.1f}, {s.q3:.1f}]  {s.tokens} tokens in {s.forwards} forwards"
        f" of {s.rows:.1f} rows  {s.tokens_per_second:>9.0f} tokens/s  {s.tokens_per_gigabyte:>9.0f} tokens/GB read"
    )


def run(
    engine: Engine,
    bundles: dict[str, Path],
    precisions: Sequence[str],
    drafter: str,
    widths: Sequence[int],
    patterns: Sequence[str],
    say: Say,
) -> list[Step]:
    """Every config and precision whose case a pattern chooses (none: all)."""
    found: list[Step] = []
    for config, path in bundles.items():
        for precision in precisions:
            golden = Golden.open(path, precision)
            model = ModelConfig.of(golden.file.fields, str(path))
            chosen = [
                (decoder, m, request)
                for decoder, m, request in requests(golden, drafter, widths)
                if not patterns or any(p in f"step-{precision}-{decoder}-{config}-m{m}" for p in patterns)
            ]
            if not chosen:
                continue
            session = engine.load(path, precision, max_rows=max(m for _, m, _ in chosen))
            try:
                for decoder, m, request in chosen:
                    measured = measure(session, request)
                    found.append(
                        line(config, precision, decoder, m, engine.device, model, len(golden.prompt), measured)
                    )
                    say(text(found[-1]))
            finally:
                session.close()
    return found
