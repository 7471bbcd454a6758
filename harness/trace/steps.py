"""Where stepping, verifying, committing or the decode loop leaves what one prefill of the same tokens gives.

A prefill that agrees with the golden is the yardstick: row invariance (``docs/model.md``) owes its bits to every other
way of computing a row. A row that differs is traced through the cache, layer by layer, or through its taps where the
engine has ``verify_taps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.cells import Divergence
from harness.checks import SAMPLING_TEMPERATURE
from harness.golden import Golden
from harness.protocol import F32, Decoded, Round, Session
from harness.trace.taps import Array, chosen, differ, order
from harness.widths import ancestors, draw
from refs.drafters import DFLASH


@dataclass(frozen=True)
class Tree:
    """Rows to verify after ``context``."""

    context: tuple[int, ...]
    tokens: Sequence[int]
    parents: Sequence[int]


Rows = dict[str, F32]
"""A prefill's logits [n, V] as ``logits``, and every layer's cache as the taps of the same rows."""


def prefilled(session: Session, golden: Golden, tokens: Sequence[int]) -> Rows:
    """What one prefill of ``tokens`` gives."""
    session.reset()
    return {"logits": session.prefill(tokens).copy(), **cached(session, golden)}


class Straight:
    """Prefills by token sequence, each run once and known for all its beginnings."""

    def __init__(self, session: Session, golden: Golden) -> None:
        self._session, self._golden = session, golden
        self._known: dict[tuple[int, ...], Rows] = {}

    def rows(self, tokens: Sequence[int]) -> Rows:
        """A prefill that begins with ``tokens``; its row ``len(tokens) - 1`` is that of the last of them."""
        key = tuple(tokens)
        if key not in self._known:
            rows = prefilled(self._session, self._golden, key)
            for end in range(1, len(key) + 1):
                self._known.setdefault(key[:end], rows)
        return self._known[key]


def cached(session: Session, golden: Golden) -> Rows:
    """Every layer's committed cache rows by tap name."""
    rows: Rows = {}
    for layer in range(golden.field("num_layers")):
        latent, k_rope = session.cache(layer)
        rows |= {f"layers.{layer}.mla.latent": latent.copy(), f"layers.{layer}.mla.k_rope": k_rope.copy()}
    return rows


def unlike(golden: Golden, got: Mapping[str, Array], want: Mapping[str, Array], told: str) -> Divergence | None:
    """The first tap that both sides have and whose bits differ."""
    for tap in order(golden):
        if tap in got and tap in want:
            found = differ(golden, tap, got[tap], want[tap], 0.0, told, chosen(got, tap))
            if found is not None:
                return found
    return None


def same_bits(got: F32, want: F32) -> bool:
    """Equal bytes."""
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def stepping(session: Session, golden: Golden) -> Divergence | None:
    """The first row that `Session.step` computes unlike the prefill."""
    n, told = len(golden.prompt), "step {} (position {}), against one prefill of the same tokens, which agrees"
    tokens = (*golden.prompt, *golden.tokens)
    want = prefilled(session, golden, tokens)
    session.reset()
    got = session.prefill(golden.prompt)[-1].copy()
    for position in range(n - 1, len(tokens)):
        if position >= n:
            got = session.step(tokens[position]).copy()
        here = told.format(position - n + 1, position)
        until = {tap: rows[: position + 1] for tap, rows in want.items()}
        found = unlike(golden, cached(session, golden), until, here)
        found = found or differ(golden, "logits", got[None], want["logits"][position][None], 0.0, here)
        if found is not None:
            tree = Tree(tokens[:position], (tokens[position],), (-1,))  # a step is a tree of one row
            return _tapped(session, golden, tree, (0,), tokens[: position + 1], here) or found
    return None


