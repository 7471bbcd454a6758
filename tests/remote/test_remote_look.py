"""What a look at a host finds fine, and what to do about the rest, from facts written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.matrix import parse
from harness.remote import look
from harness.remote.hosts import Gpus, Host
from harness.remote.order import Order
from harness.remote.ssh import Options
from harness.remote.sync import File, Snapshot
from tests.harness.records import SOURCES

CARD = {"name": "NVIDIA H200", "compute_cap": "9.0", "memory.total": "1", "driver_version": "580"}
FACTS: dict[str, Any] = {
    "system": "Linux",
    "machine": "x86_64",
    "cpus": 4,
    "load": 0.25,
    "free": 4 << 30,
    "workdir": "/there",
    "workdir_exists": True,
    "writable": True,
    "python_trouble": "",
    "python": "3.11",
    "packages": {"numpy": "2.0", "torch": "2.11.0+cu130"},
    "programs": {"g++": "g++ 13", "nvcc": "13.0"},
    "missing_features": [],
    "gpus": [],
    "holder": None,
}
PLAIN = Host("box", "box")
CARDS = replace(PLAIN, gpus=Gpus(2, "H200"), architectures=("sm_90",))
TWO = {"gpus": [CARD, CARD], "torch_gpus": 2, "torch_cuda": "13.0"}


class Far:
    """A session that knows these facts."""

    def __init__(self, facts: dict[str, Any], skew: float = 0.0, missing: list[int] | None = None) -> None:
        self.facts = {"user": "u", "node": "n"}
        self.link = SimpleNamespace(
            connection=SimpleNamespace(hops=["one", "two"]), skew=skew, ask=lambda what, **_: facts
        )
        self.closed, self.missing = False, missing or []

    def plan(self, tree: Snapshot) -> list[int]:
        return self.missing

    def close(self) -> None:
        self.closed = True


def looked(monkeypatch: pytest.MonkeyPatch, host: Host, skew: float = 0.0, **changes: Any) -> dict[str, look.Finding]:
    far = Far({**FACTS, **changes}, skew)
    monkeypatch.setattr(look, "Session", lambda *_: far)
    found = look.examine(host, Options())
    assert far.closed
    return {one.name: one for one in found}


def test_a_host_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked(monkeypatch, PLAIN)
    assert {one.name: one.found for one in found.values()} == {
        "connection": "one -> two, u@n",
        "system": "Linux x86_64, 4 CPUs, load 0.2",
        "clock": "agrees",
        "workdir": "/there, 4.0 GiB free",
        "python": "python3 3.11",
        "numpy": "2.0",
        "torch": "2.11.0+cu130",
        "C++ compiler": "g++ 13",
        "lock": "free",
    }
    assert all(one.ok for one in found.values())
    found = looked(monkeypatch, replace(CARDS, features=("avx2", "nvcc")), **TWO)
    assert all(one.ok for one in found.values())
    assert found["GPUs"].found == "2 x NVIDIA H200 (sm_90), driver 580"
    assert found["torch's view"].found == "2 GPUs, CUDA 13.0"
    assert found["features"].found == "avx2, nvcc"


@pytest.mark.parametrize(
    ("changes", "name", "text", "remedy"),
    [
        ({"skew": 2.5}, "clock", "+2.5 s", ""),
        ({"skew": -61.0}, "clock", "-61.0 s", "set the clock there"),
        ({"free": (4 << 30) - 1}, "workdir", "/there, 4.0 GiB free", "free some space: 4 GiB"),
        (
            {"writable": False, "workdir_exists": False},
            "workdir",
            "/there (not made yet), 4.0",
            "not writable: set workdir",
        ),
        ({"python_trouble": "no such file"}, "python", "no such file", "set python in hosts.yaml"),
        ({"packages": {"torch": "2.10.1"}}, "torch", "2.10.1", "install torch>=2.11 for python3 there"),
        ({"packages": {"torch": "3.0"}}, "torch", "3.0", ""),
        ({"packages": {"torch": "2.11rc1"}}, "torch", "2.11rc1", "install torch>=2.11"),
        ({"packages": {"numpy": None}}, "numpy", "missing", "install numpy for"),
        ({"packages": {"torch": "broken: no CUDA"}}, "torch", "broken: no CUDA", "install torch>=2.11"),
        ({"programs": {"clang++": "clang 18"}}, "C++ compiler", "clang 18", ""),
        ({"programs": {}}, "C++ compiler", "missing", "install g++"),
        ({"gpus": [CARD]}, "GPUs", "1 x NVIDIA H200 (sm_90), driver 580", "hosts.yaml says nothing of them"),
        ({"holder": {"client": "c"}}, "lock", "c holds the box", ""),
    ],
)
def test_what_a_plain_host_lacks(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str, text: str, remedy: str
) -> None:
    all_of_it = looked(monkeypatch, PLAIN, **changes)
    assert "torch's view" not in all_of_it, "of GPUs that are not used"
    one = all_of_it[name]
    assert one.found.startswith(text)
    assert one.remedy.startswith(remedy)
    assert one.ok == (not remedy)


@pytest.mark.parametrize(
    ("host", "changes", "name", "remedy"),
    [
        ({}, {"gpus": []}, "GPUs", "hosts.yaml says 2 x H200"),
        ({}, {"gpus": [CARD]}, "GPUs", "hosts.yaml says 2 x H200"),
        ({}, {"gpus": [CARD, {**CARD, "name": "NVIDIA H100"}]}, "GPUs", "hosts.yaml says 2 x H200"),
        ({"architectures": ("sm_120",)}, {}, "GPUs", "architectures in hosts.yaml lack 9.0"),
        ({"architectures": ("sm_90a",)}, {}, "GPUs", ""),  # code for this very architecture
        ({"architectures": ("sm_120", "sm_90")}, {}, "GPUs", ""),
        ({}, {"torch_gpus": 0}, "torch's view", "this torch sees no GPU"),
        ({}, {"programs": {"g++": "13"}}, "nvcc", "install the CUDA toolkit"),
        ({"prepare": ("module load cuda",)}, {"programs": {}}, "nvcc", ""),
        ({"prepare": ("module load gcc",)}, {"programs": {}}, "C++ compiler", ""),
        ({"features": ("avx512f",)}, {"missing_features": ["avx512f"]}, "features", "install them"),
        ({"features": ("x",), "prepare": ("y",)}, {"missing_features": ["x"]}, "features", ""),
    ],
)
def test_what_a_host_with_gpus_lacks(
    monkeypatch: pytest.MonkeyPatch, host: dict[str, Any], changes: dict[str, Any], name: str, remedy: str
) -> None:
    """What only the commands of ``prepare`` may bring is not called for."""
    one = looked(monkeypatch, replace(CARDS, **host), **{**TWO, **changes})[name]
    assert one.remedy.startswith(remedy)
    assert one.ok == (not remedy)


def test_what_a_run_would_send_and_start(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(File(f"{i:02}".encode(), 0o644, f"{i}", 10) for i in range(30))
    tree = Snapshot(Path("/"), files, ())
    host = replace(PLAIN, prepare=("true",), python="py")
    order = Order(Path("/run"), "id", "line", (parse("int4-ar-tiny-cpu"), parse("int4-ar-tiny-cuda")), sources=SOURCES)
    far = Far({}, missing=list(range(21)))
    monkeypatch.setattr(look, "Session", lambda *_: far)
    lines = list(look.dry_run(host, order, tree))
    assert far.closed
    assert lines[0] == "tree: 30 files, 300 bytes; would send 21, 210 bytes"
    assert lines[1:21] == [f"  {i:02}" for i in range(20)]
    assert lines[21:25] == [
        "  and 1 more",
        "prepare: true",
        "build for cpu: py -m harness build --device cpu",
        "bundles: py -m harness bundles",
    ]
    assert lines[25].startswith("matrix, 1 cells at most: py -m harness test --engine csrc --run-dir RUN --device cpu ")
    far.missing = list(range(20))
    each = list(look.dry_run(host, replace(order, each=True), tree))
    assert each[21] == "prepare: true"
    assert each[-1].startswith("matrix, 1 cells: ")
