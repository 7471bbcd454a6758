"""The ``kdtree`` command: what it offers, what it prints, and the status it ends with."""

from __future__ import annotations

import argparse
import ast
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from harness import cli, doctor, engines, environment, plain_json
from harness.demo import main as demo
from harness.files import said, write_atomic
from harness.inspect import main as inspect
from harness.matrix import F32_PRECISIONS, PRECISIONS, config_precisions
from harness.prepare import Infrastructure
from harness.reference_engine import ReferenceSession
from harness.remote.farside import probe
from harness.sources import ROOT
from refs import kdtr
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
        (["matrix", "-k", "fp32-ar-tinny-cpu"], "of 249 cells, did you mean fp32-ar-tiny-cpu or "),
        (["matrix", "-k", "xyz"], "of 249 cells; `kdtree matrix --list` shows their ids"),
    ],
)
def test_a_name_that_is_none_is_told_with_what_it_may_have_been_meant_for(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 3
    assert remedy in capsys.readouterr().err


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


def test_a_wrong_config_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.prepare.create", lambda *_: pytest.fail("an engine was built"))
    assert cli.main(["demo", "--config", "nosuch"]) == 3
    assert "nosuch.yaml: file: cannot be read" in capsys.readouterr().err


def test_the_demo_has_something_to_show_of_every_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*_: object) -> NoReturn:
        raise Infrastructure("reached")

    monkeypatch.setattr("harness.demo.prepare_config", reached)
    for config, has in config_precisions(scale=True).items():
        if set(has) & set(F32_PRECISIONS):
            assert demo(["--config", config]) == 3
            assert capsys.readouterr().err == "kdtree demo: reached\n", config


def test_a_precision_that_a_config_lacks_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.demo.prepare_config", lambda *_: pytest.fail("an engine was built"))
    lacking = 0
    for config, has in config_precisions(scale=True).items():
        wrong = [["--precision", p] for p in PRECISIONS if p not in has]
        wrong += [] if set(has) & set(F32_PRECISIONS) else [[]]
        for options in wrong:
            assert demo(["--config", config, *options]) == 3
            assert f"config {config} has {', '.join(has)}" in capsys.readouterr().err
            lacking += 1
    assert lacking > 20


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


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"] is True
    assert {"numpy", "torch", "C++ compiler", "nvcc", "GPU", "sshd"} <= {entry["name"] for entry in found["findings"]}
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert cli.main(["doctor"]) == 0
    assert "cpu  works" in capsys.readouterr().out


@pytest.mark.parametrize(("package", "have"), [("torch", ""), ("torch", "2.10.0"), ("numpy", "1.25.9")])
def test_doctor_ends_with_3_and_a_remedy_when_the_cpu_path_lacks_something(
    package: str, have: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: have if name == package else real(name))
    assert doctor.main([]) == 3
    text = capsys.readouterr().out
    assert "MISSING" in text
    assert f"python -m pip install '{package}>=" in text


def test_a_run_without_a_package_of_the_harness_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: "" if name == "Jinja2" else real(name))
    assert cli.main(["test", "--engine", "reference"]) == 3
    assert f"kdtree test: Jinja2 is not installed for {sys.executable}; " in capsys.readouterr().err