def verifying(session: Session, golden: Golden, straight: Straight, tree: Tree, told: str) -> Divergence | None:
    """The first row of one tree whose logits are not those of a prefill of its path, and where it went wrong."""
    ways = [ancestors(tree.parents, row) for row in range(len(tree.parents))]
    paths = [(*tree.context, *(tree.tokens[row] for row in way)) for way in ways]
    for row in sorted(range(len(ways)), key=lambda row: -len(ways[row])):  # a long path is also its beginnings
        straight.rows(paths[row])
    session.reset()
    session.prefill(tree.context)
    logits = session.verify(tree.tokens, tree.parents).copy()
    for row, (way, path) in enumerate(zip(ways, paths, strict=True)):
        want, position = straight.rows(path), len(path) - 1
        if same_bits(logits[row], want["logits"][position]):
            continue
        here = (
            f"{told}, row {row} of {len(ways)} (depth {len(way) - 1}, token {tree.tokens[row]}, position {position}, "
            f"path {' > '.join(map(str, way))}), against a prefill of its path, which agrees"
        )
        return _inside(session, golden, tree, way, path, want, here) or differ(
            golden, "logits", logits[row][None], want["logits"][position][None], 0.0, here
        )
    return None


def _tapped(
    session: Session, golden: Golden, tree: Tree, way: Sequence[int], path: Sequence[int], told: str
) -> Divergence | None:
    """The first operation of a tree's row that differs from the last row of a prefill of its path."""
    tap_rows = getattr(session, "verify_taps", None)
    if tap_rows is None or not tree.context:
        return None
    last = {tap: rows[-1:] for tap, rows in session.taps(path, operations=True).items()}
    session.reset()
    session.prefill(tree.context)
    got: Mapping[str, Any] = tap_rows(tree.tokens, tree.parents)
    return unlike(golden, {tap: rows[way[-1] :][:1] for tap, rows in got.items()}, last, told)


def _inside(
    session: Session, golden: Golden, tree: Tree, way: Sequence[int], path: Sequence[int], want: Rows, told: str
) -> Divergence | None:
    """Which tap of the last row of ``way`` went wrong: by its taps, else by its cache rows after a commit."""
    if hasattr(session, "verify_taps"):
        return _tapped(session, golden, tree, way, path, told)
    session.commit(way)
    until = {tap: rows[: len(path)] for tap, rows in want.items()}
    return unlike(golden, cached(session, golden), until, f"{told}; its cache rows after a commit")


def trees(session: Session, golden: Golden, drafter: str) -> Divergence | None:
    """Every golden round's tree, and the cache after its commit."""
    straight = Straight(session, golden)
    straight.rows((*golden.prompt, *golden.tokens))
    context = golden.prompt
    # An engine that rounds may have chosen otherwise than the golden run; its own trees serve as well.
    taken = session.decode(golden.request(drafter)).rounds if golden.rounding else golden.rounds(drafter)
    for number, round in enumerate(taken):
        tree = Tree(context, round.tokens, round.parents)
        found = verifying(session, golden, straight, tree, f"verify, round {number}")
        if found is None:
            session.reset()
            session.prefill(context)
            session.verify(round.tokens, round.parents)
            session.commit(round.accepted)
            context = (*context, *(round.tokens[row] for row in round.accepted))
            want = {tap: rows[: len(context)] for tap, rows in straight.rows(context).items()}
            told = f"commit of rows {list(round.accepted)}, round {number}, whose verify agrees"
            found = unlike(golden, cached(session, golden), want, told)
        if found is not None:
            return found
    return None


def widths(session: Session, golden: Golden, seed: int) -> Divergence | None:
    """The random trees of `harness.widths`."""
    straight = Straight(session, golden)
    for drawn in draw(golden, seed)[1]:
        tree = Tree(drawn.context, drawn.tokens, drawn.parents)
        found = verifying(session, golden, straight, tree, f"verify, random tree of width {len(drawn.tokens)}")
        if found is not None:
            return found
    return None


