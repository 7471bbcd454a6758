"""Several hosts as one: their devices share every model of the run, over one rendezvous (``--join ct200,ct201``).

The first host runs the cells; the others are prepared as it is and then take part in its jobs until it has ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.ranks.job import PORTS, VARIABLE, Nodes
from harness.matrix import Point, expected, rankable
from harness.remote.console import Console
from harness.remote.hosts import Host, HostsError
from harness.remote.order import Order
from harness.remote.run import HostRun
from harness.remote.session import Session
from harness.remote.share import Pool
from harness.remote.sync import Snapshot

FIRST_PORT, LAST_PORT = 20000, 32000 - PORTS  # below those that systems hand out


def points(hosts: Sequence[Host], ranks: int | None) -> list[Point]:
    """The cells of ``ranks`` over all hosts, by default one a GPU, or one a host without GPUs. Raises HostsError."""
    cuda = all(host.gpus for host in hosts)
    total = ranks or (sum(host.gpus.count for host in hosts if host.gpus) if cuda else len(hosts))
    if total % len(hosts):
        raise HostsError(f"--join: {len(hosts)} hosts cannot have {total} ranks evenly; say how many with --ranks")
    short = [host.name for host in hosts if cuda and host.gpus and host.gpus.count < total // len(hosts)]
    if short:
        raise HostsError(f"--join: {short[0]} has fewer than {total // len(hosts)} GPUs (gpus in hosts.yaml)")
    found = expected(["cuda" if cuda else "cpu"], ranks=[total], ranked={total: rankable(total)})
    if not found:
        raise HostsError(f"--join: no config can be shared by {total} ranks")
    return found


def nodes(hosts: Sequence[Host]) -> list[Nodes]:
    """Each host's place; the rendezvous is at the first one's address, at a port that others hardly chose too."""
    port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
    address = hosts[0].rendezvous or hosts[0].address
    return [Nodes(len(hosts), number, address, port) for number in range(len(hosts))]


class Joiner(HostRun):
    """A host that takes part: prepared like any other, it then runs ``engine.ranks.join`` until it is told to stop."""

    def __init__(
        self, host: Host, order: Order, tree: Snapshot, console: Console, stop: threading.Event, place: Nodes
    ) -> None:
        super().__init__(host, order, tree, Pool((), [host.name], lambda *_: False), console, stop)
        self.place = place
        self.told = False
        self.ready = threading.Event()
        """Set when its ranks may be called for, or when it will never be so far."""

    def work(self) -> None:
        """As that of every host; ``ready`` is set however it comes."""
        try:
            super().work()
        finally:
            self.ready.set()

    def _stopped(self) -> str:
        return "" if self.told else "interrupted"

    def end(self) -> None:
        """Its ranks are wanted no more."""
        self.told = True
        self._stop.set()

    def _cells(self, session: Session) -> None:
        point = self.order.points[0]
        argv = [self.host.python, "-m", "engine.ranks.join", "--device", point.device]
        argv += ["--ranks", str(point.ranks // self.place.count), "--nodes", str(self.place)]
        self.ready.set()
        self.doing = "running its ranks"
        outcome = session.run(argv, limit=self.host.limits.command, env=self._env(session))
        if not self.told:
            self.trouble = f"its ranks: {outcome.trouble or f'ended with status {outcome.status}'}"


def arrange(
    order: Order, hosts: Sequence[Host], tree: Snapshot, console: Console, stop: threading.Event
) -> tuple[HostRun, list[Joiner]]:
    """The run of the first host and those of the others."""
    places = nodes(hosts)
    environment: Mapping[str, str] = {VARIABLE: str(places[0])}
    ranks = order.points[0].ranks
    leading = replace(
        order,
        extra=environment,
        arguments=("--ranks", str(ranks), "-n", "0", *order.arguments),  # one worker: there is one job at a time
    )
    pool = Pool(order.expected, [hosts[0].name], lambda *_: True)
    lead = HostRun(hosts[0], leading, tree, pool, console, stop)
    others = [
        Joiner(host, order, tree, console, threading.Event(), place)
        for host, place in zip(hosts[1:], places[1:], strict=True)
    ]
    return lead, others
