"""The AR and DDTree loops of docs/model.md, Decoding, over a `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from refs.ddtree import Tree, accept, build, cut, depth_limit
from refs.elementary import F32, F
from refs.errors import ContextOverflow, DrafterError, RequestError
from refs.model import Model
from refs.sampling import choose


@dataclass(frozen=True)
class Request:
    """One decode; AR without ``draft`` and ``dflash``. ``draft[r]`` drafts the token at position ``first + r``."""

    prompt: Sequence[int]
    max_tokens: int
    draft: F32 | None = None
    first: int = 0
    block_size: int = 1
    budget: int = 0
    temperature: float = 0.0
    seed: int = 0
    dflash: bool = False
    """The model's own drafter drafts; ``draft`` and ``first`` then mean nothing."""
    chain: bool = False
    """Only the best token of each depth."""
    costs: Sequence[float] = ()
    """[budget + 1]: what a forward with so many nodes costs, by which trees are cut; empty: they are not."""

    def check(self, model: Model) -> None:
        """`RequestError`, `DrafterError` or `ContextOverflow` unless ``model`` can serve it."""
        if not self.prompt:
            raise RequestError("the prompt is empty")
        if self.max_tokens < 0 or self.budget < 0 or self.block_size < 1 or not 0 <= self.temperature < np.inf:
            raise RequestError(
                f"max_tokens {self.max_tokens}, budget {self.budget}, block_size {self.block_size}, temperature "
                f"{self.temperature}: none may be negative, block_size is at least 1"
            )
        if len(self.prompt) + self.max_tokens > model.context:
            raise ContextOverflow(
                f"{len(self.prompt)} prompt tokens and {self.max_tokens} more exceed a context of {model.context}"
            )
        if self.costs and (len(self.costs) != self.budget + 1 or not all(0 < c < np.inf for c in self.costs)):
            raise RequestError(f"{len(self.costs)} costs, must be {self.budget + 1} finite ones above 0")
        if self.dflash and model.drafter is None:
            raise DrafterError("the model has no drafter of its own")
        vocab = model.config.vocab_size
        if not self.dflash and self.draft is not None and (self.draft.ndim != 2 or self.draft.shape[1] != vocab):
            raise DrafterError(f"draft logits of shape {self.draft.shape}, must be [rows, {vocab}]")


@dataclass(frozen=True)
class Round:
    """One forward: its tree, the rows it accepted, and the logits of those rows [accepted, V]."""

    tree: Tree
    accepted: tuple[int, ...]
    logits: F
    draft: F | None = None
    """What the model's own drafter gave, [L, V]."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The committed tokens."""
        return tuple(self.tree.tokens[row] for row in self.accepted)


@dataclass(frozen=True)
class Decoded:
    """What a decode gave; ``logits`` [T+1, V]: row 0 after the prompt, row i after the i-th committed token."""

    tokens: tuple[int, ...]
    stopped: str
    """``limit`` or ``eos``."""
    logits: F
    rounds: tuple[Round, ...]

    @property
    def forwards(self) -> int:
        """Forwards after the prefill."""
        return len(self.rounds)


def recorded(request: Request, committed: int) -> F32:
    """The rows of the request's table that a tree may use when ``committed`` tokens are out."""
    if request.draft is None:
        return np.zeros((0, 1), np.float32)
    position = len(request.prompt) + committed
    rows = request.draft.shape[0]
    depth = depth_limit(request.block_size, request.max_tokens - committed, request.first, rows, position)
    start = position + 1 - request.first
    return request.draft[start : start + depth] if depth else request.draft[:0]


def drafted(request: Request, logits: F, committed: int) -> F32:
    """The rows of an own drafter's ``logits`` [L, V] that a tree may use."""
    depth = depth_limit(request.block_size, request.max_tokens - committed, 0, logits.shape[0], -1)
    return logits[:depth].astype(np.float32)


def plan(request: Request, draft: F32, bonus: int, eos: int) -> Tree:
    """The rows of the next forward, from draft logits [depths, V]."""
    tree = build(bonus, draft[:0] if bonus == eos else draft, request.budget, chain=request.chain)
    return cut(tree, request.costs) if request.costs else tree


def rounds(model: Model, request: Request) -> Iterator[Round]:
    """Reset, prefill and decode; one `Round` a forward. The first item has no tree rows accepted: it is the prefill."""
    request.check(model)
    model.reset()
    logits = model.prefill(request.prompt)[-1:]
    yield Round(Tree((), (), (), ()), (), logits)
    eos, committed = model.config.eos_id, 0
    while committed < request.max_tokens:
        bonus = choose(logits[-1], model.length - 1, request.temperature, request.seed)
        logits_of_draft = model.draft(bonus) if request.dflash else None
        if logits_of_draft is None:
            draft = recorded(request, committed)
        else:
            draft = drafted(request, logits_of_draft, committed)
        tree = plan(request, draft, bonus, eos)
        every = model.verify(tree.tokens, tree.parents)
        choices = [
            choose(row, model.length + depth, request.temperature, request.seed)
            for row, depth in zip(every, tree.depths, strict=True)
        ]
        path = accept(tree, choices, eos)
        model.commit(path)
        logits = every[list(path)]
        committed += len(path)
        yield Round(tree, path, logits, logits_of_draft)
        if tree.tokens[path[-1]] == eos:
            return


def decode(model: Model, request: Request) -> Decoded:
    """Run `rounds` to its end."""
    first, *rest = rounds(model, request)
    tokens = tuple(token for r in rest for token in r.tokens)
    stopped = "eos" if tokens and tokens[-1] == model.config.eos_id else "limit"
    return Decoded(tokens, stopped, np.concatenate([first.logits, *(r.logits for r in rest)]), tuple(rest))


def choices(tree: Tree, unstopped: Sequence[int], committed: int) -> list[int]:
    """Per row what AR chose at its depth. Off the path a row's choice is never asked for, so this may stand in."""
    following = [*unstopped[committed + 1 :], -1]
    return [following[min(d, len(following) - 1)] for d in tree.depths]


def replay(
    request: Request,
    tokens: Sequence[int],
    unstopped: Sequence[int],
    eos: int,
    own: Sequence[F] | None = None,
) -> tuple[tuple[Tree, tuple[int, ...]], ...]:
    """The rounds of a DDTree decode from AR's ``tokens`` alone: a row on the accepted path chooses what AR chose there.

    ``unstopped`` are ``tokens`` and, where EOS ended them, what AR would have gone on with (or nothing). ``own``: what
    a drafter of the model's gave in each round, in place of the request's table.
    """
    out: list[tuple[Tree, tuple[int, ...]]] = []
    committed = 0
    while committed < len(tokens) and (own is None or len(out) < len(own)):
        draft = recorded(request, committed) if own is None else drafted(request, own[len(out)], committed)
        tree = plan(request, draft, tokens[committed], eos)
        path = accept(tree, choices(tree, unstopped, committed), eos)
        out.append((tree, path))
        committed += len(path)
    return tuple(out)
