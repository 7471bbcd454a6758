"""Options, fixtures and the ledger come from the harness's own pytest plugin; what is slow, from ``slow.py``."""

import os

from harness.sources import HOOKED

pytest_plugins = ["harness.plugin", "tests.slow"]

for name in HOOKED:  # of a git hook that runs the tests, whose repositories are others
    os.environ.pop(name, None)
