"""Host keys: what is known of a host, and whether the key it shows is that one.

Reads OpenSSH's ``known_hosts`` (hashed names, patterns, ``[host]:port``, ``@revoked``). Keys are compared as bytes, so
a type this machine cannot use is still recognised. There is no "accept whatever comes" and no prompt: an unknown key is
an error that shows its fingerprint, and is accepted only when the user repeats that fingerprint.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class HostKeyError(Exception):
    """The server's key is not one that may be trusted."""


class UnknownHostKey(HostKeyError):
    """Nothing is known about this host."""


class ChangedHostKey(HostKeyError):
    """Another key of the same type is known: a new installation, or somebody in between."""


class WrongTypeHostKey(HostKeyError):
    """Keys of other types are known, and the server shows none of them."""


class RevokedHostKey(HostKeyError):
    """The key is marked as revoked."""


@dataclass(frozen=True)
class Known:
    """One line of a known_hosts file."""

    type: str
    blob: bytes
    marker: str
    """``""``, ``@revoked`` or ``@cert-authority``."""
    where: str
    """``FILE:LINE``."""


def fingerprint(blob: bytes) -> str:
    """As OpenSSH prints it: ``SHA256:`` and unpadded base64."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def server_name(host: str, port: int) -> str:
    """The name under which known_hosts has a server."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        try:
            _, _, salt, digest = patterns.split("|")
            made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except (ValueError, binascii.Error):
            return False
    found = False
    for pattern in patterns.lower().split(","):
        plain = pattern.lstrip("!").replace("[", "[[]")  # brackets are literal here, only * and ? are wild
        if fnmatch.fnmatchcase(name, plain):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _lines(path: Path) -> Iterator[tuple[str, Known]]:
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        return  # OpenSSH, too, takes a file that it cannot read as empty
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except binascii.Error:
            continue
        yield words[0], Known(words[1], blob, marker, f"{path}:{number}")


def find(files: Iterable[Path], name: str) -> list[Known]:
    """What the files know about the server ``name``."""
    return [known for path in files for patterns, known in _lines(path) if _matches(patterns, name)]


def pinned(text: str) -> tuple[str, bytes]:
    """Type and key of a pinned ``TYPE BASE64``; ``("", b"")`` for a fingerprint."""
    if text.startswith("SHA256:"):
        return "", b""
    kind, blob = text.split()[:2]
    return kind, base64.b64decode(blob)


def check_pin(name: str, kind: str, blob: bytes, pin: str) -> None:
    """Compare the shown key with the one in ``hosts.yaml``. Raises HostKeyError."""
    pin_kind, pin_blob = pinned(pin)
    shown = fingerprint(blob)
    want = fingerprint(pin_blob) if pin_blob else pin
    if shown == want:
        return
    if pin_kind and pin_kind != kind:
        raise WrongTypeHostKey(
            f"{name}: host_key in hosts.yaml is of type {pin_kind}, and the server offers none; it shows {kind} {shown}"
        )
    raise ChangedHostKey(
        f"{name}: the server's key is not the one pinned in hosts.yaml: it shows {kind} {shown}, pinned is {want}. "
        "If its administrator confirms the new key, change host_key there; otherwise somebody may be in between"
    )


def _removal(name: str, known: Known) -> str:
    """The line that takes a known key out of its file, which need not be the user's usual one."""
    return f"ssh-keygen -R '{name}' -f {shlex.quote(known.where.rpartition(':')[0])}"


def check(name: str, kind: str, blob: bytes, files: Sequence[Path], accept: Sequence[str]) -> None:
    """Compare the shown key with known_hosts. Raises HostKeyError.

    A key of a host that is not known at all is added to the first of ``files`` if its fingerprint is in ``accept``.
    """
    shown = fingerprint(blob)
    known = find(files, name)
    if revoked := [k for k in known if k.marker == "@revoked" and k.blob == blob]:
        raise RevokedHostKey(f"{name}: the server's key {kind} {shown} is revoked ({revoked[0].where})")
    plain = [k for k in known if not k.marker]
    if any(k.blob == blob for k in plain):
        return
    if same := [k for k in plain if k.type == kind]:
        raise ChangedHostKey(
            f"{name}: THE SERVER'S KEY HAS CHANGED: it shows {kind} {shown}, {same[0].where} has "
            f"{fingerprint(same[0].blob)}. Somebody may be in between. If its administrator confirms the new key: "
            f"{_removal(name, same[0])}, then --accept-new-host-key {shown}"
        )
    if plain:
        have = ", ".join(f"{k.type} ({k.where})" for k in plain)
        raise WrongTypeHostKey(
            f"{name}: the server shows a key of type {kind} ({shown}), but known for it is {have}, "
            f"which it no longer offers. If its administrator confirms the key: "
            f"{_removal(name, plain[0])}, then --accept-new-host-key {shown}"
        )
    if shown in accept:
        if not files:
            raise UnknownHostKey(f"{name}: ssh_config names no known_hosts file to add {shown} to")
        _add(files[0], f"{name} {kind} {base64.b64encode(blob).decode()}\n")
        return
    authority = "; a @cert-authority line matches it, but host certificates are not supported" if known else ""
    raise UnknownHostKey(
        f"{name}: the server's key is not known{authority}: it shows {kind} {shown}. Compare this with what its "
        f"administrator says (on the host: ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub), then accept it once with "
        f"--accept-new-host-key {shown}, or pin it as host_key in hosts.yaml"
    )


def _add(path: Path, line: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = "\n" + line  # the last line of a file edited by hand may lack its end
        file.write(line.encode())
