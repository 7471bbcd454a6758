"""``kdtree remote`` as its users call it: this working tree's matrix on hosts, and what comes back however it ends.

The hosts are several entries for one server; each has a directory and a lock of its own. What is built and generated
is taken from this checkout's caches, so that a test costs no compilation.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from harness import cli
from harness import ledger as ledgers
from harness.cells import Cell, Verdict, exit_status
from harness.filters import select
from harness.matrix import expected
from harness.remote import command
from harness.remote.hosts import Host
from harness.remote.order import Order, batch_line
from harness.remote.run import assemble, blank
from harness.sources import ROOT, describe
from tests.processes import running
from tests.remote.boxes import Box, Loopback, NoNamespaces, boxes
from tests.remote.sshd import Sshd, public
from tests.remote.support import ENVIRONMENT, FILTER, Remote, Server, matrix, until_it_says
from tests.waiting import PATIENCE


def same(cell: Cell) -> Cell:
    """A cell without what may differ between two machines or two runs."""
    return replace(cell, host="", worker="", times={})


@pytest.mark.slow
def test_a_remote_ledger_equals_a_local_one(remote: Remote) -> None:
    result = remote(remote.host("box"), *matrix())
    assert result.status == 0, result.out + result.err
    run_dir = remote.folder / "local" / "run"
    argv = [sys.executable, "-m", "harness", "test", *matrix(), "-n", "0", "--run-dir", str(run_dir)]
    subprocess.run(argv, cwd=remote.checkout, check=True, capture_output=True, timeout=4 * PATIENCE, env=ENVIRONMENT)
    there, here = result.ledger, ledgers.read(run_dir)
    assert [same(cell) for cell in there.cells] == [same(cell) for cell in here.cells]
    assert {cell.host for cell in there.cells} == {"box"} == set(there.environments)
    for field in ("sources", "engine", "expected", "filter", "problems", "schema", "per_host"):
        assert getattr(there, field) == getattr(here, field), field
    (mine,), (theirs,) = here.environments.values(), there.environments.values()
    assert mine == theirs
    assert there.sources.dirty == ("uncommitted.txt",)
    assert len(there.cells) >= 2
    assert (result.run_dir / "junit.xml").read_text().count("<testcase") == len(there.cells)
    assert f"{len(there.cells)} of {len(there.cells)} expected cells passed" in result.out
    assert f"ledger: {result.run_dir}/ledger.json" in result.out
    assert "box | tests/test_matrix.py" in result.out  # live output with the host's name
    (log,) = result.run_dir.glob("hosts/box/output.log")
    assert "tests/test_matrix.py" in log.read_text()
    assert len(list(result.run_dir.glob("hosts/box/*/junit.xml"))) == 1
    (far,) = (remote.folder / "box" / "runs").iterdir()
    assert not far.name.startswith(result.run_dir.name)  # two users may give their folders one name


@pytest.mark.slow
def test_each_host_runs_every_cell_and_failures_come_back(remote: Remote) -> None:
    names = [remote.host("one"), remote.host("two")]
    result = remote(*names, "--each", "--json", *matrix(k="fp32-ar-prompt1-cpu", engine="wrong:tokens"))
    assert result.status == 1, result.out + result.err
    ledger = result.ledger
    assert ledger.per_host
    assert [(cell.id, cell.host) for cell in ledger.cells] == [("fp32-ar-prompt1-cpu", name) for name in names]
    assert {cell.verdict for cell in ledger.cells} == {Verdict.FAIL_TOKENS}
    assert ledger.problems == ()
    assert all("torch" in ledger.environments[name] for name in names)
    answer = json.loads(result.out)
    assert (answer["status"], answer["ledger"]) == (1, str(result.run_dir / "ledger.json"))
    assert answer["hosts"] == {name: {"cells": 1, "trouble": ""} for name in names}
    assert "one | " in result.err
    assert (result.run_dir / "junit.xml").read_text().count("<failure") == 2


@pytest.fixture
def three(server: Server, tmp_path: Path) -> Iterator[Sequence[Box | Loopback]]:
    """Three hosts behind links of their own, or at least three servers."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(boxes(3, tmp_path, server.authorized))
        except NoNamespaces:
            made = [Loopback(number, tmp_path, server.authorized) for number in range(3)]
            for one in made:
                stack.callback(one.remove)
            yield made


