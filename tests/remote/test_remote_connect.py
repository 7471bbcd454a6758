"""Connecting: whose key is trusted, which way it goes, how long anything may take, and what an error says."""

from __future__ import annotations

import base64
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.remote import known_hosts
from harness.remote.hosts import Host, Limits
from harness.remote.known_hosts import ChangedHostKey, HostKeyError, RevokedHostKey, UnknownHostKey, WrongTypeHostKey
from harness.remote.link import Link
from harness.remote.ssh import Options
from harness.remote.ssh import connect as ssh_connect
from harness.remote.ssh_auth import ConnectionFailed
from harness.remote.ssh_route import RouteError, load_config, route
from tests.remote import sshd as sshd_module
from tests.remote.sshd import Relay, Sshd, keygen, public, require_sshd, ssh_config, user
from tests.remote.support import Open, Server
from tests.waiting import until


def fingerprint(key: Path) -> str:
    """By OpenSSH's word."""
    done = subprocess.run(["ssh-keygen", "-lf", f"{key}.pub"], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@pytest.fixture
def options(server: Server, tmp_path: Path) -> Options:
    """A client that knows no host yet."""
    known = tmp_path / "ssh" / "known_hosts"
    return Options(config=ssh_config(tmp_path / "config", [], key=server.key, known_hosts=known))


def known_file(options: Options, *lines: str) -> Path:
    assert options.config is not None
    path = options.config.with_name("ssh") / "known_hosts"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def attempt(host: Host, options: Options) -> None:
    ssh_connect(host, options).close()


def test_an_unknown_key_is_refused_and_can_be_accepted_by_its_fingerprint(
    host: Host, options: Options, server: Server
) -> None:
    shown = fingerprint(server.sshd.keys[0])
    with pytest.raises(UnknownHostKey, match="not known") as caught:
        attempt(host, options)
    assert f"--accept-new-host-key {shown}" in str(caught.value)
    with pytest.raises(UnknownHostKey):
        attempt(host, replace(options, accept=("SHA256:" + "A" * 43,)))
    attempt(host, replace(options, accept=(shown,)))
    attempt(host, options)  # it was written down, in words that OpenSSH reads as well
    path = known_file(options).parent / "known_hosts"
    assert path.read_text() == ""
    attempt(host, replace(options, accept=(shown,)))
    name = f"[127.0.0.1]:{host.port}"
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", str(path)], capture_output=True, text=True, check=True)
    assert public(server.sshd.keys[0]) in found.stdout


@pytest.mark.slow
def test_accepting_keeps_the_rest_of_the_file(host: Host, options: Options, server: Server) -> None:
    path = known_file(options)
    path.write_text("other.example ssh-ed25519 AAAA")  # no newline at its end
    attempt(host, replace(options, accept=(fingerprint(server.sshd.keys[0]),)))
    assert path.read_text().splitlines()[0] == "other.example ssh-ed25519 AAAA"
    attempt(host, options)


@pytest.mark.slow
def test_a_changed_key_is_refused_even_when_its_fingerprint_is_given(
    host: Host, options: Options, server: Server, tmp_path: Path
) -> None:
    other = keygen(tmp_path / "other")
    path = known_file(options, f"[127.0.0.1]:{host.port} {public(other)}")
    shown = fingerprint(server.sshd.keys[0])
    with pytest.raises(ChangedHostKey) as caught:
        attempt(host, replace(options, accept=(shown,)))
    text = str(caught.value)
    assert "HAS CHANGED" in text
    assert shown in text
    assert fingerprint(other) in text
    assert f"{path}:1" in text
    line = re.search(r"confirms the new key: (.*), then --accept", text)
    assert line is not None
    subprocess.run(shlex.split(line[1]), check=True, capture_output=True)
    assert path.read_text() == ""


@pytest.mark.slow
def test_a_key_of_another_type_is_refused(host: Host, options: Options, tmp_path: Path) -> None:
    known_file(options, f"[127.0.0.1]:{host.port} {public(keygen(tmp_path / 'rsa', 'rsa'))}")
    with pytest.raises(WrongTypeHostKey, match=r"ssh-rsa .*no longer offers"):
        attempt(host, options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1])
