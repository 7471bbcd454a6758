"""Whole commands in processes of their own, without an interpreter's start for each: a server that has imported what
they need forks one for every call.

A command sees what ``python -m MODULE ...`` would give it: its arguments, environment, working directory, streams that
are no terminal, and an exit status of its own. The server runs no command itself and starts no thread.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.sources import ROOT
from tests import processes
from tests.waiting import PATIENCE


class Forks:
    """The server's client. Calls are made one after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, str(Path(__file__).resolve())]
        self._server = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        folder: Path,
        module: str,
        *arguments: str,
        env: Mapping[str, str],
        path: Sequence[str] = (),
        cwd: Path = ROOT,
        seconds: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """``python -m module arguments`` in ``cwd``, with ``path`` before everything else that is imported from.

        ``folder`` holds what it prints until it has ended. Raises TimeoutExpired.
        """
        streams = [folder / f"{name}.{time.monotonic_ns()}" for name in ("stdout", "stderr")]
        call = {"argv": [module, *arguments], "env": dict(env), "path": list(path), "cwd": str(cwd), "seconds": seconds}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps({**call, "streams": [str(file) for file in streams]}), file=self._server.stdin, flush=True)
        status = json.loads(self._server.stdout.readline())
        if status is None:
            raise subprocess.TimeoutExpired([module, *arguments], seconds)
        out, err = (file.read_text("utf-8") for file in streams)
        return subprocess.CompletedProcess([module, *arguments], status, out, err)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(PATIENCE)


def _become(call: Mapping[str, Any]) -> None:
    """In the forked process: be the command."""
    for stream, file in zip((1, 2), call["streams"], strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(call["env"])
    os.chdir(call["cwd"])
    sys.path[:0] = call["path"]
    module, *arguments = call["argv"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _fork(call: Mapping[str, Any]) -> int | None:
    """The command's exit status, or None when it took too long."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become(call)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + call["seconds"]
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    processes.tell(pid)
    os.waitpid(pid, 0)
    return None


def _serve() -> None:
    import hypothesis  # noqa: F401  pytest's plugin of it imports it at every session's end
    import xdist.plugin  # noqa: F401

    import harness.plugin
    import harness.reports.html
    import harness.wrong_engine

    pages = harness.reports.html._environment()
    for template in pages.list_templates(extensions=["jinja"]):
        pages.get_template(template)  # compiled here, for every command that writes a report
    for line in sys.stdin:
        print(json.dumps(_fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
