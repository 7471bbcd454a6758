"""What is known of a host's key, and what is written down: without a server."""

from __future__ import annotations

import base64
import stat
import subprocess
from pathlib import Path

import pytest

from harness.remote.known_hosts import ChangedHostKey, UnknownHostKey, check, check_pin, find, fingerprint, server_name
from tests.remote.sshd import require_sshd

KIND = "ssh-ed25519"


def blob(number: int) -> bytes:
    """A key that OpenSSH takes for one."""
    return b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes([number]) * 32


def key(number: int) -> str:
    return f"{KIND} {base64.b64encode(blob(number)).decode()}"


def test_a_port_of_its_own_is_part_of_the_name() -> None:
    assert [server_name("Box.Example", port) for port in (22, 21, 23)] == [
        "box.example", "[box.example]:21", "[box.example]:23",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        f"#old.example,box.example {key(2)}",
        f"|1|nonsense {key(2)}",
        f"|1|AAAA {key(2)}",
        f"|1|a|b|c {key(2)}",
        f"|1|AAA|AAAA {key(2)}",
        "box.example ssh-ed25519",
        "box.example ssh-ed25519 !!!",
        "box.example ssh-ed25519 !",
    ],
)
def test_a_line_that_says_nothing_makes_no_key_known(tmp_path: Path, line: str) -> None:
    """By OpenSSH's word, too. The line before it lends it no key."""
    path = tmp_path / "known_hosts"
    path.write_text(f"other.example {key(1)}\n{line}\nbox.example {key(3)} # as it should be\n")
    assert [known.blob for known in find([path], "box.example")] == [blob(3)]
    require_sshd()
    done = subprocess.run(["ssh-keygen", "-F", "box.example", "-f", str(path)], capture_output=True, text=True)
    assert [number for number in (1, 2, 3) if key(number).split()[1] in done.stdout.split()] == [3]


@pytest.mark.parametrize(("marker", "told"), [("@cert-authority", True), ("@revoked", True), ("", False)])
def test_a_key_with_a_marker_is_not_the_hosts_own(tmp_path: Path, marker: str, told: bool) -> None:
    """Not the same key, and no other one either: then nothing is known, and nothing has changed."""
    path = tmp_path / "known_hosts"
    path.write_text(f"{marker} box.example {key(1)}\n" if marker else "")
    shown = [blob(1), blob(2)] if marker == "@cert-authority" else [blob(2)]
    for each in shown:
        with pytest.raises(UnknownHostKey) as caught:
            check("box.example", KIND, each, [path], [])
        assert ("a @cert-authority line matches it" in str(caught.value)) == told


def test_a_key_that_is_accepted_is_written_down_where_nobody_else_can(tmp_path: Path) -> None:
    path, accept = tmp_path / "of" / "ssh" / "known_hosts", [fingerprint(blob(1)), fingerprint(blob(2))]
    check("one.example", KIND, blob(1), [path, tmp_path / "second"], accept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    check("two.example", KIND, blob(2), [path], accept)
    assert path.read_text() == f"one.example {key(1)}\ntwo.example {key(2)}\n"
    path.write_text(f"one.example {key(1)}")
    check("two.example", KIND, blob(2), [path], accept)
    assert path.read_text() == f"one.example {key(1)}\ntwo.example {key(2)}\n"
    assert not (tmp_path / "second").exists()
    with pytest.raises(ChangedHostKey):
        check("two.example", KIND, blob(1), [path], accept)


def test_a_key_that_can_be_written_down_nowhere_is_not_accepted() -> None:
    with pytest.raises(UnknownHostKey, match="names no known_hosts file to add SHA256:"):
        check("box.example", KIND, blob(1), [], [fingerprint(blob(1))])


def test_a_pinned_key_may_have_a_comment() -> None:
    check_pin("box", KIND, blob(1), f"{key(1)} root@box")
    with pytest.raises(ChangedHostKey):
        check_pin("box", KIND, blob(2), f"{key(1)} root@box")