@pytest.mark.slow
def test_hosts_share_the_cells_and_one_is_lost(remote: Remote, three: Sequence[Box | Loopback]) -> None:
    """The third's link is cut while it is being prepared: all cells run on the other two, and the ledger says why."""
    names = []
    for number, box in enumerate(three):
        fields = {"address": box.address, "port": box.port, "host_key": box.key}
        more = {"prepare": ["sleep 3600"], "limits": {"silence": 3}} if number == 2 else {}
        names.append(remote.host(f"host{number}", **fields, **more))
    process, run_dir = remote.start(*names, *matrix())
    until_it_says(process, "running ")
    three[-1].cut()
    assert process.wait(PATIENCE) == 0
    ledger = ledgers.read(run_dir)
    assert [cell.id for cell in ledger.cells] == list(ledger.expected)
    assert {cell.host for cell in ledger.cells} == {"host0", "host1"} == set(ledger.environments)
    assert not ledger.per_host
    assert (ledger.filter, ledger.problems) == (FILTER, ())
    (note,) = [note for note in ledger.notes if note.startswith("host2: ")]
    assert "its cells ran elsewhere" in note
    assert "(prepare); what ran there ends by itself" in note


@pytest.fixture
def second(server: Server, tmp_path: Path) -> Iterator[Sshd]:
    """Another server, to be killed; the client knows it."""
    sshd = Sshd(tmp_path / "second", server.authorized)
    with server.known_hosts.open("a") as file:
        file.write(f"[127.0.0.1]:{sshd.port} {public(sshd.keys[0])}\n")
    yield sshd
    sshd.stop()


@pytest.mark.slow
def test_a_lost_status_is_infrastructure(remote: Remote, second: Sshd) -> None:
    process, run_dir = remote.start(
        remote.host("doomed", port=second.port), *matrix(k="fp32 and prompt1 and oracle", engine="wrong:hang")
    )
    until_it_says(process, "collected")
    second.stop()
    assert process.wait(PATIENCE) == 3
    ledger = ledgers.read(run_dir)
    assert [cell.verdict for cell in ledger.cells] == [Verdict.NOT_RUN]
    assert ledger.problems[0].startswith("doomed: the connection")
    assert "(running 1 cells); what ran there ends by itself, run it again" in ledger.problems[0]


@pytest.mark.slow
def test_the_time_limit_keeps_what_was_recorded(remote: Remote) -> None:
    """AR passes, DDTree hangs: the limit ends it, the finished cells count, the run is infrastructure."""
    for seconds in (4, 20, 100):  # the longer ones for a machine too busy to run the AR cell in the shorter
        box = remote.host("box", limits={"silence": 15, "command": seconds})
        result = remote(box, *matrix(k="fp32 and prompt1", engine="wrong:hang"))
        assert result.status == 3, result.out + result.err
        verdicts = {cell.id: cell.verdict for cell in result.ledger.cells}
        if verdicts["fp32-ar-prompt1-cpu"] is Verdict.PASS:
            break
    assert verdicts.pop("fp32-ar-prompt1-cpu") is Verdict.PASS
    assert set(verdicts.values()) == {Verdict.NOT_RUN}
    assert "time limit" in result.ledger.problems[0]


@pytest.mark.slow
def test_ctrl_c_ends_what_runs_there(remote: Remote) -> None:
    process, run_dir = remote.start(remote.host("box"), *matrix(k="fp32 and prompt1", engine="wrong:hang"))
    until_it_says(process, "collected")
    marker = str(remote.folder / "box" / "runs")
    assert running(marker)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert running(marker) == []
    assert "box: interrupted" in ledgers.read(run_dir).problems[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"python": "/no/python"}, "/no/python is not there (status 127)"),
        ({"environment": {"KDTREE_BUNDLES": "/proc/none"}}, "bundles: ended with status"),
    ],
)
def test_a_host_that_cannot_be_used_is_infrastructure(remote: Remote, fields: dict[str, Any], words: str) -> None:
    result = remote(remote.host("box", **fields), *matrix(k="fp32-ar-prompt1-cpu", engine="reference"))
    assert result.status == 3
    assert words in result.ledger.problems[0]
    assert words in result.out
    assert "<error" in (result.run_dir / "junit.xml").read_text()


