"""A session against a far side whose answers are written by hand; and the bytes of the frames between the two."""

from __future__ import annotations

import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.remote import session as sessions
from harness.remote.farside.wire import DATA, ERR, LARGEST, MESSAGE, OUT, Wire, WireError, parse
from harness.remote.hosts import Host, Limits
from harness.remote.link import FarError, Link, LinkLost
from harness.remote.session import Outcome, Session, Stopped, holder_text
from harness.remote.ssh import Options
from harness.remote.sync import File, Snapshot, SyncError

HOST = Host("box", "box", environment={"A": "host", "B": "host"}, prepare=("one", "two"), keep_runs=3,
            limits=Limits(prepare=11, queue=33))  # fmt: skip
OK = {"ok": True}


class Script(Link):
    """A link without a connection: it says what it is given, errors raised, and notes what it is told."""

    answered = False

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.lost, self.closed = "", False
        self.inbox: list[Any] = []
        self.said: list[dict[str, Any]] = []
        self.given: list[bytes] = []

    def say(self, op: str, **fields: Any) -> None:
        self.said.append({"op": op, **fields})

    def give(self, data: bytes) -> None:
        self.given.append(data)

    def next(self, timeout: float | None = None) -> tuple[bytes, Any]:
        event = self.inbox.pop(0)
        if isinstance(event, BaseException):
            raise event
        if callable(event):
            event()
            raise TimeoutError
        return (DATA, event) if isinstance(event, bytes) else (MESSAGE, event)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.setattr(sessions, "Link", lambda *_: made)
    return made


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def printed() -> list[tuple[bytes, bytes]]:
    return []


@pytest.fixture
def session(link: Script, stop: threading.Event, printed: list[tuple[bytes, bytes]]) -> Session:
    return Session(HOST, Options(), "run", lambda *piece: printed.append(piece), stop)


@pytest.mark.parametrize(
    ("outcome", "trouble"),
    [
        (Outcome(0, 0, ""), ""),
        (Outcome(3, 0, ""), ""),
        (Outcome(127, 0, "", text="no python"), "no python"),
        (Outcome(0, 15, ""), "killed by SIGTERM"),
        (Outcome(0, 9, ""), "killed by SIGKILL (out of memory?)"),
        (Outcome(0, 99, ""), "killed by signal 99"),
        (Outcome(0, 9, "limit", 7.4), "the time limit ended it after 7 s"),
        (Outcome(0, 2, "cancelled", 7.4), "interrupted"),
    ],
)
def test_a_status_is_one_of_a_command_that_ended_by_itself(outcome: Outcome, trouble: str) -> None:
    assert outcome.trouble == trouble


def tree_of(folder: Path) -> Snapshot:
    """Three files, two of one content, and a link."""
    files = []
    for name, data in ((b"a", b"one"), (b"b", b"three"), (b"c", b"one")):
        (folder / name.decode()).write_bytes(data)
        files.append(File(name, 0o644, hashlib.sha256(data).hexdigest(), len(data)))
    return Snapshot(folder, tuple(files), ((b"l", b"a"),))


def test_what_the_far_side_lacks_is_sent_in_its_order(session: Session, link: Script, tmp_path: Path) -> None:
    tree = tree_of(tmp_path)
    link.inbox = [{"missing": [0]}, {"missing": [1, 0]}, {**OK, "directory": "/there"}]
    seen: list[tuple[int, int]] = []
    sent = session.sync(tree, "wheels", lambda done, of: seen.append((done, of)))
    assert (sent.files, sent.contents, sent.bytes) == (4, 2, 8)
    assert seen == [(5, 8), (8, 8)]
    (asked,) = link.said
    assert {name: asked[name] for name in ("op", "run", "part")} == {"op": "sync", "run": "run-box", "part": "wheels"}
    assert asked["pieces"] == list(tree.pieces())
    assert zlib.decompress(link.given[0]) == next(iter(tree.pieces().values()))
    assert link.given[1:] == [b"three", b"one"]
    assert (session.directory, link.closed) == ("/there", False)
    link.inbox = [{"missing": []}, {**OK, "contents": [1]}]
    assert session.plan(tree) == [1]
    assert link.said[-1] == {"op": "plan", "pieces": list(tree.pieces())}


