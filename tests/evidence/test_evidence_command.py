"""`kdtree evidence` over stages of one line: what is in OUT, whatever becomes of a stage, of the run, of the disk."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import cli, files
from harness.evidence import command, record, running, window
from harness.evidence.record import LOGS
from harness.evidence.schedule import NO_TIME
from harness.evidence.stages import FAULTS_RECORD, Stage, stages, with_faults_left
from harness.gpu import Gpu, Survey
from harness.mutants.catalogue import load
from tests import processes
from tests.harness.records import SOURCES
from tests.waiting import PATIENCE

H200 = Survey((Gpu(0, "GPU-0", "NVIDIA H200", (9, 0), 1 << 37, 1 << 37),), "", "13.0")
SUMMARY = "cuda-h200-run.json"
Go = Callable[..., int]


def python(code: str) -> tuple[str, ...]:
    return ("python", "-Sc", code)


def makes(path: Path, text: str, then: str = "pass") -> tuple[str, ...]:
    return python(f"import time; open({str(path)!r}, 'w').write({text!r}); print('made', flush=True); {then}")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Stage]:
    """What runs in place of the real stages; a test may add some."""
    found: dict[str, Stage] = {}
    monkeypatch.setattr(command, "stages", lambda device, gpus: dict(found))
    monkeypatch.setattr(command, "survey", lambda: H200)
    monkeypatch.setattr(window, "describe", lambda: SOURCES)
    monkeypatch.setattr(window, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(window, "TICK", 0.01)
    monkeypatch.setattr(running, "GRACE", 0.3)
    monkeypatch.setattr(running, "LEFT_BEHIND", 0.1)
    return found


@pytest.fixture
def go(tmp_path: Path, known: dict[str, Stage]) -> Go:
    return lambda *words: command.main([str(tmp_path / "out"), *words])


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return tmp_path / "scratch" / "made.json"


def summary(tmp_path: Path, name: str = SUMMARY) -> Any:
    return json.loads((tmp_path / "out" / name).read_text())


def statuses(tmp_path: Path) -> dict[str, str]:
    return {name: found["status"] for name, found in summary(tmp_path)["stages"].items()}


def log(tmp_path: Path, name: str) -> str:
    with tarfile.open(tmp_path / "out" / LOGS) as archive:
        held = archive.extractfile(f"{name}.log.gz")
        assert held
        return gzip.decompress(held.read()).decode()


def test_each_stage_leaves_its_record_its_counts_and_its_output(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"name": "a", "group": "cuda", "caught_by": "cell: check", "operation_named": True}
    text = json.dumps([line, {**line, "name": "b", "caught_by": "", "operation_named": None}])
    known["faults"] = Stage(makes(made, text), 9, "faults", made, "mutants-cuda.json")
    known["fails"] = Stage(python("print('why'); raise SystemExit(5)"), 9, environment={"TOLD": "1"})
    known["told"] = Stage(python("import os; assert 'TOLD' not in os.environ"), 9)
    known["after"] = Stage(python("pass"), 9, needs=("fails",))
    assert go() == 1
    found = summary(tmp_path)
    assert statuses(tmp_path) == {
        "faults": "passed", "fails": "failed", "told": "passed", "after": "not started: fails failed",
    }  # fmt: skip
    assert (tmp_path / "out" / "mutants-cuda.json").read_text() == text
    assert found["stages"]["faults"]["record"] == "mutants-cuda.json"
    counted = found["stages"]["faults"]["counts"]
    assert (counted["faults"], counted["caught"], counted["operation named"], counted["named"]) == (2, 1, 1, ["b"])
    assert (found["stages"]["fails"]["exit status"], found["stages"]["fails"]["said"]) == (5, ["why"])
    assert found["stages"]["fails"]["environment"] == {"TOLD": "1"}
    assert log(tmp_path, "fails") == "why\n"
    mine = found["windows"][0]
    assert (found["engine"], mine["commit"], mine["dirty"]) == (SOURCES.engine, SOURCES.commit, list(SOURCES.dirty))
    assert set(os.listdir(tmp_path / "out")) == {SUMMARY, LOGS, "mutants-cuda.json"}
    said = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 120 for line in said)
    assert [line.split()[0] for line in said[-5:]] == ["faults", "fails", "told", "after", "summary:"]


def test_what_ends_well_and_shows_nothing_has_failed(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path
) -> None:
    skipped = '<testsuites><testsuite errors="0" failures="0" skipped="6" tests="6"/></testsuites>'
    known["tests"] = Stage(makes(made, skipped), 9, "tests", made)
    known["cells"] = Stage(python("pass"), 9, "cells", made.with_name("none"), "ledger.json")
    known["mute"] = Stage(python("print('operations: 1.0 s')"), 9, "sanitizer")
    known["heard"] = Stage(python("print('operations: 1.0 s'); print('ERROR SUMMARY: 0 errors')"), 9, "sanitizer")
    assert go() == 1
    assert statuses(tmp_path) == {"tests": "failed", "cells": "failed", "mute": "failed", "heard": "passed"}
    assert summary(tmp_path)["stages"]["tests"]["exit status"] == 0


def test_what_a_stage_made_is_in_out_as_the_next_one_runs(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path
) -> None:
    out = tmp_path / "out"
    looks = f"import json; found = json.load(open({str(out / SUMMARY)!r}))['stages']; print(found['first']['status'], "
    looks += f"found['looks']['status'], open({str(out / 'record.json')!r}).read())"
    known["first"] = Stage(makes(made, "{}"), 9, made=made, record="record.json")
    known["looks"] = Stage(python(looks), 9)
    packed = tmp_path / "elsewhere" / "all.tar.gz"
    assert go("--tar", str(packed)) == 0
    assert log(tmp_path, "looks").split() == ["passed", "waiting", "{}"] or log(tmp_path, "looks").split() == [
        "passed", "running", "{}",
    ]  # fmt: skip
    with tarfile.open(packed) as archive:
        assert set(archive.getnames()) == set(os.listdir(out))
        held = archive.extractfile(SUMMARY)
        assert held
        assert json.loads(held.read()) == summary(tmp_path)


ORPHAN = """
import os, subprocess, sys, time, signal
inner = "import os, signal, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); " \\
        "open(sys.argv[1], 'w').write(str(os.getpid())); print('deep', flush=True); time.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-Sc', {inner!r}, sys.argv[1]], " \\
         "start_new_session=True)"
