"""Builds edited copies of ``csrc/`` the way `harness.build` builds the real one, compiling only what an edit changed.

The commands are those of the real build's own ninja file, and a source that an edit leaves alone, with everything it
includes, is linked from the real build's objects. Other objects are kept by the hash of command, compiler and all those
files. Where the real build reads the standard headers ahead, so do these, from a folder that is kept as objects are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.build import build
from harness.compiling import AHEAD, STANDARD
from harness.files import used
from harness.includes import closure
from harness.mutants.catalogue import CSRC
from harness.remote.farside.process import end_descendants

LIBRARY = "kdtree.so"
COMPILE_SECONDS = 900.0  # one source takes seconds, and minutes beside other work
UNUSED_SECONDS = 7 * 24 * 3600
Command = Callable[[str, str], str]
"""The command line that makes one file of another: input, output, both quoted for the shell."""
_VARIABLE = re.compile(r"\$(?:\{([a-z_]+)\}|([a-z_]+))")
_OF_ONE_FOLDER = re.compile(r"-ffile-prefix-map=(?:'[^']*'|\S)+")  # of the real build, not of its result
_INCLUDE_AHEAD = f"-include {AHEAD}"


class CompileError(Exception):
    """An edited source does not compile or link."""


@dataclass(frozen=True)
class Unit:
    """One object of the build: which rule makes it from which source."""

    object: str
    rule: str
    source: Path
    """Relative to ``csrc/``."""


class Workshop:
    """Builds of one device under ``home``; safe to use from several threads."""

    def __init__(self, device: str, home: Path, at_once: int = 1) -> None:
        """``at_once``: the places that compilers, and whoever takes one of `places`, share.

        Raises `harness.build.BuildError` if the unedited engine cannot be built.
        """
        self.places = threading.Semaphore(at_once)
        self._at_once = at_once
        real = build(device)
        self._variables, self._rules, self._units = _parse((real.parent / "build.ninja").read_text("utf-8"))
        self._real = {unit: real.parent / unit.object for unit in self._units}
        self._unedited = {unit: self._key(unit, CSRC) for unit in self._units}
        self._reads = {unit: frozenset(map(str, closure(CSRC, [unit.source]))) for unit in self._units}
        self._objects, self._planted = home / "objects", home / "planted"
        for folder in (self._objects, self._planted):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = self._ahead() if _INCLUDE_AHEAD in self._variables.get("cflags", "") else self._objects
        """Where compilers run."""
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def library(
        self, csrc: Path, target: Path, *, anew: bool = False, edited: Collection[str] | None = None
    ) -> tuple[Path, int]:
        """The library of the sources in ``csrc``, and how many of them had to be compiled: `objects`, linked.

        Raises CompileError.
        """
        objects, compiled = self.objects(csrc, anew=anew, edited=edited)
        target.mkdir(parents=True, exist_ok=True)
        library = target / LIBRARY
        with self.places:
            inputs = " ".join(shlex.quote(str(path)) for path in objects)
            run(self._command("link", inputs, shlex.quote(str(library))), target)
        return library, compiled

    def objects(
        self, csrc: Path, *, anew: bool = False, edited: Collection[str] | None = None
    ) -> tuple[list[Path], int]:
        """The objects of the sources in ``csrc``, and how many of them had to be compiled.

        ``anew``: nothing comes from the real build. ``edited``: no other files of ``csrc`` differ from the real build's
        (default: each may); what does not read them is not looked at. Raises CompileError.
        """
        looked_at = self._units
        if not anew and edited is not None:
            reading = set(self._reading(edited))
            looked_at = [unit for unit in self._units if unit in reading or not self._real[unit].exists()]
        with ThreadPoolExecutor(min(self._at_once, max(1, len(looked_at)))) as pool:
            made = dict(zip(looked_at, pool.map(lambda unit: self._object(unit, csrc, anew), looked_at), strict=True))
        objects = [made[unit][0] if unit in made else self._real[unit] for unit in self._units]
        return objects, sum(fresh for _, fresh in made.values())

    def reach(self, edited: Collection[str]) -> int:
        """How many sources read one of these files, paths below ``csrc/``."""
        return len(self._reading(edited))

    def _reading(self, edited: Collection[str]) -> list[Unit]:
        return [unit for unit in self._units if not self._reads[unit].isdisjoint(edited)]

    def scratch(self, name: str) -> tempfile.TemporaryDirectory[str]:
        """A folder for one edited copy, of a name that no other run uses."""
        return tempfile.TemporaryDirectory(prefix=f"{name}.", dir=self._planted)

    def prune(self) -> None:
        """Forget objects that no build has used for a week, and what killed runs left as long ago."""
        oldest = time.time() - UNUSED_SECONDS
        for path in (*self._objects.iterdir(), *self._planted.iterdir()):
            with contextlib.suppress(OSError):  # another run is at it, too
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def commands(self) -> dict[Path, Command]:
        """What compiles each source, a path below ``csrc/``."""
        return {unit.source: functools.partial(self._command, unit.rule) for unit in self._units}

    def _ahead(self) -> Path:
        """The folder with `AHEAD` and, if the compiler takes it, what it made of it; sources read the text if not."""
        text = "".join(f"#include <{name}>\n" for name in STANDARD)
        command = self._command("compile", f"-x c++-header {AHEAD}", f"{AHEAD}.gch").replace(_INCLUDE_AHEAD, "")
        key = hashlib.sha256(f"{text}\0{command}\0{_compiler(shlex.split(command)[0])}".encode()).hexdigest()[:32]
        folder = self._objects / f"{key}.{AHEAD}"
        if folder.exists():
            used(folder)
            return folder
        part = Path(tempfile.mkdtemp(prefix=".", dir=self._objects))
        (part / AHEAD).write_text(text)
        with contextlib.suppress(CompileError):
            run(command, part)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
        return folder

    def _key(self, unit: Unit, csrc: Path) -> str:
        return content_key(functools.partial(self._command, unit.rule), csrc, unit.source)

    def _object(self, unit: Unit, csrc: Path, anew: bool) -> tuple[Path, bool]:
        key = self._key(unit, csrc)
        if not anew and key == self._unedited[unit] and self._real[unit].exists():
            return self._real[unit], False
        path = self._objects / f"{key}.o"
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if path.exists():
                used(path)
                return path, False
            part = self._objects / f".{key}.{os.getpid()}.o"
            command = self._command(unit.rule, shlex.quote(str(csrc / unit.source)), shlex.quote(str(part)))
            with self.places:
                run(command, self.folder)
            part.with_name(part.name + ".d").unlink(missing_ok=True)
            os.replace(part, path)
        return path, True

    def _command(self, rule: str, inputs: str, output: str) -> str:
        values = {**self._variables, "in": inputs, "out": output}
        text = self._rules[rule]
        for _ in range(4):  # variables hold variables
            text = _VARIABLE.sub(lambda match: values.get(match.group(1) or match.group(2), ""), text)
        return text


def run(command: str, folder: Path) -> None:
    """Compile or link, in ``folder``. Raises CompileError with the first of what the compiler says."""
    quiet, said = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, shell=True, cwd=folder, stdout=quiet, stderr=said, text=True) as shell:
        try:
            complaint = shell.communicate(timeout=COMPILE_SECONDS)[1]
        except subprocess.TimeoutExpired:
            end_descendants(shell.pid, 0)  # not the shell alone: its compiler would go on writing where others tidy up
            shell.kill()
            raise CompileError(f"took longer than {COMPILE_SECONDS:g} s: {command}") from None
    if shell.returncode != 0:
        errors = [line for line in complaint.splitlines() if "error" in line] or complaint.splitlines()[-4:]
        raise CompileError("\n".join([*dict.fromkeys(errors)][:6]))  # a header says it once an instantiation


def content_key(command: Command, csrc: Path, source: Path) -> str:
    """A hash of all that decides what ``command`` makes of ``source``: itself, its compiler, every file included."""
    template = command("IN", "OUT")
    digest = hashlib.sha256(f"{template}\0{_compiler(shlex.split(template)[0])}\0".encode())
    for name in closure(csrc, [source]):
        digest.update(f"{name}\0{hashlib.sha256((csrc / name).read_bytes()).hexdigest()}\0".encode())
    return digest.hexdigest()[:32]


def _parse(text: str) -> tuple[dict[str, str], dict[str, str], list[Unit]]:
    """Variables, commands by rule, and the objects, out of a build.ninja of cpp_extension."""
    variables: dict[str, str] = {}
    rules: dict[str, str] = {}
    units: list[Unit] = []
    rule = ""
    for line in text.replace("$\n", "").splitlines():
        if line.startswith("rule "):
            rule = line.split()[1]
        elif line.startswith("  command = "):
            rules[rule] = line.removeprefix("  command = ")
        elif line.startswith("build "):
            output, _, rest = line.removeprefix("build ").replace("$:", "\0").replace("$ ", "\1").partition(": ")
            name, *inputs = (part.replace("\0", ":").replace("\1", " ") for part in rest.split())
            if name != "link":
                units.append(Unit(output, name, _below_csrc(Path(inputs[0]))))
        elif " = " in line and not line.startswith(" "):
            name, _, value = line.partition(" = ")
            variables[name] = _OF_ONE_FOLDER.sub("", value)
    return variables, rules, units


def _below_csrc(source: Path) -> Path:
    """``cpu/mla.cpp`` for a source of any checkout: equal sources share a build wherever they lie."""
    parts = source.parts
    return Path(*parts[len(parts) - parts[::-1].index(CSRC.name) :])


@functools.lru_cache
def _compiler(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout
