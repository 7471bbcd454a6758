"""The far side's store in a folder of this machine: what is whole, what is kept, and whom its lock keeps out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.remote.farside import store as far_store
from harness.remote.farside.store import Lock, Store
from harness.remote.farside.tree import StoreError, Tree


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def once(data: bytes) -> Callable[[int], Iterator[bytes]]:
    """What ``put`` gets: the content in two parts."""
    return lambda size: iter((data[:2], data[2:]))


def piece(files: dict[str, bytes], links: dict[str, str] | None = None, mode: int = 0o640) -> bytes:
    rows = [[name, mode, digest(data), len(data)] for name, data in files.items()]
    return json.dumps({"files": rows, "links": [*map(list, (links or {}).items())]}).encode()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(str(tmp_path / "far"))
    found.open()
    return found


def keep(store: Store, *contents: bytes) -> None:
    for data in contents:
        assert store.put(digest(data), len(data), once(data))


def tree(*pieces: bytes) -> Tree:
    found = Tree()
    for each in pieces:
        found.add(each)
    return found


def incoming(store: Store) -> list[bytes]:
    return os.listdir(store.path("incoming"))


def test_the_folder_is_its_users_alone_and_may_be_there(tmp_path: Path, store: Store) -> None:
    assert stat.S_IMODE((tmp_path / "far").stat().st_mode) == 0o700
    assert {path.name for path in (tmp_path / "far").iterdir()} == {"store", "incoming", "runs", "cache"}
    store.open()
    assert Store("~/x").root == os.path.expanduser(b"~/x")
    assert Store(str(tmp_path)).mine != store.mine, "two processes that share a pid on two hosts"


def test_what_is_not_the_content_that_was_promised_is_not_kept(store: Store) -> None:
    keep(store, b"one")
    assert store.has(digest(b"one"), 3)
    assert not store.has(digest(b"one"), 4)
    assert not store.put(digest(b"two"), 3, once(b"2wo"))
    assert not store.has(digest(b"two"), 3)
    assert incoming(store) == []

    def broken(size: int) -> Iterator[bytes]:
        yield b"t"
        raise OSError("the link")

    with pytest.raises(OSError, match="the link"):
        store.put(digest(b"two"), 3, broken)
    assert incoming(store) == []
    assert os.listdir(store.path("store")) == [digest(b"one")[:2].encode()]


def test_what_is_read_is_whole_or_nothing(store: Store) -> None:
    keep(store, b"one")
    assert store.read(digest(b"one")) == b"one"
    assert store.read(digest(b"two")) is None
    Path(os.fsdecode(store.blob(digest(b"one")))).write_bytes(b"eno")
    assert store.read(digest(b"one")) is None


def test_what_is_missing_is_counted_by_contents(store: Store) -> None:
    keep(store, b"two")
    assert store.missing(tree(piece({"a": b"one", "b": b"two", "c": b"one", "d": b"four"}))) == [0, 2]


def test_a_tree_is_laid_out_with_modes_and_links(store: Store) -> None:
    keep(store, b"one", b"two", b"")
    os.makedirs(store.path("runs", "r"))
    files = {"a": b"one", "deep/er/b": b"two", "deep/er/c": b"one", "empty": b""}
    both = tree(piece(files), piece({"run": b"one"}, {"other/link": "../a", "deep/l": "er"}, 0o755))
    assert store.lay_out(both, "r", "tree") == []
    top = Path(os.fsdecode(store.path("runs", "r", "tree")))
    assert {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()} == {
        **files, "run": b"one", "other/link": b"one",
    }  # fmt: skip
    assert [stat.S_IMODE((top / name).stat().st_mode) for name in ("a", "deep/er/b", "run")] == [0o640, 0o640, 0o755]
    assert os.readlink(top / "other" / "link") == "../a"
    assert incoming(store) == []
    (top / "a").write_bytes(b"spoiled")
    assert store.read(digest(b"one")) == b"one", "a run has copies"


def test_nothing_is_laid_out_of_what_is_damaged_or_gone(store: Store) -> None:
    """All that is damaged is named and taken out, so that it is sent again."""
    keep(store, b"one", b"two", b"three")
    os.makedirs(store.path("runs", "r"))
    Path(os.fsdecode(store.blob(digest(b"one")))).write_bytes(b"eno")
    os.unlink(store.blob(digest(b"three")))
    wanted = tree(piece({"a": b"one", "b": b"two", "c": b"three"}))
    assert store.lay_out(wanted, "r", "tree") == [digest(b"one"), digest(b"three")]
    assert os.listdir(store.path("runs", "r")) == []
    assert incoming(store) == []
    assert store.missing(wanted) == [0, 2]
    keep(store, b"one", b"three")
    assert store.lay_out(wanted, "r", "tree") == []


def test_a_tree_larger_than_a_step_is_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_store, "_STEP", 4)
    keep(store, b"0123456789")
    os.makedirs(store.path("runs", "r"))
    assert store.lay_out(tree(piece({"a": b"0123456789"})), "r", "tree") == []
    assert Path(os.fsdecode(store.path("runs", "r", "tree", "a"))).read_bytes() == b"0123456789"


def runs(store: Store, *names: str) -> list[Lock]:
    """Runs that began one after the other, each with a content of its own and one of all; held until closed."""
    held = []
    for at, name in enumerate(names):
        manifest = piece({"own": name.encode(), "all": b"all"})
        keep(store, manifest, name.encode(), b"all")
        record = {"client": "c", "parts": {"tree": [digest(manifest)]}}
        held.append(store.begin(name, record))
        os.utime(store.path("runs", name, "alive"), (at + 1, at + 1))
    return held


def stored(store: Store) -> set[str]:
    """The contents that are there, by those of ``runs``."""
    known = {digest(name.encode()): name for name in ("a", "b", "c", "d", "all", "none's")}
    top = Path(os.fsdecode(store.path("store")))
    return {known[path.parent.name + path.name] for path in top.glob("*/*") if path.parent.name + path.name in known}


def test_the_last_runs_stay_with_what_they_need(store: Store) -> None:
    """By when they began here, not by their names, which carry their senders' clocks."""
    for lock in runs(store, "c", "d", "a", "b"):
        lock.close()
    keep(store, b"none's")
    for name in ("left.json", "left"):
        Path(os.fsdecode(store.path("incoming", name))).write_bytes(b"")
    os.makedirs(store.path("incoming", "tree", "deep"))
    removed = store.prune(2)
    assert sorted(os.listdir(store.path("runs"))) == [b"a", b"b"]
    assert stored(store) == {"a", "b", "all"}
    assert incoming(store) == []
    sizes = [len(piece({"own": name, "all": b"all"})) + 1 for name in (b"c", b"d")]
    assert removed == {"runs": 2, "contents": 5, "bytes": sum(sizes) + len(b"none's")}
    assert store.prune(2) == {"runs": 0, "contents": 0, "bytes": 0}
    manifest = store.read(digest(piece({"own": b"a", "all": b"all"})))
    assert manifest is not None, "a later sync of the same tree sends nothing"
    assert store.missing(tree(manifest)) == []


