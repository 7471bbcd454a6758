"""What is told beside results: work that takes long says that it goes on, and how long it took."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines


def tell(line: str) -> None:
    """A line that is no result, of progress or of what went wrong, on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def told(
    what: str, say: Callable[[str], None], state: Callable[[], str] = lambda: "", first: float = 1.0
) -> Iterator[None]:
    """Says ``what`` when this has taken ``first`` seconds, its state and time now and then, and how long it took.

    A plain line each, for logs and terminals alike; nothing where it takes less.
    """
    start, ended, lines = time.monotonic(), threading.Event(), 0

    def show() -> None:
        nonlocal lines
        while not ended.wait(EVERY if lines else first):
            so_far = [state(), f"{time.monotonic() - start:.0f} s"] if lines else []
            say(f"{what} ... {', '.join(filter(None, so_far))}".rstrip())
            lines += 1

    teller = threading.Thread(target=show, daemon=True)
    teller.start()
    how = "stopped after "
    try:
        yield
        how = ""
    finally:
        ended.set()
        teller.join()
        if lines:
            say(f"{what}: {how}{time.monotonic() - start:.1f} s")


def each(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one; `told` on stderr how many are done."""
    done = 0
    with told(what, tell, lambda: f"{done} of {len(items)} are done"):
        for item in items:
            yield item
            done += 1
