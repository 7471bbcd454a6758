"""The ``-k`` expressions that choose cells and faults: pytest's, evaluated before anything runs.

What a filter chooses is what a run expects, so one that chooses nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from harness.matrix import MatrixError, Point
from refs.names import meant

_WORD = re.compile(r"\s*([()]|[^\s()]+)")


def matcher(expression: str) -> Callable[[Iterable[str]], bool]:
    """The meaning of a ``-k`` expression, that of pytest: words joined by ``and``, ``or``, ``not`` and parentheses.

    A word holds for names of which one contains it, whatever the case. Raises MatrixError for a malformed expression.
    """
    words = _WORD.findall(expression)
    at = 0

    def peek() -> str:
        return words[at] if at < len(words) else ""

    def take() -> str:
        nonlocal at
        at += 1
        return str(words[at - 1])

    def either() -> Callable[[list[str]], bool]:
        left = both()
        while peek() == "or":
            take()
            left = (lambda a, b: lambda names: a(names) or b(names))(left, both())
        return left

    def both() -> Callable[[list[str]], bool]:
        left = single()
        while peek() == "and":
            take()
            left = (lambda a, b: lambda names: a(names) and b(names))(left, single())
        return left

    def single() -> Callable[[list[str]], bool]:
        word = take() if peek() else ""
        if word == "not":
            inner = single()
            return lambda names: not inner(names)
        if word == "(":
            inner = either()
            if (take() if peek() else "") != ")":
                raise MatrixError(f"-k {expression!r}: a parenthesis is not closed")
            return inner
        if word in ("", ")", "and", "or"):
            raise MatrixError(f"-k {expression!r}: a word is missing")
        return lambda names: any(word.lower() in name for name in names)

    whole = either()
    if peek():
        raise MatrixError(f"-k {expression!r}: {peek()!r} is unexpected")
    return lambda names: whole([name.lower() for name in names])


def select(points: Sequence[Point], expression: str, names: Sequence[str] = ()) -> list[Point]:
    """The points that ``expression`` chooses: the one whose id it is, otherwise those whose id it matches.

    ``names`` are further names that every point goes by. Raises MatrixError when nothing matches.
    """
    exact = [point for point in points if point.id == expression.strip()]
    if exact:
        return exact
    holds = matcher(expression)
    chosen = [point for point in points if holds([point.id, *names])]
    if not chosen:
        raise MatrixError(f"-k {expression!r} matches none of {len(points)} cells{remedy(expression.strip(), points)}")
    return chosen


def remedy(id: str, points: Sequence[Point]) -> str:
    """The end of a message about a cell that is none: ids like it, or where all of them are."""
    return meant(id, (point.id for point in points)) or "; `kdtree matrix --list` shows their ids"