def test_a_living_run_stays_whatever_its_age(store: Store) -> None:
    first, second, third = runs(store, "a", "b", "c")
    second.close()
    third.close()
    assert store.prune(0)["runs"] == 2
    assert os.listdir(store.path("runs")) == [b"a"]
    assert stored(store) == {"a", "all"}
    first.close()
    assert store.prune(0)["runs"] == 1
    assert stored(store) == set()


def test_a_run_that_died_while_it_was_made_goes_first(store: Store) -> None:
    runs(store, "a")[0].close()
    os.makedirs(store.path("runs", "z"))
    Path(os.fsdecode(store.path("runs", "a", "record.json"))).write_text("{")
    assert store.prune(1)["runs"] == 1
    assert os.listdir(store.path("runs")) == [b"a"]


def test_nothing_is_pruned_while_a_tree_arrives(store: Store) -> None:
    runs(store, "a")[0].close()
    keep(store, b"none's")
    guard, other = store.sharing(), store.sharing()
    guard.close()
    assert store.prune(0) == {"runs": 0, "contents": 0, "bytes": 0}
    assert stored(store) == {"a", "all", "none's"}
    other.close()
    assert store.prune(0)["runs"] == 1


def test_who_sends_a_tree_waits_for_who_prunes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute and no longer, and not at all for one that has ended meanwhile."""
    now = [100.0]
    slept: list[float] = []
    pruning = Lock(store.path("store.lock"))
    assert pruning.take(fcntl.LOCK_EX)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 30
        if len(slept) == 2 and ends:
            pruning.close()

    monkeypatch.setattr(far_store, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    ends = False
    with pytest.raises(StoreError, match=r"store\.lock: another run has pruned for 60 s") as caught:
        store.sharing()
    assert (caught.value.kind, len(slept)) == ("io", 3)
    slept.clear()
    ends = True
    store.sharing().close()
    assert len(slept) == 2


def test_a_lock_is_made_for_all_who_may_take_it_and_never_through_a_link(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "lock")
    before = os.umask(0o077)
    try:
        Lock(path, create=0o666).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
    Lock(path, create=0o600).close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666, "whoever made it says who may"
    (tmp_path / "link").symlink_to("lock")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(OSError, match="symbolic links"):
            Lock(os.fsencode(tmp_path / name))
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_somebody_else_makes_at_the_same_time_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = os.fsencode(tmp_path / "lock"), os.open

    def late(name: bytes, flags: int, *mode: int) -> int:
        if flags & os.O_EXCL:
            os.close(real(name, os.O_RDWR | os.O_CREAT, 0o644))
        return real(name, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", late)
        lock = Lock(path, create=0o666)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
    assert lock.take(fcntl.LOCK_EX)
    assert not Lock(path).take(fcntl.LOCK_SH)
    lock.close()
