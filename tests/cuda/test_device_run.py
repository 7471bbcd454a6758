"""The run that gathers evidence on a GPU: which stages run, in which order, and what is left of one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.gpu import Survey
from tests.cuda import device_run
from tests.cuda.device_run import Stage


def say(text: str, then: str = "pass") -> list[str]:
    return [sys.executable, "-Sc", f"print({text!r}, flush=True); {then}"]


@pytest.fixture
def trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stages of one line each, on a machine without a GPU; what `making` made, `using` needs."""
    made = tmp_path / "made"
    wait = "import time, pathlib; time.sleep(0.3)"
    known = {
        "making": Stage(say("making", f"{wait}; pathlib.Path({str(made)!r}).touch()"), 20),
        "failing": Stage(say("failing", "raise SystemExit(5)"), 20),
        "using": Stage(say("using", f"import pathlib; assert pathlib.Path({str(made)!r}).exists()"), 20),
        "told": Stage(say("told", "import os; assert os.environ['TOLD'] == '1'"), 20, {"TOLD": "1"}),
        "endless": Stage(say("endless", "import time; time.sleep(60)"), 1),
        "two": Stage(say("two"), 20, gpus=2),
    }
    monkeypatch.setattr(device_run, "stages", lambda out, scratch: known)
    monkeypatch.setattr(device_run, "BESIDE", {"making": "using"})
    monkeypatch.setattr(device_run, "TOGETHER", ())
    monkeypatch.setattr(device_run, "survey", lambda: Survey((), "none", ""))
    return tmp_path / "out"


def statuses(out: Path) -> dict[str, object]:
    return {name: found["status"] for name, found in json.loads((out / "summary.json").read_text()).items()}


@pytest.mark.slow
def test_one_stage_that_fails_keeps_no_other_from_running(trail: Path) -> None:
    assert device_run.main([str(trail)]) == 1
    assert statuses(trail) == {"failing": 5, "making": 0, "using": 0, "told": 0, "endless": 124}
    assert (trail / "logs.tar.gz").stat().st_size > 0


def test_chosen_stages_alone_decide_the_exit_status(trail: Path) -> None:
    assert device_run.main([str(trail), "--only", "making", "told"]) == 0
    assert statuses(trail) == {"told": 0, "making": 0}


def test_an_unknown_stage_is_named_before_anything_runs(trail: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        device_run.main([str(trail), "--only", "tols"])
    assert "no stage tols; there are making" in capsys.readouterr().err
    assert not trail.exists()


def test_a_stage_beside_others_has_all_the_time_that_is_left() -> None:
    """One that began at second 100 of a run that must end at 660 may last until then, whenever it is waited for."""
    assert device_run.allowed(Stage([], 520), 100, 660) == 520
    assert device_run.allowed(Stage([], 600), 100, 660) == 560


@pytest.mark.slow
def test_what_is_allowed_ends_a_stage(trail: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_run, "allowed", lambda stage, began, stop: 0.1 if stage.limit == 19 else stage.limit)
    stages = device_run.stages(trail, trail)
    stages["endless"] = Stage(say("endless", "import time; time.sleep(6)"), 19)
    stages["using"] = Stage(say("using"), 20)
    assert device_run.main([str(trail), "--only", "endless", "using"]) == 1
    assert statuses(trail) == {"endless": 124, "using": 0}


@pytest.mark.slow
def test_the_time_of_a_stage_counts_from_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "late.log").touch()
    with subprocess.Popen(say("late", "import time; time.sleep(6)"), start_new_session=True) as process:
        found = device_run.end("late", (process, time.monotonic() - 100), 101, tmp_path)
    assert found["status"] == 124
