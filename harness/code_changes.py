"""Which kernels' machine code differs between a commit's ``csrc/`` and this checkout's: what a refactoring must not do.

Guarantees: kernels are compared by all that the device sees of them (``harness/cubin.py``), byte for byte; lines and
names of files do not count, nor does where a kernel stands. Both trees are compiled with this checkout's flags. A
source that reads the same files, or the same text once preprocessed, is not compiled, and one that is compiled to the
same PTX not assembled, since of the same PTX ptxas makes the same code. What was made is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness import cubin, environment, includes, machine_code, toolchain
from harness.files import write_atomic
from harness.sources import git_environment

Parts = Mapping[str, bytes]
"""Of a kernel, by name."""
Kernels = Mapping[tuple[str, str], Parts]
"""By source and mangled name."""


class CannotCompare(Exception):
    """There is nothing to compare with; the message says why."""


@dataclass(frozen=True)
class Change:
    """A kernel that is not what it was on one architecture."""

    what: str
    """``differs``, ``new``, ``gone``; or ``moved``: the same code under another name or in another source."""
    file: str
    arch: str
    name: str
    detail: str


def _instruction(disassembler: str, arch: str, code: bytes, at: int) -> str:
    """As the disassembler prints it, ``""`` without one."""
    if not disassembler or at >= len(code):
        return ""
    with tempfile.NamedTemporaryFile(suffix=".bin") as raw:
        raw.write(code)
        raw.flush()
        command = [disassembler, "-b", f"SM{toolchain.specific(arch).replace('.', '')}", raw.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = machine_code.kernels(f"Function : code\n{done.stdout}")["code"]
    return next((line.text for line in lines if line.address == at), "")


def _difference(before: Parts, after: Parts, arch: str, disassembler: str) -> str:
    """What of a kernel differs, in words."""
    said = []
    old, new = before.get(cubin.CODE, b""), after.get(cubin.CODE, b"")
    if old != new:
        size = cubin.INSTRUCTION
        first = next(i for i in range(0, max(len(old), len(new)), size) if old[i : i + size] != new[i : i + size])
        count = f"{len(new) // size} instructions" + ("" if len(old) == len(new) else f", were {len(old) // size}")
        texts = [_instruction(disassembler, arch, code, first) for code in (new, old)]
        shown = f": {texts[0] or 'none'}, was {texts[1] or 'none'}" if any(texts) else ""
        said.append(f"{count}; the first that differs is at 0x{first:04x}{shown}")
    for name in sorted((before.keys() | after.keys()) - {cubin.CODE}):
        if before.get(name) == after.get(name):
            continue
        if name == cubin.REGISTERS:
            now, was = (int.from_bytes(parts.get(name, b""), "little") for parts in (after, before))
            said.append(f"{now} registers, were {was}")
        else:
            said.append(f"{name} differs")
    return "; ".join(said)


def compare(before: Kernels, after: Kernels, arch: str, disassembler: str = "") -> list[Change]:
    """The kernels that differ on one architecture, by source and name."""
    found = [
        Change("differs", file, arch, name, _difference(before[file, name], parts, arch, disassembler))
        for (file, name), parts in after.items()
        if (file, name) in before and before[file, name] != parts
    ]
    gone = {key: parts for key, parts in before.items() if key not in after}
    for (file, name), parts in sorted(after.items()):
        if (file, name) in before:
            continue
        # A kernel of the same name in another source is the same kernel; of another name, one of the same code is.
        was = next((key for key in gone if key[1] == name), None)
        was = was or next((key for key, old in gone.items() if old == parts), None)
        if was is None:
            found.append(Change("new", file, arch, name, ""))
        elif (old := gone.pop(was)) == parts:
            found.append(Change("moved", file, arch, name, f"was {was[1]} in {was[0]}"))
        else:
            detail = _difference(old, parts, arch, disassembler)
            found.append(Change("differs", file, arch, name, f"was in {was[0]}; {detail}"))
    found += [Change("gone", file, arch, name, "") for file, name in gone]
    return sorted(found, key=lambda change: (change.file, change.name))


@dataclass(frozen=True)
class Trees:
    """A commit's sources, laid out in a folder, and this checkout's, with the compiler for both."""

    before: Path
    after: Path
    nvcc: str
    version: str
    flags: Mapping[str, Sequence[str]]
    """By architecture."""
    cache: Path

    def sources(self, root: Path) -> set[str]:
        return {path.name for path in (root / "csrc" / "cuda").glob("*.cu")}

    def _read(self, root: Path, source: str) -> list[tuple[Path, bytes]]:
        """All that a source reads of its tree."""
        files = includes.closure(root, [Path("csrc/cuda") / source])
        return [(path, (root / path).read_bytes()) for path in files]

    def changed(self) -> list[str]:
        """The sources that read other files than they did, those of one tree alone included."""
        before, after = self.sources(self.before), self.sources(self.after)
        both = {s for s in before & after if self._read(self.before, s) != self._read(self.after, s)}
        return sorted(both | (before ^ after))

    def _run(self, root: Path, source: str, arch: str, *more: str) -> bytes:
        command = [self.nvcc, *self.flags[arch], *more, str(Path("csrc/cuda") / source)]
        done = subprocess.run(command, cwd=root, capture_output=True, check=False)
        if done.returncode != 0:
            whose = "this checkout's" if root == self.after else "the commit's"
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
            raise CannotCompare(f"{whose} {source} does not compile for {arch}:\n{said[:2000]}")
        return done.stdout

    def _text(self, root: Path, source: str, arch: str) -> bytes:
        """The preprocessed source without the places that its lines come from."""
        lines = self._run(root, source, arch, "-E").splitlines()
        return b"\n".join(line for line in lines if line.strip() and not re.match(rb"# \d+ ", line))

    def _kept(self, source: str, arch: str, text: bytes, suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps([self.version, list(self.flags[arch])]).encode() + text).hexdigest()
        return self.cache / f"{source.removesuffix('.cu')}-{digest[:24]}.{suffix}"

    def _made(self, root: Path, source: str, arch: str, stage: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            self._run(root, source, arch, stage, "-o", str(out))
            return out.read_bytes()

    def _ptx(self, root: Path, source: str, arch: str, text: bytes) -> bytes:
        """A hash of the PTX without lines, comments, debug sections, and the names that only this tree has."""
        kept = self._kept(source, arch, text, "ptx")
        if not kept.exists():
            code = self._made(root, source, arch, "-ptx").decode().split("\n\t.section", 1)[0]
            lines = [
                line for line in code.splitlines() if not re.match(r"\s*(\.loc\b|\.file\b|//|\$L__tmp)|\s*$", line)
            ]
            write_atomic(kept, hashlib.sha256(cubin.plain("\n".join(lines)).encode()).digest())
        return kept.read_bytes()

    def _kernels(self, root: Path, source: str, arch: str, text: bytes) -> Kernels:
        kept = self._kept(source, arch, text, "cubin.z")
        if not kept.exists():
            write_atomic(kept, zlib.compress(self._made(root, source, arch, "-cubin")))
        return {(source, name): parts for name, parts in cubin.kernels(zlib.decompress(kept.read_bytes())).items()}

    def kernels(self, source: str, arch: str) -> tuple[Kernels, Kernels]:
        """What a source's kernels were and are; nothing of either where they are made from the same text or PTX."""
        roots = [root for root in (self.before, self.after) if source in self.sources(root)]
        texts = [self._text(root, source, arch) for root in roots]
        if len(texts) == 2 and texts[0] == texts[1]:
            return {}, {}
        pairs = list(zip(roots, texts, strict=True))
        if len(pairs) == 2 and len({self._ptx(root, source, arch, text) for root, text in pairs}) == 1:
            return {}, {}
        made = {root: self._kernels(root, source, arch, text) for root, text in pairs}
        return made.get(self.before, {}), made.get(self.after, {})


