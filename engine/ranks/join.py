"""``python -m engine.ranks.join``: take part in the jobs that another host starts, until this process is ended.

A host that holds no rendezvous does nothing else: its ranks get every command through rank 0. After a job has ended,
or when none came, the next port is tried, as the host with the rendezvous leaves out those that are taken.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from engine.ranks.job import PORTS, Job, Nodes
from harness.cells import INFRASTRUCTURE
from harness.protocol import RankError

START_SECONDS = 60.0  # for a job to come at one port


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
    ended = attempt = 0
    while not options.jobs or ended < options.jobs:
        at = replace(nodes, port=nodes.port + attempt % PORTS)
        try:
            with Job(options.device, options.ranks, at, threads, START_SECONDS) as job:
                print(f"ranks of node {at.node}: taking part at {at.address}:{at.port}", flush=True)
                failure = job.wait()
            ended += 1
            print(f"ranks of node {at.node}: {failure or 'the job has ended'}", flush=True)
        except RankError as error:
            attempt += 1
            print(f"ranks of node {at.node}: {str(error).splitlines()[0]}; trying the next port", flush=True)
            if options.jobs and attempt >= PORTS:
                return INFRASTRUCTURE
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
