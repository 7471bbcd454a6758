"""``python -m engine.ranks.join``: take part in the jobs that another host starts, until this process is ended.

A host that holds no rendezvous does nothing else: its ranks get every command through rank 0. The host with the
rendezvous takes the first port that is free there, and when it does so is its own affair: it may compile for minutes
before. So this one knocks at all ports agreed on until one answers, and starts its ranks then.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.ranks.job import PORTS, Job, Nodes
from harness.cells import INFRASTRUCTURE
from harness.protocol import RankError

START_SECONDS = 90.0  # for the job, once a port answers: less than its host waits, if another's answered first
KNOCKING = 480.0  # seconds at most for a rendezvous to appear, where a number of jobs is asked for


def answering(nodes: Nodes, first: int, seconds: float = float("inf")) -> Nodes | None:
    """The place at the port that answers, of those agreed on from the ``first`` around; None after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        for number in range(first, first + PORTS):
            at = replace(nodes, port=nodes.port + number % PORTS)
            try:
                socket.create_connection((at.address, at.port), timeout=2).close()
                return at
            except OSError:
                continue
        if time.monotonic() > end:
            return None
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Take part; the status is that of the last job once ``--jobs`` of them have ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of this host")
    parser.add_argument("--nodes", required=True, help="COUNT,NODE,ADDRESS,PORT")
    parser.add_argument("--jobs", type=int, default=0, help="end after so many (default: never)")
    options = parser.parse_args(argv)
    try:
        nodes = Nodes.of(options.nodes)
    except ValueError as error:
        parser.error(f"--nodes: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the job under way is closed
    threads = {"OMP_NUM_THREADS": "1", "KDTREE_THREADS": os.environ.get("KDTREE_THREADS", "1")}
    ended = failed = first = 0
    while not options.jobs or ended < options.jobs:
        at = answering(nodes, first, KNOCKING if options.jobs else float("inf"))
        if at is None or (options.jobs and failed >= PORTS):
            print(f"ranks of node {nodes.node}: no rendezvous at {nodes.address}:{nodes.port}", flush=True)
            return INFRASTRUCTURE
        try:
            with Job(options.device, options.ranks, at, threads, START_SECONDS) as job:
                print(f"ranks of node {at.node}: taking part at {at.address}:{at.port}", flush=True)
                failure = job.wait()
            ended += 1
            print(f"ranks of node {at.node}: {failure or 'the job has ended'}", flush=True)
        except RankError as error:  # another's service perhaps: the port after it is next
            failed, first = failed + 1, at.port - nodes.port + 1
            print(f"ranks of node {at.node}: {at.port}: {str(error).splitlines()[0]}; knocking on", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
