"""Bundles are made once, checked against the lock, and survive whatever happens to the process that makes them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness import bundle_lock, bundles
from harness.bundle_lock import BundleError, LockDiffers
from refs import generate, kdtr, recipe
from refs.errors import ConfigError
from tests.waiting import PATIENCE, until

ROOT = Path(bundles.__file__).resolve().parents[1]
QUICK = ["block1", "budget0"]  # a tenth of a second each


def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness.bundles", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def made(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if " made in " in line]


def with_made(folder: Path) -> Path:
    """``folder`` with QUICK as this run's cache holds them: made, with their stamps."""
    for path in bundles.ensure(QUICK).values():
        for file in (path, path.with_name(f".{path.stem}.made")):
            shutil.copy2(file, folder)
    return folder


def test_the_lock_pins_every_config_and_nothing_else() -> None:
    assert sorted(bundle_lock.read_lock()) == recipe.names(scale=True)


def test_missing_bundles_are_made_and_present_ones_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    paths = bundles.ensure(QUICK, tmp_path, say=lines.append)
    assert paths == {name: tmp_path / f"{name}.kdtr" for name in QUICK}
    assert sorted(made(lines)) == QUICK
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths.values()}
    lines.clear()
    bundles.ensure([*QUICK, "block1"], tmp_path, say=lines.append)
    assert not lines
    assert before == {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in paths.values()}
    pins = bundle_lock.read_lock()
    assert all(bundle_lock.sha256(p) == pins[name]["sha256"] for name, p in paths.items())


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "gone", "empty", "stamp gone", "stamp of other sources", "stamp garbage"]
)
def test_whatever_is_not_known_to_be_right_is_made_again(tmp_path: Path, damage: str) -> None:
    path, stamp = (with_made(tmp_path) / name for name in ("block1.kdtr", ".block1.made"))
    bundles.ensure(["block1"], tmp_path, say=pytest.fail)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "gone":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "stamp gone":
        stamp.unlink()
    elif damage == "stamp garbage":
        stamp.write_bytes(b"\xff\xfe")
    else:
        stamp.write_text("0" * 64 + " " + stamp.read_text().split()[1])
    lines: list[str] = []
    bundles.ensure(["block1"], tmp_path, say=lines.append)
    assert made(lines) == ["block1"]
    kdtr.read(path, verify=True)
    assert bundle_lock.sha256(path) == bundle_lock.read_lock()["block1"]["sha256"]
    bundles.ensure(["block1"], tmp_path, say=pytest.fail)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDTREE_BUNDLES", str(tmp_path / "file"))
    with pytest.raises(BundleError, match="Not a directory; KDTREE_BUNDLES names another folder"):
        bundles.ensure(QUICK)
    with pytest.raises(BundleError, match="Not a directory; --out names another folder"):
        bundles.ensure(QUICK, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("", "No space left on device; --out names another folder"),
        ("out/tiny.kdtr", "No space left on device; --out names another folder"),
        ("refs/exact.py", r"refs/exact\.py: No space left on device$"),  # a source, which no other folder would help
    ],
)
def test_what_the_system_refuses_is_told_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, remedy: str
) -> None:
    def refused(*_: Any) -> Any:
        raise OSError(28, "No space left on device", *([str(tmp_path / place)] if place else []))

    monkeypatch.setattr(bundles, "_ensured", refused)
    with pytest.raises(BundleError, match=remedy):
        bundles.ensure(QUICK, tmp_path / "out")

    def unread(*_: Any) -> Any:
        raise BrokenPipeError

    monkeypatch.setattr(bundles, "_ensured", unread)
    with pytest.raises(BrokenPipeError):
        bundles.ensure(QUICK, tmp_path / "out")


