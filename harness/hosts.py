"""``hosts.yaml``: the machines that ``kdtree remote`` may use, read strictly.

``docs/remote.md`` describes the fields. Whatever is wrong is a HostsError ``FILE:LINE: hosts.NAME.FIELD: reason``;
nothing is guessed, no unknown field is passed over, and what looks like a secret is refused.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

DEFAULT_LOCK = "/tmp/kdtree-engine.lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"passw|passphrase|secret|(^|_)token(_|$)|api_?key|private_?key|credential", re.IGNORECASE)
_ARCHITECTURE = re.compile(r"sm_([1-9][0-9]*)([0-9])([af]?)")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class HostsError(Exception):
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


class _Reader:
    """Turns YAML nodes into values; every complaint has the node's line."""

    def __init__(self, file: str) -> None:
        self.file = file

    def error(self, node: yaml.Node, where: str, reason: str) -> HostsError:
        return HostsError(f"{self.file}:{node.start_mark.line + 1}: {where}: {reason}")

    def mapping(self, node: yaml.Node, where: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value nodes by key."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, where, f"expected fields, found {_found(node)}")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise self.error(key, where, f"{_found(key)} is not a name; quote it")
            if key.value in found:
                raise self.error(key, f"{where}.{key.value}", "given twice")
            found[key.value] = (key, value)
        return found

    def record(
        self, node: yaml.Node, where: str, readers: Mapping[str, Callable[[yaml.Node, str], Any]]
    ) -> dict[str, Any]:
        values = {}
        for name, (key, value) in self.mapping(node, where).items():
            if name not in readers:
                if _SECRET.search(name):
                    raise self.error(
                        key, f"{where}.{name}", "no secrets here: keys come from the SSH agent or ssh_config"
                    )
                near = difflib.get_close_matches(name, readers, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(readers)}"
                raise self.error(key, f"{where}.{name}", f"unknown field{hint}")
            values[name] = readers[name](value, f"{where}.{name}")
        return values

    def text(self, node: yaml.Node, where: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            raise self.error(node, where, f"expected text, found {_found(node)}")
        if not node.value.strip() or "\0" in node.value or "\n" in node.value.strip():
            raise self.error(node, where, "expected one line of text")
        return str(node.value)

    def matching(self, pattern: re.Pattern[str], what: str) -> Callable[[yaml.Node, str], str]:
        def read(node: yaml.Node, where: str) -> str:
            text = self.text(node, where)
            if not pattern.fullmatch(text):
                raise self.error(node, where, f"expected {what}, found {text!r}")
            return text

        return read

    def number(self, low: float, high: float, kind: type[T]) -> Callable[[yaml.Node, str], T]:
        def read(node: yaml.Node, where: str) -> T:
            what = (
                f"expected {'an integer' if kind is int else 'a number'} from {low:g} to {high:g}, found {_found(node)}"
            )
            if not isinstance(node, yaml.ScalarNode) or node.style:
                raise self.error(node, where, what)
            try:
                value: Any = kind(node.value)  # type: ignore[call-arg]
            except ValueError:
                raise self.error(node, where, what) from None
            if not low <= value <= high:
                raise self.error(node, where, what)
            return value  # type: ignore[no-any-return]

        return read

    def listing(self, item: Callable[[yaml.Node, str], str]) -> Callable[[yaml.Node, str], tuple[str, ...]]:
        def read(node: yaml.Node, where: str) -> tuple[str, ...]:
            if not isinstance(node, yaml.SequenceNode):
                raise self.error(node, where, f"expected a list, found {_found(node)}")
            return tuple(item(child, f"{where}[{i}]") for i, child in enumerate(node.value))

        return read

    def environment(self, node: yaml.Node, where: str) -> dict[str, str]:
        values = {}
        for name, (key, value) in self.mapping(node, where).items():
            if not _VARIABLE.fullmatch(name):
                raise self.error(key, f"{where}.{name}", "not the name of an environment variable")
            if _SECRET.search(name):
                raise self.error(key, f"{where}.{name}", "no secrets here: set it on the host itself")
            plain = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int")
            if not isinstance(value, yaml.ScalarNode) or value.tag not in plain or "\0" in value.value:
                raise self.error(value, f"{where}.{name}", f"expected text, found {_found(value)}; quote it")
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
            "address": self.text,
            "user": self.text,
            "port": self.number(1, 65535, int),
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


def _found(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "fields"


def parse(text: str, file: str = "hosts.yaml") -> dict[str, Host]:
    """Hosts by name, in the file's order. Raises HostsError."""
    reader = _Reader(file)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise HostsError(f"{file}:{mark.line + 1 if mark else 1}: not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise HostsError(f"{file}: not YAML: {error}") from None
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
