"""A bf16 session against its goldens, which are float64 without roundings: statistics where choices of experts are
clear.

Tokens must be the golden ones as long as the history is and the golden margin exceeds what roundings can move;
rounds and acceptance must be those that follow from the engine's own AR. Nothing here loosens what holds in every
bit: DDTree is AR.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness import compare
from harness.cells import Check, Findings, Verdict
from harness.compare import exactly
from harness.golden import Golden
from harness.golden_checks import recorded, shared
from harness.protocol import Decoded, DecodeRequest, Draft, Round, Session
from harness.rounding import operations
from refs.decode import Request, replay
from refs.golden_bf16 import divergence, nmse

Mask = npt.NDArray[np.bool_]
ZERO_SHARE = 0.05
"""Zeros have a mean square error of 1; a tolerance above this would be too near to letting them pass."""


def clear_tokens(golden: Golden) -> Mask:
    """[T+1]: rows whose greatest logit leads by more than both sides of a rounding can move it; exact ties lead
    together."""
    logits, late = golden.logits, golden.decided[len(golden.prompt) - 1 :]
    top = logits.max(axis=1, keepdims=True)
    margin = (top - np.where(logits < top, logits, -np.inf).max(axis=1, keepdims=True))[:, 0]
    return np.asarray(late & (margin > 2 * golden.tolerance("logits")))


def tokens(found: Findings, golden: Golden, decoded: Decoded) -> None:
    """Shape and finiteness of the logits, tokens, how it stopped, and the logits of rows with the golden history."""
    got, want = decoded.logits, golden.logits
    same = shared(decoded.tokens, golden.tokens)
    shaped = compare.shape("logits", got, (len(decoded.tokens) + 1, want.shape[1]))
    found.checks.append(shaped)
    if got is not None and shaped.ok:
        wrong = int(np.count_nonzero(~np.isfinite(got)))
        found.checks.append(exactly("logits.finite", wrong, Verdict.FAIL_NONFINITE, f"{wrong} of {got.size} are not"))
    repeats = len(decoded.tokens) > 1 and len(set(decoded.tokens)) == 1 and len(set(golden.tokens)) > 1
    found.checks.append(
        exactly("degenerate", int(repeats), Verdict.FAIL_TOKENS, f"token {decoded.tokens[:1]} over and over")
    )
    parted = same < max(len(decoded.tokens), len(golden.tokens))
    unclear = same < len(golden.tokens) and not clear_tokens(golden)[same]
    detail = (
        f"from token {same} on: got {list(decoded.tokens[same : same + 8])}, "
        f"golden {list(golden.tokens[same : same + 8])}, whose lead there no rounding can take"
    )
    found.checks.append(exactly("tokens", int(parted and not unclear), Verdict.FAIL_TOKENS, detail))
    ended = bool(decoded.tokens) and decoded.tokens[-1] == golden.field("eos_id")
    limit = len(decoded.tokens) == int(golden.meta["run"]["max_tokens"])
    fine = decoded.stopped == ("eos" if ended else "limit") and (ended or limit)
    found.checks.append(
        exactly("stopped", int(not fine), Verdict.FAIL_TOKENS, f"{decoded.stopped!r} after {decoded.tokens[-1:]}")
    )
    if got is None or not all(check.ok for check in found.checks):
        return
    rows = min(same + 1, len(got), len(want))
    late = golden.decided[len(golden.prompt) - 1 :][:rows]
    found.step_errors = tuple(np.where(late, compare.difference(got[:rows], want[:rows]).max(axis=1), 0.0).tolist())
    if late.any():
        found.checks.append(compare.max_abs("logits", got[:rows][late], want[:rows][late], golden.tolerance("logits")))


def own_rounds(golden: Golden, request: DecodeRequest, ar: Decoded, decoded: Decoded) -> tuple[Round, ...]:
    """The rounds that DDTree must take, given the engine's own AR decode.

    Where the model's own drafter drafts, what it gave in each round is taken as given.
    """
    own = None
    asked = Request(request.prompt, request.max_tokens, block_size=request.block_size, budget=request.budget)
    if isinstance(request.draft, Draft):
        asked = replace(asked, draft=request.draft.logits, first=request.draft.first)
    else:
        asked = replace(asked, dflash=True)
        own = [] if decoded.draft_logits is None else list(decoded.draft_logits[:, : request.block_size - 1])
    found = replay(asked, ar.tokens, ar.tokens, golden.field("eos_id"), own)
    return tuple(Round(tuple(tree.tokens), tuple(tree.parents), tuple(path)) for tree, path in found)


def teacher_forced(found: Findings, golden: Golden, session: Session, decoded: Decoded) -> list[Check]:
    """One prefill of the golden tokens: statistics of logits and residual stream; every operation from its own
    inputs; bits."""
    forced = (*golden.prompt, *golden.tokens)
    taps = {name: rows.copy() for name, rows in session.taps(forced, operations=True).items()}
    checks, found.divergence = operations(golden, forced, taps)
    if not all(check.ok for check in checks):
        return checks
    n = len(golden.prompt)
    for name, want in golden.taps.items():
        got, decided = taps[name], golden.decided
        allowed = golden.tolerance(name)
        checks.append(Check(f"taps.{name}.nmse", nmse(got[decided], want[decided]), allowed, Verdict.FAIL_LOGITS))
    late, clear = golden.decided[n - 1 :], clear_tokens(golden)
    got, want = taps["logits"][n - 1 :], golden.logits
    flipped = np.flatnonzero(clear & (got.argmax(axis=1) != want.argmax(axis=1)))
    limits = {name: golden.tolerance(f"logits.{name}") for name in ("nmse", "kl")}
    checks += [
        Check("logits.nmse", nmse(got[late], want[late]), limits["nmse"], Verdict.FAIL_LOGITS),
        Check("logits.kl", float(np.abs(divergence(got[late], want[late])).max()), limits["kl"], Verdict.FAIL_LOGITS),
        exactly(
            "logits.top1", flipped.size, Verdict.FAIL_LOGITS, f"another token leads in rows {flipped[:8].tolist()}"
        ),
        Check(
            "logits.scale",
            limits["nmse"],
            ZERO_SHARE,
            Verdict.FAIL_LOGITS,
            "the tolerance is so wide that zeros could pass",
        ),
    ]
    other = golden.other_logits()
    if other is not None and golden.has_moe:
        both = min(len(other), len(want))
        apart = nmse(other[:both], want[:both])
        told = f"the goldens of bf16 and int4-bf16 are {apart:.2g} apart, within the tolerance {limits['nmse']:.2g}"
        checks.append(exactly("golden.precisions", int(not apart > limits["nmse"]), Verdict.FAIL_LOGITS, told))
    return checks + _own_history(golden, session, decoded, taps if decoded.tokens == golden.tokens else None)


def _own_history(
    golden: Golden, session: Session, decoded: Decoded, taps: dict[str, compare.Array] | None
) -> list[Check]:
    """One prefill of the engine's own tokens against its decode, in every bit."""
    if taps is None:
        taps = dict(session.taps((*golden.prompt, *decoded.tokens)))
    rows = taps["logits"][len(golden.prompt) - 1 :]
    return [compare.bits("prefill", rows, recorded(decoded), "one prefill against decode, [step, token]")]
