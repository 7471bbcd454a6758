"""Options, fixtures and the ledger come from the harness's own pytest plugin; what is slow, from ``slow.py``.

The collector of garbage does not go through what will never be any.
"""

from __future__ import annotations

import gc
import os

import pytest

from harness.sources import HOOKED

pytest_plugins = ["harness.plugin", "tests.slow"]

for name in HOOKED:  # of a git hook that runs the tests, whose repositories are others
    os.environ.pop(name, None)

gc.disable()  # importing torch and collecting thousands of tests makes millions of objects that stay


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.freeze()
