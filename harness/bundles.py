"""Bundles made at run time from refs/, once whatever the number of processes, and checked against refs/bundles.lock.

Guarantees: a path that `ensure` returns holds the bytes that the lock pins and that the sources as they stand make;
each bundle is made by one process while the others wait, under a lock that the kernel drops when its owner dies; a
file appears by rename, so a killed run leaves nothing that the next one trips over.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from harness import plain_json
from harness.bundle_lock import (
    LOCK,
    UPDATE,
    BundleError,
    LockDiffers,
    Pins,
    first_difference,
    pin_of,
    read_lock,
    sha256,
)
from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.cli import Parser
from harness.files import said, used, write_atomic
from harness.matrix import is_large
from harness.progress import EVERY, tell, told
from refs import generate, recipe
from refs.errors import RefError

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
UNUSED_SECONDS, LARGE_UNUSED_SECONDS = 7 * 24 * 3600, 24 * 3600
"""A cache folder of other sources that no run has used for so long is removed; its large bundles go earlier."""

Say = Callable[[str], None]


def source_key() -> str:
    """A hash over everything under refs/ but the lock: whatever a bundle's bytes depend on is there."""
    folder = ROOT / "refs"
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(where, name)
            if name != LOCK.name and path.is_file():
                about = path.stat()
                found.append((path.relative_to(folder).as_posix(), about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return _key_of(folder, tuple(sorted(found)))


@functools.lru_cache(maxsize=8)
def _key_of(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> str:
    """Of files by name, size and times: what did not change since this process read it is not read again."""
    digest = hashlib.sha256()
    for name, *_ in files:
        data = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where bundles of these sources are kept: below ``KDTREE_BUNDLES``, or ``bundles/`` of the checkout."""
    return Path(os.environ.get("KDTREE_BUNDLES") or ROOT / "bundles") / source_key()[:16]


def ensure(
    configs: Sequence[str] | None = None, out: Path | None = None, *, say: Say = lambda line: None
) -> dict[str, Path]:
    """The bundles of ``configs`` (default: all) as files of ``out`` (default: the cache), made where they are missing.

    Raises `BundleError`, `LockDiffers` or a `RefError`; what could be made is then there all the same.
    """
    wanted = list(dict.fromkeys(configs)) if configs is not None else recipe.names()
    for name in wanted:
        recipe.load(name)  # a wrong name or file is an error before anything is made
    try:
        return _ensured(wanted, cache_folder() if out is None else out, out is None, say)
    except BrokenPipeError:  # from `say`
        raise
    except OSError as error:
        folder = cache_folder() if out is None else out
        path = Path(error.filename or folder)
        if not path.is_relative_to(folder) and not folder.is_relative_to(path):
            raise BundleError(said(error)) from error  # a source, say
        other = "KDTREE_BUNDLES" if out is None else "--out"
        raise BundleError(f"{folder}: {error.strerror}; {other} names another folder") from error


def _ensured(wanted: Sequence[str], folder: Path, is_cache: bool, say: Say) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    if is_cache:
        used(folder)
        with contextlib.suppress(OSError):  # another run clears it as well
            _drop_unused(folder)
    pins, key = read_lock(), source_key()
    missing = [name for name in wanted if not _is_current(folder, name, key, pins)]
    if missing:
        started = time.perf_counter()
        say(f"bundles: making {len(missing)} of {len(wanted)} in {folder}")
        if len(missing) > 1:
            _make_side_by_side(missing, folder, say)
        for name in missing:
            with _owned(folder, name, say):
                if not _is_current(folder, name, key, pins):
                    _make(folder, name, key, pins, say)
        say(f"bundles: {len(missing)} made and checked in {time.perf_counter() - started:.1f} s")
    return {name: _path(folder, name) for name in wanted}


def update_lock(configs: Sequence[str] | None = None, *, say: Say = lambda line: None) -> list[str]:
    """Pin what the sources make; the names whose pins changed. Bundles whose config is gone are dropped."""
    known = recipe.names(scale=True)
    before = read_lock() if LOCK.exists() else {}
    pins = {name: pin for name, pin in before.items() if name in known}
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in configs or recipe.names():
        with _owned(folder, name, say):
            generate.write(name, _path(folder, name))
            pins[name] = pin_of(_path(folder, name))
            write_atomic(_stamp(folder, name), f"{source_key()} {pins[name]['sha256']}\n".encode())
            say(f"bundles: {name} pinned as {pins[name]['sha256'][:16]}")
    text = json.dumps({"bundles": pins}, indent=0, sort_keys=True) + "\n"
    write_atomic(LOCK, text.encode())
    return sorted(name for name in {*pins, *before} if pins.get(name) != before.get(name))


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.kdtr"


def _stamp(folder: Path, name: str) -> Path:
    return folder / f".{name}.made"


def _is_current(folder: Path, name: str, key: str, pins: Pins) -> bool:
    """Whether the file is there, was made from these sources, and has the bytes that were made and are pinned."""
    try:
        made = _stamp(folder, name).read_text(encoding="ascii").split()
        digest = sha256(_path(folder, name))
    except (OSError, UnicodeDecodeError):
        return False
    return name in pins and made == [key, digest] and digest == pins[name]["sha256"]


@contextlib.contextmanager
def _owned(folder: Path, name: str, say: Say) -> Iterator[None]:
    """Hold the bundle's lock; wait for another process that does, however it ends."""
    with (folder / f".{name}.lock").open("wb") as handle:
        if not _try_own(handle.fileno()):
            say(f"bundles: {name} is being made by another process; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        for litter in folder.glob(f".{name}.kdtr.*.part"):  # of a run that was killed: its owner is gone
            litter.unlink(missing_ok=True)
        yield


def _try_own(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make(folder: Path, name: str, key: str, pins: Pins, say: Say) -> None:
    """Make one bundle whose lock is held, check it, and stamp it. A wrong one is removed."""
    started, path = time.perf_counter(), _path(folder, name)
    try:
        with told(f"bundles: {name}", say, first=EVERY):
            attempt = generate.write(name, path).attempt
    except generate.GenerateError as error:
        raise BundleError(str(error)) from error
    made = pin_of(path)
    if made != pins.get(name):
        path.unlink()
        if name not in pins:
            raise LockDiffers(f"bundle {name}: {LOCK.name} does not pin it; {UPDATE} {name} does")
        raise LockDiffers(f"{first_difference(name, made, pins[name])}. If refs/ was meant to change: {UPDATE}")
    write_atomic(_stamp(folder, name), f"{key} {made['sha256']}\n".encode())
    say(f"bundles: {name} made in {time.perf_counter() - started:.1f} s (attempt {attempt})")


def _make_side_by_side(names: Sequence[str], folder: Path, say: Say) -> None:
    """Let processes make what nobody else is making; whatever they fail at, the caller meets itself."""
    command = [sys.executable, "-m", "harness.bundles", "--worker", "--out", str(folder), *names]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for _ in range(min(PROCESSES, len(names)))
    ]

    def relay(worker: subprocess.Popen[str]) -> None:
        for line in worker.stdout or ():
            say(line.rstrip("\n"))

    threads = [threading.Thread(target=relay, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for worker, thread in zip(workers, threads, strict=True):
            worker.wait()
            thread.join()
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()


def _work(names: Sequence[str], folder: Path) -> None:
    """A side process: make each bundle that is missing and that nobody else is making."""
    pins, key = read_lock(), source_key()
    for name in names:
        with (folder / f".{name}.lock").open("wb") as handle:
            if _try_own(handle.fileno()) and not _is_current(folder, name, key, pins):
                with contextlib.suppress(BundleError, RefError):  # the parent meets it again and reports it
                    _make(folder, name, key, pins, lambda line: print(line, flush=True))


def _drop_unused(current: Path) -> None:
    """Remove cache folders of other sources that no run has asked for in a week, and large bundles after a day."""
    for folder in current.parent.iterdir():
        is_ours = len(folder.name) == len(current.name) and all(c in "0123456789abcdef" for c in folder.name)
        if not is_ours or folder == current:
            continue
        unused = time.time() - folder.stat().st_mtime
        if unused > UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
        elif unused > LARGE_UNUSED_SECONDS:
            for path in folder.glob("*.kdtr"):
                if is_large(path.stem):
                    path.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    """``kdtree bundles``: exit status 0 when all are made as pinned, 1 when one differs from the lock, 3 otherwise."""
    parser = Parser(
        prog="kdtree bundles",
        description="Regenerate bundles from refs/ where they are missing, and check them against refs/bundles.lock.",
        epilog="examples:\n  kdtree bundles\n  kdtree bundles k26_layer\n  kdtree bundles --out elsewhere tiny\n\n"
        "exit status: 0 all are as pinned, 1 one differs from the lock, 3 a wrong config, file or argument",
    )
    parser.add_argument(
        "configs", nargs="*", metavar="CONFIG", help="default: all of refs/configs/, those of real sizes excepted"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the cache (KDTREE_BUNDLES or bundles/)")
    parser.add_argument("--update-lock", action="store_true", help="pin what the sources make; for maintainers")
    parser.add_json("paths and hashes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        if options.worker:
            _work(options.configs, options.out)
            return PASSED
        if options.update_lock:
            changed = update_lock(options.configs or None, say=tell)
            tell(f"bundles: {LOCK.name}: {len(changed)} changed{': ' if changed else ''}{', '.join(changed)}")
        paths = ensure(options.configs or None, options.out, say=tell)
    except LockDiffers as error:
        tell(f"kdtree bundles: {error}")
        return FAILED
    except (BundleError, RefError, OSError) as error:
        tell(f"kdtree bundles: {error}")
        return INFRASTRUCTURE
    pins = read_lock()
    if options.json:
        rows = {name: {"path": str(path), "sha256": pins[name]["sha256"]} for name, path in paths.items()}
        plain_json.give(rows, options.json)
    if options.json != plain_json.PRINTED:
        for name, path in paths.items():
            print(f"{pins[name]['sha256'][:16]}  {path.stat().st_size / 1e6:7.2f} MB  {path}")
    return PASSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
