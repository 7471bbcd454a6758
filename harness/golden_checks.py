"""What a session gave, held against the golden results: shapes, tokens, logits, rounds, taps.

Each function adds its checks to the cell's findings in the order in which they decide the verdict, and notes where the
numbers first left the golden ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness import compare
from harness.cells import BadRound, Check, Divergence, Findings, Tree, Verdict
from harness.compare import Array, bits, exactly
from harness.golden import Golden
from harness.protocol import F32, Decoded, Round, Session


def shared(got: tuple[int, ...], want: tuple[int, ...]) -> int:
    """How many tokens agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))


def recorded(decoded: Decoded) -> F32:
    """The logits of a recorded decode; nothing, of no shape, where the engine kept none."""
    return decoded.logits if decoded.logits is not None else np.zeros((0, 0), np.float32)


def _divergence(tap: str, axis: str, got: Array, want: Array, tolerance: float) -> Divergence:
    index, count, sentence = compare.worst(got, want, tolerance)
    detail = f"{axis} {index[0]}: {sentence}"
    return Divergence(tap, index, float(got[index]), float(want[index]), tolerance, count, detail)


def against_golden(found: Findings, golden: Golden, decoded: Decoded) -> None:
    """Shape, finite, tokens, logits. Rows after the first wrong token have another history and are left out."""
    got, want, tolerance = decoded.logits, golden.logits, golden.tolerance("logits")
    same = shared(decoded.tokens, golden.tokens)
    rows: list[Check] = []
    shaped = compare.shape("logits", got, (len(decoded.tokens) + 1, want.shape[1]))
    if got is None or not shaped.ok:
        found.checks.append(shaped)
    else:
        got, want = got[: same + 1], want[: same + 1]
        rows = compare.logits(got, want, tolerance)
        found.checks += rows[:2]
        found.step_errors = tuple(compare.difference(got, want).max(axis=1).tolist())
        if not all(check.ok for check in rows):
            found.divergence = _divergence("logits", "step", got, want, tolerance)
    repeats = len(decoded.tokens) > 1 and len(set(decoded.tokens)) == 1 and len(set(golden.tokens)) > 1
    found.checks.append(
        exactly("degenerate", int(repeats), Verdict.FAIL_TOKENS, f"token {decoded.tokens[:1]} over and over")
    )
    wrong = max(len(decoded.tokens), len(golden.tokens)) - same
    found.checks.append(
        exactly(
            "tokens",
            wrong,
            Verdict.FAIL_TOKENS,
            f"from token {same} on: got {list(decoded.tokens[same : same + 8])}, "
            f"golden {list(golden.tokens[same : same + 8])}",
        )
    )
    stops = "eos" if golden.tokens and golden.tokens[-1] == golden.field("eos_id") else "limit"
    found.checks.append(
        exactly("stopped", int(decoded.stopped != stops), Verdict.FAIL_TOKENS, f"{decoded.stopped!r}, golden {stops!r}")
    )
    found.checks += rows[2:]
    other = golden.other_logits()
    if other is not None and golden.has_moe:
        rows_of_both = min(len(other), len(golden.logits))
        apart = float(compare.difference(other[:rows_of_both], golden.logits[:rows_of_both]).max())
        found.checks.append(
            exactly(
                "golden.precisions",
                int(not apart > tolerance),
                Verdict.FAIL_LOGITS,
                f"FP32 and INT4 goldens are {apart:.3g} apart, within the tolerance {tolerance:.3g}: they could be one",
            )
        )


def _tree(round: Round) -> Tree:
    return Tree(tuple(map(int, round.tokens)), tuple(map(int, round.parents)), tuple(map(int, round.accepted)))


