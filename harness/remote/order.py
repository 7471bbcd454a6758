"""What a remote run was asked to do, and what it means on a host: cells, command lines, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.gpu_share import ranks_share
from harness.matrix import Point
from harness.remote.hosts import Host
from harness.remote.share import Pool
from harness.remote.ssh import Options
from harness.remote.sync import Snapshot
from harness.sources import Sources


@dataclass(frozen=True)
class Order:
    """What was asked for."""

    run_dir: Path
    id: str
    """Of the run's directories on the hosts; no two runs share one."""
    command: str
    """The line that was typed."""
    points: tuple[Point, ...]
    sources: Sources
    """As they stood when this was asked for, and are sent."""
    filter: str = ""
    engine: str = "csrc"
    each: bool = False
    options: Options = field(default_factory=Options)
    wheels: Snapshot | None = None
    arguments: tuple[str, ...] = ()
    """More of them for the far side's pytest."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Variables of this run for its commands there."""

    @property
    def expected(self) -> tuple[str, ...]:
        return tuple(point.id for point in self.points)


def able(host: Host, point: Point) -> bool:
    """Whether ``host`` has what the cell needs."""
    if point.device not in host.devices:
        return False
    if point.device == "cpu" or host.gpus is None:
        return point.device == "cpu"
    return point.ranks <= host.gpus.count or ranks_share(host.environment)


def pools(order: Order, hosts: Sequence[Host]) -> dict[str, Pool]:
    """The pool each host takes its cells from: one for all, or one each."""
    points = {point.id: point for point in order.points}
    by_name = {host.name: host for host in hosts}

    def fits(host: str, cell: str) -> bool:
        return able(by_name[host], points[cell])

    if order.each:
        return {host: Pool(order.expected, [host], fits) for host in by_name}
    shared = Pool(order.expected, by_name, fits)
    return dict.fromkeys(by_name, shared)


def step_lines(host: Host, order: Order) -> list[tuple[str, list[str]]]:
    """What precedes the first batch: names and command lines, to be run in the tree."""
    devices = sorted({point.device for point in order.points if able(host, point)})
    python = [host.python, "-m", "harness"]
    configs = sorted({point.config for point in order.points}) if order.filter else []
    steps = [("bundles", [*python, "bundles", *configs])]
    if order.engine == "csrc":
        archs = {"cuda": [part for arch in host.capabilities for part in ("--arch", arch)]}
        builds = [(f"build for {d}", [*python, "build", "--device", d, *archs.get(d, [])]) for d in devices]
        steps = builds + steps
    return steps


def batch_line(host: Host, order: Order, cells: Sequence[str], run_dir: str) -> list[str]:
    """The command that runs ``cells`` and leaves their ledger in ``run_dir``."""
    by_id = {point.id: point for point in order.points}
    whole = not order.filter and len(cells) == len(order.expected)
    chosen = [] if whole else [f"tests/test_matrix.py::test_cell[{cell}]" for cell in cells]
    devices = sorted({by_id[cell].device for cell in cells})
    return [
        *(host.python, "-m", "harness", "test", "--engine", order.engine, "--run-dir", run_dir),
        *(part for device in devices for part in ("--device", device)),
        *("--host-name", host.name),
        *order.arguments,
        *chosen,
    ]


def environment(
    host: Host, directory: str, workdir: str, *, wheels: bool, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What the project's commands find in their environment on ``host``; what hosts.yaml says there comes first."""
    env = {
        "KDTREE_BUNDLES": f"{workdir}/cache/bundles",
        "KDTREE_BUILD": f"{workdir}/cache/build",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "120",
    }
    if host.capabilities:
        env["TORCH_CUDA_ARCH_LIST"] = ";".join(host.capabilities)
    env.update(extra or {})
    env.update(host.environment)
    if wheels:
        env["PYTHONPATH"] = ":".join(filter(None, [f"{directory}/site", env.get("PYTHONPATH")]))
    return env
