"""Files that appear whole or not at all, and a link that is never missing.

Everything here goes through a temporary name in the target's own directory and one rename, so a reader or a run beside
this one never sees half a file, and a killed process leaves at worst a dot-file that nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Write ``data`` to ``path``; ``exclusive``: an existing ``path`` stays and is a ``FileExistsError``.

    An OSError names ``path``, whatever step failed.
    """
    try:
        _write(path, data, exclusive)
    except OSError as error:  # a full disk names nothing, other faults the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, data: bytes, exclusive: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes 0600, which would hide reports from other users of the machine
        if exclusive:
            os.link(name, path)  # rename would replace silently
        else:
            os.replace(name, path)
            return
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    Path(name).unlink()


def used(path: Path) -> None:
    """Note that something of a cache was used, so that it is kept; a cache that this user may only read stays as it is.

    os.utime's error would name no file.
    """
    with contextlib.suppress(OSError):
        os.utime(path)


def said(error: OSError) -> str:
    """``FILE: reason``, for a reader."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):  # of a tree, one a file
        _, target, reason = error.args[0][0]
        return f"{target}: {re.sub(r'^.Errno [0-9]+. |: .*$', '', str(reason))}"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def point(link: Path, target: str) -> None:
    """Make ``link`` a symbolic link to ``target`` (relative to the link), replacing an earlier link in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
