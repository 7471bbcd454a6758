"""K2.6-shaped layers on one GPU against several: ``python -m harness.bench.ranks --ranks 2 --file MODEL.kdtr``.

Three times a width: one rank; all ranks; and one rank's share of the work alone, which exchanges with itself
(``--alone``, on one GPU for any number of ranks: `harness.bench.share`). The first over the second is the speed-up, the
third over the second what is not spent waiting for other GPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import create
from engine.session import CsrcEngine
from harness import plain_json
from harness.bench import k26, share, step
from harness.cli import Parser
from harness.environment import survey
from harness.protocol import Engine
from harness.sources import describe
from refs.config import ModelConfig
from refs.drafter_config import split
from refs.kdtr import read

RUNS = 5


def measure(
    label: str,
    engine: Engine,
    path: Path,
    precision: str,
    widths: Sequence[int],
    logits: dict[Any, Any],
    real: bool,
    graphs: bool = True,
) -> list[dict[str, Any]]:
    """Microseconds a forward at every width; of ``real`` engines also whether all give the bits of the first width of
    the first: ``logits`` holds those by precision."""
    model = ModelConfig.of(split(read(path).fields)[0], str(path))
    given = k26.requests(model, tuple(m for m in widths if m > 1), step.BLOCK)
    found = []
    with engine.load(path, precision, max_rows=max(widths), graphs=graphs) as session:  # type: ignore[attr-defined]
        for m in widths:
            timing, decoded, rows = step.measure(session, given[m], RUNS)
            equal = digest = None
            if real:
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


def main() -> int:
    """Measure and print; 1 where a width or a number of ranks gave other bits."""
    parser = Parser(prog="python -m harness.bench.ranks", description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--layers", type=int, default=3, help="one dense, the others MoE")
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--vocab", type=int, default=8192, help="small, so that layers are what is timed")
    parser.add_argument("--precision", action="append", default=[], help="default: int4-bf16, K2.6's own")
    parser.add_argument("--ranks", type=int, action="append", default=[], help="real ones")
    parser.add_argument("--alone", type=int, action="append", default=[], help="the share of one of so many ranks")
    parser.add_argument("--no-graphs", action="store_true", help="every launch by itself")
    parser.add_argument("--several-only", action="store_true", help="leave out one rank")
    parser.add_argument("-M", type=int, action="append", default=[], help="widths (default 1 and 16)")
    parser.add_json("everything that was measured")
    options = parser.parse_args()
    widths = options.M or [1, 16]
    config = k26.model(num_layers=options.layers, n_routed_experts=options.experts, vocab_size=options.vocab)
    if not options.file.exists():
        k26.write(options.file, config, lambda text: print(text, file=sys.stderr, flush=True))
    engines: list[tuple[str, Any]] = [] if options.several_only else [("one rank", lambda: create("cuda"))]
    engines += [(f"share of {n} ranks, alone", lambda n=n: CsrcEngine("cuda:0", share.alone(n))) for n in options.alone]
    gpus = len(survey().gpus)
    for n in options.ranks:
        label = f"{n} ranks that share {gpus} GPU(s)" if n > gpus else f"{n} ranks"
        engines.append((label, lambda n=n: create("cuda", ranks=n)))
    judged = describe()
    about = {"commit": judged.commit, "engine": judged.engine, "device": ", ".join(g.name for g in survey().gpus)}
    found: list[dict[str, Any]] = []
    logits: dict[Any, Any] = {}
    for label, make in engines:
        engine = make()
        for precision in options.precision or ["int4-bf16"]:
            real, graphs = "alone" not in label, not options.no_graphs
            with contextlib.redirect_stdout(plain_json.beside(options.json)):
                found += measure(label, engine, options.file, precision, widths, logits, real, graphs)
            if options.json != plain_json.PRINTED:
                plain_json.give({**about, "lines": found}, options.json)
        if hasattr(engine, "close"):
            engine.close()
    if options.json == plain_json.PRINTED:
        plain_json.give({**about, "lines": found}, options.json)
    return 1 if any(entry["equal"] is False for entry in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
