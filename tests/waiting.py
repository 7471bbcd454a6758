"""Waiting in tests: one patience for all that will come, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds. What takes longer does not come at all, so whoever waits in vain fails.

How soon something has to come is another question: a test that asks it measures, and compares with the time that it
would take without what is tested.
"""


def until(condition: Callable[[], object]) -> float:
    """Wait for ``condition``; how many seconds it took. Fails after `PATIENCE`."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE, f"not within {PATIENCE:.0f} s"
        time.sleep(0.005)
    return time.monotonic() - began