subprocess.run([sys.executable, "-Sc", middle, sys.argv[1]], start_new_session=True)
while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]): time.sleep(0.01)
"""
STAYS = "open(sys.argv[2], 'w').close(); time.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("pass", "passed"),
        (STAYS, "out of time"),
        (f"signal.signal(signal.SIGINT, signal.SIG_IGN); {STAYS}", "out of time"),
    ],
    ids=["ended", "heeds", "ignores"],
)
def test_a_stage_ends_with_all_that_it_started(
    tmp_path: Path, known: dict[str, Stage], go: Go, monkeypatch: pytest.MonkeyPatch, then: str, status: str
) -> None:
    """A grandchild in another session, its parents gone, deaf to SIGINT; the stage itself is told at its limit."""
    file, stays = tmp_path / "pid", tmp_path / "stays"
    monkeypatch.setattr(
        Stage, "limit", property(lambda stage: 0.0 if stays.exists() and str(stays) in stage.command else PATIENCE)
    )
    known["orphan"] = Stage((*python(ORPHAN + then), str(file), str(stays)), 9)
    known["other"] = Stage(python("pass"), 9)
    began = time.monotonic()
    assert go() == (0 if status == "passed" else 2)
    assert statuses(tmp_path) == {"orphan": status, "other": "passed"}
    assert not processes.alive(int(file.read_text()))
    assert time.monotonic() - began < 2 * PATIENCE


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_what_had_ended_is_kept(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, number: int
) -> None:
    known["first"] = Stage(makes(made, "{}"), 9, made=made, record="record.json")
    known["asks"] = Stage(("sh", "-c", f"kill -{int(number)} $PPID; sleep 600"), 9)
    known["never"] = Stage(python("pass"), 9)
    before = signal.getsignal(number)
    assert go() == 2
    assert statuses(tmp_path) == {"first": "passed", "asks": "interrupted", "never": "not started: interrupted"}
    assert (tmp_path / "out" / "record.json").exists()
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_nothing_begins_that_would_not_end_within_the_budget(
    tmp_path: Path, known: dict[str, Stage], go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST", 1.0)
    monkeypatch.setattr(window, "SPARE", 0.1)
    monkeypatch.setattr(window, "ENDING", 0.5)
    known["short"] = Stage(python("pass"), 0.1)
    known["long"] = Stage(python("pass"), 90)
    known["hangs"] = Stage(python("import time; time.sleep(600)"), 0.2)
    began = time.monotonic()
    assert go("--budget", "4") == 2
    assert time.monotonic() - began < 20  # less than its own limit, which is 30 s
    assert statuses(tmp_path) == {"short": "passed", "long": "not started: no time left", "hangs": "out of time"}


@pytest.mark.slow
def test_what_runs_beside_stands_still_while_something_measures(
    tmp_path: Path, known: dict[str, Stage], go: Go
) -> None:
    ticks, enough = tmp_path / "ticks", tmp_path / "enough"
    counts = f"import os, time\nwhile not os.path.exists({str(enough)!r}):\n    "
    counts += f"open({str(ticks)!r}, 'a').write('x'); time.sleep(0.005)"
    measures = f"import os, time\nwhile not os.path.exists({str(ticks)!r}): time.sleep(0.01)\n"
    looks = f"def size(): return os.path.getsize({str(ticks)!r})\ntime.sleep(0.1); a = size(); time.sleep(0.3)\n"
    looks += "print(size() - a)"
    known["beside"] = Stage(python(counts), PATIENCE, beside=True)
    known["first"] = Stage(python(measures + looks), 9)
    known["quiet"] = Stage(python(f"{measures}{looks}\nopen({str(enough)!r}, 'w').close()"), 9, quiet=True)
    assert go() == 0
    assert int(log(tmp_path, "first")) > 0
    assert int(log(tmp_path, "quiet")) == 0
    assert statuses(tmp_path) == dict.fromkeys(("beside", "first", "quiet"), "passed"), "it goes on after it"


def test_a_second_window_goes_on_and_does_again_only_what_prepares(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path
) -> None:
    runs = tmp_path / "runs"

    def noted(name: str, then: str = "pass") -> tuple[str, ...]:
        return makes(made.with_name(name), name, f"open({str(runs)!r}, 'a').write({name!r} + ' '); {then}")

    known["build"] = Stage(noted("build"), 9, prepares=True)
    known["good"] = Stage(noted("good"), 9, made=made.with_name("good"), record="good.json", needs=("build",))
    known["bad"] = Stage(noted("bad", "raise SystemExit(1)"), 9, needs=("build",))
    assert go() == 1
    assert go() == 3  # OUT has a run already
    runs.write_text("")
    known["bad"] = Stage(noted("bad"), 9, needs=("build",))
    second = ["--resume", str(tmp_path / "out")]
    assert command.main([str(tmp_path / "second"), *second]) == 0
    assert runs.read_text().split() == ["build", "bad"]
    found = json.loads((tmp_path / "second" / SUMMARY).read_text())
    assert {name: (one["status"], one["window"]) for name, one in found["stages"].items()} == {
        "build": ("passed", 1), "good": ("passed", 0), "bad": ("passed", 1),
    }  # fmt: skip
    assert len(found["windows"]) == 2
    assert (tmp_path / "second" / "good.json").read_text() == "good"


def test_a_window_that_ended_with_its_machine_is_gone_on_with_from_what_it_had(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "KEEP_EVERY", 0.0)
    out, died, other = tmp_path / "out", tmp_path / "died", ["--only", "other"]
    until = f"while 'record' not in json.load(open({str(out / SUMMARY)!r}))['stages']['faults']: time.sleep(0.01)"
    part = made.with_suffix(".part")  # as `kdtree mutants` writes its record: a window may read it at any time
    code = f"import json, os, shutil, time\nopen({str(part)!r}, 'w').write('[]')\n"
    code += f"os.rename({str(part)!r}, {str(made)!r})\n{until}\n"
    code += f"shutil.copytree({str(out)!r}, {str(died)!r})"
    known["faults"] = Stage(python(code), PATIENCE, made=made, record="mutants-cuda.json")
    known["other"] = Stage(python("pass"), 9)
    assert go() == 0
    assert json.loads((died / SUMMARY).read_text())["stages"]["faults"]["status"] == "running"
    for before, after in ((died, "second"), (tmp_path / "second", "third")):
        assert command.main([str(tmp_path / after), "--resume", str(before), *other]) == 0
        assert (tmp_path / after / "mutants-cuda.json").read_text() == "[]"
    known["faults"] = Stage(python(f"print(open({str(made.with_name('mutants-cuda.json'))!r}).read())"), 9)
    assert command.main([str(out), "--resume", str(tmp_path / "third"), "--only", "faults"]) == 3, "an earlier run's"
    shutil.rmtree(out)
    assert command.main([str(out), "--resume", str(tmp_path / "third"), "--only", "faults"]) == 0
    assert log(tmp_path, "faults") == "[]\n"


def test_a_record_of_a_stage_that_did_not_pass_may_be_gone(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only records of stages that passed are kept with the documents; a window goes on from there."""
    known["good"] = Stage(makes(made, "1"), 9, made=made, record="good.json")
    late = made.with_name("late")
    known["late"] = Stage(makes(late, "2", "raise SystemExit(1)"), 9, made=late, record="late.json")
    assert go() == 1
    second = [str(tmp_path / "second"), "--resume", str(tmp_path / "out")]
    (tmp_path / "out" / "late.json").unlink()
    assert command.main(second) == 1, "it runs again, and fails again"
    assert {path.name for path in (tmp_path / "second").iterdir()} == {SUMMARY, LOGS, "good.json", "late.json"}
    (tmp_path / "out" / "good.json").unlink()
    capsys.readouterr()
    assert command.main([str(tmp_path / "third"), *second[1:]]) == 3
    assert "good.json" in capsys.readouterr().err


