"""One cell through the protocol: every check of the design, in the order in which they decide the verdict.

An AR cell decodes, streams, steps and prefills the golden run and compares tokens, logits and taps. A DDTree cell holds
its rounds against the golden ones and its bits against AR's in the same session: logits of every committed row, the
cache after compaction, verify at every width, sampling with a seed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness import golden_bf16_checks
from harness.cells import Check, Findings, Verdict
from harness.compare import bits, exactly
from harness.golden import Golden
from harness.golden_checks import against_golden, cache, draft, recorded, rounds, shared, taps
from harness.matrix import PRECISIONS
from harness.protocol import F32, Decoded, DecodeRequest, Engine, Session
from harness.widths import check_widths
from refs.drafters import DFLASH
from refs.sampling import choose

SAMPLING_TEMPERATURE = 0.75  # exact in every float type; flat enough that a drafted token is refused now and then


class Ran(NamedTuple):
    """A greedy run of a session, and the cache that it built, by layer."""

    decoded: Decoded
    layers: list[tuple[F32, F32]]


def run_ar(session: Session, golden: Golden) -> Ran:
    """Raises what the engine raises."""
    return Ran(session.decode(golden.request()), _caches(session, golden))


def run_checks(
    found: Findings,
    engine: Engine,
    session: Session,
    golden: Golden,
    drafter: str,
    seed: int,
    alone: Session | None = None,
    known: Ran | None = None,
) -> None:
    """All checks of one cell, each in ``found`` as soon as it is made: time may run out before the last.

    ``drafter`` is ``""`` for AR; ``alone`` is one rank, whose bits several must give; ``known`` is AR's run of this
    session, made here where it is not given. Raises what the engine raises.
    """
    request = golden.request(drafter)
    ar = (known or run_ar(session, golden)) if drafter else None
    session.reset_counters()
    stale = {name: count for name, count in session.counters().items() if count}
    decoded = session.decode(request)
    found.kernels = {name: int(count) for name, count in session.counters().items()}
    found.times = {"prefill": decoded.prefill_seconds, "decode": decoded.decode_seconds}
    run = Ran(decoded, _caches(session, golden))

    if golden.rounding:
        golden_bf16_checks.tokens(found, golden, decoded)
    else:
        against_golden(found, golden, decoded)
    if ar is not None:
        _rounds(found, golden, request, drafter, ar, run)
    if alone is not None:
        found.checks += _against_one_rank(decoded, run.layers, alone.decode(request), _caches(alone, golden))
    found.checks.append(_counts(decoded, drafter))
    found.checks += _stream(session, request, decoded)
    if ar is not None:
        _other_trees(found, session, golden, drafter, seed, ranked=alone is not None)
    else:
        _other_prefixes(found, session, golden, seed, run)
    found.checks += _kernels(engine, golden, found.kernels, drafter)
    found.checks.append(exactly("kernels.reset", len(stale), Verdict.FAIL_KERNEL, f"counted after a reset: {stale}"))
    guard = session.broken_guard()
    found.checks.append(exactly("guards", int(bool(guard)), Verdict.FAIL_KERNEL, f"written outside of {guard}"))


def _rounds(found: Findings, golden: Golden, request: DecodeRequest, drafter: str, ar: Ran, run: Ran) -> None:
    """DDTree's rounds, and its bits against AR's."""
    if golden.rounding:
        owed = golden_bf16_checks.own_rounds(golden, request, ar.decoded, run.decoded)
    else:
        owed = golden.rounds(drafter)
    rounds(found, owed, run.decoded)
    if drafter == DFLASH and not golden.rounding:
        draft(found, golden, run.decoded)
    found.checks += _against_ar(run.decoded, ar.decoded, run.layers, ar.layers)


def _other_trees(found: Findings, session: Session, golden: Golden, drafter: str, seed: int, *, ranked: bool) -> None:
    """DDTree sampled, and trees of every width; what a failed cell's taps say."""
    found.checks += _sampling(session, golden, drafter, seed)
    check_widths(found.checks, session, golden, seed, ranked=ranked)
    if not golden.rounding and not all(check.ok for check in found.checks):
        taps(found, session, golden)


