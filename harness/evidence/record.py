"""The folder that a run leaves: records named as they are committed, the summary, the logs; each whole at any time.

What cannot be written, on a full disk say, is kept and tried again with whatever is written next.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import plain_json
from harness.bundle_lock import read_lock
from harness.environment import environment, survey
from harness.evidence.counts import COUNTS, shows
from harness.evidence.running import Running
from harness.evidence.schedule import FAILED, PASSED
from harness.evidence.stages import Stage
from harness.files import said, write_atomic
from harness.ledger import timestamp
from harness.ledger_format import LedgerError
from harness.sources import ROOT, Sources

SCHEMA = 1
LOGS = "logs.tar"
TAIL = 15  # lines of its output that tell of a stage that did not pass


class EvidenceError(Exception):
    """A run's folder cannot be used: ``FILE: reason``."""


def window(sources: Sources) -> dict[str, Any]:
    """What stages of one run on one machine have in common."""
    about = environment()
    kept = ("driver", "torch", "cuda", "nvcc", "python", "numpy", "compiler", "cpu", "cpus", "os")
    return {
        "started": timestamp(),
        "commit": sources.commit,
        "dirty": list(sources.dirty),
        "harness": sources.harness,
        "gpus": [gpu.name for gpu in survey().gpus],
        **{name: about[name] for name in kept},
        "problems": [],
    }


def blank(device: str, sources: Sources) -> dict[str, Any]:
    """A summary without windows and stages."""
    return {
        "schema": SCHEMA, "device": device, "engine": sources.engine, "lock": sources.lock, "bundles": _pinned(),
        "windows": [], "stages": {},
    }  # fmt: skip


def _pinned() -> dict[str, str]:
    """Every bundle's SHA-256."""
    return {name: str(pin["sha256"]) for name, pin in read_lock().items()}


def earlier(path: Path, device: str, sources: Sources, known: Mapping[str, Stage]) -> dict[str, Any]:
    """The summary of an earlier window, to go on with. Raises EvidenceError unless engine and bundles are the same.

    Bundles that came since are no obstacle, but what runs every cell has then not run all.
    """
    try:
        summary = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise EvidenceError(f"{said(error)}; --resume names the folder of an earlier run") from error
    except ValueError as error:
        raise EvidenceError(f"{path}: not JSON: {error}") from error
    if not isinstance(summary, dict) or summary.get("schema") != SCHEMA:
        raise EvidenceError(f"{path}: schema: not a summary of `kdtree evidence`, so nothing can go on with it")
    windows, stages = summary.get("windows"), summary.get("stages")
    told = stages.values() if isinstance(stages, dict) and isinstance(windows, list) else [None]
    if not all(isinstance(one, dict) and "status" in one for one in told):
        raise EvidenceError(
            f"{path}: windows or stages: not as `kdtree evidence` writes them; leave out --resume, and all stages run"
            " again"
        )
    mixed = "records of two are not mixed: leave out --resume, and all stages run again"
    for field, value in {"device": device, "engine": sources.engine}.items():
        if summary.get(field) != value:
            raise EvidenceError(f"{path}: {field}: {summary.get(field)} there, {value} here; {mixed}")
    pinned, bundles = _pinned(), summary.get("bundles")
    before = bundles if isinstance(bundles, dict) else {}
    if others := sorted(name for name, sha in before.items() if pinned.get(name) != sha):
        raise EvidenceError(f"{path}: bundles: {', '.join(others)}: not as they are pinned here; {mixed}")
    if not before:
        raise EvidenceError(f"{path}: bundles: does not tell which there were; {mixed}")
    if new := sorted(pinned.keys() - before.keys()):
        for name, found in summary["stages"].items():
            if name in known and known[name].every_cell and found["status"] == PASSED:
                found["status"] = f"without {', '.join(new)}"
    return {**summary, "lock": sources.lock, "bundles": pinned}


def status_of(running: Running) -> str:
    """In words: why it was told to end, or how it ended by itself."""
    code = running.process.poll()
    if running.why:
        return running.why
    return PASSED if code == 0 else FAILED