def test_what_is_left_of_the_faults_decides_whether_they_begin(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [fault for fault in load() if fault.device == "cuda"]
    same = {"device": "cuda", "caught_by": "x", "engine": SOURCES.engine}
    caught = [{"name": fault.name, "edits": fault.digest, **same} for fault in faults]
    wanted = 360.0
    known["faults"] = Stage(makes(made, json.dumps(caught[1:])), wanted, made=made, record=FAULTS_RECORD)
    assert go("--budget", "100") == 2
    assert statuses(tmp_path) == {"faults": NO_TIME}
    (tmp_path / "out" / FAULTS_RECORD).write_text(json.dumps(caught[1:]))
    second = ["--resume", str(tmp_path / "out"), "--budget", "100"]
    assert command.main([str(tmp_path / "second"), *second]) == 0
    (tmp_path / "out" / FAULTS_RECORD).write_text("[1]")
    assert command.main([str(tmp_path / "third"), *second]) == 3
    assert f"{FAULTS_RECORD}: not a record of `kdtree mutants --out`" in capsys.readouterr().err
    half = with_faults_left(stages("h200"), 0.5)
    assert (half["faults"].seconds, half["faults-build"].seconds) == (180, 110)
    assert with_faults_left(stages("h200"), 0)["faults"].seconds == 60


def test_a_stage_that_runs_is_told_of_by_its_last_line_that_is_not_indented(
    tmp_path: Path, known: dict[str, Stage], go: Go, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "TELL_EVERY", 0.0)
    waits = f"while not os.path.exists({str(tmp_path / 'told')!r}): time.sleep(0.01)"
    known["one"] = Stage(python(f"import os, time\nprint('case 1\\n    of peers', flush=True)\n{waits}"), PATIENCE)
    say = window.Window._say

    def noticed(run: window.Window, name: str, what: str) -> None:
        if "case 1" in what:
            (tmp_path / "told").touch()
        say(run, name, what)

    monkeypatch.setattr(window.Window, "_say", noticed)
    assert go() == 0
    assert "of peers" not in capsys.readouterr().out


def test_a_config_that_is_new_has_what_runs_every_cell_run_again(
    tmp_path: Path, known: dict[str, Stage], go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    known["cells"], known["one"] = Stage(python("pass"), 9, every_cell=True), Stage(python("pass"), 9)
    monkeypatch.setattr(record, "read_lock", lambda: {"tiny": {"sha256": "1"}})
    assert go() == 0
    monkeypatch.setattr(record, "read_lock", lambda: {"tiny": {"sha256": "1"}, "new": {"sha256": "2"}})
    assert go("--resume", str(tmp_path / "out")) == 0
    found = summary(tmp_path)
    assert {name: found["stages"][name]["window"] for name in ("cells", "one")} == {"cells": 1, "one": 0}
    assert found["bundles"] == {"tiny": "1", "new": "2"}
    monkeypatch.setattr(record, "read_lock", lambda: {"new": {"sha256": "2"}})
    assert go("--resume", str(tmp_path / "out")) == 3


@pytest.mark.parametrize("field", ["engine", "bundles", "device", "schema"])
def test_windows_of_two_engines_are_not_mixed(
    tmp_path: Path, known: dict[str, Stage], go: Go, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    known["one"] = Stage(python("pass"), 9)
    assert go() == 0
    path = tmp_path / "out" / SUMMARY
    path.write_text(json.dumps({**summary(tmp_path), field: "other"}))
    before = path.read_bytes()
    assert go("--resume", str(tmp_path / "out")) == 3
    assert f"{SUMMARY}: {field}: " in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_full_disk_is_told_and_tried_again(
    tmp_path: Path, known: dict[str, Stage], go: Go, made: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    known["first"] = Stage(makes(made, "{}"), 9, made=made, record="record.json")
    known["last"] = Stage(python("pass"), 9)
    room = [False] * 3

    def full(path: Path, data: bytes) -> None:
        if path.name == "record.json" and room:
            room.pop()
            raise OSError(28, "No space left on device", str(path))
        files.write_atomic(path, data)

    monkeypatch.setattr(record, "write_atomic", full)
    assert go() == 0
    assert (tmp_path / "out" / "record.json").read_text() == "{}"
    room[:] = [False] * 999
    assert command.main([str(tmp_path / "second")]) == 3
    assert "NOT WRITTEN, to be tried again: record.json: No space left on device" in capsys.readouterr().out
    found = json.loads((tmp_path / "second" / SUMMARY).read_text())
    assert found["windows"][0]["problems"] == ["record.json: No space left on device"]


def test_two_at_once_in_a_checkout_are_refused(
    tmp_path: Path, known: dict[str, Stage], go: Go, capsys: pytest.CaptureFixture[str]
) -> None:
    known["one"] = Stage(python("pass"), 9)
    with window.alone_here():
        assert go() == 3
    assert "another run is under way" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert go() == 0


def test_arguments_that_cannot_be_followed_are_told_before_anything_runs(
    tmp_path: Path, known: dict[str, Stage], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known["tests"] = Stage(python("pass"), 9)
    (tmp_path / "file").touch()
    for words, said in {
        (str(tmp_path / "o"), "--only", "tets"): "no stage tets; there are tests",
        (): "OUT is missing",
        (str(tmp_path / "o"), "--budget", "5"): "no number of seconds from 60 on",
        (str(tmp_path / "o"), "--resume", str(tmp_path)): "--resume names the folder of an earlier run",
        (str(tmp_path / "file"),): "OUT is a folder that can be made",
    }.items():
        assert cli.main(["evidence", *words]) == 3
        assert said in capsys.readouterr().err
    with monkeypatch.context() as read_only:
        read_only.setattr(window, "SCRATCH", tmp_path / "file" / "build" / "evidence")
        assert cli.main(["evidence", str(tmp_path / "o")]) == 3
        assert "run it in a checkout of your own" in capsys.readouterr().err
    monkeypatch.setattr(command, "survey", lambda: Survey((), "no driver", ""))
    assert cli.main(["evidence", str(tmp_path / "o")]) == 3
    assert "no GPU: no driver" in capsys.readouterr().err


def test_what_a_machine_lacks_is_told_and_does_not_keep_the_others(
    tmp_path: Path, known: dict[str, Stage], go: Go
) -> None:
    known["tool"] = Stage(python("pass"), 9, tool="no-such-program")
    known["package"] = Stage(python("pass"), 9, module="no_such_package", prepares=True)
    known["after"] = Stage(python("pass"), 9, after=("package",))
    known["two"] = Stage(python("pass"), 9, gpus=2)
    known["here"] = Stage(python("pass"), 9)
    assert go() == 2
    assert statuses(tmp_path) == {
        "tool": "not started: no-such-program is not on PATH",
        "package": "not started: the package no_such_package is not installed",
        "after": "passed",
        "two": "not chosen: it takes 2 GPUs",
        "here": "passed",
    }
    known.pop("tool"), known.pop("package"), known.pop("after")
    (tmp_path / "out" / SUMMARY).unlink()
    assert go() == 0


@pytest.mark.parametrize(
    ("states", "unwritten", "status"),
    [
        ({"tests": "passed", "build": "no longer needed"}, [], 0),
        ({"tests": "passed", "two": "not chosen: it takes 2 GPUs"}, [], 0),
        ({"tests": "passed"}, ["run.json"], 3),
        ({"tests": "failed", "build": "passed"}, [], 1),
        ({"tests": "failed", "build": "out of time"}, [], 1),
        ({"tests": "not started: build failed", "build": "failed"}, [], 3),
        ({"tests": "passed", "build": "out of time"}, [], 2),
        ({"tests": "interrupted", "build": "passed"}, [], 2),
        ({"tests": "not started: no time left", "build": "passed"}, [], 2),
    ],
)
def test_the_status_is_that_of_the_worst_stage(states: dict[str, str], unwritten: list[str], status: int) -> None:
    run = object.__new__(window.Window)
    run.stages = {"tests": Stage((), 1), "build": Stage((), 1, prepares=True), "two": Stage((), 1, gpus=2)}
    run.states = states
    run.folder = SimpleNamespace(unwritten=unwritten)  # type: ignore[assignment]
    assert run.status() == status


def test_counts_on_one_line() -> None:
    counts = {"passed": 3, "failed": 0, "named": ["a", "b"], "absent": [], "why": {}, "text": ""}
    assert window.told({"counts": counts}) == ": passed 3, failed 0, named a b"
    assert window.told({"counts": {"none": "it wrote no record", "passed": 1}}) == ": no counts, it wrote no record"
    assert window.told({}) == window.told({"counts": {}}) == ""


def test_what_stands_for_a_stage_without_a_gpu_waits_for_nothing() -> None:
    made = Path("made")
    cells = Stage(("x",), 1, "cells", made, "ledger.json", needs=("build",), gpus=2, rehearsal=("y",), quiet=True)
    assert command.rehearsed(cells) == Stage(("y",), 60, "cells", made, "ledger.json", gpus=0)
    tests = replace(cells, counts="tests", after=("a",), share=0.5)
    assert command.rehearsed(tests) == Stage(("y",), 60, "", made, "", gpus=0)
