"""Options, fixtures and the ledger come from the harness's own pytest plugin."""

pytest_plugins = ["harness.plugin"]
