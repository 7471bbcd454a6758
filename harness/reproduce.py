"""Proof that a bundle's bytes depend on refs/ alone: the same hashes on whatever this machine can be made to look like.

Each *variant* makes the bundles in a process of its own, in another way, and is held against refs/bundles.lock: vector
dispatch off, other BLAS kernels, one and two threads, another locale and hash seed; and, in throw-away environments,
every admitted Python with the oldest and the newest numpy that pyproject.toml admits and that has a wheel for it.
What could not be tried is named, never counted as passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import plain_json
from harness.bundle_lock import LOCK, first_difference, pin_of, read_lock
from harness.cells import FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.cli import Parser, ended

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
QUICK = ("tiny", "tiny2", "odd", "ties", "sampled")
SECONDS = 600
"""One variant, or one installation, may take."""
CANDIDATES = 12
"""Versions of numpy that are asked for, one after the other, until one has a wheel for a Python."""


@dataclass(frozen=True)
class Variant:
    """One way of making bundles: an interpreter and what is changed in its environment."""

    name: str
    python: str
    environment: tuple[tuple[str, str], ...] = ()
    disable_simd: bool = False
    """Turn off every vector extension that this interpreter's numpy would dispatch to."""


@dataclass(frozen=True)
class Outcome:
    """How a variant ended: ``same``, ``differs`` or ``not tried``."""

    variant: str
    result: str
    python: str = ""
    numpy: str = ""
    simd: str = ""
    detail: str = ""
    seconds: float = 0.0


class NotTried(Exception):
    """A variant cannot be had on this machine; the text says why."""


