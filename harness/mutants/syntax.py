"""Whether every planted fault compiles, for the price of a few compilations instead of one a fault.

Faults whose edits lie apart are planted together in one copy of ``csrc/``, and each source that an edit reaches, itself
or through a header, is checked by the real build's own command. Where that fails, its faults are halved down to those
that do not compile alone: faults that only disturb each other are not accused. What passed is kept by the hash of the
command and of all the files that went in.
"""

from __future__ import annotations

import difflib
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import build, environment, toolchain
from harness.bundles import Say
from harness.includes import closure
from harness.mutants.build import Command, CompileError, Workshop, content_key, run
from harness.mutants.catalogue import CSRC, CatalogueError, Fault, edited

WORKERS = 2
ARCH = "9.0"  # of the CUDA sources: the kernels of Hopper's own instructions are among them


@dataclass(frozen=True)
class Hunk:
    """Lines ``[start, end)`` of a file, which ``lines`` replace."""

    start: int
    end: int
    lines: tuple[str, ...]

    def meets(self, other: Hunk) -> bool:
        """Whether both cannot be applied, one after the other from the end of the file."""
        return self.start == other.start or (self.start < other.end and other.start < self.end)


Hunks = dict[str, list[Hunk]]
"""By file, from the first line to the last."""


def hunks(fault: Fault, csrc: Path = CSRC) -> Hunks:
    """What the fault changes, in whole lines. Raises CatalogueError where an edit does not fit the sources."""
    found: Hunks = {}
    for file, text in edited(fault, csrc).items():
        before, after = _lines((csrc / file).read_text("utf-8")), _lines(text)
        head = _alike(before, after)
        tail = _alike(before[head:][::-1], after[head:][::-1])  # what is alike is not for difflib, which is slow
        before, after = before[head : len(before) - tail], after[head : len(after) - tail]
        matched = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        found[file] = [Hunk(head + a, head + b, tuple(after[c:d])) for tag, a, b, c, d in matched if tag != "equal"]
    return found


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def merged(csrc: Path, faults: Sequence[Hunks]) -> dict[str, str]:
    """The text of every file that ``faults``, which lie apart, change together."""
    texts = {}
    for file in sorted({file for one in faults for file in one}):
        lines = _lines((csrc / file).read_text("utf-8"))
        for hunk in sorted((hunk for one in faults for hunk in one.get(file, ())), key=lambda h: h.start, reverse=True):
            lines[hunk.start : hunk.end] = hunk.lines
        texts[file] = "".join(lines)
    return texts


def batches(changes: Mapping[str, Hunks]) -> list[list[str]]:
    """The faults' names in as few lists as come of it, so that no two of a list touch the same lines."""
    made: list[list[str]] = []
    for name, mine in changes.items():
        for batch in made:
            if not any(
                a.meets(b)
                for other in batch
                for file, here in mine.items()
                for a in here
                for b in changes[other].get(file, ())
            ):
                batch.append(name)
                break
        else:
            made.append([name])
    return made


@dataclass(frozen=True)
class Checker:
    """Compiles single sources of edited copies, only to see whether that is possible."""

    commands: Mapping[Path, Command]
    """By source, a path below ``csrc/``."""
    kept: Path
    """Where the names of passed checks lie."""
    csrc: Path = CSRC
    folder: Path = Path()
    """Where compilers run: they may find there what the commands name."""

    def complaint(self, source: Path, texts: Mapping[str, str]) -> str:
        """What the compiler says of ``source`` when the files ``texts`` are as given; ``""`` if nothing."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "csrc"
            shutil.copytree(self.csrc, copy)
            for file, text in texts.items():
                (copy / file).write_text(text, "utf-8")
            passed = self.kept / f"{content_key(self.commands[source], copy, source)}.compiles"
            if passed.exists():
                return ""
            try:
                run(self.commands[source](shlex.quote(str(copy / source)), shlex.quote(f"{folder}/out")), self.folder)
            except CompileError as error:
                return str(error).replace(f"{copy}/", "")
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
        return ""

    def guilty(self, source: Path, changes: Mapping[str, Hunks]) -> dict[str, str]:
        """Those of ``changes`` with which ``source`` does not compile, and what the compiler says of each."""
        complaint = self.complaint(source, merged(self.csrc, list(changes.values())))
        if not complaint:
            return {}
        if len(changes) == 1:
            return dict.fromkeys(changes, complaint)
        items = list(changes.items())
        half = len(items) // 2
        return {**self.guilty(source, dict(items[:half])), **self.guilty(source, dict(items[half:]))}


def checker(device: str, home: Path) -> Checker:
    """Of ``csrc/`` as it is compiled for ``device``; no GPU and no CUDA build of torch is needed. Raises BuildError."""
    extra = "-fsyntax-only" if device == "cpu" else "-fsyntax-only -DKDTREE_CUDA -DUSE_CUDA"

    def no_code(command: Command) -> Command:
        return lambda source, out: f"{command(source, out)} {extra}"

    workshop = Workshop("cpu", home)
    commands = {source: no_code(command) for source, command in workshop.commands().items()}
    if device == "cuda":
        commands |= dict.fromkeys((path.relative_to(CSRC) for path in sorted((CSRC / "cuda").glob("*.cu"))), _nvcc())
    return Checker(commands, home / "objects", folder=workshop.folder)


def _nvcc() -> Command:
    nvcc, _ = environment.nvcc()
    if not nvcc:
        raise toolchain.BuildError("no nvcc: install the CUDA toolkit 13 and put nvcc on PATH, or set CUDA_HOME")
    number = toolchain.specific(ARCH).replace(".", "")
    flags = [*build._flags("cuda", False, None)["cuda"], f"-gencode=arch=compute_{number},code=compute_{number}"]
    return lambda source, out: f"{shlex.join([nvcc, *flags])} -ptx -Xcicc -O0 {source} -o {out}"


def broken(faults: Sequence[Fault], checker: Checker, say: Say) -> dict[str, str]:
    """The faults that cannot be planted or do not compile, by name, and why; each source is told of as it is done."""
    found: dict[str, str] = {}
    changes: dict[str, Hunks] = {}
    for fault in faults:
        try:
            changes[fault.name] = hunks(fault, checker.csrc)
        except CatalogueError as error:
            found[fault.name] = str(error)
    reach = {source: {str(path) for path in closure(checker.csrc, [source])} for source in checker.commands}
    work = []
    for batch in batches(changes):
        for source, files in reach.items():
            here = {name: changes[name] for name in batch if not files.isdisjoint(changes[name])}
            if here:
                work.append((source, here))
    reached = {name for _, here in work for name in here}
    unread = [name for name, files in changes.items() if files and name not in reached]
    found |= dict.fromkeys(unread, "no source that is compiled reads what it edits")
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, ((source, here), guilty) in enumerate(
            zip(work, pool.map(lambda job: checker.guilty(*job), work), strict=True), 1
        ):
            for name, complaint in guilty.items():
                found.setdefault(name, complaint)
            said = f": {', '.join(guilty)} not" if guilty else ""
            say(f"[{done:3d}/{len(work)}] {source} compiles with {len(here)} faults{said}")
    return found
