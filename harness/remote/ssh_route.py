"""From a host's address to the hops that lead there, by the user's ssh_config.

paramiko reads ssh_config when asked to, but knows no ``Include`` and follows no ``ProxyJump``; both are done here.
"""

from __future__ import annotations

import getpass
import glob
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko

from harness.files import said

DEFAULT_CONFIGS = (Path("~/.ssh/config"), Path("/etc/ssh/ssh_config"))
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?/?")


class RouteError(Exception):
    """ssh_config cannot be read, or says something that leads nowhere."""


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way."""

    alias: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    """Key files that ssh_config names; empty: the usual ones."""
    identities_only: bool
    known_hosts: tuple[Path, ...]
    key_name: str | None
    """HostKeyAlias."""
    command: str | None = None
    """ProxyCommand; of the first hop only."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


def _included(path: Path, base: Path, depth: int = 0) -> Iterator[str]:
    if depth > 16:
        raise RouteError(f"{path}: Include nested more than 16 deep")
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise RouteError(said(error)) from None
    except UnicodeDecodeError as error:
        raise RouteError(f"{path}: not UTF-8 at byte {error.start}") from None
    block = "Host *"
    for line in lines:
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() in ("host", "match"):
            block = line
        if word.lower() != "include":
            yield line
            continue
        for pattern in rest.split():
            for name in sorted(glob.glob(str(base / Path(pattern.strip('"')).expanduser()))):
                yield from _included(Path(name), base, depth + 1)
        yield block  # what follows belongs to the block the Include stood in


def load_config(path: Path | None) -> paramiko.SSHConfig:
    """``path`` alone, or the user's and the system's files. Raises RouteError."""
    config = paramiko.SSHConfig()
    for file in [path] if path else [p.expanduser() for p in DEFAULT_CONFIGS if p.expanduser().is_file()]:
        try:
            base = file.parent if file.parent == Path("/etc/ssh") else Path("~/.ssh").expanduser()  # as OpenSSH has it
            config.parse(io.StringIO("\n".join(_included(file, base))))
        except paramiko.SSHException as error:
            raise RouteError(f"{file}: {error}") from None
    return config


def _hop(config: paramiko.SSHConfig, alias: str, user: str | None, port: int | None, first: bool) -> Hop:
    try:
        options = config.lookup(alias)
    except Exception as error:  # paramiko raises many types here, ImportError and KeyError among them
        raise RouteError(f"ssh_config: {alias}: {type(error).__name__}: {error}") from None
    command = options.get("proxycommand")
    known = f"{options.get('userknownhostsfile', '~/.ssh/known_hosts ~/.ssh/known_hosts2')} " + options.get(
        "globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
    )
    try:
        number = port or int(options.get("port", 22))
    except ValueError:
        raise RouteError(f"ssh_config: {alias}: Port {options['port']!r} is no number") from None
    return Hop(
        alias=alias,
        host=options["hostname"],
        port=number,
        user=user or options.get("user") or getpass.getuser(),
        identities=tuple(Path(os.path.expanduser(name)) for name in options.get("identityfile", [])),
        identities_only=options.get("identitiesonly", "no").lower() == "yes",
        known_hosts=tuple(Path(os.path.expanduser(name)) for name in known.split() if name != "none"),
        key_name=options.get("hostkeyalias"),
        command=command if first and command and command.lower() != "none" else None,
    )


def route(
    config: paramiko.SSHConfig, address: str, user: str | None, port: int | None, seen: tuple[str, ...] = ()
) -> list[Hop]:
    """The hops to ``address``, the last one being it. Raises RouteError."""
    if address in seen:
        raise RouteError(f"ssh_config: ProxyJump goes in a circle: {' -> '.join((*seen, address))}")
    hop = _hop(config, address, user, port, True)
    jumps = config.lookup(address).get("proxyjump", "none")
    if jumps.lower() == "none":
        return [hop]
    hops: list[Hop] = []
    for i, jump in enumerate(jumps.split(",")):
        parts = _JUMP.fullmatch(jump.strip())
        if not parts:
            raise RouteError(f"ssh_config: {address}: ProxyJump {jump!r} is not [USER@]HOST[:PORT]")
        name, jump_port = parts["v6"] or parts["host"], int(parts["port"]) if parts["port"] else None
        if i == 0:  # only the way to the first one is looked up again, as in OpenSSH
            hops += route(config, name, parts["user"], jump_port, (*seen, address))
        else:
            hops.append(_hop(config, name, parts["user"], jump_port, False))
    return [*hops, _hop(config, address, user, port, False)]
