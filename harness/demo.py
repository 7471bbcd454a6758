"""``kdtree demo``: AR beside DDTree on one bundle; tokens, match, forwards, acceptance, times.

Where a bundle's tokens are the bytes of a text (config ``text``), the text is shown too.

Exit status 0 when both decoders agree in every token and every bit of the logits, 1 when not, 3 for anything that kept
the demo from running.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser
from harness.engines import create
from harness.golden import Golden
from harness.matrix import DEVICES, PRECISIONS, Point
from harness.prepare import Infrastructure, prepare
from harness.protocol import Decoded, DecodeRequest, Draft, EngineError, Session
from refs import recipe

RUNS = 3


@dataclass(frozen=True)
class Result:
    """One precision's two decodes. Times are the fastest of RUNS runs, in seconds, without build and load."""

    precision: str
    tokens: list[int]
    tree_tokens: list[int]
    forwards: int
    tree_forwards: int
    match: bool
    bits_match: bool
    acceptance: float
    """Tokens committed by a DDTree forward, on average."""
    prefill_seconds: tuple[float, float]
    decode_seconds: tuple[float, float]
    drafted: str


def _oracle(tokens: Sequence[int], first: int, vocab: int) -> Draft:
    """A draft whose best token is always the one that AR emitted."""
    logits = np.zeros((max(len(tokens), 1), vocab), np.float32)
    for row, token in enumerate(tokens):
        logits[row, token] = 16.0  # so far above the rest that a chain beats every sibling
    return Draft(logits, first)


def _fastest(session: Session, request: DecodeRequest) -> Decoded:
    """The fastest of several decodes, after one that warms caches, graphs and threads."""
    session.decode(request)
    return min((session.decode(request) for _ in range(RUNS)), key=lambda decoded: decoded.decode_seconds)


def run(session: Session, golden: Golden, drafter: str, tokens: int, block: int, budget: int) -> Result:
    """Both decodes of one precision."""
    request = replace(golden.request(), max_tokens=tokens, temperature=0.0)
    ar = _fastest(session, request)
    drafted = replace(golden.request(drafter), max_tokens=tokens, temperature=0.0, block_size=block, budget=budget)
    table = drafted.draft if isinstance(drafted.draft, Draft) else None
    note = "dflash, the model's own" if table is None else f"{drafter}, recorded in the bundle"
    if drafter == "oracle" and table is not None and len(table.logits) < len(ar.tokens) - 1:
        first, vocab = len(golden.prompt) + 1, golden.field("vocab_size")
        drafted = replace(drafted, draft=_oracle(ar.tokens[1:], first, vocab))
        note = "oracle, made from the AR tokens: the bundle's table is shorter"
    elif table is not None and len(table.logits) < len(ar.tokens) - 1:
        note += f", for the first {len(table.logits)} drafted positions; after them DDTree is AR"
    tree = _fastest(session, drafted)
    bits = ar.logits is not None and tree.logits is not None and ar.logits.tobytes() == tree.logits.tobytes()
    return Result(
        precision=golden.precision,
        tokens=list(ar.tokens),
        tree_tokens=list(tree.tokens),
        forwards=ar.forwards,
        tree_forwards=tree.forwards,
        match=ar.tokens == tree.tokens,
        bits_match=bits,
        acceptance=len(tree.tokens) / tree.forwards if tree.forwards else 0.0,
        prefill_seconds=(ar.prefill_seconds, tree.prefill_seconds),
        decode_seconds=(ar.decode_seconds, tree.decode_seconds),
        drafted=note,
    )


def text_of(tokens: Sequence[int]) -> str:
    """The text that bytes spell, quoted; other tokens as ``<id>``, broken UTF-8 as the replacement character."""
    parts = b"".join(bytes([token]) if token < 256 else b"<%d>" % token for token in tokens)
    return json.dumps(parts.decode("utf-8", "replace"), ensure_ascii=False)


def _line(name: str, tokens: Sequence[int], forwards: int, is_text: bool) -> str:
    content = text_of(tokens) if is_text else " ".join(map(str, tokens))
    return f"  {name:<7} {len(tokens)} tokens, {forwards} forwards: {content}"


def show(result: Result, block: int, budget: int, prompt: Sequence[int] = ()) -> str:
    """The result for a reader; as text after ``prompt`` if there is one."""

    def milliseconds(pair: tuple[float, float]) -> str:
        return f"AR {1e3 * pair[0]:.2f} ms, DDTree {1e3 * pair[1]:.2f} ms"

    less = result.forwards / result.tree_forwards if result.tree_forwards else 0.0
    return "\n".join(
        [
            f"{result.precision.upper()}",
            *([f"  prompt  {text_of(prompt)}"] if prompt else []),
            _line("AR", result.tokens, result.forwards, bool(prompt)),
            _line("DDTree", result.tree_tokens, result.tree_forwards, bool(prompt)),
            f"  greedy-exact match: {'YES' if result.match else 'NO'}"
            f" (logits {'equal in every bit' if result.bits_match else 'differ in bits'})",
            f"  forwards reduced {less:.2f}x, from {result.forwards} to {result.tree_forwards} (prefill not counted)",
            f"  average acceptance {result.acceptance:.2f} tokens a forward, block {block}, budget {budget}",
            f"  drafter {result.drafted}",
            f"  wall time, prefill: {milliseconds(result.prefill_seconds)}",
            f"  wall time, decode:  {milliseconds(result.decode_seconds)}",
        ]
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree demo",
        description="Decode one bundle with AR and with DDTree and compare them.",
        epilog="examples:\n  kdtree demo\n  kdtree demo --precision int4 --drafter noisy --budget 16\n\n"
        "exit status: 0 they agree in every token and every bit, 1 they do not, 3 the demo could not run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: both")
    parser.add_argument("--tokens", type=_positive, default=24)
    parser.add_argument("--block", type=_positive, default=8, help="a tree is at most block - 1 deep")
    parser.add_argument("--budget", type=int, default=7, help="nodes of a tree, the root not counted")
    parser.add_argument("--drafter", default="oracle", help="oracle, noisy, hostile or dflash")
    parser.add_argument("--engine", default="csrc")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def main(argv: Sequence[str]) -> int:
    """See ``kdtree demo --help``."""
    parser = _parser()
    options = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        point = Point("fp32", "ar", options.config, "", options.device)
        path = prepare(options.engine, [point], say)[options.config]
        engine = create(options.engine, options.device)
        is_text = bool(recipe.load(options.config).weights.checkpoint)
        results: list[Result] = []
        prompt: tuple[int, ...] = ()
        for precision in [options.precision] if options.precision else PRECISIONS:
            golden = Golden.open(path, precision)
            session = engine.load(path, precision, max_rows=max(options.budget + 1, 1))
            asked = (options.drafter, options.tokens, options.block, options.budget)
            results.append(run(session, golden, *asked))
            prompt = golden.prompt if is_text else ()
            session.close()
    except (Infrastructure, EngineError, ValueError) as error:
        print(f"kdtree demo: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    if options.json:
        content: dict[str, Any] = {**vars(options), "results": [asdict(result) for result in results]}
        print(json.dumps(content, indent=1))
    else:
        print(f"config {options.config}, engine {options.engine} on {options.device}, greedy")
        print(
            f"wall times are the fastest of {RUNS} runs after one to warm up; build, bundles and load are not in them"
        )
        for result in results:
            print(show(result, options.block, options.budget, prompt))
    return PASSED if all(result.match and result.bits_match for result in results) else FAILED
