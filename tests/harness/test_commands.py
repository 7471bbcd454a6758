"""The ``kdtree`` command: what it offers, what it prints, and the status it ends with."""

from __future__ import annotations

import argparse
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from harness import cli
from harness.cells import Ledger
from harness.ending import as_by_ctrl_c, uninterrupted
from harness.files import said, write_atomic
from harness.prepare import Plan
from harness.reports.command import write_reports
from harness.run import Run
from harness.sources import ROOT
from tests.waiting import PATIENCE


def test_help_lists_the_commands_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("test", "matrix", "doctor", "bundles", "demo", "inspect"):
        assert f"\n  {name} " in text
    assert "3 configuration or infrastructure" in text


def test_a_command_whose_module_is_absent_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "ghost", ("harness.ghost:main", "nobody"))
    monkeypatch.setitem(cli.COMMANDS, "half", ("harness.cells:main", "no such function"))
    assert {"ghost", "half"} & set(cli.available()) == set()
    assert cli.main(["ghost"]) == 3


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["tset"], "'tset' is no command, did you mean test?"),
        (["reports"], "did you mean report?"),
        (["nvcc"], "nvcc is no command but a session: nox -s nvcc"),
        (["xyz"], "'xyz' is no command\n"),
        (["trace", "int4-ar-tiny2-cup"], "is no cell of the matrix, did you mean int4-ar-tiny2-cpu or "),
        (["trace", "x-ar-y-z"], "is no cell of the matrix; `kdtree matrix --list` shows their ids"),
        (["matrix", "-k", "fp32-ar-tinny-cpu"], " cells, did you mean fp32-ar-tiny-cpu or "),
        (["matrix", "-k", "xyz"], " cells; `kdtree matrix --list` shows their ids"),
    ],
)
def test_a_name_that_is_none_is_told_with_what_it_may_have_been_meant_for(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 3
    assert remedy in capsys.readouterr().err


def test_the_matrix_of_an_installed_package_is_told_to_be_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.matrix_command.ROOT", tmp_path)
    assert cli.main(["test", "-k", "tiny"]) == 3
    assert f"no tests/test_matrix.py under {tmp_path}: the matrix runs from a checkout" in capsys.readouterr().err


WRONG = [[], ["nothing"], ["demo", "--tokens", "0"], ["inspect"], ["test", "-k"]]
WRONG += [["matrix", "--ranks", ranks] for ranks in ("0", "-2", "7919")] + [["mutants", "--fraction", "1/0"]]
WRONG += [
    ["build", "--arch", "12.0"],
    ["demo", "--budget", "x"],
    ["bench", "--seconds", "x"],
    ["demo", "--tokens", "x"],
    ["demo", "--budget", "-1"],
    ["demo", "--drafter", "nosuch"],
    ["bench", "--drafter", "nosuch"],
    ["mutants", "--workers", "0"],
    ["mutants", "--fraction", "x"],
    ["test", "-n", "-1"],
    ["test", "-n", "x"],
    ["test", "--ranks", "x"],
    ["test", "nosuchfile"],
    ["test", "-q", "-p", "no:randomly", "nosuchfile"],
]
WRONG += [["import", ".", "-o", "x", "--inner-norm-eps", "x"]]
WRONG += [["plan", "k2.6", "--memory", memory] for memory in ("nan", "inf", "1")]
WRONG += [[name, "--nothing"] for name in sorted(cli.available()) if name != "test"]  # that one hands on to pytest


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_end_with_3(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 3
    assert "invalid _" not in capfd.readouterr().err  # the name of a function of ours


@pytest.mark.parametrize("name", sorted(cli.available()))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With its exit statuses; in a narrow terminal only what cannot be broken, as an example, is wider."""
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: " in text
    assert "exit status: 0" in text
    assert [line for line in text.splitlines() if len(line) > 50 and not line.startswith("  ")] == []


@pytest.mark.parametrize("name", sorted(cli.available()))
def test_help_tells_what_every_option_does_and_shows_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[cli.Parser] = []

    def parse(self: cli.Parser, *_: object) -> NoReturn:
        seen.append(self)
        raise SystemExit(0)

    monkeypatch.setattr(cli.Parser, "parse_args", lambda self, *a: parse(self) if self.prog != "kdtree" else name_of(a))
    monkeypatch.setattr(cli.Parser, "parse_known_args", parse)
    assert cli.main([name]) == 0
    (parser,) = seen
    assert [action.option_strings or action.dest for action in parser._actions if not action.help] == []
    assert f"  kdtree {name}" in (parser.epilog or "")
    assert "exit status: 0" in (parser.epilog or "")


def name_of(arguments: tuple[list[str], ...]) -> argparse.Namespace:
    return argparse.Namespace(command=arguments[0][0])


def test_a_package_that_is_not_installed_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(argv: object) -> NoReturn:
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    def broken(argv: object) -> NoReturn:
        raise ModuleNotFoundError("No module named 'harness.gone'", name="harness.gone")

    monkeypatch.setattr("harness.inspect.main", lacking)
    assert cli.main(["inspect"]) == 3
    assert f"kdtree inspect: yaml is not installed for {sys.executable}; " in capsys.readouterr().err
    monkeypatch.setattr(
        "harness.inspect.main", lambda argv: exec(compile("raise ImportError('no libz')", "/lib/t.py", "exec"))
    )
    assert cli.main(["inspect"]) == 3
    assert f"a package of {sys.executable} cannot be imported: no libz (/lib/t.py); " in capsys.readouterr().err
    monkeypatch.setattr("harness.inspect.main", broken)
    assert cli.main(["inspect"]) == 3
    assert "ModuleNotFoundError: No module named 'harness.gone'\nkdtree inspect: a fault" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("layers"), AssertionError(), RuntimeError("no"), RecursionError()])
def test_a_fault_of_a_command_is_no_verdict(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 would say that a cell failed; where it happened is shown."""

    def work(argv: object) -> NoReturn:
        raise error

    monkeypatch.setattr("harness.inspect.main", work)
    assert cli.main(["inspect"]) == 3
    text = capsys.readouterr().err
    assert "in work\n" in text
    assert text.endswith("kdtree inspect: a fault of kdtree itself, and no verdict on the engine\n")


ENDED = """
import os, signal, sys, tempfile, time
import harness.inspect
from harness import cli

def work(argv):
    with tempfile.TemporaryDirectory() as folder:
        print(folder, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

harness.inspect.main = work
sys.exit(cli.main(["inspect"]))
"""


def test_a_command_that_is_told_to_end_leaves_nothing_behind() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (2, "kdtree: interrupted\n")
    assert not Path(done.stdout.strip()).exists()


def test_an_interrupt_before_the_command_has_begun_is_told_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n\nclass Pressed:\n    def find_spec(self, name, *_):\n"
        "        if name == 'harness.cli':\n            raise KeyboardInterrupt\n\nsys.meta_path.insert(0, Pressed())\n"
    )
    line = [sys.executable, "-m", "harness", "matrix", "--list"]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kdtree: interrupted\n")


MODULES = ("harness.nvcc", "harness.reproduce", "harness.bench.counters", "harness.bench.timeline")
INTERRUPTED = """
import argparse, runpy, sys

def pressed(*_):
    raise KeyboardInterrupt

argparse.ArgumentParser.parse_args = pressed
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", [*MODULES, "harness.bench.tables", "tests.fuzz.run"])
def test_what_is_run_as_a_module_ends_as_commands_do(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kdtree: interrupted\n")


def test_what_is_written_last_is_written_whole_before_an_interrupt_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C of an impatient user comes while the ledger is written."""

    def interrupted(ledger: Ledger, run_dir: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        write_reports(ledger, run_dir)

    monkeypatch.setattr("harness.run.write_reports", interrupted)
    run = Run(Plan("csrc", ("cpu",), ("fp32-ar-tiny-cpu",), ""), (), run_dir=tmp_path, host="box", command="x")
    with as_by_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            run.finish()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "junit.xml", "ledger.json"]


def test_a_signal_that_is_ignored_stays_so_while_something_is_written() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with as_by_ctrl_c(), uninterrupted():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_that_something_fails_over_is_still_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A condition that was waiting when Ctrl-C came leaves with RuntimeError: it holds its lock no longer."""

    def work(argv: Sequence[str]) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            threading.Condition().release()

    monkeypatch.setattr("harness.inspect.main", work)
    assert cli.main(["inspect"]) == 2
    assert capsys.readouterr().err == "kdtree: interrupted\n"


def test_a_tree_that_cannot_be_copied_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "gone").symlink_to("nowhere")
    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "from", tmp_path / "to")
    assert said(caught.value) == f"{tmp_path}/to/gone: No such file or directory"


def test_streams_that_are_closed_or_know_no_signs_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.inspect.main", lambda argv: print("\u2705"))
    narrow = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    cli.main(["inspect"])
    assert narrow.buffer.getvalue() == b"\\u2705\n"  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", None)
    cli.main(["inspect"])
    sys.stdout.close()


WRITERS = [["bench", "ops", "--json"], ["bench", "ops", "--plot"], ["acceptance", "--json"], ["mutants", "--out"]]
WRITERS += [["report", "LEDGER", "--html"], ["report", "LEDGER", "--junit"]]


@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_a_result_that_cannot_be_written_is_told_before_it_is_made(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.json").mkdir()
    for wrong, reason in ((tmp_path / "file" / "out.json", "cannot be written"), (tmp_path / "a.json", "is a folder")):
        assert cli.main([*arguments, str(wrong)]) == 3
        assert f"{wrong} {reason}" in capsys.readouterr().err


def test_a_fault_of_the_disk_is_a_line_that_names_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("harness.files.os.fsync", full)
    monkeypatch.setattr("harness.inspect.main", lambda argv: write_atomic(Path(argv[0]), b"x"))
    assert cli.main(["inspect", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err == f"kdtree inspect: {tmp_path / 'out'}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_what_needs_no_numbers_imports_neither_torch_nor_numpy() -> None:
    calls = [["--help"], ["matrix", "--list"], *([name, "--help"] for name in ("report", "gate", "remote", "build"))]
    heavy = "'numpy' in sys.modules or 'torch' in sys.modules"
    code = f"import sys; from harness.cli import main; [main(a) for a in {calls}]; sys.exit({heavy})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_reader_that_leaves_is_no_success_and_no_traceback() -> None:
    command = [sys.executable, "-m", "harness", "matrix"]
    listing = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert listing.stdout is not None
    listing.stdout.close()
    _, complaint = listing.communicate(timeout=PATIENCE)
    assert (listing.returncode, complaint) == (141, b"")


def test_a_filter_of_the_matrix_that_matches_nothing_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "-k", "nothing"]) == 3
    assert "matches none of" in capsys.readouterr().err
