"""Which sources a run judged: the commit, what differs from it, and hashes that need no git.

The hashes cover paths and contents, sorted by path, so equal trees have equal hashes on every machine. A tree that was
copied without its ``.git`` carries ``.kdtree-source.json`` (``{"commit": ..., "dirty": [...]}``) in its place. With the
tree's hashes beside them, as ``python -m harness.sources`` prints it, it is also believed where a ``.git`` came along
that may be of another commit: as long as the hashes are those of the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE_FILE = ".kdtree-source.json"
HOOKED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Sources:
    """What was judged. Two runs are comparable when all but ``harness`` agree, and mergeable when all agree."""

    commit: str
    """Full hash, or ``""`` where neither git nor ``.kdtree-source.json`` knows it."""
    dirty: tuple[str, ...]
    """Paths that differ from the commit, untracked ones included, sorted."""
    engine: str
    """SHA-256 over ``csrc/`` and ``engine/``."""
    lock: str
    """SHA-256 of ``refs/bundles.lock``, or ``""`` without one."""
    harness: str
    """SHA-256 over ``harness/``, ``refs/`` and ``tests/``."""


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(
            p.startswith(".") or p == "__pycache__" or p.endswith(".egg-info") for p in parts
        ):
            yield path


def tree_hash(root: Path, *folders: str) -> str:
    """SHA-256 over every file below ``folders``; caches and hidden files do not count."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in _files(root / folder):
            data = path.read_bytes()
            digest.update(os.fsencode(f"{path.relative_to(root).as_posix()}\0{len(data)}\0"))
            digest.update(data)
    return digest.hexdigest()


def git_environment() -> dict[str, str]:
    """For git to look at the folder that it runs in: within a hook, variables name the repository committed to."""
    return {name: value for name, value in os.environ.items() if name not in HOOKED}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, env=git_environment(), capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "backslashreplace") if done.returncode == 0 else None


def _hashes(root: Path) -> dict[str, str]:
    lock = root / "refs" / "bundles.lock"
    return {
        "engine": tree_hash(root, "csrc", "engine"),
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else "",
        "harness": tree_hash(root, "harness", "refs", "tests"),
    }


def _revision(root: Path, hashes: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        # what is none of ours is as no file: a shell that is about to write it from here has made it empty first
        content = json.loads((root / SOURCE_FILE).read_text("utf-8"))
        if not (root / ".git").exists() or content.get("hashes") == hashes:
            return str(content["commit"]), tuple(str(path) for path in content["dirty"])
    if not (root / ".git").exists() and _git(root, "ls-files", "--error-unmatch", ".") is None:
        return "", ()  # a repository around this tree may know nothing of it
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    if commit is None or status is None:
        return "", ()
    return commit.strip(), tuple(sorted(entry[3:] for entry in status.split("\0") if entry))


def describe(root: Path = ROOT) -> Sources:
    """The sources as they stand on disk."""
    hashes = _hashes(root)
    commit, dirty = _revision(root, hashes)
    return Sources(commit=commit, dirty=dirty, **hashes)


def misfit(known: Sources, root: Path = ROOT) -> str:
    """Why the commit that the tree carries in a file is not the one that ``known`` names, in a line; or ``""``."""
    carried = root / SOURCE_FILE
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        commit = str(json.loads(carried.read_text("utf-8"))["commit"])
        if commit != known.commit:
            return (
                f"{SOURCE_FILE} names commit {commit[:12]}, but its hashes are not those of these files: "
                f"write it again, python -m harness.sources > {SOURCE_FILE}"
            )
    return ""


if __name__ == "__main__":
    known = describe()
    others = [path for path in known.dirty if path != SOURCE_FILE]
    hashes = {"engine": known.engine, "lock": known.lock, "harness": known.harness}
    print(json.dumps({"commit": known.commit, "dirty": others, "hashes": hashes}))