def _lay_out(root: Path, commit: str, folder: Path) -> None:
    """A commit's ``csrc/`` in a folder. Raises CannotCompare."""
    command = ["git", "archive", "--format=zip", commit, "--", "csrc"]
    try:
        done = subprocess.run(command, cwd=root, env=git_environment(), capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompare(f"--against {commit}: git does not run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CannotCompare(
            f"--against {commit}: not a commit of this checkout that has csrc/ ({said[-1] if said else 'git failed'});"
            " name one that `git log` shows, such as HEAD or main"
        )
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)


@dataclass(frozen=True)
class Compared:
    """What was found, and among how many."""

    changes: list[Change]
    sources: int
    """That read other files than they did."""
    kernels: int
    """Of these sources, those apart that read the same once preprocessed."""


def against(
    commit: str,
    root: Path,
    nvcc: tuple[str, str],
    flags: Mapping[str, Sequence[str]],
    cache: Path,
    disassembler: str = "",
) -> Compared:
    """The checkout ``root`` beside a commit of it; ``nvcc``: path and version; flags by architecture.

    Raises CannotCompare.
    """
    with tempfile.TemporaryDirectory() as folder:
        _lay_out(root, commit, Path(folder))
        trees = Trees(Path(folder), root, *nvcc, flags, cache)
        sources = trees.changed()
        todo = [(source, arch) for source in sources for arch in flags]

        def one(task: tuple[str, str]) -> tuple[Kernels, Kernels]:
            made = trees.kernels(*task)
            said = "compared" if any(made) else "reads the same"
            print(f"{task[0]} for {task[1]}: {said}", file=sys.stderr, flush=True)
            return made

        with ThreadPoolExecutor(environment.processors()) as pool:
            results = list(zip(todo, pool.map(one, todo), strict=True))
    changes, count = [], 0
    for arch in flags:
        before: dict[tuple[str, str], Parts] = {}
        after: dict[tuple[str, str], Parts] = {}
        for (_, made_for), (old, new) in results:
            if made_for == arch:
                before.update(old)
                after.update(new)
        changes += compare(before, after, arch, disassembler)
        count += len(after)
    return Compared(changes, len(sources), count)
