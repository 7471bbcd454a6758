"""Looking at a host without changing it: what it lacks (``--doctor``), and what a run would do (``--dry-run``)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.remote.hosts import Host
from harness.remote.order import Order, able, batch_line, step_lines
from harness.remote.run import SKEW
from harness.remote.session import Session, holder_text
from harness.remote.ssh import Options
from harness.remote.sync import Snapshot
from harness.toolchain import TORCH_MINIMUM, release

SPACE = 4 << 30  # bytes a host should have free: a build, the bundles, a few runs


@dataclass(frozen=True)
class Finding:
    """One thing about a host. ``remedy`` is empty when it is fine, or when it only needs to be known."""

    name: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return not self.remedy


def _silent(_: bytes, __: bytes) -> None:
    """Nothing is run on the host that would print."""


def examine(host: Host, options: Options) -> list[Finding]:
    """Everything ``--doctor`` says about a host. Raises what connecting raises."""
    session = Session(host, options, "doctor", _silent)
    try:
        facts = session.link.ask(
            "look", python=host.python, env=dict(host.environment), features=list(host.features), lock=host.lock
        )
        return list(_judge(host, session, facts))
    finally:
        session.close()


def _judge(host: Host, session: Session, facts: dict[str, Any]) -> Iterator[Finding]:
    hops = " -> ".join(map(str, session.link.connection.hops))
    yield Finding("connection", f"{hops}, {session.facts['user']}@{session.facts['node']}")
    yield Finding("system", f"{facts['system']} {facts['machine']}, {facts['cpus']} CPUs, load {facts['load']:.1f}")
    skew = session.link.skew
    far = f"{skew:+.1f} s" if abs(skew) > SKEW else "agrees"
    yield Finding("clock", far, "set the clock there (NTP); runs work, their times are off" if abs(skew) > 60 else "")
    yield from _workdir(facts)
    yield from _python(host, facts)
    yield from _programs(host, facts)
    yield from _gpus(host, facts)
    holder = facts.get("holder")
    yield Finding("lock", "free" if holder is None else holder_text(holder))


def _workdir(facts: dict[str, Any]) -> Iterator[Finding]:
    free = int(facts["free"])
    where = f"{facts['workdir']}{'' if facts['workdir_exists'] else ' (not made yet)'}, {free / 2**30:.1f} GiB free"
    remedy = "" if free >= SPACE else f"free some space: {SPACE >> 30} GiB are recommended"
    yield Finding("workdir", where, remedy if facts["writable"] else "not writable: set workdir in hosts.yaml")


def _python(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    trouble = facts["python_trouble"]
    yield Finding(
        "python", trouble or f"{host.python} {facts['python']}", "set python in hosts.yaml" if trouble else ""
    )
    for package, version in facts["packages"].items():
        fine = version is not None and not version.startswith("broken")
        if package == "torch" and fine:
            fine = release(version) >= TORCH_MINIMUM
        wanted = f"torch>={'.'.join(map(str, TORCH_MINIMUM))}" if package == "torch" else package
        remedy = "" if fine else f"install {wanted} for {host.python} there, or send it: --wheels DIR"
        yield Finding(package, version or "missing", remedy)


def _programs(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    programs = facts["programs"]
    later = " (before the prepare commands, which a look does not run)" if host.prepare else ""
    compiler = programs.get("g++") or programs.get("clang++")
    yield Finding("C++ compiler", compiler or f"missing{later}", "" if compiler or later else "install g++")
    if host.gpus:
        nvcc = programs.get("nvcc")
        remedy = "" if nvcc or later else "install the CUDA toolkit, or add it to PATH (environment, prepare)"
        yield Finding("nvcc", nvcc or f"missing{later}", remedy)
    missing = facts["missing_features"]
    if host.features:
        text = f"missing: {', '.join(missing)}{later}" if missing else ", ".join(host.features)
        yield Finding(
            "features", text, "" if not missing or later else "install them, or correct features in hosts.yaml"
        )


def _gpus(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    gpus = facts["gpus"]
    if not host.gpus and not gpus:
        return
    kinds = sorted({f"{gpu['name']} (sm_{gpu['compute_cap'].replace('.', '')})" for gpu in gpus})
    text = f"{len(gpus)} x {', '.join(kinds)}, driver {gpus[0]['driver_version']}" if gpus else "none"
    remedy = ""
    if host.gpus is None:
        remedy = "hosts.yaml says nothing of them, so they are not used: add gpus and architectures"
    elif len(gpus) != host.gpus.count or any(host.gpus.kind not in gpu["name"] for gpu in gpus):
        remedy = f"hosts.yaml says {host.gpus.count} x {host.gpus.kind}: correct gpus there, or look after the box"
    elif lacking := sorted({gpu["compute_cap"] for gpu in gpus} - {known.rstrip("af") for known in host.capabilities}):
        remedy = f"architectures in hosts.yaml lack {', '.join(lacking)}"
    yield Finding("GPUs", text, remedy)
    if host.gpus:
        count = int(facts.get("torch_gpus", 0))
        said = f"{count} GPUs, CUDA {facts.get('torch_cuda') or 'none'}"
        yield Finding("torch's view", said, "" if count else "this torch sees no GPU: install a CUDA build of it there")


def dry_run(host: Host, order: Order, tree: Snapshot) -> Iterator[str]:
    """Lines that say what a run would send and start. Raises what connecting raises."""
    session = Session(host, order.options, "dry-run", _silent)
    try:
        for part, snapshot in (("tree", tree), ("wheels", order.wheels)):
            if snapshot is None:
                continue
            contents = snapshot.contents()
            missing = [contents[i] for i in session.plan(snapshot)]
            size = sum(file.size for file in missing)
            yield f"{part}: {len(snapshot.files)} files, {snapshot.size} bytes; would send {len(missing)}, {size} bytes"
            yield from (f"  {ascii(file.path.decode('utf-8', 'replace'))[1:-1]}" for file in missing[:20])
            if len(missing) > 20:
                yield f"  and {len(missing) - 20} more"
        yield from (f"prepare: {command}" for command in host.prepare)
        yield from (f"{name}: {shlex.join(argv)}" for name, argv in step_lines(host, order))
        cells = [point.id for point in order.points if able(host, point)]
        line = shlex.join(batch_line(host, order, cells, "RUN"))
        line = line if len(line) <= 400 else f"{line[:390]} ..."
        yield f"matrix, {len(cells)} cells{'' if order.each else ' at most'}: {line}"
    finally:
        session.close()


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """The fields of each, and whether it is in order."""
    return [{**asdict(finding), "ok": finding.ok} for finding in findings]