def _other_prefixes(found: Findings, session: Session, golden: Golden, seed: int, run: Ran) -> None:
    """AR sampled, stepped from every prefix, and layer by layer."""
    found.checks += _draws(session, golden, seed)
    found.checks += _stepping(session, golden, run.decoded)
    if golden.rounding:
        found.checks += golden_bf16_checks.teacher_forced(found, golden, session, run.decoded)
    else:
        found.checks += taps(found, session, golden, run.decoded)
        found.checks += cache(golden, run.layers, run.decoded)


def _caches(session: Session, golden: Golden) -> list[tuple[F32, F32]]:
    layers = (session.cache(layer) for layer in range(golden.field("num_layers")))
    return [(latent.copy(), k_rope.copy()) for latent, k_rope in layers]


def _counts(decoded: Decoded, drafter: str) -> Check:
    """Forwards, rows committed and tokens tell one story; AR takes one forward a token."""
    committed = sum(decoded.accepted_per_round)
    wrong = committed != len(decoded.tokens) or len(decoded.accepted_per_round) != decoded.forwards
    wrong = wrong or (not drafter and decoded.forwards != len(decoded.tokens))
    detail = (
        f"{len(decoded.tokens)} tokens, {decoded.forwards} forwards, {list(decoded.accepted_per_round)} rows committed"
    )
    return exactly("counts", int(wrong), Verdict.FAIL_ACCEPTANCE, detail)


def _against_ar(
    decoded: Decoded, ar: Decoded, cache: list[tuple[F32, F32]], ar_cache: list[tuple[F32, F32]]
) -> list[Check]:
    """Logits of every committed row, and every layer's cache, are AR's bits."""
    logits = bits("ar.logits", recorded(decoded), recorded(ar), "DDTree against AR, [step, token]")
    return [logits, _same_cache("ar.cache", cache, ar_cache)]


def _against_one_rank(
    decoded: Decoded, cache: list[tuple[F32, F32]], one: Decoded, one_cache: list[tuple[F32, F32]]
) -> list[Check]:
    """Several ranks give one rank's tokens and rounds, and its bits in every logit and in every layer's cache."""
    wrong = int((decoded.tokens, decoded.rounds, decoded.stopped) != (one.tokens, one.rounds, one.stopped))
    detail = f"tokens {list(decoded.tokens)}, one rank {list(one.tokens)}; {decoded.forwards} and {one.forwards} rounds"
    return [
        exactly("ranks.tokens", wrong, Verdict.FAIL_BITWISE, detail),
        bits("ranks.logits", recorded(decoded), recorded(one), "several ranks against one, [step, token]"),
        _same_cache("ranks.cache", cache, one_cache),
    ]


def _same_cache(name: str, mine: list[tuple[F32, F32]], others: list[tuple[F32, F32]]) -> Check:
    """Every layer's cache, bit for bit."""
    details: list[str] = []
    for layer, (pair, other) in enumerate(zip(mine, others, strict=True)):
        for part, a, b in zip(("latent", "k_rope"), pair, other, strict=True):
            check = bits("cache", a, b, f"layer {layer}, {part}, [slot, element]")
            details += [check.detail] if not check.ok else []
    return exactly(name, len(details), Verdict.FAIL_BITWISE, "".join(details[:1]))


def _stream(session: Session, request: DecodeRequest, decoded: Decoded) -> list[Check]:
    streamed = tuple(int(token) for token in session.stream(request))
    same = shared(streamed, decoded.tokens)
    wrong = max(len(streamed), len(decoded.tokens)) - same
    return [exactly("stream", wrong, Verdict.FAIL_TOKENS, f"{list(streamed)} streamed, {list(decoded.tokens)} decoded")]