def entry(running: Running, number: int) -> dict[str, Any]:
    """What the summary says of a stage that has ended. One that says it is well and has nothing to show has failed."""
    stage, status = running.stage, status_of(running)
    counts = counted(stage, running.log) if stage.counts else {}
    if status == PASSED and stage.counts and not shows(counts):
        status = FAILED
    found: dict[str, Any] = {"status": status, "window": number, "seconds": round(running.seconds, 1)}
    found["command"] = " ".join(stage.command)
    if stage.environment:
        found["environment"] = dict(stage.environment)
    if status == FAILED:
        found["exit status"] = running.process.returncode
    if stage.counts:
        found["counts"] = counts
    if stage.record and stage.made and (ROOT / stage.made).is_file():
        found["record"] = stage.record
    if status != PASSED:
        found["said"] = tail(running.log)
    return found


def counted(stage: Stage, log: Path) -> dict[str, Any]:
    """The counts of a stage's own record, or why there are none."""
    path = ROOT / stage.made if stage.made else log
    try:
        return COUNTS[stage.counts](path.read_bytes())
    except FileNotFoundError:
        return {"none": "it wrote no record"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, LedgerError) as error:
        return {"none": f"its record cannot be read: {type(error).__name__}: {error}"}


def tail(log: Path) -> list[str]:
    """The last lines of an output, without this machine's folders."""
    text = log.read_bytes()[-20000:].decode("utf-8", "replace")
    for folder, word in sorted({str(ROOT): ".", sys.prefix: "PYTHON"}.items(), key=lambda one: -len(one[0])):
        text = text.replace(folder, word)  # the longer one first: either may lie in the other
    lines = text.splitlines()
    return [line[:200] for line in lines if line.strip()][-TAIL:]


class Folder:
    """Where evidence goes: ``out``, and all that is in it as one file ``tar`` where one is asked for."""

    def __init__(self, out: Path, tar: Path | None) -> None:
        self.out, self.tar = out, tar
        self.problems: list[str] = []
        self._files: dict[str, bytes] = {}
        self._pending: set[str] = set()
        self._tar_is_old = tar is not None
        self._logs: dict[str, bytes] = {}

    def take(self, folder: Path, summary: Mapping[str, Any]) -> None:
        """Records and logs of an earlier window, as its summary names them. Raises EvidenceError."""
        try:
            for found in summary["stages"].values():
                name = found.get("record")
                if name and (found["status"] == PASSED or (folder / name).is_file()):
                    self.put(name, (folder / name).read_bytes())
            if (folder / LOGS).is_file():
                with tarfile.open(folder / LOGS, "r:") as archive:
                    held = {about.name: archive.extractfile(about) for about in archive.getmembers()}
                    self._logs |= {name: file.read() for name, file in held.items() if file}
                self.put(LOGS, _tar(self._logs))
        except (OSError, tarfile.TarError) as error:
            reason = said(error) if isinstance(error, OSError) and error.filename else f"{folder / LOGS}: {error}"
            raise EvidenceError(f"{reason}; the earlier run's summary tells of it") from error

    def held(self, name: str) -> bytes | None:
        """A record as it was last put, or None."""
        return self._files.get(name)

    def log(self, name: str, path: Path) -> None:
        """Add a stage's output, compressed, to the logs."""
        self._logs[f"{name}.log.gz"] = gzip.compress(path.read_bytes(), mtime=0)
        self.put(LOGS, _tar(self._logs))

    def record(self, stage: Stage) -> bool:
        """Take over what a stage has made, as far as it has come; whether there is something."""
        if not (stage.record and stage.made and (ROOT / stage.made).is_file()):
            return False
        self.put(stage.record, (ROOT / stage.made).read_bytes())
        return True

    def summary(self, name: str, content: Mapping[str, Any]) -> None:
        """Write the summary, and all as one file."""
        self.put(name, (plain_json.text(content) + "\n").encode())
        self.write()
        if self.tar:
            self._tar_is_old = True
            try:
                write_atomic(self.tar, gzip.compress(_tar(self._files), 6, mtime=0))
                self._tar_is_old = False
            except OSError as error:
                self.problems.append(f"{self.tar.name}: {error.strerror}")

    def put(self, name: str, data: bytes) -> None:
        """To be written."""
        if self._files.get(name) != data:
            self._files[name] = data
            self._pending.add(name)

    @property
    def unwritten(self) -> list[str]:
        """Names of what is not on the disk as it should be."""
        return sorted(self._pending) + ([str(self.tar)] if self._tar_is_old else [])

    def write(self) -> None:
        """Write whatever is not written yet; ``problems`` says what cannot be."""
        self.problems = []
        for name in sorted(self._pending):
            try:
                write_atomic(self.out / name, self._files[name])
                self._pending.discard(name)
            except OSError as error:
                self.problems.append(f"{name}: {error.strerror}")


def _tar(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return held.getvalue()