def test_half_a_content_ends_the_link_and_a_complaint_does_not(
    session: Session, link: Script, stop: threading.Event, tmp_path: Path
) -> None:
    tree = tree_of(tmp_path)
    link.inbox = [{"missing": []}, {"missing": [0, 1]}, FarError("disk", "full")]
    link.answered = True
    with pytest.raises(FarError, match="full"):
        session.sync(tree)
    assert (link.given, link.closed) == ([], False)
    link.answered = False
    (tmp_path / "b").write_bytes(b"other")
    link.inbox = [{"missing": []}, {"missing": [0, 1]}]
    with pytest.raises(SyncError, match="b: changed while it was sent"):
        session.sync(tree)
    assert link.closed
    link.closed = False
    stop.set()
    link.inbox = [{"missing": []}, {"missing": [0]}]
    with pytest.raises(Stopped):
        session.sync(tree)
    assert link.closed


HOLDER = {"client": "c", "run": "r", "user": "u", "pid": 5}


def test_a_box_is_waited_for_and_who_has_it_told(session: Session, link: Script, stop: threading.Event) -> None:
    told: list[str] = []
    link.inbox = [{"holder": HOLDER}, {"holder": {}}, {**OK, "held": True}]
    assert session.lock("x" * 600, told.append)
    assert told == ["c holds the box (run r, as user u, process 5 there)", "somebody holds the box"]
    (asked,) = link.said
    assert (asked["path"], asked["patience"], asked["me"]["run"]) == (HOST.lock, 33, "run-box")
    assert asked["me"]["command"] == "x" * 500
    told.clear()
    link.inbox = [{**OK, "held": False, "holder": {**HOLDER, "age": 120}}]
    assert not session.lock("x", told.append)
    assert told == ["gave up after 33 s: c holds the box for 2 min (run r, as user u, process 5 there)"]
    link.inbox = [stop.set, {**OK, "held": False, "holder": {}}]
    with pytest.raises(Stopped):
        session.lock("x", told.append)
    assert link.said[-1] == {"op": "cancel"}


def test_a_holder_is_named_as_far_as_it_is_known() -> None:
    assert holder_text({"age": 90}) == "? holds the box for 2 min (run ?, as user ?, process ? there)"


def test_a_command_and_how_it_ended(session: Session, link: Script, printed: list[tuple[bytes, bytes]]) -> None:
    link.inbox = [{"started": 1}, {**OK, "status": 3, "signal": 0, "reason": "", "seconds": 1.5, "left": [7, 8]}]
    outcome = session.run(("a", "b"), limit=5, env={"B": "run", "C": "run"}, cwd="elsewhere")
    assert outcome == Outcome(3, 0, "", 1.5, 2)
    assert link.said == [
        {
            "op": "run", "run": "run-box", "argv": ["a", "b"], "cwd": "elsewhere", "exported": None, "limit": 5,
            "env": {"A": "host", "B": "run", "C": "run"}, "grace": 5.0,
        }
    ]  # fmt: skip
    assert printed == [(OUT, b""), (ERR, b"")]
    link.inbox = [{**OK, "status": 127, "signal": 0, "reason": "", "text": "not there"}]
    assert session.run(["a"], limit=5) == Outcome(127, 0, "", text="not there")