def _cut_short(golden: Golden, decoded: Decoded) -> str:
    """What a decode lacks that has to go on to its limit or to the end token, and no further, with logits of each."""
    tokens, eos = decoded.tokens, golden.field("eos_id")
    last = tokens.index(eos) + 1 if eos in tokens else int(golden.meta["run"]["max_tokens"])
    if len(tokens) != last:
        return f"ended after {len(tokens)} tokens, not {last}; "
    rows = len(recorded(decoded))
    return "" if rows == last + 1 else f"{rows} rows of logits for {last} tokens; "


def _sampling(session: Session, golden: Golden, drafter: str, seed: int) -> list[Check]:
    """With a temperature and one seed, DDTree draws AR's tokens from AR's bits."""
    changes: dict[str, Any] = {"temperature": SAMPLING_TEMPERATURE, "seed": seed}
    ar = session.decode(golden.request(**changes))
    tree = session.decode(golden.request(drafter, **changes))
    same, short = shared(tree.tokens, ar.tokens), _cut_short(golden, ar)
    wrong = max(len(tree.tokens), len(ar.tokens)) - same + bool(short)
    detail = f"{short}from token {same} on: DDTree {list(tree.tokens[same:])}, AR {list(ar.tokens[same:])}"
    return [
        exactly("sampling.tokens", wrong, Verdict.FAIL_BITWISE, detail),
        bits("sampling.logits", recorded(tree), recorded(ar), "sampled, DDTree against AR, [step, token]"),
    ]


def _draws(session: Session, golden: Golden, seed: int) -> list[Check]:
    """AR's sampled tokens are those that the reference draws from the engine's own logits."""
    sampled = session.decode(golden.request(temperature=SAMPLING_TEMPERATURE, seed=seed))
    last = len(golden.prompt) - 1
    logits = recorded(sampled)[: len(sampled.tokens)]
    drawn = tuple(choose(row, last + i, SAMPLING_TEMPERATURE, seed) for i, row in enumerate(logits))
    same, short = shared(sampled.tokens, drawn), _cut_short(golden, sampled)
    wrong = max(len(sampled.tokens), len(drawn)) - same + bool(short)
    detail = f"{short}from token {same} on: got {list(sampled.tokens[same:])}, the reference draws {list(drawn[same:])}"
    return [exactly("sampling.draws", wrong, Verdict.FAIL_TOKENS, detail)]


def _stepping(session: Session, golden: Golden, decoded: Decoded) -> list[Check]:
    """Prefill and single steps give the bits of the engine's own loop."""
    session.reset()
    rows = [session.prefill(golden.prompt)[-1].copy()]
    rows += [session.step(token).copy() for token in decoded.tokens]
    return [bits("steps", np.stack(rows), recorded(decoded), "stepping against decode, [step, token]")]


def _kernels(engine: Engine, golden: Golden, counters: dict[str, int], drafter: str) -> list[Check]:
    """The kernels of this cell ran, and those that are another precision's alone, or the own drafter's, did not."""
    needed = engine.kernels(golden.precision, golden.has_moe)
    foreign = frozenset().union(*(engine.kernels(p, golden.has_moe) for p in PRECISIONS)) - needed
    drafting: frozenset[str] = getattr(engine, "drafter_kernels", frozenset)()
    if drafter == DFLASH:
        needed |= drafting
        foreign -= engine.kernels("fp32", moe=False)  # the drafter itself is f32 whatever the model is
    else:
        foreign |= drafting
    idle = sorted(name for name in needed if counters.get(name, 0) < 1)
    ran = sorted(name for name in foreign if counters.get(name, 0) > 0)
    return [
        exactly("kernels", len(idle), Verdict.FAIL_KERNEL, f"never launched: {', '.join(idle)}; counted: {counters}"),
        exactly("kernels.foreign", len(ran), Verdict.FAIL_KERNEL, f"not this cell's, yet launched: {ran}"),
    ]
