"""``kdtree quality``: what INT4 costs on real text: bits per byte of the held-out documents in both precisions.

Each document is cut into pieces of PIECE bytes; a piece is run as the end token and its bytes, so every byte is
scored once, and none with text that training saw. KL divergence and top-1 agreement compare the precisions at the same
positions. Errors are standard errors over documents, because bytes of one document are not independent.

Exit status 0 when measured, 3 for anything that kept it from running.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import plain_json
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser
from harness.matrix import F32_PRECISIONS
from harness.prepare import Infrastructure, prepare_config
from harness.progress import each, tell
from harness.protocol import EngineError, Session
from refs import checkpoint, recipe
from refs.errors import RefError

F64 = npt.NDArray[np.float64]
PIECE = 512


@dataclass(frozen=True)
class Estimate:
    """A mean over bytes and its standard error over documents."""

    value: float
    error: float


@dataclass(frozen=True)
class Quality:
    """All in bits or shares per byte."""

    bytes: int
    documents: int
    fp32_bits: Estimate
    int4_bits: Estimate
    difference: Estimate
    """INT4 - FP32, paired."""
    kl_bits: Estimate
    """KL(FP32 || INT4)."""
    agreement: Estimate
    """Share of positions at which both have the same first choice."""
    fp32_top1: Estimate
    """Share of positions at which the first choice is the byte that follows."""
    int4_top1: Estimate


def pieces(documents: Sequence[tuple[str, bytes]], limit: int) -> Iterator[tuple[int, bytes]]:
    """(document's index, piece), of at most ``limit`` bytes altogether (0: of all)."""
    left = limit or sum(len(text) for _, text in documents)
    for index, (_, text) in enumerate(documents):
        for at in range(0, min(len(text), left), PIECE):
            yield index, text[at : min(at + PIECE, left)]
        left = max(0, left - len(text))


def log2_softmax(logits: npt.NDArray[Any]) -> F64:
    """Rows of logits -> base-2 logarithms of their probabilities, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray((wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))) / math.log(2))


def estimate(sums: F64, sizes: F64) -> Estimate:
    """The ratio of totals, and its standard error with documents as clusters (0 for a single one)."""
    total, count = float(sizes.sum()), len(sizes)
    value = float(sums.sum()) / total
    spread = float(((sums - value * sizes) ** 2).sum()) * count / max(count - 1, 1)
    return Estimate(value, math.sqrt(spread) / total if count > 1 else 0.0)


def measure(sessions: dict[str, Session], documents: Sequence[tuple[str, bytes]], end: int, limit: int) -> Quality:
    """Score ``documents`` with both precisions' sessions."""
    columns = np.zeros((len(documents), 8))  # sizes, then the sums of the seven measures
    for index, piece in each(list(pieces(documents, limit)), "scoring"):
        wanted = np.frombuffer(piece, np.uint8).astype(np.int64)
        logs = {}
        for precision, session in sessions.items():
            session.reset()
            logs[precision] = log2_softmax(session.prefill([end, *piece[:-1]]))
        a, b = logs["fp32"], logs["int4"]
        rows = np.arange(len(wanted))
        nll_a, nll_b = -a[rows, wanted], -b[rows, wanted]
        best_a, best_b = a.argmax(-1), b.argmax(-1)
        kl = (np.exp2(a) * (a - b)).sum(-1)
        measures = (nll_a, nll_b, nll_b - nll_a, kl, best_a == best_b, best_a == wanted, best_b == wanted)
        columns[index] += [len(wanted), *(float(np.sum(m)) for m in measures)]
    used = columns[columns[:, 0] > 0]
    estimates = [estimate(used[:, i], used[:, 0]) for i in range(1, 8)]
    return Quality(int(used[:, 0].sum()), len(used), *estimates)


def show(quality: Quality) -> str:
    """For a reader."""

    def line(name: str, e: Estimate, unit: str, digits: int = 4) -> str:
        return f"  {name:<22}{e.value:>9.{digits}f} +- {e.error:.{digits}f} {unit}"

    return "\n".join(
        [
            f"{quality.bytes} bytes of {quality.documents} held-out documents, errors over documents",
            line("FP32", quality.fp32_bits, "bits per byte"),
            line("INT4", quality.int4_bits, "bits per byte"),
            line("INT4 - FP32", quality.difference, "bits per byte", 5),
            line("KL(FP32 || INT4)", quality.kl_bits, "bits per byte", 5),
            line("same first choice", quality.agreement, "of positions"),
            line("FP32 first choice right", quality.fp32_top1, "of positions"),
            line("INT4 first choice right", quality.int4_top1, "of positions"),
        ]
    )


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree quality",
        description="Bits per byte of held-out text in FP32 and INT4, with KL divergence and top-1 agreement.",
        epilog="examples:\n  kdtree quality\n  kdtree quality --bytes 20000 --json\n\n"
        "exit status: 0 measured, 3 it could not run",
    )
    parser.add_argument("--config", default="text", help="one with trained weights")
    parser.add_argument("--bytes", type=int, default=0, metavar="N", help="of the held-out text; 0: all (default)")
    parser.add_engine()
    parser.add_json("one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """See ``kdtree quality --help``."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.bytes < 0:
        parser.error(f"argument --bytes: {options.bytes} is negative")

    def fail(error: Exception | str) -> int:
        tell(f"kdtree quality: {error}")
        return INFRASTRUCTURE

    try:
        wanted = recipe.load(options.config)
        if not wanted.weights.checkpoint:
            return fail(f"config {options.config} has drawn weights, which speak no language; text has trained ones")
        engine, path = prepare_config(options.engine, options.config, options.device)
        sessions = {precision: engine.load(path, precision) for precision in F32_PRECISIONS}
        tell(f"scoring held-out text of config {options.config} with engine {options.engine} on {options.device}")
        documents = checkpoint.heldout(wanted.weights.checkpoint)
        quality = measure(sessions, documents, wanted.model.eos_id, options.bytes)
        for session in sessions.values():
            session.close()
    except (Infrastructure, EngineError, RefError) as error:
        return fail(error)
    plain_json.give(quality, options.json)
    if options.json != plain_json.PRINTED:
        print(show(quality))
    return PASSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
