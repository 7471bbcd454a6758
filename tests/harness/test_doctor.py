"""``kdtree doctor``: what this machine has and lacks, told without importing it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from harness import cli, doctor, environment
from harness.remote.farside import probe
from harness.sources import ROOT
from harness.toolchain import TORCH_MINIMUM


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
    assert f"{shlex.quote(sys.executable)} -m pip install '{package}>=" in text
    assert "`nox -s test` installs them all, into an environment of its own" in text


def test_doctor_knows_a_python_that_pip_may_not_add_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of Debian and its like (PEP 668); an environment made from it takes packages."""
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: "" if name == "Jinja2" else real(name))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    refused = f"pip adds nothing to {sys.executable}"
    for marked, prefix, told in ((False, "/usr", False), (True, "/usr", True), (True, "/home/me/env", False)):
        if marked:
            (tmp_path / "EXTERNALLY-MANAGED").touch()
        monkeypatch.setattr(sys, "base_prefix", "/usr")
        monkeypatch.setattr(sys, "prefix", prefix)
        assert doctor.main([]) == 3
        text = capsys.readouterr().out
        assert (refused in text, "-m venv ~/kdtree-python" in text) == (told, told)


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
    assert wanted["torch"] == TORCH_MINIMUM
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