def test_other_sources_are_other_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change under refs/ is never answered with a bundle that was made before it."""
    monkeypatch.setenv("KDTREE_BUNDLES", str(tmp_path))
    first = bundles.ensure(["block1"])["block1"]
    assert first.parent == tmp_path / bundles.source_key()[:16]
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "refs", copy / "refs", ignore=shutil.ignore_patterns("__pycache__", "bundles.lock"))
    monkeypatch.setattr(bundles, "ROOT", copy)
    key = bundles.source_key()
    assert first.parent.name == key[:16]  # the place of the checkout does not matter
    for changed in ("refs/exact.py", "refs/configs/tiny.yaml", "refs/text/model.safetensors"):
        with (copy / changed).open("a") as out:
            out.write("\n")
        assert bundles.source_key() != key
        key = bundles.source_key()
    (copy / "refs" / "bundles.lock").write_text("{}")
    (copy / "refs" / "__pycache__").mkdir()
    (copy / "refs" / "__pycache__" / "exact.pyc").touch()
    assert bundles.source_key() == key
    edited = copy / "refs" / "exact.py"
    before = edited.stat()
    edited.write_bytes(edited.read_bytes()[:-1] + b" ")
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert edited.stat().st_size == before.st_size
    assert bundles.source_key() != key, "another content of the same size, and the time set back"


def test_a_bundle_that_is_not_the_pinned_one_names_the_first_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generate.layout

    def layout(result: Any) -> Any:
        fields, tensors = real(result)
        for name in ("layers.1.router.w", "golden.int4.tokens"):
            tensors[name] = tensors[name] + tensors[name].dtype.type(1)
        return fields, tensors

    monkeypatch.setattr(generate, "layout", layout)
    with pytest.raises(LockDiffers, match=r"bundle block1: tensor golden\.int4\.tokens is the first .*--update-lock"):
        bundles.ensure(["block1"], tmp_path)
    assert visible(tmp_path) == []
    monkeypatch.undo()
    assert bundles.ensure(["block1"], tmp_path)["block1"].is_file()


def test_differences_are_named_in_the_files_order() -> None:
    pin: dict[str, Any] = {"sha256": "aa", "fields": {"a": 1, "b": 2.0}, "tensors": {"t": "01", "u": "02"}}
    difference = bundle_lock.first_difference
    assert "field b is the first that differs: made 3, pinned 2.0" in difference(
        "x", {**pin, "fields": {"a": 1, "b": 3}}, pin
    )
    assert "tensor t is the first that differs: made absent, pinned 01" in difference(
        "x", {**pin, "tensors": {"u": "03"}}, pin
    )
    assert "tensor a is the first that differs: made 09, pinned absent" in difference(
        "x", {**pin, "tensors": {**pin["tensors"], "a": "09"}}, pin
    )
    assert "other bytes: made bb, pinned aa" in difference("x", {**pin, "sha256": "bb"}, pin)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"bundles": {"tiny": 3}}', '{"bundles": {"tiny": {"sha256": "a"}}}', "\xff"]
)
def test_a_broken_lock_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bundles.lock"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"bundles\.lock: not a lock of bundles .* --update-lock"):
        bundle_lock.read_lock(path)
    assert bundle_lock.read_lock(tmp_path / "absent") == {}


def test_a_config_that_the_lock_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {k: v for k, v in bundle_lock.read_lock().items() if k != "block1"}
    monkeypatch.setattr(bundles, "read_lock", lambda: pins)
    with pytest.raises(LockDiffers, match=r"block1: bundles\.lock does not pin it"):
        bundles.ensure(["block1"], tmp_path)


def test_updating_the_lock_says_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_BUNDLES", str(tmp_path))
    lock = tmp_path / "bundles.lock"
    pins = bundle_lock.read_lock()
    kept = {name: pins[name] for name in ("budget0", "k26_slice")} | {"of a config that is gone": pins["tiny"]}
    lock.write_text(json.dumps({"bundles": {**kept, "block1": {**pins["block1"], "sha256": "00"}}}))
    monkeypatch.setattr(bundles, "LOCK", lock)
    monkeypatch.setattr(bundles, "read_lock", lambda: bundle_lock.read_lock(lock))
    assert bundles.update_lock(["block1"]) == ["block1", "of a config that is gone"]
    assert bundle_lock.read_lock(lock) == {name: pins[name] for name in (*QUICK, "k26_slice")}
    text = lock.read_text()
    lock.unlink()
    assert bundles.update_lock(["block1"]) == ["block1"], "the first pins of all"
    lock.write_text(text)
    lines: list[str] = []
    assert bundles.ensure(["block1"], say=lines.append)["block1"].is_file()
    assert not lines


@pytest.mark.slow
def test_many_processes_make_each_bundle_once(tmp_path: Path) -> None:
    processes = [run("--out", str(tmp_path), *QUICK) for _ in range(3)]
    output = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, output
    assert sorted(made([line for _, err in output for line in err.splitlines()])) == QUICK
    assert visible(tmp_path) == ["block1.kdtr", "budget0.kdtr"]


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_trips_the_next(tmp_path: Path) -> None:
    """Killed in the middle of a bundle: the next run starts at once, makes it, and removes the litter."""
    process = run("--out", str(tmp_path), "tiny")
    lock = tmp_path / ".tiny.lock"
    until(lambda: process.poll() is not None or (lock.exists() and held(lock)))
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert not (tmp_path / "tiny.kdtr").exists()
    litter = tmp_path / ".tiny.kdtr.abc.part"  # what it would have left a moment later
    litter.write_bytes(b"half")
    lines: list[str] = []
    bundles.ensure(["tiny"], tmp_path, say=lines.append)
    assert made(lines) == ["tiny"]
    assert not any("waiting" in line for line in lines)
    assert not litter.exists()


def held(path: Path) -> bool:
    with path.open("wb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_waits_says_so_and_goes_on_when_the_owner_dies(tmp_path: Path) -> None:
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".block1.lock")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        lines: list[str] = []
        litter = tmp_path / ".block1.kdtr.abc.part"
        litter.touch()

        def say(line: str) -> None:
            lines.append(line)
            if "waiting" in line:
                owner.kill()
            if " made in " in line:
                assert held(tmp_path / ".block1.lock"), "now it is the maker's"

        bundles.ensure(["block1"], tmp_path, say=say)
    assert not litter.exists()
    assert any("block1 is being made by another process; waiting" in line for line in lines)
    assert made(lines) == ["block1"]


def test_a_side_process_that_fails_is_no_lost_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side processes that die make nothing; the caller then makes everything itself."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    lines: list[str] = []
    bundles.ensure(QUICK, tmp_path, say=lines.append)
    assert made(lines) == QUICK


def test_unused_caches_go_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_BUNDLES", str(tmp_path))
    long_ago = time.time() - bundles.UNUSED_SECONDS - 60
    for name in ("0123456789abcdef", "fedcba9876543210", "my-own-files", "0123456789abcdeg"):
        (tmp_path / name).mkdir()
        if name != "fedcba9876543210":
            os.utime(tmp_path / name, (long_ago, long_ago))
    bundles.ensure([])
    assert visible(tmp_path) == sorted(
        [bundles.source_key()[:16], "fedcba9876543210", "my-own-files", "0123456789abcdeg"]
    )


def test_large_bundles_of_other_sources_go_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_BUNDLES", str(tmp_path))
    other = tmp_path / ("ab" * 8)
    other.mkdir()
    for name in ("k26_slice", "tiny"):
        (other / f"{name}.kdtr").write_bytes(b"x")
    for days, kept in ((0.9, {"k26_slice.kdtr", "tiny.kdtr"}), (1.1, {"tiny.kdtr"})):
        then = time.time() - days * 24 * 3600
        os.utime(other, (then, then))
        bundles.ensure(["block1"])
        assert {path.name for path in other.iterdir()} == kept


def test_a_wrong_name_is_an_error_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        bundles.ensure(["block1", "nothing"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_commands_exit_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundles.main(["--out", str(with_made(tmp_path)), "--json", *QUICK]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {name: row["path"] for name, row in rows.items()} == {n: str(tmp_path / f"{n}.kdtr") for n in QUICK}
    assert bundles.main(["--out", str(tmp_path), "block1"]) == 0
    assert capsys.readouterr().out.startswith(rows["block1"]["sha256"][:16])
    assert bundles.main(["--out", str(tmp_path), "nothing"]) == 3
    assert "kdtree bundles: " in capsys.readouterr().err
    (tmp_path / "file").write_bytes(b"")
    assert bundles.main(["--out", str(tmp_path / "file"), "block1"]) == 3
    assert "kdtree bundles: " in capsys.readouterr().err
    pins = bundle_lock.read_lock()
    pins["block1"] = {**pins["block1"], "sha256": "00", "tensors": {**pins["block1"]["tensors"], "embed.w": "00"}}
    monkeypatch.setattr(bundles, "read_lock", lambda: pins)
    assert bundles.main(["--out", str(tmp_path), "block1"]) == 1
    assert "bundle block1: tensor embed.w is the first that differs" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        bundles.main(["--unknown"])
    assert caught.value.code == 3


def test_all_but_those_of_real_sizes_are_meant_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "_ensured", lambda wanted, *_: dict.fromkeys(wanted, tmp_path))
    assert list(bundles.ensure(out=tmp_path)) == recipe.names()
    assert not {"k26_slice", "k26_layer", "k26_bf16"} & set(bundles.ensure(out=tmp_path))
    assert list(bundles.ensure([], tmp_path)) == []


def test_a_side_process_makes_what_nobody_else_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it cannot make it leaves to its parent, which meets the error itself."""
    with (tmp_path / ".block1.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert bundles.main(["--worker", "--out", str(tmp_path), *QUICK]) == 0
    assert visible(tmp_path) == ["budget0.kdtr"]
    assert made(capsys.readouterr().out.splitlines()) == ["budget0"]
    assert bundles.main(["--worker", "--out", str(tmp_path), "budget0"]) == 0
    assert capsys.readouterr().out == "", "it is there"
    pins = {**bundle_lock.read_lock()}
    pins.pop("block1")
    monkeypatch.setattr(bundles, "read_lock", lambda: pins)
    assert bundles.main(["--worker", "--out", str(tmp_path), "block1"]) == 0
    assert visible(tmp_path) == ["budget0.kdtr"]


@pytest.mark.parametrize(("changed", "said"), [([], "0 changed\n"), (["a", "b"], "2 changed: a, b\n")])
def test_the_command_that_pins_says_what_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changed: list[str], said: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(bundles, "update_lock", lambda configs, say: asked.append(configs) or changed)
    monkeypatch.setattr(bundles, "ensure", lambda configs, out, say: asked.append(configs) or {})
    assert bundles.main(["--update-lock"]) == 0
    assert bundles.main(["--update-lock", "block1"]) == 0
    assert asked == [None, None, ["block1"], ["block1"]]
    assert capsys.readouterr().err.endswith(f"bundles.lock: {said}")
