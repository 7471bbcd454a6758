"""What is kept of a stage that has ended and of an earlier run, without running one."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.evidence import record
from harness.evidence.record import EvidenceError, Folder, earlier, entry, tail
from harness.evidence.stages import Stage
from tests.harness.records import SOURCES

SHOWN = '[{"how": {"t": "noticed"}, "not_built": ""}]'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("a\n\nlast words\n")
    return path


def ended(log: Path, code: int, why: str = "", **fields: Any) -> dict[str, Any]:
    """The entry of a stage that ran 1.26 s in the third window."""
    process = SimpleNamespace(poll=lambda: code, returncode=code)
    running: Any = SimpleNamespace(
        process=process, why=why, log=log, seconds=1.26, stage=Stage(("python", "x"), 9, **fields)
    )
    return entry(running, 2)


def test_a_stage_says_what_it_is_and_no_more(log: Path, tmp_path: Path) -> None:
    plain = {"window": 2, "seconds": 1.3, "command": "python x"}
    said = {"said": ["a", "last words"]}
    assert ended(log, 0) == {"status": "passed", **plain}
    assert ended(log, 5) == {"status": "failed", **plain, "exit status": 5, **said}
    assert ended(log, 0, "out of time") == {"status": "out of time", **plain, **said}
    assert ended(log, -2, "interrupted") == {"status": "interrupted", **plain, **said}
    assert ended(log, 0, environment={"A": "1"}) == {"status": "passed", **plain, "environment": {"A": "1"}}
    made = tmp_path / "made.json"
    fields = {"counts": "broken", "made": made, "record": "broken.json"}
    none = {"counts": {"none": "it wrote no record"}}
    assert ended(log, 0, **fields) == {"status": "failed", **plain, "exit status": 0, **none, **said}
    assert ended(log, 0, "out of time", **fields) == {"status": "out of time", **plain, **none, **said}
    made.write_text(SHOWN)
    counts = {"counts": {"breaks": 1, "noticed": 1, "not built": 0}}
    assert ended(log, 0, **fields) == {"status": "passed", **plain, **counts, "record": "broken.json"}
    assert ended(log, 1, **fields)["record"] == "broken.json", "what it had come to"
    assert "record" not in ended(log, 0, counts="broken", made=made)
    assert "record" not in ended(log, 0, record="broken.json")


@pytest.mark.parametrize(("root", "prefix"), [("/a/kd", "/b/py"), ("/a/kd", "/a/kd/.nox/test"), ("/x/kd", "/x")])
def test_the_last_words_have_no_folders_of_this_machine(
    tmp_path: Path, root: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ROOT", Path(root))
    monkeypatch.setattr(sys, "prefix", prefix)
    path = tmp_path / "log"
    lines = [f"line {i}" for i in range(30)]
    path.write_text("\n".join([*lines, "", "  ", f"{root}/a {prefix}/b", "x" * 300]))
    assert tail(path) == [*lines[17:], "./a PYTHON/b", "x" * 200]
    path.write_bytes(b"y" * 30000 + b"\n\xff")
    assert tail(path) == ["y" * 200, "\ufffd"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--resume names the folder of an earlier run"),
        ("{", "not JSON"),
        ("[]", "schema: not a summary"),
        ('{"schema": 2}', "schema: not a summary"),
        ('{"schema": 1}', "windows or stages: not as"),
        ('{"schema": 1, "windows": [], "stages": {"a": {}}}', "windows or stages: not as"),
        ('{"schema": 1, "windows": [], "stages": {}}', "device: None there, h200 here"),
    ],
)
def test_an_earlier_run_that_cannot_be_gone_on_with(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EvidenceError, match=said):
        earlier(path, "h200", SOURCES, {})


def test_a_folder_takes_over_records_and_logs(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    log = tmp_path / "log"
    log.write_text("words")
    for folder in (first, second):
        folder.mkdir()
    out = Folder(first, None)
    out.put("a.json", b"1")
    out.log("a", log)
    out.summary("run.json", record.blank("h200", SOURCES))
    assert (out.unwritten, out.problems) == ([], [])
    summary: dict[str, Any] = {"stages": {"a": {"status": "passed", "record": "a.json"}, "b": {"status": "passed"}}}
    tar = tmp_path / "all.tar.gz"
    other = Folder(second, tar)
    assert other.unwritten == [str(tar)]
    other.take(first, summary)
    assert (other.held("a.json"), other.held("b.json")) == (b"1", None)
    assert other.unwritten == ["a.json", "logs.tar", str(tar)]
    bare = tmp_path / "bare"
    bare.mkdir()
    Folder(bare, None).take(bare, {"stages": {}})  # of a run that had no logs yet
    log.write_text("more")
    other.log("b", log)
    assert other.unwritten == ["a.json", "logs.tar", str(tar)]
    other.summary("run.json", summary)
    assert (other.unwritten, other.problems) == ([], [])
    with tarfile.open(second / "logs.tar") as archive:
        held = {one.name: archive.extractfile(one) for one in archive.getmembers()}
        assert {name: gzip.decompress(file.read()) for name, file in held.items() if file} == {
            "a.log.gz": b"words", "b.log.gz": b"more",
        }  # fmt: skip
    with tarfile.open(tar) as archive:
        assert sorted(archive.getnames()) == ["a.json", "logs.tar", "run.json"]
    assert json.loads((second / "run.json").read_text()) == summary
    summary["stages"]["b"]["record"] = "gone.json"
    with pytest.raises(
        EvidenceError, match=rf"^{first}/gone\.json: No such file.*the earlier run's summary tells of it"
    ):
        Folder(second, None).take(first, summary)
    (first / "logs.tar").write_bytes(b"no archive")
    with pytest.raises(EvidenceError, match=r"logs\.tar: .*the earlier run's summary tells of it"):
        Folder(second, None).take(first, {"stages": {}})


def test_what_cannot_be_written_stays_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"a.json", "all.tar.gz"}
    whole = record.write_atomic

    def write(path: Path, data: bytes) -> None:
        if path.name in full:
            raise OSError(28, "No space left on device", str(path))
        whole(path, data)

    monkeypatch.setattr(record, "write_atomic", write)
    tar = tmp_path / "all.tar.gz"
    folder = Folder(tmp_path, tar)
    folder.put("a.json", b"1")
    folder.put("b.json", b"2")
    folder.summary("run.json", {})
    assert folder.problems == ["a.json: No space left on device", "all.tar.gz: No space left on device"]
    assert folder.unwritten == ["a.json", str(tar)]
    assert {path.name for path in tmp_path.iterdir()} == {"b.json", "run.json"}
    full.clear()
    folder.put("b.json", b"2")
    folder.summary("run.json", {})
    assert (folder.problems, folder.unwritten) == ([], [])
    assert (tmp_path / "a.json").read_bytes() == b"1"
    full.add("all.tar.gz")
    folder.summary("run.json", {"more": 1})
    assert folder.unwritten == [str(tar)], "there it is the one before"


def test_a_stage_s_record_is_taken_as_far_as_it_has_come(tmp_path: Path) -> None:
    made, folder = tmp_path / "made", Folder(tmp_path, None)
    assert not folder.record(Stage((), 1, made=made, record="a.json"))
    made.write_text("half")
    assert not folder.record(Stage((), 1, made=made))
    assert folder.record(Stage((), 1, made=made, record="a.json"))
    assert folder.held("a.json") == b"half"
