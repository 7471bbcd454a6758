"""``kdtree remote HOST ...``: the matrix of this working tree on other machines, with one ledger for all of them.

Exit status as everywhere: 0 every expected cell passed, 1 a cell failed, 2 a cell did not run, 3 configuration or
infrastructure, which includes every host, key, connection or exit status that was lost; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.cells import INFRASTRUCTURE
from harness.cli import Parser
from harness.matrix import MatrixError
from harness.remote import hosts
from harness.remote.hosts import Host, HostsError
from harness.sources import ROOT
from refs.names import meant

INTERRUPTED = 130  # as a shell reports Ctrl-C
EPILOG = """examples:
  kdtree remote ct200                     the whole matrix on ct200
  kdtree remote ct200 ct201               shared between two hosts, by their speed
  kdtree remote --join ct200,ct201        one model over the GPUs of both
  kdtree remote ct200 --doctor            what the host lacks; changes nothing there
  kdtree remote ct200 -k 'int4 and tiny'  some cells only
  kdtree remote ct200 -- -n 4             what follows -- goes to pytest there

exit status: 0 every expected cell passed, 1 a cell failed, 2 a cell did not run, 3 configuration or infrastructure
(a host that cannot be reached, a lost connection or exit status, a broken build), 130 interrupted"""


def _parser() -> Parser:
    parser = Parser(
        prog="kdtree remote",
        description="Validate this working tree, uncommitted changes included, on hosts of hosts.yaml.",
        epilog=EPILOG,
    )
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="a name in hosts.yaml")
    parser.add_argument("--join", metavar="HOST,HOST", default="", help="these hosts together share every model")
    parser.add_argument("--ranks", metavar="N", type=int, action="append", help="cells of N ranks alone; repeatable")
    parser.add_argument("--each", action="store_true", help="every host runs every cell, instead of sharing them")
    parser.add_argument("-k", metavar="EXPR", default="", help="cells to run, as pytest takes it")
    parser.add_argument("--device", action="append", choices=("cpu", "cuda"), help="default: all that the hosts have")
    parser.add_argument("--engine", default="csrc", help="which engine is judged (default: csrc)")
    parser.add_argument("--doctor", action="store_true", help="say what each host lacks, changing nothing")
    parser.add_argument("--dry-run", action="store_true", help="say what would be sent and run, changing nothing")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="send these wheels for a host without internet")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where results go (default: reports/<run id>)")
    parser.add_json("one JSON object")
    parser.add_argument(
        "--hosts-file", type=Path, default=ROOT / "hosts.yaml", metavar="FILE", help="default: hosts.yaml"
    )
    parser.add_argument("--ssh-config", type=Path, metavar="FILE", help="in place of the user's and the system's")
    parser.add_argument(
        "--accept-new-host-key",
        action="append",
        default=[],
        metavar="SHA256:...",
        help="add the key with this fingerprint to known_hosts if the host is not known yet; repeatable",
    )
    return parser


def _chosen(names: Sequence[str], file: Path) -> list[Host]:
    known = hosts.read(file)
    if len(set(names)) != len(names):
        raise HostsError("a host is named twice on the command line")
    for name in names:
        if name not in known:
            hint = meant(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise HostsError(f"{file}: hosts.{name}: no such host{hint}")
    return [known[name] for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """See ``kdtree remote --help``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = _parser().parse_args(arguments[:split]), arguments[split + 1 :]
    try:
        if importlib.util.find_spec("paramiko") is None:
            raise HostsError("paramiko is missing: pip install 'paramiko>=3.4'")
        from harness.remote import actions as remote_command

        if bool(options.hosts) == bool(options.join):
            raise HostsError(f"name hosts of {options.hosts_file}, or name several with --join")
        if options.join and (options.each or len(options.ranks or ()) > 1 or "," not in options.join):
            raise HostsError("--join takes several hosts and at most one --ranks, and not --each")
        chosen = _chosen(options.join.split(",") if options.join else options.hosts, options.hosts_file)
        return remote_command.run(options, chosen, shlex.join(["kdtree", "remote", *arguments]), tuple(rest))
    except (HostsError, MatrixError) as error:
        print(f"kdtree remote: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    except KeyboardInterrupt:
        print("kdtree remote: interrupted", file=sys.stderr)
        return INTERRUPTED