def test_the_type_that_is_known_is_asked_for(host: Host, options: Options, server: Server, kind: int) -> None:
    known_file(options, f"[127.0.0.1]:{host.port} {public(server.sshd.keys[kind])}")
    attempt(host, options)


@pytest.mark.slow
def test_one_of_several_known_keys_will_do(host: Host, options: Options, server: Server, tmp_path: Path) -> None:
    """A file that holds the key before a re-installation and the one after it."""
    name = f"[127.0.0.1]:{host.port}"
    known_file(options, f"{name} {public(keygen(tmp_path / 'old'))}", f"{name} {public(server.sshd.keys[0])}")
    attempt(host, options)


@pytest.mark.slow
def test_a_revoked_key_is_refused(host: Host, options: Options, server: Server) -> None:
    key = public(server.sshd.keys[0])
    name = f"[127.0.0.1]:{host.port}"
    known_file(options, f"@revoked * {key}", f"{name} {key}")
    with pytest.raises(RevokedHostKey):
        attempt(host, options)


@pytest.mark.slow
def test_a_pinned_key_stands_in_for_known_hosts(host: Host, options: Options, server: Server, tmp_path: Path) -> None:
    for key in server.sshd.keys:
        attempt(replace(host, host_key=public(key)), options)
    attempt(replace(host, host_key=fingerprint(server.sshd.keys[0])), options)
    other = keygen(tmp_path / "other")
    for pin in (public(other), fingerprint(other)):
        with pytest.raises(ChangedHostKey, match=r"pinned in hosts\.yaml"):
            attempt(replace(host, host_key=pin), options)
    with pytest.raises(WrongTypeHostKey, match=r"hosts\.yaml is of type ssh-rsa"):
        attempt(replace(host, host_key=public(keygen(tmp_path / "rsa", "rsa"))), options)
    # known_hosts has no say then, not even a contradicting one
    known_file(options, f"[127.0.0.1]:{host.port} {public(other)}")
    attempt(replace(host, host_key=public(server.sshd.keys[0])), options)


