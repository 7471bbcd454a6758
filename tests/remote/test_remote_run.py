"""Commands on a host: their output, how they ended, and that nothing of them outlives its reason to run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from harness.remote import link
from harness.remote import session as remote_session
from harness.remote.farside.agent import HELLO
from harness.remote.farside.wire import ERR, OUT
from harness.remote.hosts import Host, Limits
from harness.remote.link import FarError, LinkLost
from harness.remote.session import Session, Stopped
from harness.remote.sync import working_tree
from tests import processes
from tests.processes import running
from tests.remote.sshd import Relay, public
from tests.remote.support import Open, Printed, Server, in_background
from tests.waiting import PATIENCE, until


@pytest.fixture
def session(connect: Open, repo: Path) -> Session:
    made: Session = connect()
    made.sync(working_tree(repo))
    return made


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families here ignore SIGTERM; nobody has to wait the usual time for that."""
    monkeypatch.setattr(remote_session, "GRACE", 0.7)
    monkeypatch.setattr(link, "GRACE", 0.7)


def test_output_and_status(session: Session, printed: Printed) -> None:
    outcome = session.run(["sh", "-c", "echo out; echo err >&2; exit 7"], limit=20)
    assert (outcome.status, outcome.signal, outcome.reason) == (7, 0, "")
    assert (printed.out, printed.err) == ("out\n", "err\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_no_status(session: Session, number: signal.Signals) -> None:
    outcome = session.run(["sh", "-c", f"kill -{int(number)} $$"], limit=20)
    assert (outcome.status, outcome.signal) == (0, number)
    assert number.name in outcome.trouble


@pytest.mark.slow
def test_a_missing_or_useless_program(session: Session) -> None:
    assert session.run(["no-such-program"], limit=20).status == 127
    assert session.run(["./a.txt"], limit=20).status == 126
    assert session.run(["true"], limit=20).status == 0


@pytest.mark.slow
def test_environment_does_not_depend_on_the_server(session: Session, printed: Printed, repo: Path) -> None:
    session.run(["sh", "-c", 'printf "%s" "$KDTREE_TEST"'], limit=20, env={"KDTREE_TEST": "ünï\n$HOME 'x'"})
    assert printed.out == "ünï\n$HOME 'x'"


@pytest.mark.slow
def test_what_preparation_exports_holds_for_later_commands(
    connect: Open, server: Server, tmp_path: Path, repo: Path, printed: Printed
) -> None:
    commands = ("export PREPARED='a b\nc'", "alias x=y", "cd src", "export OWN=$OWN:2")
    session = connect(server.host(tmp_path, prepare=commands, environment={"OWN": "1"}))
    session.sync(working_tree(repo))
    assert session.prepare().status == 0
    session.run(["sh", "-c", 'printf "%s|%s" "$PREPARED" "$OWN"; ls src >/dev/null'], limit=20)
    assert printed.out == "a b\nc|1:2"
    broken = connect(server.host(tmp_path, prepare=("true", "exit 9", "touch never")))
    broken.sync(working_tree(repo))
    assert broken.prepare().status == 9


@pytest.mark.slow
def test_lines_come_while_the_command_runs(connect: Open, repo: Path) -> None:
    seen: list[tuple[bytes, float]] = []
    session = connect(output=lambda kind, data: seen.append((data, time.monotonic())))
    session.sync(working_tree(repo))
    session.run(["sh", "-c", "echo first; sleep 0.5; echo second"], limit=20)
    times = {data: at for data, at in seen if data}
    assert times[b"second\n"] - times[b"first\n"] > 0.3


@pytest.mark.slow
def test_much_on_both_streams(session: Session, printed: Printed) -> None:
    """16 MiB on each at once; whoever drains one and then the other would wait for ever."""
    program = (
        "import sys, threading\n"
        "def pour(stream, byte):\n"
        "    for _ in range(256):\n"
        "        stream.buffer.write(byte * 65536)\n"
        "    stream.flush()\n"
        "threads = [threading.Thread(target=pour, args=a) for a in ((sys.stdout, b'o'), (sys.stderr, b'e'))]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    outcome = session.run([sys.executable, "-c", program], limit=60)
    assert outcome.status == 0
    assert bytes(printed.streams[OUT]) == b"o" * (16 << 20)
    assert bytes(printed.streams[ERR]) == b"e" * (16 << 20)


# Everything a command may start to get away: a child, one in a session of its own, an orphan, one that ignores SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
seconds = sys.argv[1]
subprocess.Popen(["sleep", seconds])
subprocess.Popen(["sleep", seconds], start_new_session=True, env={})
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execve("/bin/sh", ["sh", "-c", "trap '' TERM HUP INT; sleep %s; sleep %s" % (seconds, seconds)], {})
    os._exit(0)
print("ready", flush=True)
if len(sys.argv) > 2:
    sys.exit(5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(float(seconds))
"""


def family(marker: str, *more: str) -> list[str]:
    return [sys.executable, "-c", FAMILY, marker, *more]


@pytest.mark.slow
def test_the_time_limit_ends_everything(session: Session, marker: str) -> None:
    began = time.monotonic()
    outcome = session.run(family(marker), limit=1.5)
    assert outcome.reason == "limit"
    assert "time limit" in outcome.trouble
    assert outcome.left == 0
    assert running(marker) == []
    assert time.monotonic() - began < 60  # the family would stay for days


@pytest.mark.slow
def test_what_a_command_leaves_behind_is_ended_with_it(session: Session, marker: str) -> None:
    outcome = session.run(family(marker, "leave"), limit=20)
    assert (outcome.status, outcome.reason) == (5, "")
    assert running(marker) == []
    assert session.run(["true"], limit=20).status == 0


@pytest.mark.slow
def test_stopping_ends_everything(connect: Open, repo: Path, marker: str, printed: Printed) -> None:
    stop = threading.Event()
    session = connect(stop=stop)
    session.sync(working_tree(repo))
    threading.Timer(1, stop.set).start()
    outcome = session.run(family(marker), limit=60)
    assert outcome.reason == "cancelled"
    assert running(marker) == []
    with pytest.raises(Stopped):
        session.run(["true"], limit=20)


def family_in_background(session: Session, marker: str) -> tuple[threading.Thread, list[BaseException]]:
    """Start a family and wait until it lives."""
    started = in_background(lambda: session.run(family(marker), limit=60))
    until(lambda: len(running(marker)) >= 4)
    return started


@pytest.mark.slow
def test_the_server_dies_in_the_middle(session: Session, server: Server, marker: str) -> None:
    thread, errors = family_in_background(session, marker)
    server.sshd.kill_sessions()
    thread.join(PATIENCE)
    assert [type(e) for e in errors] == [LinkLost]
    until(lambda: not running(marker))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_half_of_the_watchdog_is_killed(session: Session, marker: str, victim: str, host: Host) -> None:
    """The agent and its keeper watch each other; both show the program's start line."""
    thread, errors = family_in_background(session, marker)
    pair = running("zlib.decompress")
    above = processes.ancestors(running(marker)[0])
    agent, keeper = (pid for pid in above if pid in pair)
    assert processes.tell(agent if victim == "agent" else keeper)
    thread.join(PATIENCE)
    assert [type(e) for e in errors] == [LinkLost]
    until(lambda: not running(marker))


CLIENT = """
import os, sys
from pathlib import Path
from harness.remote.hosts import Host, Limits
from harness.remote import link
from harness.remote.session import Session
from harness.remote.ssh import Options
from harness.remote.sync import working_tree
link.GRACE = 0.7
port, user, config, workdir, python, repo, *argv = sys.argv[1:]
host = Host(name="loop", address="127.0.0.1", port=int(port), user=user, workdir=workdir, python=python,
            lock=workdir + ".lock", limits=Limits(silence=3))
session = Session(host, Options(config=Path(config)), f"client-{os.getpid()}", lambda kind, data: None)
session.sync(working_tree(Path(repo)))
session.run(argv, limit=600)
"""


def client(server: Server, host: Host, repo: Path, argv: list[str]) -> subprocess.Popen[bytes]:
    words = [str(host.port), str(host.user), str(server.options.config), host.workdir, host.python, str(repo), *argv]
    return subprocess.Popen([sys.executable, "-c", CLIENT, *words])


@pytest.mark.slow
def test_the_client_is_killed(server: Server, host: Host, repo: Path, marker: str) -> None:
    process = client(server, host, repo, family(marker))
    until(lambda: len(running(marker)) >= 5)  # the client's own command line has the number too
    process.kill()
    process.wait()
    seconds = until(lambda: not running(marker))
    print(f"no remote process is alive {seconds:.1f} s after the client's SIGKILL")


@pytest.mark.slow
def test_the_client_hangs(server: Server, host: Host, repo: Path, marker: str) -> None:
    """Stopped, not dead: its kernel keeps the connection open, only the heartbeat is missing."""
    process = client(server, host, repo, family(marker))
    until(lambda: len(running(marker)) >= 5)
    process.send_signal(signal.SIGSTOP)
    try:
        seconds = until(lambda: set(running(marker)) == {process.pid})
        assert 1.5 < seconds < HELLO / 2  # which the far side grants who has not said what
    finally:
        process.kill()
        process.wait()


def silent_link(server: Server, connect: Open, tmp_path: Path, repo: Path, limits: Limits, marker: str) -> float:
    """Seconds from the last packet to the client's LinkLost; what ran there is gone by then or soon after."""
    relay = Relay(server.sshd.port)
    try:
        host = server.host(tmp_path, port=relay.port, limits=limits, host_key=public(server.sshd.keys[0]))
        session = connect(host)
        session.sync(working_tree(repo))
        thread, errors = family_in_background(session, marker)
        relay.freeze()
        began = time.monotonic()
        thread.join(PATIENCE)
        seconds = time.monotonic() - began
        assert [type(e) for e in errors] == [LinkLost]
        assert "nothing was heard" in str(errors[0])
        until(lambda: not running(marker))
        return seconds
    finally:
        relay.close()


@pytest.mark.slow
def test_a_silent_link_is_noticed(server: Server, connect: Open, tmp_path: Path, repo: Path, marker: str) -> None:
    seconds = silent_link(server, connect, tmp_path, repo, Limits(silence=2), marker)
    assert 1.5 < seconds < Limits().silence * 0.75


@pytest.mark.slow
def test_a_silent_link_is_noticed_within_30_s_by_default(
    server: Server, connect: Open, tmp_path: Path, repo: Path, marker: str
) -> None:
    seconds = silent_link(server, connect, tmp_path, repo, Limits(), marker)
    print(f"a silent link was noticed after {seconds:.1f} s")
    assert seconds < 30


@pytest.mark.slow
def test_a_link_that_falls_silent_while_we_send(server: Server, connect: Open, tmp_path: Path, repo: Path) -> None:
    (repo / "big").write_bytes(os.urandom(32 << 20))
    relay = Relay(server.sshd.port)
    host = server.host(tmp_path, port=relay.port, limits=Limits(silence=2), host_key=public(server.sshd.keys[0]))
    session = connect(host)
    frozen: list[float] = []

    def freeze(done: int, total: int) -> None:
        if not frozen and done > 4 << 20:
            relay.freeze()
            frozen.append(time.monotonic())

    with pytest.raises(LinkLost, match="nothing was heard"):
        session.sync(working_tree(repo), progress=freeze)
    assert time.monotonic() - frozen[0] < Limits().silence * 0.75
    relay.close()


@pytest.mark.slow
def test_a_long_quiet_command_is_not_a_silent_link(server: Server, connect: Open, tmp_path: Path, repo: Path) -> None:
    session = connect(server.host(tmp_path, limits=Limits(silence=2)))
    session.sync(working_tree(repo))
    assert session.run(["sleep", "3.5"], limit=20).status == 0


@pytest.mark.slow
def test_two_clients_queue_and_are_told_who_holds_the_box(connect: Open, repo: Path, host: Host) -> None:
    first, second, third = connect(), connect(), connect()
    assert first.lock("nox -s remote -- loop", lambda text: None)
    told: list[str] = []
    got: list[str] = []

    def wait(session: Session, name: str) -> None:
        if session.lock("other", told.append):
            got.append(name)

    threads = [threading.Thread(target=wait, args=pair) for pair in ((second, "second"), (third, "third"))]
    for thread in threads:
        thread.start()
    until(lambda: len(told) == 2)
    assert got == []
    assert all(first.run_id in text and "@" in text and "holds the box" in text for text in told)
    first.close()  # no unlock: whoever goes away for whatever reason lets go
    until(lambda: len(got) == 1)
    (second if got == ["second"] else third).unlock()
    until(lambda: len(got) == 2)


@pytest.mark.slow
def test_waiting_for_the_box_has_a_limit_and_can_be_stopped(connect: Open, server: Server, tmp_path: Path) -> None:
    host = server.host(tmp_path, limits=Limits(queue=1, silence=8))
    holder = connect(host)
    assert holder.lock("x", lambda text: None)
    told: list[str] = []
    late = connect(host)
    assert not late.lock("y", told.append)
    assert "gave up after 1 s" in told[-1]
    assert late.link.ask("unlock") == {"ok": True}  # the connection is still good
    stop = threading.Event()
    patient = connect(server.host(tmp_path), stop=stop)
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(Stopped):
        patient.lock("z", told.append)


@pytest.mark.slow
def test_clock_skew(connect: Open, server: Server, tmp_path: Path, repo: Path) -> None:
    """A host a year ahead: its Python, in an environment of its own, adds a year to what the clock says."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    ahead = "lambda real=time.time: real() + 31536000"  # once, though Debian's Python reads the folder as lib64's too
    (site / "ahead.pth").write_text(f"import time; time.time = vars(time).setdefault('ahead', {ahead})\n")
    host = server.host(tmp_path, python=str(tmp_path / "env" / "bin" / "python"))
    session = connect(host)
    assert abs(session.link.skew - 31536000) < 60
    session.sync(working_tree(repo))
    told: list[str] = []
    assert session.lock("x", told.append)
    other = connect(server.host(tmp_path, limits=Limits(queue=0.5, silence=8)))
    assert not other.lock("y", told.append)
    assert "for 0 min" in told[0]  # not half a million: and never less than nothing
    assert session.run(["sleep", "999"], limit=1).reason == "limit"
    assert session.prune()["runs"] == 0


def pythons() -> list[tuple[str, str]]:
    """Every admitted Python on this machine, by version."""
    found = {}
    names = [f"python3.{minor}" for minor in range(10, 15)]
    paths = [path for name in names if (path := shutil.which(name))]
    for path in [*paths, *map(str, Path.home().glob(".pyenv/versions/3.*/bin/python"))]:
        asked = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
        version = asked.stdout.decode().strip()
        if asked.returncode == 0 and tuple(map(int, version.split("."))) >= (3, 10):
            found.setdefault(version, path)
    return sorted(found.items(), key=lambda pair: tuple(map(int, pair[0].split("."))))


@pytest.mark.slow
def test_the_far_side_under_other_pythons(
    connect: Open, server: Server, tmp_path: Path, repo: Path, printed: Printed, marker: str
) -> None:
    for version, python in pythons():
        printed.streams[OUT].clear()
        own = {"workdir": str(tmp_path / f"far{version}"), "lock": str(tmp_path / f"lock{version}")}
        session = connect(server.host(tmp_path, python=python, **own))
        under_python(session, version, tmp_path, repo, printed, marker)


def under_python(session: Session, version: str, tmp_path: Path, repo: Path, printed: Printed, marker: str) -> None:
    assert session.facts["python"].startswith(f"{version}.")
    session.sync(working_tree(repo))
    assert session.lock("x", lambda text: None)
    assert session.run(["sh", "-c", "cat a.txt; exit 3"], limit=20).status == 3
    assert printed.out == "one\n"
    assert session.run(family(marker), limit=1).reason == "limit"
    assert running(marker) == []
    assert session.fetch("tree", tmp_path / "back" / version) == 6
    assert session.prune()["ok"]


@pytest.mark.slow
def test_files_come_back_after_a_failure_too(session: Session, tmp_path: Path) -> None:
    script = "mkdir -p out/deep; printf '\\0\\1' > out/deep/b; ln -s /etc/passwd out/link; mkfifo out/p; exit 3"
    (Path(session.directory) / "tree" / "out").mkdir()
    (Path(session.directory) / "tree" / "out" / "new\nline").touch()
    assert session.run(["sh", "-c", script], limit=20).status == 3
    into = tmp_path / "back"
    assert session.fetch("tree/out", into) == 2
    assert sorted(str(p.relative_to(into)) for p in into.rglob("*") if p.is_file()) == ["deep/b", "new\nline"]
    assert (into / "deep" / "b").read_bytes() == b"\0\1"
    assert session.fetch("tree/nothing", tmp_path / "none") == 0


@pytest.mark.slow
def test_a_fetch_that_breaks_leaves_nothing(session: Session, server: Server, tmp_path: Path) -> None:
    session.run(["sh", "-c", "mkdir out; truncate -s 1G out/x"], limit=20)
    into = tmp_path / "back"

    def kill() -> None:
        until(lambda: any(tmp_path.glob(".back*/x")))
        server.sshd.kill_sessions()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(LinkLost):
        session.fetch("tree/out", into)
    assert not into.exists()
    assert not list(tmp_path.glob(".back*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("honest", "hostile", "kind"),
    [
        ("sha256=hashing.hexdigest()", "sha256=hashing.hexdigest()[::-1]", "damaged"),
        ("agent.wire.send(DATA, chunk)", "agent.wire.send(DATA, chunk[1:])", "damaged"),
        ("path=decode(os.path.relpath(path, top))", "path=os.path.join(os.pardir, os.pardir, top.hex()[:9])", "path"),
        ("path=decode(os.path.relpath(path, top))", "path=os.sep + top.hex()[:9]", "path"),
    ],
)
def test_a_far_side_that_lies_is_not_believed(
    connect: Open, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: str, hostile: str, kind: str
) -> None:
    program = zlib.decompress(link.program()).decode()
    assert honest in program
    monkeypatch.setattr(link, "program", lambda: zlib.compress(program.replace(honest, hostile).encode()))
    session = connect()
    session.sync(working_tree(repo))
    with pytest.raises(FarError) as caught:
        session.fetch("tree/src", tmp_path / "a" / "b" / "back")
    assert caught.value.kind == kind
    assert list(tmp_path.glob("a/**/*back*")) == []
