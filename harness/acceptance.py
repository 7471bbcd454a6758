"""``kdtree acceptance``: how many tokens a forward commits with the model's own drafter, on held-out text, greedy.

Prompts are passages of the held-out documents, PASSAGES from each. For every budget the draft tree stands beside the
drafter's plain chain of at most as many tokens, and every decode is held against AR token by token. Errors are standard
errors over documents, because passages of one document are not independent.

Exit status 0 when every output is AR's, 1 when one is not, 3 for anything that kept it from running.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import plain_json
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser, positive
from harness.environment import environment
from harness.matrix import PRECISIONS
from harness.prepare import Infrastructure, prepare_config
from harness.progress import each, tell
from harness.protocol import DecodeRequest, EngineError, OwnDrafter, Session
from harness.quality import Estimate, estimate
from harness.sources import describe
from refs import checkpoint, recipe
from refs.errors import RefError

BUDGETS = (7, 15, 31, 63)


@dataclass(frozen=True)
class Line:
    """One budget in one precision; lengths are tokens committed by a forward, the bonus included."""

    precision: str
    budget: int
    tree: Estimate
    chain: Estimate
    """Of the drafter's best token at each depth, as many as the budget and the block allow."""
    equal: bool
    """Every output of both is AR's in every token."""
    passages: int
    tokens: int
    forwards: int
    """By the tree."""


def passages(
    documents: Sequence[tuple[str, bytes]], end: int, length: int, each: int
) -> Iterator[tuple[int, list[int]]]:
    """(document's index, prompt of ``length`` tokens): the end token and bytes from the beginning of a line on."""
    for index, (_, text) in enumerate(documents):
        lines = [0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n"))]
        starts = [at for at in lines if at + length - 1 <= len(text) and text[at : at + 1].isalpha()]
        count = min(each, len(starts))
        for i in range(count):
            at = starts[i * len(starts) // count]
            yield index, [end, *text[at : at + length - 1]]


def measure(
    session: Session,
    precision: str,
    prompts: Sequence[tuple[int, list[int]]],
    tokens: int,
    block: int,
    budgets: Sequence[int],
) -> list[Line]:
    """Every budget, over all prompts. Raises EngineError."""
    documents = 1 + max(index for index, _ in prompts)
    sums = {(b, chain): np.zeros((documents, 2)) for b in budgets for chain in (False, True)}  # tokens, forwards
    equal = dict.fromkeys(budgets, True)
    for index, prompt in each(prompts, f"{precision}: decoding"):
        want = session.decode(DecodeRequest(prompt, tokens)).tokens
        for (budget, chain), found in sums.items():
            asked = DecodeRequest(prompt, tokens, OwnDrafter(), block_size=block, budget=budget, chain=chain)
            got = session.decode(asked)
            equal[budget] &= got.tokens == want
            found[index] += len(got.tokens), got.forwards
    lines = []
    for budget in budgets:
        tree, plain = (found[found[:, 1] > 0] for found in (sums[budget, False], sums[budget, True]))
        lines.append(
            Line(
                precision,
                budget,
                estimate(tree[:, 0], tree[:, 1]),
                estimate(plain[:, 0], plain[:, 1]),
                equal[budget],
                len(prompts),
                int(tree[:, 0].sum()),
                int(tree[:, 1].sum()),
            )
        )
    return lines


def show(lines: Sequence[Line]) -> str:
    """For a reader."""
    out = []
    for precision in dict.fromkeys(line.precision for line in lines):
        mine = [line for line in lines if line.precision == precision]
        out += [
            f"{precision.upper()}, {mine[0].passages} passages, {mine[0].tokens} tokens; tokens a forward, "
            "errors over documents",
            f"  {'budget':>6}  {'tree':>14}  {'plain chain':>14}  equal to AR",
        ]
        for line in mine:
            tree, chain = (f"{e.value:.2f} +- {e.error:.2f}" for e in (line.tree, line.chain))
            out.append(f"  {line.budget:>6}  {tree:>14}  {chain:>14}  {'yes' if line.equal else 'NO'}")
    return "\n".join(out)


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree acceptance",
        description="Tokens a forward with the model's own drafter on held-out text, greedy, beside its plain chain.",
        epilog="examples:\n  kdtree acceptance --precision int4 --budget 15 --passages 1\n"
        "  kdtree acceptance --json docs/evidence/text-acceptance.json\n\n"
        "exit status: 0 every output is AR's, 1 one is not, 3 it could not run",
    )
    parser.add_argument("--config", default="text", help="one with trained weights and a drafter")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: all")
    parser.add_argument(
        "--budget",
        type=positive,
        action="append",
        help=f"nodes of a tree, repeatable (default: {BUDGETS[0]} to {BUDGETS[-1]})",
    )
    parser.add_argument("--block", type=positive, default=16, help="a tree is at most block - 1 deep (default: 16)")
    parser.add_argument("--passages", type=positive, default=2, help="of each document (default: 2)")
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--tokens", type=positive, default=96, help="to be decoded after each (default: 96)")
    parser.add_engine()
    parser.add_json("the figures and what they depend on")
    return parser


def main(argv: Sequence[str]) -> int:
    """See ``kdtree acceptance --help``."""
    options = _parser().parse_args(argv)
    budgets = options.budget or list(BUDGETS)
    lines: list[Line] = []
    try:
        wanted = recipe.load(options.config)
        if not wanted.weights.checkpoint or wanted.drafter is None:
            tell(f"kdtree acceptance: config {options.config} has no trained weights with a drafter; text has")
            return INFRASTRUCTURE
        engine, path = prepare_config(options.engine, options.config, options.device)
        texts = checkpoint.heldout(wanted.weights.checkpoint)
        prompts = list(passages(texts, wanted.model.eos_id, options.prompt, options.passages))
        if not prompts:
            tell(f"kdtree acceptance: no held-out document has a passage of {options.prompt} tokens")
            return INFRASTRUCTURE
        for precision in [options.precision] if options.precision else PRECISIONS:
            tell(f"{precision}: {len(prompts)} passages, budgets {', '.join(map(str, budgets))}, on {options.device}")
            session = engine.load(path, precision, max_rows=max(budgets) + 1)
            lines += measure(session, precision, prompts, options.tokens, options.block, budgets)
            session.close()
    except (Infrastructure, EngineError, RefError) as error:
        tell(f"kdtree acceptance: {error}")
        return INFRASTRUCTURE
    plain_json.give(_content(options, lines) if options.json else None, options.json)
    if options.json != plain_json.PRINTED:
        print(show(lines))
    return PASSED if all(line.equal for line in lines) else FAILED


def _content(options: argparse.Namespace, lines: Sequence[Line]) -> dict[str, Any]:
    sources = describe()
    asked: dict[str, Any] = {
        key: value for key, value in vars(options).items() if key not in ("json", "budget", "precision")
    }
    return {
        "commit": sources.commit,
        "dirty": list(sources.dirty),
        "engine": sources.engine,
        "environment": environment(),
        "request": asked,
        "lines": lines,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