def test_doctors_look_for_all_that_the_project_depends_on() -> None:
    """Here and on a remote host; the versions are those of pyproject.toml."""
    stated = re.findall(r'"([A-Za-z0-9-]+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    wanted = {name.lower(): tuple(map(int, version.split("."))) for name, version in stated}
    (needed,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    have = {name.lower(): minimum for name, minimum in doctor.HARNESS.items()}
    assert {*re.findall(r'"([a-z0-9-]+)>', needed), "pytest", "pytest-xdist"} == set(have)
    for name, minimum in have.items():
        assert minimum[: len(wanted[name])] == wanted[name][:2], name
    assert wanted["torch"] == doctor.TORCH_MINIMUM
    there = {finding.name.lower() for finding in doctor.examine() if finding.needed_for == "cpu"}
    assert set(have) < {name.lower() for name in probe._NEEDED.values()} <= there


def test_doctor_says_that_an_installed_torch_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert doctor.main([]) == 3
    assert "cannot be imported: OSError: libcudart.so.13" in capsys.readouterr().out


def test_doctor_says_when_the_toolkit_does_not_fit_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "nvcc", lambda: ("/opt/cuda/bin/nvcc", "12.4"))
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")
    assert doctor.main([]) == 0  # the CPU path does not care
    assert "install CUDA toolkit 13.0, or a torch built for CUDA 12.4" in capsys.readouterr().out


def test_torch_and_its_cuda_are_read_without_importing_it() -> None:
    code = "import sys; from harness.environment import environment; environment(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo takes the fastest of several runs; how fast does not matter here."""
    monkeypatch.setattr("harness.demo.RUNS", 1)


@pytest.mark.usefixtures("once")
def test_demo_agrees_and_counts_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(["--engine", "reference", "--precision", "fp32", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["forwards"], result["tree_forwards"], result["acceptance"]) == (24, 3, 8.0)
    assert result["match"]
    assert result["bits_match"]


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("tokens", "options", "note"),
    [
        (18, [], "oracle, made from the AR tokens"),  # two more than the bundle has
        (5, [], "oracle, recorded in the bundle"),
        (18, ["--drafter", "noisy"], "after them DDTree is AR"),
        (3, ["--block", "1", "--budget", "0"], "oracle, recorded"),
    ],
)
def test_demo_with_other_lengths(
    tokens: int, options: list[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--engine", "reference", "--precision", "int4", "--config", "groups", "--tokens", str(tokens)]
    assert demo([*given, *options]) == 0
    text = capsys.readouterr().out
    assert "greedy-exact match: YES (logits equal in every bit)" in text
    assert f"AR      {tokens} tokens, {tokens} forwards" in text
    assert note in text


def test_demo_ends_with_1_when_the_decoders_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(["--engine", "wrong:bitwise", "--precision", "fp32", "--tokens", "2"]) == 1
    assert "greedy-exact match: YES (logits differ in bits)" in capsys.readouterr().out


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "nosuch"], "nosuch.yaml"),
        (["--drafter", "dflash"], "--drafter dflash: config groups has oracle, noisy, hostile"),
        (["--tokens", "600"], "exceed a context of 512"),
        (["--engine", "nosuch"], "no engine is named"),
    ],
)
def test_demo_names_what_it_cannot_do(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(["--engine", "reference", "--config", "groups", *options]) == 3
    assert message in capsys.readouterr().err


def test_inspect_shows_a_file_and_one_tensor(micro: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(micro), "--verify"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[1:])) <= 120
    for part in (
        "every checksum is right",
        "hidden_size              32",
        "golden.fp32.logits",
        'meta config: "micro"',
    ):
        assert part in text
    assert inspect([str(micro), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fields"]["vocab_size"] == 64
    assert {t["name"]: t["shape"] for t in content["tensors"]}["golden.fp32.logits"] == [9, 64]
    assert inspect([str(micro), "--tensor", "layers.1.experts.up.sc", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert 0 < float(values["max"]) < 1  # scales are bf16, shown as numbers
    assert values["not_finite"] == 0


def test_inspect_refuses_by_name(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(micro.read_bytes())
    data[kdtr.read(micro).entries["golden.prompt"].offset] ^= 1
    broken = tmp_path / "broken.kdtr"
    broken.write_bytes(data)
    assert inspect([str(broken)]) == 0  # the data's checksums are read on request
    assert inspect([str(broken), "--verify"]) == 3
    assert f"{broken}: tensor golden.prompt.crc" in capsys.readouterr().err
    assert inspect([str(micro), "--tensor", "nothing"]) == 3
    assert "nothing: the file has no such tensor" in capsys.readouterr().err
    assert inspect([str(tmp_path / "gone")]) == 3


def test_two_packages_with_one_engine_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, target in (("one", "one:create"), ("two", "two:create")):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kdtree.engines]\nmine = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        engines.UnknownEngine, match=r"'mine' is registered as (one|two):create and as (two|one):create"
    ):
        engines.registered()


def test_an_engine_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kdtree.engines]\nmine = not_there:create\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(engines.UnknownEngine, match="engine 'mine': not_there:create cannot be loaded"):
        engines.create("mine", "cpu")


def test_demo_closes_what_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(ReferenceSession, "close", lambda self: closed.append(1))
    assert demo(["--engine", "reference", "--tokens", "1"]) == 0
    assert closed == [1, 1]


def test_what_machines_read_is_json_whatever_was_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """Python writes NaN and infinities as no other reader of JSON takes them."""
    for arguments in (["trace", "fp32-ar-tiny-cpu"], ["demo", "--precision", "fp32", "--tokens", "2"]):
        assert cli.main([*arguments, "--engine", "wrong:nan", "--json"]) in (0, 1)
        json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert cli.main(["mutants", "--list", "-k", "nibble", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)
    assert set(first) == {"name", "group", "says"}
    assert json.loads(plain_json.text({"a": [float("nan"), float("-inf"), 1.5]})) == {"a": ["nan", "-inf", 1.5]}


def test_json_is_asked_for_and_printed_in_one_way() -> None:
    """By ``Parser.add_json`` and ``harness/plain_json.py``."""
    asking = 0
    for path in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "engine").rglob("*.py")]:
        text = path.read_text("utf-8")
        assert '"--json"' not in text or path.name == "cli.py", path
        if ".add_json(" in text:
            asking += 1
            calls = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert not [call for call in calls if call.startswith("print(json.dump")], path
    assert asking > 20


JSON = [
    ["doctor"],
    ["matrix", "-k", "tiny2"],
    ["plan", "k2.6", "--memory", "640"],
    ["mutants", "--list"],
    ["bench", "--list"],
]


@pytest.mark.parametrize("arguments", JSON, ids=" ".join)
def test_json_stands_alone_on_stdout_or_in_a_file_beside_the_text(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        assert cli.main([*arguments, *more]) == 0
        return capsys.readouterr().out

    out = tmp_path / "out.json"
    text, printed = said(), said("--json")
    assert said("--json=-") == said("--json", "-") == printed
    assert said("--json", str(out)) == text != printed
    assert out.read_text("utf-8") == printed
    other = tmp_path / "other name"
    assert said(f"--json={other}") == text
    assert other.read_text("utf-8") == printed


def test_what_a_command_reads_is_never_taken_for_the_file_that_json_writes(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", "--json", str(micro)]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(micro)
    ledger = tmp_path / "ledger.json"
    ledger.write_text("{}")
    for command in ("gate", "report", "plan"):
        assert cli.main([command, "--json", str(ledger)]) == 3
        assert "--json=- prints" in capsys.readouterr().err
    assert ledger.read_text() == "{}"
    assert cli.main(["bench", "ops", "--json", str(tmp_path / "speed")]) == 3
    assert f"--json={tmp_path / 'speed'}" in capsys.readouterr().err
