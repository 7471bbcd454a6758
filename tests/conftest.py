"""Options, fixtures and the ledger come from the harness's own pytest plugin; what is slow, from ``slow.py``."""

pytest_plugins = ["harness.plugin", "tests.slow"]
