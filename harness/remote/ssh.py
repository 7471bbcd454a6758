"""An authenticated SSH connection, hop by hop, with a limit on every wait and never a question to the user.

Errors are ``ConnectionFailed`` (with the host's name, and what to do where that is known) or, for a host key that may
not be trusted, ``known_hosts.HostKeyError``.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from harness.remote import known_hosts
from harness.remote.hosts import Host, Limits
from harness.remote.ssh_auth import ConnectionFailed, authenticate, within
from harness.remote.ssh_route import Hop, RouteError, load_config, route

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its tracebacks go to stderr

_FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")  # one pass for secrecy and integrity


@dataclass(frozen=True)
class Options:
    """How to connect, beside what ``hosts.yaml`` says."""

    config: Path | None = None
    """In place of the user's and the system's ssh_config."""
    accept: tuple[str, ...] = ()
    """Fingerprints of new host keys that the user accepts."""


class Connection:
    """The transports of one route; the last one reaches the host."""

    def __init__(self, hops: list[Hop]) -> None:
        self.hops = hops
        self.transports: list[paramiko.Transport] = []
        self.socket: socket.socket | None = None

    @property
    def transport(self) -> paramiko.Transport:
        return self.transports[-1]

    def execute(self, command: str, limit: float) -> paramiko.Channel:
        """Start ``command`` on the host."""
        try:
            channel = self.transport.open_session(timeout=limit)
            channel.settimeout(limit)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise ConnectionFailed(
                f"{self.hops[-1]}: no command can be started: {error or type(error).__name__}"
            ) from None
        return channel

    def close(self) -> None:
        """Close every hop, the innermost first. Never raises, never waits for the other side."""
        for transport in reversed(self.transports):
            with suppress(Exception):  # a dead link makes paramiko raise in many ways, and none matters any more
                transport.close()
        if self.socket:
            with suppress(OSError):
                self.socket.close()


def connect(host: Host, options: Options) -> Connection:
    """Connect to ``host`` through every hop of its route. Raises ConnectionFailed, HostKeyError."""
    try:
        hops = route(load_config(options.config), host.address, host.user, host.port)
    except RouteError as error:
        raise ConnectionFailed(str(error)) from None
    connection = Connection(hops)
    try:
        for hop in hops:
            sock = _socket(connection, hop, host.limits)
            transport = paramiko.Transport(sock)
            connection.transports.append(transport)
            _handshake(transport, hop, host if hop is hops[-1] else None, host.limits, options)
            authenticate(transport, hop, host.limits)
            transport.set_keepalive(max(1, int(host.limits.silence / 4)))
    except BaseException as error:
        connection.close()
        if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            raise ConnectionFailed(f"{hop}: {error or type(error).__name__}") from error
        raise
    return connection


def _until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _socket(connection: Connection, hop: Hop, limits: Limits) -> Any:
    """Something to speak SSH over: a TCP connection, a ProxyCommand, or a channel through the hop before."""
    if connection.transports:
        before = connection.hops[len(connection.transports) - 1]
        try:
            return connection.transport.open_channel(
                "direct-tcpip", (hop.host, hop.port), ("127.0.0.1", 0), timeout=limits.connect
            )
        except paramiko.ChannelException as error:
            raise ConnectionFailed(f"{hop}: the jump host {before} cannot reach it: {error.text}") from None
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionFailed(f"{hop}: the jump host {before} does not answer: {error}") from None
    if hop.command:
        return paramiko.ProxyCommand(hop.command)

    def dial() -> socket.socket:
        sock = socket.create_connection((hop.host, hop.port), timeout=limits.connect)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    try:
        connection.socket = within(limits.connect, dial, f"{hop}: connect: no answer")
    except TimeoutError:
        raise ConnectionFailed(f"{hop}: connect: no answer within {limits.connect:g} s") from None
    except socket.gaierror as error:
        raise ConnectionFailed(
            f"{hop}: {hop.host!r} is neither known to ssh_config nor to DNS ({error.strerror}): "
            "correct `address` in hosts.yaml, or give it a HostName in ssh_config"
        ) from None
    except OSError as error:
        raise ConnectionFailed(f"{hop}: connect: {error.strerror or error}") from None
    return connection.socket


def _known_files(hop: Hop) -> list[Path]:
    return [path for path in hop.known_hosts if path != Path("/dev/null")]


def _handshake(transport: paramiko.Transport, hop: Hop, host: Host | None, limits: Limits, options: Options) -> None:
    """Exchange keys and check the server's; ``host`` is given for the last hop, which may have a pinned key."""
    name = hop.key_name or known_hosts.server_name(hop.host, hop.port)
    files = _known_files(hop)
    pin = host.host_key if host else None
    if pin:
        types = {known_hosts.pinned(pin)[0]}
    else:
        types = {known.type for known in known_hosts.find(files, name) if not known.marker}
    security = transport.get_security_options()
    # A server has keys of several types; ask for one that can be checked.
    security.key_types = sorted(
        security.key_types,
        key=lambda t: (t.replace("rsa-sha2-512", "ssh-rsa").replace("rsa-sha2-256", "ssh-rsa")) not in types,
    )
    security.ciphers = sorted(security.ciphers, key=lambda c: c not in _FAST_CIPHERS)
    # paramiko does not tell which limit is over, and takes a late answer for a refusal; its own come after ours.
    transport.banner_timeout = limits.banner + 5
    transport.handshake_timeout = limits.connect + 5
    transport.auth_timeout = limits.auth + 5
    done = threading.Event()
    transport.start_client(event=done)
    if not _until(lambda: done.is_set() or transport.remote_version, limits.banner):
        raise ConnectionFailed(f"{hop}: banner: connected, but the server says nothing within {limits.banner:g} s")
    if not _until(done.is_set, limits.connect):
        raise ConnectionFailed(f"{hop}: key exchange: not finished within {limits.connect:g} s")
    if not transport.is_active():
        error = transport.get_exception()
        if transport.remote_version:
            raise ConnectionFailed(f"{hop}: key exchange: {str(error or '') or 'the server closed the connection'}")
        raise ConnectionFailed(
            f"{hop}: banner: no SSH server answers there, or it closed the connection at once ({error})"
        )
    key = transport.get_remote_server_key()
    if pin:
        known_hosts.check_pin(name, key.get_name(), key.asbytes(), pin)
    else:
        known_hosts.check(name, key.get_name(), key.asbytes(), files, options.accept)