def rounds(found: Findings, want: tuple[Round, ...], decoded: Decoded) -> None:
    """The first round unlike the golden one decides: by its tree, or else by what was accepted from it."""
    tree_detail = accept_detail = ""
    for i, golden in enumerate(want):
        if i >= len(decoded.rounds):
            accept_detail = f"{len(decoded.rounds)} rounds were recorded, golden {len(want)}"
            break
        got, golden_tree = _tree(decoded.rounds[i]), _tree(golden)
        if got == golden_tree:
            continue
        found.bad_round = BadRound(i, got, golden_tree)
        if (got.tokens, got.parents) != (golden_tree.tokens, golden_tree.parents):
            row = min(shared(got.tokens, golden_tree.tokens), shared(got.parents, golden_tree.parents))
            tree_detail = f"round {i}, row {row}: got {_row(got, row)}, golden {_row(golden_tree, row)}"
        else:
            accept_detail = f"round {i}: accepted rows {list(got.accepted)}, golden {list(golden_tree.accepted)}"
        break
    found.acceptance = tuple(int(count) for count in decoded.accepted_per_round)
    golden_counts = tuple(len(round.accepted) for round in want)
    if not accept_detail and found.acceptance != golden_counts:
        accept_detail = f"rows committed by round {list(found.acceptance)}, golden {list(golden_counts)}"
    off = decoded.forwards - len(want)
    found.checks += [
        exactly("tree", int(bool(tree_detail)), Verdict.FAIL_TREE, tree_detail),
        exactly("accepted", int(bool(accept_detail)), Verdict.FAIL_ACCEPTANCE, accept_detail),
        exactly("forwards", abs(off), Verdict.FAIL_ACCEPTANCE, f"{decoded.forwards} forwards, golden {len(want)}"),
    ]


def draft(found: Findings, golden: Golden, decoded: Decoded) -> None:
    """The own drafter's logits of every round up to the first with another history, and the first beyond its bound."""
    want, tolerance = golden.draft_logits(), golden.tolerance("draft")
    got = decoded.draft_logits
    if got is None or got.ndim != 3 or got.shape[1] < want.shape[1] or got.shape[2] != want.shape[2]:
        shape = None if got is None else got.shape
        found.checks.append(exactly("draft.shape", 1, Verdict.FAIL_SHAPE, f"draft logits {shape}, golden {want.shape}"))
        return
    counts = tuple(len(r.accepted) for r in golden.rounds("dflash"))
    same = shared(found.acceptance, counts)
    want = want[: same + 1].reshape(-1, want.shape[2])
    got = got[: same + 1, : golden.draft_logits().shape[1]].reshape(-1, want.shape[1])
    here = compare.tensor("draft", got, want, tolerance)
    found.checks += here
    if here[0].ok and not here[-1].ok and found.divergence is None:
        found.divergence = _divergence("draft", "row", got, want, tolerance)


def _row(tree: Tree, row: int) -> str:
    if row >= min(len(tree.tokens), len(tree.parents)):
        return f"no such row ({len(tree.tokens)} rows)"
    return f"token {tree.tokens[row]} under row {tree.parents[row]}"


def cache(golden: Golden, layers: Sequence[tuple[F32, F32]], decoded: Decoded) -> list[Check]:
    """Every layer's cache after the decode: its length, its latents and its rotated keys."""
    checks: list[Check] = []
    if decoded.tokens == golden.tokens:
        for layer, rows in enumerate(layers):
            for name, got, want in zip(("latent", "k_rope"), rows, golden.cache(layer), strict=True):
                bound = golden.tolerance(f"layers.{layer}.mla.{name}")
                checks += compare.tensor(f"cache.layers.{layer}.{name}", got, want, bound)
    return checks


def taps(found: Findings, session: Session, golden: Golden, decoded: Decoded | None = None) -> list[Check]:
    """The residual stream after every layer, and the first tap outside its tolerance as the divergence."""
    tokens = (*golden.prompt, *golden.tokens)
    taps = session.taps(tokens)
    checks: list[Check] = []
    for name, want in golden.taps.items():
        if name not in taps:
            checks.append(exactly(f"taps.{name}.shape", 1, Verdict.FAIL_SHAPE, "the engine has no such tap"))
            continue
        got, tolerance = taps[name], golden.tolerance(name)
        here = compare.tensor(f"taps.{name}", got, want, tolerance)
        checks += here
        if not here[-1].ok and here[0].ok:
            found.divergence = _divergence(name, "row", got, want, tolerance)
            break
    if decoded is not None and decoded.tokens == golden.tokens:
        rows = taps["logits"][len(golden.prompt) - 1 :] if "logits" in taps else np.zeros((0, 0), np.float32)
        checks.append(bits("prefill", rows, recorded(decoded), "one prefill against decode, [step, token]"))
    return checks