def describe_interpreter() -> dict[str, Any]:
    """This process's Python and numpy, and the vector extensions that numpy found beyond its baseline."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "simd": sorted(config.get("SIMD Extensions", {}).get("found", [])),
    }


def make(configs: Sequence[str]) -> dict[str, Any]:
    """What a child prints: who it is and the pin of each bundle it made."""
    from refs import generate

    pins = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in configs:
            path = Path(folder) / f"{name}.kdtr"
            generate.write(name, path)
            pins[name] = pin_of(path)
            path.unlink()
    return {**describe_interpreter(), "pins": pins}


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A terminal's Ctrl-C goes to the children as well: after one that it ended no other is begun."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)
    if done.returncode == -signal.SIGINT or "Operation cancelled by user" in done.stderr:  # the latter is pip's
        raise KeyboardInterrupt
    return done


def _child(python: str, environment: dict[str, str], arguments: Sequence[str], sources: Path) -> Any:
    """Run this module in another interpreter; its JSON. `NotTried` if it cannot be run."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NPY_"))}
    try:
        done = _run([python, "-m", "harness.reproduce", *arguments], cwd=sources, env={**clean, **environment})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotTried(f"{type(error).__name__}: {error}") from error
    if done.returncode == INCOMPLETE:
        raise KeyboardInterrupt
    if done.returncode:
        raise NotTried(f"exit status {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout)


def attempt(variant: Variant, configs: Sequence[str], sources: Path = ROOT) -> Outcome:
    """Make the bundles of ``sources`` in one variant and hold them against the lock there.

    A variant that cannot be had here is an outcome, too.
    """
    started = time.perf_counter()
    environment = dict(variant.environment)
    try:
        if variant.disable_simd:
            found = _child(variant.python, {}, ["--describe"], sources)["simd"]
            if not found:
                raise NotTried("numpy dispatches to no vector extension here")
            environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(found)
        got = _child(variant.python, environment, ["--make", *configs], sources)
        if variant.disable_simd and got["simd"]:
            raise NotTried(f"numpy kept {', '.join(got['simd'])}")
    except NotTried as reason:
        return Outcome(variant.name, "not tried", detail=str(reason))
    pins = read_lock(sources / LOCK.relative_to(ROOT))
    wrong = [
        first_difference(name, got["pins"][name], pins[name]) if name in pins else f"bundle {name}: not in the lock"
        for name in configs
        if got["pins"][name] != pins.get(name)
    ]
    return Outcome(
        variant.name,
        "differs" if wrong else "same",
        got["python"],
        got["numpy"],
        " ".join(got["simd"]) or "none",
        "; ".join(wrong),
        time.perf_counter() - started,
    )


def local_variants() -> list[Variant]:
    """The running interpreter, looked at in other ways."""
    one, two = ((("OMP_NUM_THREADS", n), ("OPENBLAS_NUM_THREADS", n), ("MKL_NUM_THREADS", n)) for n in "12")
    elsewhere = (("LC_ALL", "tr_TR.UTF-8"), ("LANG", "tr_TR.UTF-8"), ("TZ", "Asia/Kolkata"))
    python = sys.executable
    return [
        Variant("as it is", python),
        Variant("vector dispatch off", python, disable_simd=True),
        Variant("OPENBLAS_CORETYPE=Prescott", python, (("OPENBLAS_CORETYPE", "Prescott"),)),
        Variant("OPENBLAS_CORETYPE=Haswell", python, (("OPENBLAS_CORETYPE", "Haswell"),)),
        Variant("1 thread", python, one),
        Variant("2 threads", python, two),
        Variant("hash seed 1, locale C", python, (("PYTHONHASHSEED", "1"), ("LC_ALL", "C"))),
        Variant("hash seed 4242, Turkish locale", python, (("PYTHONHASHSEED", "4242"), *elsewhere)),
        Variant("optimised (-OO)", python, (("PYTHONOPTIMIZE", "2"),)),
    ]


def requirement(pattern: str) -> tuple[int, ...]:
    """A lower bound from pyproject.toml, as numbers. Raises NotTried where it states none."""
    found = re.search(pattern + r"\s*>=\s*([0-9.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise NotTried(f"pyproject.toml states no lower bound matching {pattern!r}")
    return numbers(found[1])


def numbers(version: str) -> tuple[int, ...]:
    """``1.26.4`` as a tuple that compares."""
    return tuple(int(part) for part in version.split("."))


def pythons() -> dict[str, str]:
    """Every CPython on this machine that pyproject.toml admits: path by full version, one of each."""
    low = requirement('requires-python = "')
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    places += [*Path.home().glob(".pyenv/versions/*/bin"), *Path.home().glob(".local/share/uv/python/*/bin")]
    programs = (p for place in places for p in sorted(place.glob("python3*")))
    candidates = [sys.executable, *(str(p) for p in programs if re.fullmatch(r"python3(\.\d+)?", p.name))]
    found: dict[str, str] = {}
    question = "import sys, platform as p; print(p.python_implementation(), p.python_version(), sys.executable)"
    for path in dict.fromkeys(candidates):
        try:
            answer = subprocess.run([path, "-c", question], capture_output=True, text=True, timeout=30, check=True)
            kind, version, executable = answer.stdout.split(maxsplit=2)
        except (OSError, ValueError, subprocess.SubprocessError):
            continue  # a shim of a version manager that has no such version
        if kind == "CPython" and version.replace(".", "").isdigit() and numbers(version) >= low:
            found.setdefault(version, executable.strip())
    return dict(sorted(found.items(), key=lambda item: numbers(item[0])))


def _pip(*arguments: str) -> str:
    done = _run([sys.executable, "-m", "pip", *arguments])
    if done.returncode:
        raise NotTried(f"pip: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def environment_with(python: str, folder: Path, which: str) -> str:
    """A new virtual environment of ``python`` with the ``oldest`` or ``newest`` numpy admitted; its interpreter.

    Raises NotTried with what kept it from being made.
    """
    built = _run([python, "-m", "venv", "--without-pip", str(folder)])
    if built.returncode:
        raise NotTried(f"venv: {(built.stderr.strip().splitlines() or ['no message'])[-1]}")
    inside = str(folder / "bin" / "python")
    listed = _pip("--python", inside, "index", "versions", "numpy", "--only-binary", ":all:")
    versions = re.search(r"Available versions: (.*)", listed)
    low = requirement('"numpy')
    released = [v for v in re.split(r",\s*", versions[1].strip()) if re.fullmatch(r"[0-9.]+", v)] if versions else []
    admitted = [v for v in released if numbers(v) >= low]
    if not admitted:
        raise NotTried("pip lists no admitted numpy for this Python")
    failed = NotTried("nothing was installed")
    for candidate in sorted(admitted, key=numbers, reverse=which == "newest")[:CANDIDATES]:
        try:  # pip lists versions that have no wheel for this Python, too
            _pip("--python", inside, "install", "--quiet", "--only-binary", ":all:", f"numpy=={candidate}", "pyyaml")
        except NotTried as reason:
            failed = reason
        else:
            return inside
    raise failed


def installed_outcomes(
    path: str, version: str, which: str, configs: Sequence[str], folder: Path, sources: Path = ROOT
) -> list[Outcome]:
    """One Python with one numpy, with and without vector dispatch; ``folder`` takes the environment meanwhile."""
    name = f"Python {version}, {which} numpy"
    try:
        inside = environment_with(path, folder / f"{version}-{which}", which)
    except (NotTried, OSError, subprocess.TimeoutExpired) as reason:
        return [Outcome(name, "not tried", detail=str(reason))]
    variants = [Variant(name, inside), Variant(f"{name}, vector dispatch off", inside, disable_simd=True)]
    outcomes = [attempt(variant, configs, sources) for variant in variants]
    shutil.rmtree(folder / f"{version}-{which}", ignore_errors=True)
    return outcomes


def _alone(variant: Variant, configs: Sequence[str], sources: Path) -> list[Outcome]:
    return [attempt(variant, configs, sources)]


def frozen(folder: Path) -> Path:
    """A copy of what the children run, so that an edit in the checkout meanwhile is not taken for a difference."""
    for name in ("refs", "harness"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(configs: Sequence[str], *, quick: bool, say: Any) -> list[Outcome]:
    """All variants, two at a time; ``quick`` leaves out every Python but the running one."""
    found = pythons()
    running = platform.python_version()
    chosen = {running: sys.executable} if quick else found
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        sources = frozen(Path(folder) / "sources")
        jobs = [pool.submit(_alone, variant, configs, sources) for variant in local_variants()]
        jobs += [
            pool.submit(installed_outcomes, path, version, which, configs, Path(folder), sources)
            for version, path in chosen.items()
            for which in ("oldest", "newest")
        ]
        say(f"reproduce: {len(configs)} bundles in {len(jobs)} ways, {PROCESSES} at a time")
        try:
            for job in as_completed(jobs):
                for outcome in job.result():
                    say(f"reproduce: {outcome.variant}: {outcome.result}, {outcome.seconds:.1f} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the pool would run all that has not begun
            raise
        outcomes = [outcome for job in jobs for outcome in job.result()]
    if quick:
        outcomes += [Outcome(f"Python {v}", "not tried", detail="--quick") for v in found if v != running]
    here = platform.machine()
    other = "aarch64" if here in ("x86_64", "AMD64") else "x86-64"
    return [*outcomes, Outcome(f"another architecture ({other})", "not tried", detail=f"this machine is {here}")]


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a variant, aligned."""
    head = ("variant", "result", "Python", "NumPy", "seconds", "vector dispatch")
    rows = [(o.variant, o.result, o.python, o.numpy, f"{o.seconds:.1f}" if o.seconds else "", o.simd) for o in outcomes]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    return "\n".join(lines + [f"{o.variant}: {o.result}: {o.detail}" for o in outcomes if o.detail])


def main(argv: Sequence[str]) -> int:
    """``python -m harness.reproduce``: 0 when nothing differs, 1 when something does, 3 when nothing could be tried."""
    parser = Parser(
        prog="python -m harness.reproduce", description="Prove that bundles have the same bytes everywhere."
    )
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="default: all but those of real sizes")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} under the running Python alone")
    parser.add_json("what became of each variant")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.make or options.describe:
        print(plain_json.text(make(options.configs) if options.make else describe_interpreter()))
        return PASSED
    from refs import recipe

    configs = options.configs or (QUICK if options.quick else recipe.names())
    outcomes = run(configs, quick=options.quick, say=lambda line: print(line, file=sys.stderr, flush=True))
    tried = [o for o in outcomes if o.result != "not tried"]
    differing = [o for o in tried if o.result == "differs"]
    plain_json.give({"configs": list(configs), "outcomes": list(outcomes)}, options.json)
    if options.json != plain_json.PRINTED:
        print(table(outcomes))
        print(f"{len(tried) - len(differing)} of {len(tried)} variants made the pinned bytes of {len(configs)} bundles")
    return FAILED if differing else PASSED if tried else INFRASTRUCTURE


if __name__ == "__main__":
    sys.exit(ended("python -m harness.reproduce", lambda: main(sys.argv[1:])))
