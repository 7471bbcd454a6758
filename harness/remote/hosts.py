"""``hosts.yaml``: the machines that ``kdtree remote`` may use, read strictly.

``docs/remote.md`` describes the fields. Whatever is wrong is a HostsError ``FILE:LINE: hosts.NAME.FIELD: reason``;
nothing is guessed, no unknown field is passed over, and what looks like a secret is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from harness.yaml_nodes import Reader, YamlError, found, located, looks_secret

DEFAULT_LOCK = "/tmp/kdtree-engine.lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS = re.compile(r"(?![^:]*:[0-9]+$)[^@\s]+")  # neither USER@HOST nor HOST:PORT; IPv6 has more colons
_ARCHITECTURE = re.compile(r"sm_([1-9][0-9]*)([0-9])([af]?)")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class HostsError(YamlError):
    """``hosts.yaml`` cannot be used."""


@dataclass(frozen=True)
class Limits:
    """Seconds after which waiting ends."""

    connect: float = 10.0
    """For TCP and the key exchange, per hop."""
    banner: float = 15.0
    """For the server's first line."""
    auth: float = 20.0
    """For all keys together."""
    silence: float = 20.0
    """Without a single byte from the other side, in both directions."""
    prepare: float = 1800.0
    """For preparation, build and bundles, each."""
    command: float = 7200.0
    """For one call of the matrix."""
    queue: float = 7200.0
    """For the box to become free."""


@dataclass(frozen=True)
class Gpus:
    """What ``nvidia-smi`` should show."""

    count: int
    kind: str
    """A part of the GPU's name."""


@dataclass(frozen=True)
class Host:
    """One machine. Times in seconds; paths are on that machine and may begin with ``~/``."""

    name: str
    address: str
    """A name in ssh_config, a DNS name or an IP address."""
    user: str | None = None
    port: int | None = None
    rendezvous: str | None = None
    """The address at which other hosts reach it, for ``--join``; ``address`` if it is that one."""
    host_key: str | None = None
    """``TYPE BASE64`` or ``SHA256:...``; in place of known_hosts."""
    workdir: str = "~/.cache/kdtree-remote"
    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    """``sm_120``, ...: what to build for."""
    gpus: Gpus | None = None
    features: tuple[str, ...] = ()
    """Programs and CPU flags that the host is expected to have."""
    prepare: tuple[str, ...] = ()
    """Shell commands, run in one shell before the build; what they export holds for everything after them."""
    lock: str = DEFAULT_LOCK
    """Runs with the same lock on the same box queue."""
    keep_runs: int = 5
    limits: Limits = field(default_factory=Limits)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices whose cells the host takes."""
        return ("cpu", "cuda") if self.gpus else ("cpu",)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The architectures as torch and ``kdtree build`` write them: ``9.0``, ``12.0``."""
        parts = (_ARCHITECTURE.fullmatch(a) for a in self.architectures)
        return tuple(f"{m[1]}.{m[2]}{m[3]}" for m in parts if m)


class _HostReader(Reader):
    """Turns the nodes of ``hosts.yaml`` into hosts."""

    complaint = HostsError

    def environment(self, node: yaml.Node, where: str) -> dict[str, str]:
        values = {}
        for name, (key, value) in self.mapping(node, where).items():
            if not _VARIABLE.fullmatch(name):
                raise self.error(key, f"{where}.{name}", "not the name of an environment variable")
            if looks_secret(name):
                raise self.error(key, f"{where}.{name}", "no secrets here: set it on the host itself")
            plain = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int")
            if not isinstance(value, yaml.ScalarNode) or value.tag not in plain or "\0" in value.value:
                raise self.error(value, f"{where}.{name}", f"expected text, found {found(value)}; quote it")
            values[name] = str(value.value)
        return values

    def host_key(self, node: yaml.Node, where: str) -> str:
        text = self.text(node, where)
        if _FINGERPRINT.fullmatch(text):
            return text
        parts = text.split()
        try:
            blob = base64.b64decode(parts[1], validate=True) if len(parts) >= 2 else b""
        except binascii.Error:
            blob = b""
        if not blob.startswith(len(parts[0]).to_bytes(4, "big") + parts[0].encode()):
            raise self.error(node, where, "expected 'SHA256:...' or 'TYPE BASE64' as ssh-keyscan prints it")
        return " ".join(parts[:2])

    def host(self, node: yaml.Node, name: str) -> Host:
        where = f"hosts.{name}"
        seconds = self.number(0.1, 7 * 86400, float)
        readers: dict[str, Callable[[yaml.Node, str], Any]] = {
            "address": self.matching(
                _ADDRESS,
                "a Host of ssh_config, a DNS name or an IP address (`user` and `port` are fields of their own)",
            ),
            "user": self.text,
            "port": self.number(1, 65535, int),
            "rendezvous": self.matching(re.compile(r"[A-Za-z0-9.:-]+"), "a DNS name or an IP address"),
            "host_key": self.host_key,
            "workdir": self.matching(re.compile(r"(~/|/).+"), "a path that begins with / or ~/"),
            "python": self.text,
            "environment": self.environment,
            "architectures": self.listing(self.matching(_ARCHITECTURE, "an architecture like sm_120")),
            "gpus": self.gpus,
            "features": self.listing(self.text),
            "prepare": self.listing(self.text),
            "lock": self.matching(re.compile(r"(~/|/).+"), "a path that begins with / or ~/"),
            "keep_runs": self.number(0, 1000, int),
            "limits": lambda n, w: Limits(**self.record(n, w, {f.name: seconds for f in fields(Limits)})),
        }
        values = self.record(node, where, readers)
        if "address" not in values:
            raise self.error(node, where, "address is missing")
        if values.get("gpus") and not values.get("architectures"):
            raise self.error(
                node, where, "architectures is missing: say what to build for its GPUs, for example [sm_120]"
            )
        return Host(name=name, **values)

    def gpus(self, node: yaml.Node, where: str) -> Gpus:
        values = self.record(node, where, {"count": self.number(1, 1024, int), "kind": self.text})
        for name in ("count", "kind"):
            if name not in values:
                raise self.error(node, where, f"{name} is missing")
        return Gpus(**values)


def parse(text: str, file: str = "hosts.yaml") -> dict[str, Host]:
    """Hosts by name, in the file's order. Raises HostsError."""
    reader = _HostReader(file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise HostsError(located(error, file)) from None
    if root is None:
        raise HostsError(f"{file}:1: hosts: missing; the file is empty")
    top = reader.mapping(root, "file")
    for name, (key, _) in top.items():
        if name != "hosts":
            raise reader.error(key, name, "unknown field; the file has one, hosts")
    if "hosts" not in top:
        raise reader.error(root, "hosts", "missing")
    hosts = {}
    for name, (key, node) in reader.mapping(top["hosts"][1], "hosts").items():
        if not _NAME.fullmatch(name):
            raise reader.error(
                key, f"hosts.{name}", "a host's name has letters, digits, dots, hyphens and underscores only"
            )
        hosts[name] = reader.host(node, name)
    return hosts


def read(path: Path) -> dict[str, Host]:
    """Hosts by name. Raises HostsError."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise HostsError(f"{path}: {error.strerror}; docs/remote.md shows what belongs there") from None
    except UnicodeDecodeError as error:
        raise HostsError(f"{path}: not UTF-8 at byte {error.start}") from None
    return parse(text, str(path))
