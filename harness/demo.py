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

from engine import costs
from harness import plain_json, tree_text
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser, positive
from harness.describe import counted, filled
from harness.golden import Golden
from harness.matrix import DRAFTERS, F32_PRECISIONS, PRECISIONS
from harness.prepare import Infrastructure, prepare_config
from harness.protocol import Decoded, DecodeRequest, Draft, EngineError, OwnDrafter, RequestError, Session
from refs import recipe
from refs.drafters import DFLASH

RUNS = 3


@dataclass(frozen=True)
class Result:
    """One precision's AR and one drafter's DDTree. Times are the fastest of RUNS runs, in seconds, without load."""

    precision: str
    drafter: str
    tokens: list[int]
    tree_tokens: list[int]
    forwards: int
    tree_forwards: int
    match: bool
    bits_match: bool
    acceptance: float
    """Tokens committed by a DDTree forward, on average."""
    rows: float
    """Rows of a DDTree forward, on average."""
    prefill_seconds: tuple[float, float]
    decode_seconds: tuple[float, float]
    drafted: str
    costs: str
    """What rows cost relative to one row, where the budget follows them."""
    tree: list[str]
    """The first of the rounds that committed most."""

    @property
    def speed_up(self) -> float:
        """AR's decode time over DDTree's."""
        return self.decode_seconds[0] / self.decode_seconds[1] if self.decode_seconds[1] else 0.0


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


def _drafted(golden: Golden, drafter: str, ar: Decoded, request: DecodeRequest) -> tuple[DecodeRequest, str]:
    """The DDTree request, with an oracle's table made anew where the bundle's is too short; and what drafts."""
    if isinstance(request.draft, OwnDrafter):
        return request, "the model's own DFlash drafter"
    table = request.draft
    short = table is not None and len(table.logits) < len(ar.tokens) - 1
    if drafter == "oracle" and short:
        first, vocab = len(golden.prompt) + 1, golden.field("vocab_size")
        made = replace(request, draft=_oracle(ar.tokens[1:], first, vocab))
        return made, "oracle, made from the AR tokens: the bundle's table is shorter"
    note = f"{drafter}, recorded in the bundle"
    if table is not None and short:
        note += f", for the first {len(table.logits)} drafted positions; after them DDTree is AR"
    return request, note


def run(
    session: Session,
    golden: Golden,
    drafters: Sequence[str],
    tokens: int,
    block: int,
    budget: int | None,
    is_text: bool,
) -> list[Result]:
    """AR, and DDTree with each drafter, of one precision; ``budget`` None follows the measured costs.

    Raises EngineError: what the session refuses, and RequestError for costs that this engine does not measure.
    """
    ar = _fastest(session, replace(golden.request(), max_tokens=tokens, temperature=0.0))
    results = []
    for drafter in drafters:
        limits: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "block_size": block}
        request, note = _drafted(golden, drafter, ar, replace(golden.request(drafter), **limits, budget=budget or 0))
        if budget is None:
            auto = getattr(session, "auto_budget", None)
            if auto is None:
                raise RequestError("--budget auto: this engine measures no costs; give a number")
            request = auto(request)
        tree = _fastest(session, request)
        bits = ar.logits is not None and tree.logits is not None and ar.logits.tobytes() == tree.logits.tobytes()
        shown = tree_text.busiest(tree.rounds)
        rows = [len(r.tokens) for r in tree.rounds]
        results.append(
            Result(
                precision=golden.precision,
                drafter=drafter,
                tokens=list(ar.tokens),
                tree_tokens=list(tree.tokens),
                forwards=ar.forwards,
                tree_forwards=tree.forwards,
                match=ar.tokens == tree.tokens,
                bits_match=bits,
                acceptance=len(tree.tokens) / tree.forwards if tree.forwards else 0.0,
                rows=sum(rows) / len(rows) if rows else 0.0,
                prefill_seconds=(ar.prefill_seconds, tree.prefill_seconds),
                decode_seconds=(ar.decode_seconds, tree.decode_seconds),
                drafted=note,
                costs=costs.summary(request.costs) if request.costs else "",
                tree=tree_text.lines(shown, tree_text.as_byte if is_text else str) if shown else [],
            )
        )
    return results


def text_of(tokens: Sequence[int]) -> str:
    """The text that bytes spell, quoted; other tokens as ``<id>``, broken UTF-8 as the replacement character."""
    parts = b"".join(bytes([token]) if token < 256 else b"<%d>" % token for token in tokens)
    return json.dumps(parts.decode("utf-8", "replace"), ensure_ascii=False)


def _line(name: str, tokens: Sequence[int], forwards: int, is_text: bool) -> str:
    start = f"  {name:<7} {counted(len(tokens), 'token')}, {counted(forwards, 'forward')}: "
    return start + text_of(tokens) if is_text else filled(start + " ".join(map(str, tokens)), " " * 10)


