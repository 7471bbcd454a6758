"""Logging in to an SSH server with the user's keys: the agent's, those that ssh_config names, the usual files.

There is never a question: a key with a passphrase is named in the error, and works through the agent.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import paramiko

from harness.remote import known_hosts
from harness.remote.hosts import Limits
from harness.remote.ssh_route import Hop

T = TypeVar("T")

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


class ConnectionFailed(Exception):
    """No connection, or not as that user."""


def within(seconds: float, function: Callable[[], T], late: str) -> T:
    """``function()``, in a thread that is given up after ``seconds``: name lookups and agents know no limit.

    Raises ConnectionFailed, which begins with ``late``, or what the function raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise ConnectionFailed(f"{late} within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def authenticate(transport: paramiko.Transport, hop: Hop, limits: Limits) -> None:
    """Log in with a key. Raises ConnectionFailed, which says what was tried."""
    tried: list[str] = []

    def attempt() -> bool:
        for label, key in _keys(hop, tried):
            try:
                more = transport.auth_publickey(hop.user, key)
            except paramiko.BadAuthenticationType as error:
                raise ConnectionFailed(
                    f"{hop}: auth: the server takes no keys from this user, only {', '.join(error.allowed_types)}"
                ) from None
            except paramiko.AuthenticationException:
                tried.append(f"{label} refused")
                if not transport.is_active():
                    tried.append("then the server closed the connection")
                    return False
                continue
            if more:
                raise ConnectionFailed(
                    f"{hop}: auth: the server wants {', '.join(more)} as well; only keys are supported"
                )
            return True
        return False

    if not within(limits.auth, attempt, f"{hop}: auth: no answer"):
        remedy = "start an SSH agent with a key, or name one in ssh_config (IdentityFile)"
        if tried:
            remedy = "passwords are not used: a key's public half belongs into authorized_keys there"
        what = "; ".join(tried) or "no key found"
        raise ConnectionFailed(f"{hop}: auth: user {hop.user} is refused ({what}): {remedy}")


def _keys(hop: Hop, remarks: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys worth trying: what ssh_config names (by agent or by file), other agent keys, the usual files."""
    named = list(hop.identities)
    agent = {key.asbytes(): key for key in paramiko.Agent().get_keys()}
    for path in named:
        with suppress(OSError, IndexError, ValueError):
            words = path.with_name(path.name + ".pub").read_text().split()
            if key := agent.pop(base64.b64decode(words[1]), None):
                yield f"{path} (agent)", key
    for path in named:
        yield from _file_key(path, remarks)
    if not hop.identities_only:
        for key in agent.values():
            yield f"agent key {known_hosts.fingerprint(key.asbytes())}", key
    if not named:
        for name in _DEFAULT_KEYS:
            yield from _file_key(Path("~/.ssh").expanduser() / name, remarks)


def _file_key(path: Path, remarks: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    try:
        yield str(path), paramiko.PKey.from_path(path)
    except FileNotFoundError:
        return
    except TypeError:  # what cryptography raises for a key with a passphrase
        remarks.append(f"{path} has a passphrase: ssh-add it")
    except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
        remarks.append(f"{path} unusable: {error}")