def test_known_hosts_is_read_as_openssh_reads_it(tmp_path: Path) -> None:
    """Against ssh-keygen -F, over hashed names, patterns, negation, ports, markers, comments and rubbish."""
    keys = [public(keygen(tmp_path / f"k{i}")) for i in range(3)]
    blobs = {key.split()[1] for key in keys}
    path = tmp_path / "known_hosts"
    path.write_text("plain.example,[port.example]:2222 " + keys[0] + " a comment\nhashed.example " + keys[1] + "\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    with path.open("a") as file:
        file.write(f"# {keys[2]}\n\n*.wild.example,!not.wild.example {keys[2]}\n10.0.0.? {keys[0]}\n")
        file.write(f"@revoked bad.example {keys[1]}\n@cert-authority *.ca.example {keys[1]}\n")
        file.write("broken ssh-ed25519 !!!\nshort\nUPPER.example " + keys[0] + "\n[*.p.example]:22* " + keys[0] + "\n")
    names = ["plain.example", "[plain.example]:22", "[port.example]:2222", "port.example", "hashed.example"]
    names += ["a.wild.example", "not.wild.example", "10.0.0.7", "10.0.0.77", "bad.example", "x.ca.example"]
    names += ["upper.example", "short", "unknown.example", "[a.p.example]:2200", "[a.p.example]:300"]
    found = 0
    for name in names:
        done = subprocess.run(["ssh-keygen", "-F", name, "-f", str(path)], capture_output=True, text=True, check=False)
        theirs = {
            word for line in done.stdout.splitlines() if line[:1] != "#" for word in line.split() if word in blobs
        }
        ours = {base64.b64encode(known.blob).decode() for known in known_hosts.find([path], name)}
        assert ours == theirs, name
        found += len(theirs)
    assert found >= 8


def test_fingerprints_are_openssh_s(tmp_path: Path) -> None:
    key = keygen(tmp_path / "k", "ecdsa")
    assert known_hosts.fingerprint(base64.b64decode(public(key).split()[1])) == fingerprint(key)


@pytest.mark.slow
def test_wrong_user(host: Host, server: Server) -> None:
    with pytest.raises(
        ConnectionFailed, match=r"nobody-of-that-name is refused \(.*id refused\).*authorized_keys there"
    ):
        attempt(replace(host, user="nobody-of-that-name"), server.options)


@pytest.mark.slow
def test_a_key_that_the_server_does_not_take(host: Host, server: Server, tmp_path: Path) -> None:
    other = keygen(tmp_path / "other")
    config = ssh_config(tmp_path / "c", [], key=other, known_hosts=server.known_hosts)
    with pytest.raises(ConnectionFailed, match=f"{other} refused"):
        attempt(host, Options(config=config))


@pytest.mark.slow
def test_a_key_with_a_passphrase_is_named_and_nobody_is_asked(host: Host, server: Server, tmp_path: Path) -> None:
    locked = keygen(tmp_path / "locked", passphrase="not empty")
    config = ssh_config(tmp_path / "c", [], key=locked, known_hosts=server.known_hosts)
    with pytest.raises(ConnectionFailed, match=f"{locked} has a passphrase: ssh-add it"):
        attempt(host, Options(config=config))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An SSH agent of our own; the path of its socket."""
    path = Path(os.path.relpath(tmp_path / "agent"))  # sockets' names must be short
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    until(path.exists)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
    yield path
    process.terminate()
    process.wait()


@pytest.mark.slow
def test_keys_come_from_the_agent(host: Host, server: Server, tmp_path: Path, agent: Path) -> None:
    """Named by ssh_config with the public part alone on disk, among others that would exhaust the server's patience."""
    for i in range(8):
        subprocess.run(["ssh-add", "-q", str(keygen(tmp_path / f"wrong{i}"))], check=True, capture_output=True)
    subprocess.run(["ssh-add", "-q", str(server.key)], check=True, capture_output=True)
    name = tmp_path / "in-agent"
    name.with_name("in-agent.pub").write_text(public(server.key))
    config = ssh_config(tmp_path / "c", [], key=name, known_hosts=server.known_hosts)
    attempt(host, Options(config=config))


@pytest.mark.slow
def test_a_server_that_takes_no_keys(host: Host, server: Server, tmp_path: Path) -> None:
    sshd = Sshd(tmp_path / "s", server.authorized, options=["PubkeyAuthentication no"], passwords="yes")
    try:
        with pytest.raises(ConnectionFailed, match="takes no keys from this user, only"):
            attempt(replace(host, port=sshd.port, host_key=public(sshd.keys[0])), server.options)
    finally:
        sshd.stop()


@pytest.mark.slow
def test_two_hops(connect: Open, host: Host, server: Server, tmp_path: Path) -> None:
    """ProxyJump through two servers, each with a key, a port and an ssh_config entry of its own."""
    hops = [Sshd(tmp_path / f"hop{i}", server.authorized) for i in range(2)]
    known = tmp_path / "known"
    known.write_text(
        server.known_hosts.read_text() + "".join(f"[127.0.0.1]:{h.port} {public(h.keys[0])}\n" for h in hops)
    )
    blocks = [
        f"Host outer\n  HostName 127.0.0.1\n  Port {hops[0].port}\n  User {user()}",
        f"Host inner\n  HostName 127.0.0.1\n  User {user()}\n  ProxyJump outer",
        f"Host box\n  HostName 127.0.0.1\n  Port {host.port}\n  User {user()}\n  ProxyJump inner:{hops[1].port}",
    ]
    config = ssh_config(tmp_path / "c", blocks, key=server.key, known_hosts=known)
    try:
        at = replace(host, address="box", port=None, user=None)
        session = connect(at, options=Options(config=config))
        assert [hop.port for hop in session.link.connection.hops] == [hops[0].port, hops[1].port, host.port]
        assert session.facts["user"] == user()
        for hop in hops:
            assert "Accepted publickey" in hop.log.read_text()
        # An unknown key on the way counts as much as the last one, and a hop that cannot reach the next says so.
        known.write_text(
            "\n".join(line for line in known.read_text().splitlines() if str(hops[1].port) not in line) + "\n"
        )
        with pytest.raises(UnknownHostKey, match=str(hops[1].port)):
            attempt(at, Options(config=config))
        config = ssh_config(
            tmp_path / "c2",
            [blocks[0], "Host box\n  HostName 127.0.0.1\n  Port 1\n  ProxyJump outer"],
            key=server.key,
            known_hosts=known,
        )
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1: the jump host .* cannot reach it"):
            attempt(at, Options(config=config))
        hops[0].kill_sessions()
    finally:
        for sshd in hops:
            sshd.stop()


@pytest.mark.slow
def test_proxy_command(connect: Open, host: Host, server: Server, tmp_path: Path) -> None:
    command = f"ssh -F {server.options.config} -p {host.port} -W %h:%p {user()}@127.0.0.1"
    blocks = [f"Host box\n  HostName 127.0.0.1\n  Port {host.port}\n  User {user()}\n  ProxyCommand {command}"]
    config = ssh_config(tmp_path / "c", blocks, key=server.key, known_hosts=server.known_hosts)
    session = connect(replace(host, address="box", port=None, user=None), options=Options(config=config))
    assert session.facts["user"] == user()


def test_routes(tmp_path: Path) -> None:
    config = tmp_path / "c"
    jumps = {"a": "b", "b": "u@c:77,ssh://v@d:88", "loop": "pool", "pool": "loop", "six": "w@[::1]:99", "none": "none"}
    blocks = "".join(f"Host {name}\n  ProxyJump {jump}\n" for name, jump in jumps.items())
    config.write_text(f"Include {tmp_path}/more*\n{blocks}Host *\n  User me\n")
    (tmp_path / "more1").write_text("Host d\n  HostName d.example\n")
    loaded = load_config(config)
    hops = route(loaded, "a", None, None)
    assert [str(hop) for hop in hops] == ["u@c:77", "v@d.example:88", "me@b:22", "me@a:22"]
    assert [str(hop) for hop in route(loaded, "six", "x", 5)] == ["w@::1:99", "x@six:5"]
    assert [str(hop) for hop in route(loaded, "none", None, None)] == ["me@none:22"]
    with pytest.raises(RouteError, match="circle: loop -> pool -> loop"):
        route(loaded, "loop", None, None)
    config.write_text("Host x\n  ProxyJump @@:x\n")
    with pytest.raises(RouteError, match="ProxyJump '@@:x'"):
        route(load_config(config), "x", None, None)
    with pytest.raises(RouteError, match="nowhere"):
        load_config(tmp_path / "nowhere")


def test_an_include_stays_in_its_block(tmp_path: Path) -> None:
    config = tmp_path / "c"
    (tmp_path / "inner").write_text("Host other\n  User other\n")
    config.write_text(f"Host a\n  Include {tmp_path}/inner\n  Port 77\nHost *\n  User me\n")
    loaded = load_config(config)
    assert str(route(loaded, "a", None, None)[0]) == "me@a:77"
    assert str(route(loaded, "b", None, None)[0]) == "me@b:22"


@pytest.mark.slow
def test_missing_python_and_what_is_none(
    connect: Open, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConnectionFailed, match=r"python: /no/python is not there \(status 127\); set python in hosts\.yaml"
    ):
        connect(server.host(tmp_path, python="/no/python"))
    with pytest.raises(ConnectionFailed, match="cannot run the far side's program"):
        connect(server.host(tmp_path, python="/bin/false"))
    old = tmp_path / "old"
    old.write_text(
        f'#!/bin/sh\nshift 2\nexec {server.host(tmp_path).python} -c "import sys; sys.version_info = (3, 9, 1); $1"\n'
    )
    old.chmod(0o755)
    listen = Link._listen_to_errors
    monkeypatch.setattr(Link, "_listen_to_errors", lambda self: time.sleep(0.5) or listen(self))  # on a busy machine
    with pytest.raises(ConnectionFailed, match=r"Python 3\.9 is too old, 3\.10 is needed"):
        connect(server.host(tmp_path, python=str(old)))


@pytest.mark.slow
def test_a_login_that_prints_is_no_trouble(connect: Open, server: Server, tmp_path: Path) -> None:
    chatty = tmp_path / "py thon's"  # and a path that has to be quoted
    python = server.host(tmp_path).python
    chatty.write_text(
        f'#!/bin/sh\necho "Welcome to this box!"; echo motd >&2; head -c 3000 /dev/zero\nexec {python} "$@"\n'
    )
    chatty.chmod(0o755)
    assert connect(server.host(tmp_path, python=str(chatty))).facts["ok"]


@pytest.mark.slow
def test_nobody_listens(host: Host, server: Server) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else may listen there meanwhile
        with pytest.raises(ConnectionFailed, match="connect: Connection refused"):
            attempt(replace(host, port=deaf.getsockname()[1]), server.options)
    with pytest.raises(
        ConnectionFailed, match=r"neither known to ssh_config nor to DNS .*: correct `address` in hosts\.yaml, or"
    ):
        attempt(replace(host, address="no-such-host.invalid"), server.options)


def gives_up(at: Host, options: Options, limit: str, match: str) -> None:
    """By this limit of one second; the others, which a busy machine may need, are as they are."""
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match=match):
        attempt(replace(at, limits=replace(Limits(), **{limit: 1.0})), options)
    assert 0.9 < time.monotonic() - began < getattr(Limits(), limit) * 0.75


