"""What ``kdtree remote`` does once its arguments are read: look at hosts, say what would happen, or run the matrix."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ledger as ledgers
from harness import plain_json
from harness.cells import INFRASTRUCTURE, PASSED, Verdict, exit_status
from harness.ending import uninterrupted
from harness.filters import select
from harness.matrix import of_run
from harness.remote import join
from harness.remote.command import INTERRUPTED
from harness.remote.console import Console, put
from harness.remote.hosts import Host, HostsError
from harness.remote.look import as_json, dry_run, examine
from harness.remote.order import Order, able, pools
from harness.remote.run import KNOWN, HostRun, assemble
from harness.remote.ssh import Options
from harness.remote.ssh_route import RouteError, load_config
from harness.remote.sync import Snapshot, SyncError, wheels, working_tree
from harness.reports.command import write_reports
from harness.sources import ROOT, describe


def run(options: argparse.Namespace, hosts: Sequence[Host], line: str, rest: tuple[str, ...]) -> int:
    """The exit status. Raises HostsError and MatrixError for what is wrong before any host is asked."""
    ssh = Options(options.ssh_config, tuple(options.accept_new_host_key))
    try:
        load_config(ssh.config)  # what is wrong there is wrong for every host
    except RouteError as error:
        raise HostsError(str(error)) from None
    console = Console(plain_json.beside(options.json), sys.stderr)
    console.width = max(len(host.name) for host in hosts)
    if options.doctor:
        return _look(hosts, console, options.json, lambda host: _doctor(host, ssh, console))
    order = _order(options, hosts, line, rest, ssh)
    try:
        tree = working_tree(ROOT)
        if options.wheels:
            order = replace(order, wheels=wheels(options.wheels))
    except SyncError as error:
        raise HostsError(str(error)) from None
    if options.dry_run:
        return _look(hosts, console, options.json, lambda host: _dry_run(host, order, tree, console))
    return _matrix(order, hosts, tree, console, options)


def _order(options: argparse.Namespace, hosts: Sequence[Host], line: str, rest: tuple[str, ...], ssh: Options) -> Order:
    devices = options.device or sorted({device for host in hosts for device in host.devices})
    gpus = min((host.gpus.count for host in hosts if host.gpus), default=0)  # what every host with GPUs can do
    if options.join:
        points = join.points(hosts, options.ranks[0] if options.ranks else None)
    else:
        points = of_run(devices, gpus=gpus, ranks=options.ranks or (), shared=options.engine == "csrc")
        rest = (*(part for count in options.ranks or () for part in ("--ranks", str(count))), *rest)
    if options.k:
        points = select(points, options.k)
    for point in points if not options.join else ():
        without = [host.name for host in hosts if not able(host, point)]
        if without and (options.each or len(without) == len(hosts)):
            raise HostsError(f"{point.id}: {', '.join(without)} cannot run it (gpus in hosts.yaml); name a --device")
    run_id = ledgers.new_run_id()
    run_dir = (options.run_dir or ROOT / "reports" / run_id).absolute()
    if (run_dir / ledgers.LEDGER_FILE).exists():
        raise HostsError(f"--run-dir {run_dir} holds the ledger of an earlier run; name another folder")
    return Order(
        run_dir=run_dir,
        id=run_id,
        command=line,
        points=tuple(points),
        sources=describe(ROOT),
        filter=options.k,
        engine=options.engine,
        each=options.each,
        options=ssh,
        arguments=rest,
    )


def _look(hosts: Sequence[Host], console: Console, json: Path | None, one: Callable[[Host], tuple[bool, Any]]) -> int:
    """Ask every host, whatever the others say."""
    report: dict[str, Any] = {}
    fine = True
    for host in hosts:
        try:
            good, report[host.name] = one(host)
        except KNOWN as error:
            good, report[host.name] = False, {"error": str(error)}
            console.show(host.name, f"cannot be used: {error}")
        fine = fine and good
    plain_json.give({"ok": fine, "hosts": report}, json)
    return PASSED if fine else INFRASTRUCTURE


def _doctor(host: Host, ssh: Options, console: Console) -> tuple[bool, Any]:
    findings = examine(host, ssh)
    for finding in findings:
        mark = f"MISSING  {finding.found}; {finding.remedy}" if finding.remedy else f"ok       {finding.found}"
        console.show(host.name, f"{finding.name:<13} {mark}")
    return all(finding.ok for finding in findings), as_json(findings)


def _dry_run(host: Host, order: Order, tree: Snapshot, console: Console) -> tuple[bool, Any]:
    lines = list(dry_run(host, order, tree))
    for line in lines:
        console.show(host.name, line)
    return True, lines


def _matrix(order: Order, hosts: Sequence[Host], tree: Snapshot, console: Console, options: argparse.Namespace) -> int:
    started = ledgers.timestamp()
    stop = threading.Event()
    order.run_dir.mkdir(parents=True, exist_ok=True)
    runs: list[HostRun]
    if options.join:
        lead, others = join.arrange(order, hosts, tree, console, stop)
        runs = [lead, *others]
        interrupted = _join(lead, others, stop)
    else:
        shared = pools(order, hosts)
        runs = [HostRun(host, order, tree, shared[host.name], console, stop) for host in hosts]
        interrupted = _wait(runs, stop)
    with uninterrupted():
        ledger = assemble(order, started, runs)
        path = ledgers.write(ledger, order.run_dir)
        write_reports(ledger, order.run_dir)
    status = INTERRUPTED if interrupted else exit_status(ledger)
    report = {}
    lines = []
    for run in runs:
        cells = sum(c.host == run.host.name and c.verdict is not Verdict.NOT_RUN for c in ledger.cells)
        report[run.host.name] = {"cells": cells, "trouble": run.trouble}
        lines.append(f"{run.host.name}: {cells} cells{f'; {run.trouble}' if run.trouble else ''}")
    lines += [*ledgers.summary(ledger), f"ledger: {path}"]
    put(plain_json.beside(options.json), "\n".join(lines) + "\n")
    answer = {"run_id": ledger.run_id, "ledger": str(path), "status": status, "hosts": report}
    plain_json.give(answer, options.json)
    return status


def _join(lead: HostRun, others: Sequence[join.Joiner], stop: threading.Event) -> bool:
    """The others first, so that the first host's ranks do not wait; they end when it has. True if interrupted."""
    for other in others:
        threading.Thread(target=other.work, daemon=True).start()
    try:
        for other in others:
            while not other.ready.wait(1):
                continue
        if any(other.trouble for other in others):
            lead.trouble = "not started: another host of the rendezvous failed"
            lead.over.set()
            interrupted = False
        else:
            interrupted = _wait([lead], stop)
    except KeyboardInterrupt:
        interrupted = True
    for other in others:
        other.end()
    for other in others:
        other.over.wait(30)
    return interrupted


def _wait(runs: Sequence[HostRun], stop: threading.Event) -> bool:
    """Run every host to its end; True if the user wanted none of it.

    Ctrl-C ends what runs there and waits for what comes back; a second one leaves at once.
    """
    for run in runs:
        threading.Thread(target=run.work, daemon=True).start()
    for last in (False, True):
        try:
            for run in runs:
                while not run.over.wait(1):  # not join: CPython takes a thread whose join is interrupted for ended
                    continue
            return stop.is_set()
        except KeyboardInterrupt:
            stop.set()
            for run in runs:
                run.pool.stop()
            if not last:
                print("kdtree remote: ending what runs there; Ctrl-C again leaves at once", file=sys.stderr)
    for run in runs:
        if run.session:
            run.session.link.close()
    for run in runs:
        run.over.wait(2)
    return True