def test_a_command_is_cancelled_once_and_given_time(
    session: Session, link: Script, stop: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])

    def later(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    link.inbox = [later(9999), stop.set, later(19), {**OK, "status": 0, "signal": 2, "reason": "cancelled"}]
    assert session.run(["a"], limit=5).trouble == "interrupted"
    assert [said["op"] for said in link.said] == ["run", "cancel"]
    with pytest.raises(Stopped):
        session.run(["a"], limit=5)
    other = Session(HOST, Options(), "run", lambda *_: None, stop)
    link.inbox = [later(0), later(21), later(0)]
    with pytest.raises(LinkLost, match="it did not end when asked to"):
        list(other._messages_until_stopped())


def test_what_preparation_exports_holds_once_it_has_succeeded(session: Session, link: Script) -> None:
    session.directory = "/there"
    for answer in ({"status": 4}, {"status": 0, "reason": "limit"}, {"status": 0}):
        link.inbox = [{**OK, "signal": 0, "reason": "", **answer}, {**OK, "status": 0, "signal": 0, "reason": ""}]
        session.prepare({"X": "1"})
        asked = link.said[-1]
        assert asked["argv"] == ["sh", "-c", 'set -e\none\ntwo\nenv -0 > "$KDTREE_EXPORTED"']
        assert (asked["exported"], asked["limit"]) == (None, 11)
        assert asked["env"] == {"A": "host", "B": "host", "X": "1", "KDTREE_EXPORTED": "/there/environment"}
        session.run(["a"], limit=5)
        assert link.said[-1]["exported"] == ("environment" if answer == {"status": 0} else None)


def fetched(path: str, *chunks: bytes, **lies: Any) -> list[Any]:
    data = b"".join(chunks)
    return [
        {"path": path, "size": len(data), **{k: v for k, v in lies.items() if k == "size"}},
        *chunks,
        {"sha256": hashlib.sha256(data).hexdigest(), **{k: v for k, v in lies.items() if k != "size"}},
    ]


def test_files_come_back_whole_in_place_of_what_was_there(session: Session, link: Script, tmp_path: Path) -> None:
    into = tmp_path / "a" / "back"
    into.mkdir(parents=True)
    (into / "old").touch()
    left = into.with_name(f".back.{os.getpid()}.partial")  # of a process that was killed and had this one's number
    left.mkdir()
    (left / "half").touch()
    link.inbox = [*fetched("x", b"one", b"two"), *fetched("deep/down/y"), {**OK, "files": 2}]
    assert session.fetch("reports/1", into) == 2
    assert link.said == [{"op": "fetch", "run": "run-box", "path": "reports/1", "budget": 1 << 30}]
    assert {p.relative_to(into).as_posix(): p.read_bytes() for p in into.rglob("*") if p.is_file()} == {
        "x": b"onetwo", "deep/down/y": b"",
    }  # fmt: skip
    link.inbox = [{**OK, "files": 0}]
    assert session.fetch("none", tmp_path / "none") == 0
    assert list((tmp_path / "none").iterdir()) == []


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (fetched("x", b"one", sha256="0" * 64), "damaged"),
        (fetched("x", b"one", size=4), "damaged"),
        (fetched("x", b"one", size=2), "damaged"),
        (fetched("x", b"one", short=True), "damaged"),
        (fetched("../x"), "path"),
        (fetched("a/../../x"), "path"),
        (fetched("/etc/x"), "path"),
        (fetched(""), "path"),
        (fetched("a\0b"), "path"),
    ],
)
def test_what_a_far_side_sends_is_checked(
    session: Session, link: Script, tmp_path: Path, events: Sequence[Any], kind: str
) -> None:
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "old").touch()
    link.inbox = [*events, {**OK, "files": 1}]
    with pytest.raises(FarError) as caught:
        session.fetch("reports", tmp_path / "back")
    assert caught.value.kind == kind
    assert [p.name for p in tmp_path.iterdir()] == ["back"]
    assert (tmp_path / "back" / "old").exists()


def test_goodbye_is_said_where_somebody_hears_it(
    session: Session, link: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.inbox = [OK, {**OK, "runs": 1}]
    session.unlock()
    assert session.prune() == {**OK, "runs": 1}
    session.close()
    assert link.said == [{"op": "unlock"}, {"op": "prune", "keep": 3}, {"op": "bye"}]
    assert link.closed
    link.lost = "gone"
    session.close()
    assert len(link.said) == 3

    def gone(op: str) -> None:
        raise LinkLost("now")

    link.lost, link.closed = "", False
    monkeypatch.setattr(link, "say", gone)
    session.close()
    assert link.closed


def frames(data: bytes, step: int = 1 << 20) -> Wire:
    """A wire that reads ``data``, ``step`` bytes at a time at most."""
    left = bytearray(data)

    def read(size: int) -> bytes:
        taken = bytes(left[: min(size, step)])
        del left[: len(taken)]
        return taken

    return Wire(read, lambda data: None)


def test_frames_are_a_byte_four_of_length_and_the_payload() -> None:
    sent: list[bytes] = []
    wire = Wire(lambda size: b"", sent.append)
    wire.send(DATA, b"abc")
    wire.send(b"H")
    wire.say(op="x", n=[1, 2])
    assert sent == [b"D\0\0\0\3abc", b"H\0\0\0\0", b'J\0\0\0\x14{"op":"x","n":[1,2]}']
    for step in (1, 2, 7, 1 << 20):
        back = frames(b"".join(sent), step)
        assert [back.receive() for _ in sent] == [(DATA, b"abc"), (b"H", b""), (MESSAGE, b'{"op":"x","n":[1,2]}')]
        with pytest.raises(EOFError):
            back.receive()


def test_what_is_no_frame_is_refused() -> None:
    for data in (b"X\0\0\0\0", b"D" + struct.pack(">I", LARGEST + 1)):
        with pytest.raises(WireError, match="frame of kind"):
            frames(data).receive()
    for data in (b"D\0\0", b"D" + struct.pack(">I", LARGEST), b"D\0\0\0\2a"):
        with pytest.raises(EOFError):
            frames(data).receive()
    for payload, said in ((b"{", "not JSON"), (b"[1]", "not an object"), (b"\xff", "not JSON")):
        with pytest.raises(WireError, match=said):
            parse(payload)
    assert parse(b'{"a": 1}') == {"a": 1}