@pytest.mark.slow
def test_the_connect_limit(host: Host, server: Server) -> None:
    """A listener whose queue is full: the kernel drops what comes, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        time.sleep(0.2)
        gives_up(replace(host, port=port), server.options, "connect", "connect: no answer within 1 s")
        for filler in fillers:
            filler.close()


@pytest.mark.slow
def test_the_banner_limit(host: Host, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        gives_up(replace(host, port=port), server.options, "banner", "banner: .*says nothing within 1 s")


@pytest.mark.slow
def test_something_else_listens(host: Host, server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            peer, _ = other.accept()
            peer.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            peer.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionFailed, match="no SSH server answers there"):
            attempt(replace(host, port=other.getsockname()[1]), server.options)


@pytest.mark.slow
def test_the_key_exchange_limit(host: Host, server: Server) -> None:
    relay = Relay(server.sshd.port, freeze_after=60)  # the banner passes, and nothing after it
    try:
        gives_up(replace(host, port=relay.port), server.options, "connect", "key exchange: not finished within 1 s")
    finally:
        relay.close()


@pytest.mark.slow
def test_the_auth_limit(host: Host, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(server.sshd.port)
    monkeypatch.setattr(known_hosts, "check_pin", lambda *_: relay.freeze())  # between key exchange and authentication
    try:
        at = replace(host, port=relay.port, host_key=public(server.sshd.keys[0]))
        gives_up(at, server.options, "auth", "auth: no answer within 1 s")
    finally:
        relay.close()


@pytest.mark.slow
def test_a_server_takes_another_port_if_its_own_is_taken(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding a free one and listening there, whatever else runs may have got it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports, real = [other.getsockname()[1]], sshd_module.free_port
        monkeypatch.setattr(sshd_module, "free_port", lambda: ports.pop() if ports else real())
        sshd = Sshd(tmp_path / "s", server.authorized)
        try:
            assert sshd.port != other.getsockname()[1]
            assert ports == []
        finally:
            sshd.stop()
    with pytest.raises(RuntimeError, match=r"sshd does not start: .*\n?.*nonsense"):
        Sshd(tmp_path / "t", server.authorized, options=["nonsense"])


def test_a_machine_without_sshd_is_not_green_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are skipped by name where nobody asked for them, and fail where CI did."""
    monkeypatch.setattr(sshd_module, "SSHD", "")
    monkeypatch.delenv("KDTREE_REQUIRE_SSHD", raising=False)
    with pytest.raises(pytest.skip.Exception, match="sshd is not installed: apt-get install openssh-server"):
        require_sshd()
    monkeypatch.setenv("KDTREE_REQUIRE_SSHD", "1")
    with pytest.raises(pytest.fail.Exception, match="sshd is not installed: apt-get install openssh-server"):
        require_sshd()


def test_every_error_about_keys_is_one_kind() -> None:
    assert all(issubclass(e, HostKeyError) for e in (UnknownHostKey, ChangedHostKey, WrongTypeHostKey, RevokedHostKey))
