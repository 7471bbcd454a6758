"""Engines by name: the project's own, and those that others register under the entry point group ``kdtree.engines``.

A name may carry an argument after a colon, ``wrong:tokens``, that the factory takes as its second parameter.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from harness.protocol import Engine, EngineError

GROUP = "kdtree.engines"
OWN = {
    "csrc": "engine:create",
    "reference": "harness.reference_engine:create",
    "wrong": "harness.wrong_engine:create",
}
"""The project's engines work in a checkout that was never installed."""


class UnknownEngine(EngineError):
    """No engine has this name, or two have."""


def registered() -> dict[str, str]:
    """Targets ``module:function`` by name. Raises UnknownEngine when one name stands for two targets."""
    found = dict(OWN)
    for entry in entry_points(group=GROUP):
        if found.setdefault(entry.name, entry.value) != entry.value:
            raise UnknownEngine(
                f"engine {entry.name!r} is registered as {entry.value} and as {found[entry.name]}: rename one of them"
            )
    return found


def create(name: str, device: str, ranks: int = 1) -> Engine:
    """The engine ``name`` on ``device``, or on ``ranks`` such devices together.

    Raises UnknownEngine, also for one that cannot be shared by ranks, or what its factory raises.
    """
    plain, _, argument = name.partition(":")
    targets = registered()
    if plain not in targets:
        raise UnknownEngine(
            f"no engine is named {plain!r}; known: {', '.join(sorted(targets))}. "
            f"An installed package adds one under the entry point group {GROUP!r}"
        )
    module, _, attribute = targets[plain].partition(":")
    try:
        factory = cast(Callable[..., Any], getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise UnknownEngine(f"engine {plain!r}: {targets[plain]} cannot be loaded: {error}") from error
    if argument and len(inspect.signature(factory).parameters) < 2:
        raise UnknownEngine(f"engine {plain!r} takes no argument, {argument!r} was given")
    if ranks > 1 and "ranks" not in inspect.signature(factory).parameters:
        raise UnknownEngine(f"engine {plain!r} runs on one device, {ranks} ranks were asked for")
    several = {"ranks": ranks} if ranks > 1 else {}
    engine = factory(device, argument, **several) if argument else factory(device, **several)
    lacking = [name for name in ("name", "device", "load", "kernels") if not hasattr(engine, name)]
    if lacking:
        raise UnknownEngine(
            f"engine {plain!r}: {targets[plain]} made a {type(engine).__name__} without {', '.join(lacking)}: "
            "it is no Engine of harness/protocol.py"
        )
    return cast(Engine, engine)