def decoding(session: Session, golden: Golden, drafter: str) -> Divergence | None:
    """The engine's own loop: the first round, row or step unlike the golden one, where all it is made of agrees."""
    decoded = session.decode(golden.request(drafter))
    if golden.rounding:  # what it chose is its own affair; that its history is what it chose, is not
        return _history(session, golden, decoded)
    if drafter:
        for number, (got, want) in enumerate(zip(decoded.rounds, golden.rounds(drafter), strict=False)):
            found = _drafted(golden, decoded, number) if drafter == DFLASH else None
            found = found or _round(number, got, want)
            if found is not None:
                return found
    return _tokens(decoded, golden) or _history(session, golden, decoded)


def sampling(session: Session, golden: Golden, drafter: str, seed: int) -> Divergence | None:
    """With a temperature and one seed, the first token that DDTree draws unlike AR."""
    changes: dict[str, Any] = {"temperature": SAMPLING_TEMPERATURE, "seed": seed}
    want = session.decode(golden.request(**changes))
    got = session.decode(golden.request(drafter, **changes))
    at = _apart(got.tokens, want.tokens)
    if at is None:
        return None
    a, b = (tokens[at] if at < len(tokens) else None for tokens in (got.tokens, want.tokens))
    return _discrete("tokens", (at,), a, b, f"token {at} of a sampled decode: DDTree {_said(a)}, AR {_said(b)}")


def _drafted(golden: Golden, decoded: Decoded, number: int) -> Divergence | None:
    """What the own drafter gave in a round, before a tree was made of it."""
    want = golden.draft_logits()[number]
    if decoded.draft_logits is None or len(decoded.draft_logits) <= number:
        return None
    got = decoded.draft_logits[number][: len(want)]
    return differ(golden, "draft", got, want, golden.tolerance("draft"), f"round {number} of the drafter, by depth")


def _round(number: int, got: Round, want: Round) -> Divergence | None:
    for name in ("tokens", "parents", "accepted"):
        mine, golden = tuple(getattr(got, name)), tuple(getattr(want, name))
        at = _apart(mine, golden)
        if at is None:
            continue
        a, b = (row[at] if at < len(row) else None for row in (mine, golden))
        sizes = f"{len(mine)} and {len(golden)} rows"
        detail = f"round {number}, {name}, row {at}: got {_said(a)}, golden {_said(b)} ({sizes})"
        if name != "accepted" and at < len(want.tokens):
            way = ancestors(want.parents, at)
            path = " > ".join(map(str, way))
            detail += f"; the golden row's path is {path}, tokens {[want.tokens[row] for row in way]}"
        return _discrete(f"rounds.{name}", (number, at), a, b, detail)
    return None


def _tokens(decoded: Decoded, golden: Golden) -> Divergence | None:
    at = _apart(decoded.tokens, golden.tokens)
    if at is None:
        return None
    a, b = (tokens[at] if at < len(tokens) else None for tokens in (decoded.tokens, golden.tokens))
    return _discrete("tokens", (at,), a, b, f"token {at} of the decode: got {_said(a)}, golden {_said(b)}")


def _history(session: Session, golden: Golden, decoded: Decoded) -> Divergence | None:
    """The logits and the cache that the loop left, against those of one prefill."""
    left = cached(session, golden)
    want = prefilled(session, golden, [*golden.prompt, *decoded.tokens])
    told = "after the whole decode, against one prefill of the same tokens"
    if decoded.logits is not None:
        rows = want["logits"][len(golden.prompt) - 1 :]
        found = differ(golden, "logits", decoded.logits, rows, 0.0, f"{told}, by step")
        if found is not None:
            return found
    return unlike(golden, left, want, told)


def _apart(got: Sequence[int], want: Sequence[int]) -> int | None:
    for i, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return i
    return None if len(got) == len(want) else min(len(got), len(want))


def _said(value: int | None) -> str:
    return "none" if value is None else str(value)


def _discrete(tap: str, index: tuple[int, ...], got: int | None, want: int | None, detail: str) -> Divergence:
    numbers = [np.nan if value is None else float(value) for value in (got, want)]
    return Divergence(tap, index, numbers[0], numbers[1], 0.0, 1, detail)
