"""Sessions: each prepares an environment and calls pytest or the ``kdtree`` command. ``nox -l`` lists them.

A torch that the interpreter running nox can import is used as it is (GPU boxes have one); otherwise one is installed.
``nox --no-venv`` installs nothing and uses the interpreter that runs nox.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import nox

TORCH = "torch==2.13.0"  # what is installed where no torch is importable; any torch >= 2.11 serves
FOUND = importlib.util.find_spec("torch")
SHARED = ("test", "gate", "demo", "remote", "mutants", "bench", "nvcc")  # sessions with one environment

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["test"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = False

PROJECT = nox.project.load_toml("pyproject.toml")["project"]


def end(number: int, frame: FrameType | None) -> NoReturn:
    """Told to end, nox ends what it runs as a terminal's Ctrl-C would; by itself it would leave it running.

    A script's background job ignores Ctrl-C, and so does all that it starts: that is told to end in the same words.
    """
    tell = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    with contextlib.suppress(OSError):  # no Linux
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), tell)
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, end)


def alone() -> IO[str] | None:
    """A lock of this checkout, until it is closed: of two nox at once one makes the environment, the other finds it.

    None where nothing can be written, and no environment made.
    """
    folder = Path(__file__).resolve().parent / ".nox"
    try:
        folder.mkdir(exist_ok=True)
        lock = open(folder / "kdtree-lock", "w")  # noqa: SIM115
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("nox > waiting for another nox that makes an environment", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


LOCK = alone()  # nox makes a session's environment before it calls the session


def install(session: nox.Session, *extras: str, torch: bool = True) -> None:
    """Install the project's dependencies and ``extras``, unless this environment already got exactly them."""
    session.env.update({"PYTHONPATH": os.getcwd(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    session.env["PYTHONDONTWRITEBYTECODE"] = ""  # a run starts dozens of interpreters; each would compile everything
    if session.virtualenv.venv_backend == "none":
        return
    wanted = [*PROJECT["dependencies"]]
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    origin = FOUND.origin if torch and FOUND else None
    if torch and not origin:
        wanted.append(TORCH)
    stamp = Path(session.virtualenv.location) / "kdtree-installed"
    digest = hashlib.sha256("\n".join([*wanted, str(origin)]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    session.install(*wanted, silent=False)  # gigabytes, where torch brings CUDA along: pip says how far it is
    if origin:  # the folder that holds torch comes last on the path, so that the environment's own packages win
        purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = session.run_install("python", "-c", purelib, silent=True)
        (Path(str(site).strip()) / "torch-found.pth").write_text(f"{Path(origin).parents[1]}\n")
    stamp.write_text(digest)


def install_shared(session: nox.Session) -> None:
    """The environment of all sessions that run the engine: the first one makes it, the others find a link to it.

    With PyPI's torch it has five gigabytes.
    """
    install(session, "test", "remote")
    if session.virtualenv.venv_backend != "none":
        mine = Path(session.virtualenv.location).resolve()
        for name in SHARED:
            with contextlib.suppress(FileExistsError):  # one of its own, or the link of an earlier session
                (mine.parent / name).symlink_to(mine.name)


def python(session: nox.Session, *arguments: str) -> None:
    """Run this session's interpreter: without an environment the one that runs nox, which need not be on PATH.

    Other nox may make environments from here on. Interrupted, what runs has time to record what did not run and to end
    what it started: more than nox's half a second.
    """
    if LOCK:
        LOCK.close()
    own = session.virtualenv.venv_backend == "none"
    grace = {"interrupt_timeout": 20.0, "terminate_timeout": 10.0}
    session.run(sys.executable if own else "python", *arguments, **grace)


@nox.session
def test(session: nox.Session) -> None:
    """Build, bundles, the matrix and the other tests (``-- --all``: the slow ones too); arguments go to pytest."""
    install_shared(session)
    # A worker has a stretch of files, so that what a module makes is made once, and takes from others in the end.
    workers = [] if any(a.startswith("-n") for a in session.posargs) else ["-n", "auto", "--dist", "worksteal"]
    python(session, "-m", "pytest", *workers, *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Exit 0 only if the newest ledger (or the one named) is complete, green and made from this checkout."""
    install_shared(session)
    python(session, "-m", "harness", "gate", *(session.posargs or ["reports/latest/ledger.json"]))


@nox.session
def demo(session: nox.Session) -> None:
    """AR beside DDTree on one model: tokens, match, forwards, times; then the trained one with its drafter, as text."""
    install_shared(session)
    python(session, "-m", "harness", "demo", *session.posargs)
    if not session.posargs:
        text = ["--config", "text", "--tokens", "96", "--block", "16", "--budget", "15"]
        python(session, "-m", "harness", "demo", *text, "--drafter", "dflash", "--drafter", "oracle", "--tree")


@nox.session
def remote(session: nox.Session) -> None:
    """The matrix on hosts of hosts.yaml: ``nox -s remote -- ct200``."""
    install_shared(session)
    python(session, "-m", "harness", "remote", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant every fault of the catalogue in the engine and report the share that the matrix caught."""
    install_shared(session)
    python(session, "-m", "harness", "mutants", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed of this machine's engines: times, bytes, shares of the ceilings, peers."""
    install_shared(session)
    python(session, "-m", "harness", "bench", *session.posargs)


@nox.session
def oracles(session: nox.Session) -> None:
    """The importer, the reference and the engine against transformers and compressed-tensors."""
    install(session, "test", "oracles")
    workers = [] if any(a.startswith("-n") for a in session.posargs) else ["-n", "auto"]
    python(session, "-m", "pytest", "tests/oracles", *workers, *session.posargs)


@nox.session
def reproduce(session: nox.Session) -> None:
    """The bundles' hashes under other CPU features, thread counts, NumPy and Python versions."""
    install(session, torch=False)
    python(session, "-m", "harness.reproduce", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """The C++ KDTR reader under a coverage-guided fuzzer with sanitizers: ``nox -s fuzz -- --seconds 600``."""
    install(session, torch=False)
    python(session, "-m", "tests.fuzz.run", *session.posargs)


@nox.session
def nvcc(session: nox.Session) -> None:
    """Compile every CUDA source for Hopper and Blackwell without a GPU; registers, spills; the CUDA faults compile."""
    install_shared(session)
    python(session, "-m", "harness.nvcc", *session.posargs)
    if not session.posargs:
        python(session, "-m", "harness", "mutants", "--compile-only", "--device", "cuda")


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint and type checks."""
    install(session, "lint", "test", "remote", torch=False)
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "mypy")
    # The oldest Python too, for what it has not; numpy's types for it are coarser than what is checked above.
    python(session, "-m", "mypy", "--python-version", "3.10", "--no-warn-return-any", "--no-warn-unused-ignores")