def show(results: Sequence[Result], block: int, budget: int | None, prompt: Sequence[int], trees: bool) -> str:
    """One precision's results for a reader; as text after ``prompt`` if there is one."""

    def milliseconds(pair: tuple[float, float]) -> str:
        return f"AR {1e3 * pair[0]:.2f} ms, DDTree {1e3 * pair[1]:.2f} ms"

    first = results[0]
    out = [f"{first.precision.upper()}"]
    out += [f"  prompt  {text_of(prompt)}"] if prompt else []
    out += [_line("AR", first.tokens, first.forwards, bool(prompt))]
    limit = f"budget {budget}" if budget is not None else "budget auto"
    for r in results:
        less = r.forwards / r.tree_forwards if r.tree_forwards else 0.0
        out += [
            _line("DDTree", r.tree_tokens, r.tree_forwards, bool(prompt)),
            f"  greedy-exact match: {'YES' if r.match else 'NO'}"
            f" (logits {'equal in every bit' if r.bits_match else 'differ in bits'})",
            f"  forwards reduced {less:.2f}x, from {r.forwards} to {r.tree_forwards} (prefill not counted)",
            f"  average acceptance {r.acceptance:.2f} tokens a forward, block {block}, {limit},"
            f" {r.rows:.1f} rows a forward",
            f"  drafter {r.drafted}",
            *([f"  cost of a forward relative to one row: {r.costs}"] if r.costs else []),
            f"  wall time, prefill: {milliseconds(r.prefill_seconds)}",
            f"  wall time, decode:  {milliseconds(r.decode_seconds)}, {r.speed_up:.2f}x",
        ]
        if trees and r.tree:
            out += [
                "  the tree of the round that committed most, accepted nodes marked *:",
                *(f"    {x}" for x in r.tree),
            ]
    return "\n".join(out)


def _budget(text: str) -> int | None:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number from 0 on nor auto")
    return None if text == "auto" else int(text)


def _precisions(config: recipe.Recipe, asked: str | None) -> list[str]:
    """Those to show: the one asked for, or what the config has of FP32 and INT4. Raises RequestError."""
    found = [p for p in ([asked] if asked else F32_PRECISIONS) if p in config.precisions]
    if not found:
        has = ", ".join(config.precisions)
        raise RequestError(f"--precision {asked or F32_PRECISIONS[0]}: config {config.name} has {has}")
    return found


def _drafters(config: recipe.Recipe, asked: Sequence[str] | None) -> list[str]:
    """Those asked for, or the config's first. Raises RequestError."""
    known = config.run.drafters
    for drafter in asked or ():
        if drafter not in known:
            has = ", ".join(known)
            raise RequestError(f"--drafter {drafter}: config {config.name} has {has} (run.drafters of its file)")
    if not known:
        raise RequestError(f"config {config.name} records no drafter (run.drafters of its file)")
    return list(asked or known[:1])


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree demo",
        description="Decode one bundle with AR and with DDTree and compare them.",
        epilog="examples:\n  kdtree demo\n  kdtree demo --precision int4 --drafter noisy --budget 16\n"
        "  kdtree demo --config text --tokens 96 --block 16 --budget auto --drafter dflash --drafter oracle --tree\n\n"
        "exit status: 0 they agree in every token and every bit, 1 they do not, 3 the demo could not run",
    )
    parser.add_argument("--config", default="tiny", help="a name of refs/configs (default: tiny)")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: fp32 and int4, where the config has them")
    parser.add_argument("--tokens", type=positive, default=24, help="to be decoded (default: 24)")
    parser.add_argument("--block", type=positive, default=8, help="a tree is at most block - 1 deep (default: 8)")
    parser.add_argument(
        "--budget",
        type=_budget,
        default=7,
        metavar="N|auto",
        help="nodes of a tree (default: 7), or as many as pay here",
    )
    parser.add_argument(
        "--drafter",
        action="append",
        choices=(*DRAFTERS, DFLASH),
        help="default: the config's first, mostly oracle; repeatable, to compare",
    )
    parser.add_argument("--tree", action="store_true", help="show a tree of each drafter")
    parser.add_engine()
    parser.add_json("one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """See ``kdtree demo --help``."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        config = recipe.load(options.config)
        drafters, precisions = _drafters(config, options.drafter), _precisions(config, options.precision)
        engine, path = prepare_config(options.engine, options.config, options.device)
        is_text = bool(config.weights.checkpoint)
        rows = 1 + (costs.LIMIT if options.budget is None else options.budget)
        results: list[list[Result]] = []
        prompt: tuple[int, ...] = ()
        for precision in precisions:
            golden = Golden.open(path, precision)
            session = engine.load(path, precision, max_rows=rows)
            results.append(run(session, golden, drafters, options.tokens, options.block, options.budget, is_text))
            prompt = golden.prompt if is_text else ()
            session.close()
    except (Infrastructure, EngineError, ValueError) as error:
        print(f"kdtree demo: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    flat = [result for one in results for result in one]
    if options.json:
        asked = {key: value for key, value in vars(options).items() if key != "json"}
        asked |= {"drafter": drafters, "budget": "auto" if options.budget is None else options.budget}
        content: dict[str, Any] = {**asked, "results": [asdict(r) | {"speed_up": r.speed_up} for r in flat]}
        plain_json.give(content, options.json)
    if options.json != plain_json.PRINTED:
        print(f"config {options.config}, engine {options.engine} on {options.device}, greedy")
        print(
            f"wall times are the fastest of {RUNS} runs after one to warm up; build, bundles and load are not in them"
        )
        for one in results:
            print(show(one, options.block, options.budget, prompt, options.tree))
    return PASSED if all(result.match and result.bits_match for result in flat) else FAILED
