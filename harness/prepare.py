"""What a run will do, settled before any worker starts: devices, expected cells, the build, the bundles.

Whatever stands in the way is an Infrastructure error with the remedy in its message, and the run's exit status is 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import host_memory
from harness.cells import DEVICES
from harness.engines import create, registered
from harness.environment import survey
from harness.filters import remedy, select
from harness.gpu_share import SHARE, ranks_share
from harness.matrix import MatrixError, Point, of_run
from harness.progress import tell
from harness.protocol import Engine, EngineError

Say = Callable[[str], None]


class Infrastructure(Exception):
    """A build, a bundle, a device or the configuration keeps the run from starting."""


@dataclass(frozen=True)
class Plan:
    """What a run expects, as values that can be handed to its workers."""

    engine: str
    devices: tuple[str, ...]
    expected: tuple[str, ...]
    """Cell ids in the order in which they run."""
    filter: str
    """The expression that chose them, ``""`` for all."""


def usable_devices(engine: str, asked: Sequence[str], required: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The devices whose cells are expected, and a note on one that is left out.

    Without ``asked`` those are the CPU and, for the project's own engine, a usable GPU. Raises Infrastructure for a
    device that was asked for or required and is not usable.
    """
    for device in (*asked, *required):
        if device not in DEVICES:
            raise Infrastructure(f"device {device!r} is none of {', '.join(DEVICES)}")
    own = engine.partition(":")[0] == "csrc"
    wanted = list(dict.fromkeys([*(asked or ["cpu"]), *required]))
    reason = survey().reason if "cuda" in wanted or (own and not asked) else "not asked for"
    if "cuda" in wanted and reason:
        raise Infrastructure(f"device cuda was asked for and is not usable: {reason}; `kdtree doctor` says more")
    if not asked and own and not reason and "cuda" not in wanted:
        wanted.append("cuda")
    note = f"no CUDA cells: {reason}" if own and not asked and reason else ""
    return tuple(sorted(wanted, key=DEVICES.index)), note


def points_of(engine: str, devices: Sequence[str], ranks: Sequence[int] = (), *, scale: bool = False) -> list[Point]:
    """The cells of a run on this machine. Raises MatrixError; Infrastructure for more ranks than GPUs."""
    gpus = len(survey().gpus) if "cuda" in devices else 0
    if ranks and "cuda" in devices and max(ranks) > max(gpus, 1) and not ranks_share():
        raise Infrastructure(
            f"--ranks {max(ranks)}: every rank needs a GPU, and there {'is 1' if gpus == 1 else f'are {gpus}'} here; "
            f"{SHARE}=1 lets them share, which is slow and gives the same bits"
        )
    return of_run(devices, gpus=gpus, ranks=ranks, shared=engine == "csrc", scale=scale)


def plan(
    engine: str,
    devices: Sequence[str],
    *,
    ranks: Sequence[int] = (),
    ids: Sequence[str] = (),
    expression: str = "",
    names: Sequence[str] = (),
    scale: bool = False,
) -> Plan:
    """The expected cells: all, or those that ``ids`` name, of them those that ``expression`` chooses.

    ``scale``: all are those of real sizes too.

    Raises Infrastructure for a broken config, an unknown engine, or a choice that leaves nothing.
    """
    try:
        if engine.partition(":")[0] not in registered():
            raise Infrastructure(f"no engine is named {engine!r}; known: {', '.join(sorted(registered()))}")
        points = points_of(engine, devices, ranks, scale=scale)
        chosen: list[Point] = points
        if ids:
            unknown = sorted(set(ids) - {point.id for point in points})
            if unknown:
                raise Infrastructure(f"{unknown[0]} is no cell of this run{remedy(unknown[0], points)}")
            chosen = [point for point in points if point.id in ids]
        if expression:
            chosen = select(chosen, expression, names)
    except MatrixError as error:
        raise Infrastructure(str(error)) from error
    text = " and ".join(filter(None, [" or ".join(sorted(ids)), expression]))
    return Plan(engine, tuple(devices), tuple(point.id for point in chosen), text)


def prepare_config(engine: str, config: str, device: str) -> tuple[Engine, Path]:
    """An engine and one config's bundle, built and made as needed; what takes long is told on stderr.

    Raises Infrastructure.
    """
    path = prepare(engine, [Point("fp32", "ar", config, "", device)], tell)[config]
    return create(engine, device), path


def check_variables() -> None:
    """Ask the CPU's engine whether it takes its variables, where one is set: what it refuses it would in every cell.

    Raises Infrastructure with what it says.
    """
    if not any(os.environ.get(name) for name in ("KDTREE_THREADS", "KDTREE_ISA")):
        return  # to load it takes seconds
    from engine.library import library, named_errors

    own = library("cpu")
    try:
        with named_errors():
            own.backend_close(own.backend_open("cpu", False))
    except EngineError as error:
        raise Infrastructure(str(error)) from error


def prepare(engine: str, points: Sequence[Point], say: Say) -> dict[str, Path]:
    """Build the engine for every device of ``points`` and make their bundles; the bundles' paths by config.

    Raises Infrastructure.
    """
    from refs import recipe  # numpy and the reference, for runs alone
    from refs.errors import RefError

    configs = list(dict.fromkeys(point.config for point in points))
    try:
        for config in configs:
            recipe.load(config)  # a wrong name or file is told before anything is built
        host_memory.check(points)
    except (host_memory.TooLittleMemory, RefError) as error:
        raise Infrastructure(str(error)) from error
    devices = dict.fromkeys(point.device for point in points)
    for device in devices:
        try:
            create(engine, device)
        except Exception as error:
            raise Infrastructure(
                f"engine {engine!r} is not usable on {device}: {type(error).__name__}: {error}"
            ) from error
    if engine == "csrc" and "cpu" in devices:
        check_variables()
    from harness.bundles import ensure

    try:
        return ensure(configs, say=say)
    except Exception as error:
        raise Infrastructure(f"bundles: {type(error).__name__}: {error}") from error