@pytest.mark.slow
def test_wrong_arguments_are_configuration(remote: Remote, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        file = tmp_path / "hosts.yaml"
        file.write_text(yaml.safe_dump({"hosts": remote.hosts}))
        assert command.main([*arguments, "--hosts-file", str(file), "--run-dir", str(tmp_path / "run")]) == 3
        err = capsys.readouterr().err
        assert err.startswith("kdtree remote: ")
        return err

    box = remote.host("box", nonsense=1)
    assert "hosts.box.nonsense: unknown field" in said(box)
    box = remote.host("box")
    assert "hosts.nope: no such host; there are box" in said("nope")
    assert "named twice" in said(box, box)
    assert "matches none of" in said(box, "-k", "nothing-like-this")
    assert "cannot run it (gpus in hosts.yaml)" in said(box, "--device", "cuda")
    assert "holds no wheel" in said(box, "--wheels", str(tmp_path))
    assert f"{tmp_path}/gone: No such file or directory\n" in said(box, "--ssh-config", str(tmp_path / "gone"))
    with pytest.raises(SystemExit) as caught:  # as every command's parser does
        command.main([box, "--no-such-option"])
    assert caught.value.code == 3
    assert not (tmp_path / "run").exists()


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_size) for p in folder.rglob("*")}


@pytest.mark.slow
def test_doctor_says_what_is_missing_and_changes_nothing(remote: Remote, tmp_path: Path) -> None:
    site = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(site)], check=True)
    bare = remote.host("bare", python=str(site / "bin" / "python"), features=["avx-none", "sh"])
    good = remote.host("good")
    before = everything(tmp_path)
    result = remote(bare, good, "--doctor", "--json")
    assert result.status == 3
    changed = everything(tmp_path).items() ^ before.items()
    assert {path for path, _ in changed} <= {str(tmp_path / "hosts.yaml"), str(tmp_path), str(tmp_path / "ssh")}
    report = json.loads(result.out)["hosts"]
    found = {entry["name"]: entry for entry in report["bare"]}
    assert not found["torch"]["ok"]
    assert found["torch"]["found"] == "missing"
    assert "--wheels" in found["torch"]["remedy"]
    assert "install pytest-xdist for" in found["pytest-xdist"]["remedy"]  # the package's name, not the module's
    assert found["features"]["found"] == "missing: avx-none"
    assert found["lock"]["found"] == "free"
    assert [entry for entry in report["good"] if not entry["ok"]] == []
    assert {"connection", "clock", "workdir", "numpy", "C++ compiler"} <= {entry["name"] for entry in report["good"]}


@pytest.mark.slow
def test_doctor_reports_gpus_against_hosts_yaml(remote: Remote, tmp_path: Path) -> None:
    """With a stand-in for nvidia-smi, whose output is that of a real one."""
    tools = tmp_path / "bin"
    tools.mkdir()
    line = "NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887 MiB, 580.95.05"
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\nfor i in 1 2; do echo '{line}'; done\n")
    (tools / "nvidia-smi").chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    fields = {"environment": {"PATH": f"{tools}:/usr/bin:/bin"}, "python": str(tmp_path / "env" / "bin" / "python")}
    gpus = {"count": 2, "kind": "RTX PRO 6000 Blackwell"}
    expected = {
        remote.host("right", gpus=gpus, architectures=["sm_120"], **fields): "",
        remote.host("fewer", gpus={**gpus, "count": 8}, architectures=["sm_120"], **fields): "hosts.yaml says 8 x",
        remote.host("older", gpus=gpus, architectures=["sm_90"], **fields): "lack 12.0",
        remote.host("unsaid", **fields): "says nothing of them",
    }
    report = json.loads(remote(*expected, "--doctor", "--json").out)["hosts"]
    for name, remedy in expected.items():
        found = {entry["name"]: entry for entry in report[name]}
        assert found["GPUs"]["found"].startswith("2 x NVIDIA RTX PRO 6000 Blackwell Server Edition (sm_120)")
        assert remedy in found["GPUs"]["remedy"]
        assert bool(found["GPUs"]["remedy"]) == bool(remedy)


@pytest.mark.slow
def test_dry_run_sends_and_starts_nothing(remote: Remote, tmp_path: Path) -> None:
    box = remote.host("box", prepare=["touch never"])
    result = remote(box, "--dry-run", "-k", FILTER)
    assert result.status == 0, result.err
    assert not (tmp_path / "box").exists()
    assert not result.run_dir.exists()
    assert "prepare: touch never" in result.out
    assert "build for cpu: " in result.out
    assert "tests/test_matrix.py::test_cell[" in result.out
    count = len(
        subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=remote.checkout, capture_output=True
        ).stdout.split()
    )
    assert f"tree: {count + 1} files" in result.out


