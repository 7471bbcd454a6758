"""K2.6-shaped layers on one GPU against several: ``python -m harness.bench.ranks --ranks 2 --file MODEL.kdtr``.

Three times a width: one rank; all ranks; and one rank's share of the work alone, which exchanges with itself
(``--alone``, on one GPU for any number of ranks: `harness.bench.share`). The first over the second is the speed-up, the
third over the second what is not spent waiting for other GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import create
from engine.session import CsrcEngine
from harness import plain_json
from harness.bench import k26, share, step
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser, positive
from harness.environment import survey
from harness.protocol import Engine, EngineError
from harness.sources import describe
from refs.config import ModelConfig
from refs.drafter_config import split
from refs.kdtr import read

RUNS = 5


def measure(
    label: str, engine: Engine, path: Path, precision: str, widths: Sequence[int], logits: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Microseconds a forward at every width, and whether each gives the bits of the first width of the first engine:
    ``logits`` holds those by precision; None: what comes out of this engine means nothing."""
    model = ModelConfig.of(split(read(path).fields)[0], str(path))
    given = k26.requests(model, tuple(m for m in widths if m > 1), step.BLOCK)
    found = []
    with engine.load(path, precision, max_rows=max(widths)) as session:  # type: ignore[attr-defined]
        for m in widths:
            timing, decoded, rows = step.measure(session, given[m], RUNS)
            equal = digest = None
            if logits is not None:
                got = session.decode(replace(given[m], record=True)).logits.view(np.uint32)
                equal = bool(np.array_equal(logits.setdefault(precision, got), got))
                digest = hashlib.sha256(got.tobytes()).hexdigest()[:16]
            entry = {"engine": label, "precision": precision, "M": m, "rows": rows, "forwards": decoded.forwards}
            times = {"us": round(timing.us, 1), "q1": round(timing.q1, 1), "q3": round(timing.q3, 1)}
            found.append({**entry, **times, "equal": equal, "logits": digest})
            line = f"{precision:<10} {label:<28} M={m:<3} {timing.us:9.1f} us a forward"
            bits = {None: "", True: "  bits equal", False: "  BITS DIFFER"}[equal]
            print(f"{line} [{timing.q1:.1f}, {timing.q3:.1f}]{bits}", flush=True)
    return found


def _parser() -> Parser:
    parser = Parser(
        prog="python -m harness.bench.ranks",
        description="K2.6-shaped layers on one GPU, on several, and one rank's share of them alone (docs/ranks.md).",
        epilog="example:\n  python -m harness.bench.ranks --ranks 2 --alone 2 --file /tmp/k26.kdtr --json OUT\n\n"
        f"exit status: {PASSED}; {FAILED} a width or a number of ranks gave other bits; {INFRASTRUCTURE} the file, a "
        "device or the arguments",
    )
    parser.add_argument("--file", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--layers", type=positive, default=3, help="one dense, the others MoE (default: 3)")
    parser.add_argument("--experts", type=positive, default=384, help="of a layer (default: 384)")
    parser.add_argument("--vocab", type=positive, default=8192, help="default: 8192, so that layers are what is timed")
    parser.add_argument("--precision", action="append", default=[], help="default: int4-bf16, K2.6's own")
    parser.add_argument("--ranks", type=positive, action="append", default=[], metavar="N", help="N real ranks")
    parser.add_argument("--alone", type=positive, action="append", default=[], metavar="N", help="a share of N ranks")
    parser.add_argument("-M", type=positive, action="append", default=[], help="widths (default: 1 and 16)")
    parser.add_json("everything that was measured")
    return parser


def engines(options: argparse.Namespace) -> Iterator[tuple[str, Engine, bool]]:
    """What is measured: a label, the engine, and whether its logits mean something. Raises EngineError."""
    yield "one rank", create("cuda"), True
    for n in options.alone:
        yield f"share of {n} ranks, alone", CsrcEngine("cuda:0", share.alone(n)), False
    gpus = len(survey().gpus)
    for n in options.ranks:
        label = f"{n} ranks that share {gpus} GPU(s)" if n > gpus else f"{n} ranks"
        yield label, create("cuda", ranks=n), True


def main(argv: Sequence[str] | None = None) -> int:
    """See ``--help``."""
    parser = _parser()
    options = parser.parse_args(argv)
    judged = describe()
    about = {"commit": judged.commit, "engine": judged.engine, "device": ", ".join(g.name for g in survey().gpus)}
    found: list[dict[str, Any]] = []
    try:
        config = k26.model(num_layers=options.layers, n_routed_experts=options.experts, vocab_size=options.vocab)
        if not options.file.exists():
            k26.write(options.file, config, lambda text: print(text, file=sys.stderr, flush=True))
        logits: dict[str, Any] = {}
        for label, engine, real in engines(options):
            for precision in options.precision or ["int4-bf16"]:
                with contextlib.redirect_stdout(plain_json.beside(options.json)):
                    kept = logits if real else None
                    found += measure(label, engine, options.file, precision, options.M or [1, 16], kept)
                if options.json != plain_json.PRINTED:  # a run that is ended keeps what it had
                    plain_json.give({**about, "lines": found}, options.json)
            if hasattr(engine, "close"):
                engine.close()
    except (EngineError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    if options.json == plain_json.PRINTED:
        plain_json.give({**about, "lines": found}, options.json)
    return FAILED if any(entry["equal"] is False for entry in found) else PASSED


if __name__ == "__main__":
    raise SystemExit(main())