def wheel(folder: Path, name: str, code: str) -> None:
    """The smallest wheel there is, by the specification's words."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.mark.slow
def test_wheels_are_part_of_the_runs_environment(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "kdtree_sent_plugin", "def pytest_report_header(config):\n    return 'the wheel was here'\n")
    box = remote.host("box")
    result = remote(
        box,
        "--wheels",
        str(folder),
        *matrix(k="fp32-ar-prompt1-cpu", engine="reference"),
        "--",
        "-n",
        "0",
        "-p",
        "kdtree_sent_plugin",
    )
    assert result.status == 0, result.out + result.err
    assert "box | the wheel was here" in result.out


@pytest.mark.slow
def test_two_users_of_one_box_queue(remote: Remote, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"until [ -e {shlex.quote(str(go))} ]; do sleep 0.1; done"
    box = remote.host("box", prepare=["echo the box is mine", wait, "exit 4"])
    again = remote.host("again", lock=remote.hosts[box]["lock"], prepare=["exit 5"])
    first, _ = remote.start(box, *matrix())
    until_it_says(first, "the box is mine")
    second, run_dir = remote.start(again, *matrix())
    until_it_says(second, "holds the box")
    assert second.poll() is None
    go.touch()
    assert first.wait(PATIENCE) == second.wait(PATIENCE) == 3
    assert ledgers.read(run_dir).problems == ("again: prepare: ended with status 5",)  # it had the box in the end


@pytest.mark.slow
def test_a_reader_that_leaves_changes_no_status(remote: Remote) -> None:
    """``kdtree remote ... | head -1``: it goes on, and ends as it would have, its ledger written."""
    process, run_dir = remote.start(remote.host("box", prepare=["sleep 0.5", "exit 4"]), *matrix())
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 3
    assert ledgers.read(run_dir).problems == ("box: prepare: ended with status 4",)


def test_ledgers_that_do_not_fit_together_are_infrastructure(tmp_path: Path) -> None:
    """Two hosts that judged different sources, which a tree that is written to on a host would cause."""
    points = tuple(select(expected(["cpu"]), "fp32-ar-prompt1-cpu or fp32-ar-block1-cpu"))
    order = Order(tmp_path / "run", "id", "kdtree remote one two", points, describe())
    runs = []
    for name, point in zip(("one", "two"), points, strict=True):
        shard = replace(blank(order, [name], f"shard-{name}", [point.id]), sources=replace(describe(), engine=name))
        runs.append(SimpleNamespace(host=SimpleNamespace(name=name), shards=[shard], salvaged=[], trouble="", notes=[]))
    ledger = assemble(order, ledgers.timestamp(), runs)  # type: ignore[arg-type]
    assert ledgers.read(ledgers.write(ledger, order.run_dir)).problems == ledger.problems
    assert "does not fit together" in ledger.problems[0]
    assert "sources" in ledger.problems[0]
    assert exit_status(ledger) == 3


def test_what_a_host_is_sent_is_taken_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It runs `kdtree test` on the cells that it is given, with more arguments for pytest."""
    points = tuple(expected(["cpu"])[:2])
    order = Order(
        tmp_path, "id", "kdtree remote box", points, describe(), arguments=("-n", "0", "-p", "no:cacheprovider")
    )
    taken: list[list[str]] = []
    monkeypatch.setattr(pytest, "main", lambda arguments: taken.append(arguments) or 0)
    for cells in (order.expected, order.expected[:1]):
        line = batch_line(Host("box", "address"), order, cells, str(tmp_path / "run"))
        assert line[1:3] == ["-m", "harness"]
        assert cli.main(line[3:]) == 0
    whole, part = ([word for word in arguments if word.startswith("tests/")] for arguments in taken)
    assert (whole, part) == ([], [f"tests/test_matrix.py::test_cell[{points[0].id}]"])


def test_the_help_names_every_exit_status() -> None:
    argv = [sys.executable, "-m", "harness", "remote", "--help"]
    text = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for words in ("0 every expected cell passed", "1 a cell failed", "2 a cell did not run", "3 configuration", "130"):
        assert words in text.replace("\n", " ")
