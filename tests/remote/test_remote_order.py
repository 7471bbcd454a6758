"""What a run means on a host: who takes which cells, and the command lines and variables there, word by word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.matrix import parse
from harness.remote.hosts import Gpus, Host
from harness.remote.order import Order, able, batch_line, environment, pools, step_lines
from tests.harness.records import SOURCES

CPU, CUDA, TWO = "int4-ar-tiny-cpu", "fp32-ar-yarn-cuda", "int4-ar-tiny-cuda-x2"
PLAIN = Host("plain", "plain", python="py")
CARD = Host("card", "card", python="py", gpus=Gpus(1, "H200"), architectures=("sm_90a", "sm_120"))
ORDER = Order(Path("/run"), "id", "kdtree remote", tuple(map(parse, (CPU, CUDA, TWO))), sources=SOURCES)


def test_a_host_takes_cells_of_its_devices_and_of_as_many_ranks_as_it_has_gpus() -> None:
    cards = replace(CARD, gpus=Gpus(2, "H200"))
    shares = replace(CARD, environment={"KDTREE_RANKS_SHARE_GPU": "1"})
    cells = (CPU, CUDA, TWO, "int4-ar-tiny-cpu-x2")
    for host, wanted in (
        (PLAIN, [True, False, False, True]),
        (CARD, [True, True, False, True]),
        (cards, [True, True, True, True]),
        (shares, [True, True, True, True]),
    ):
        assert [able(host, parse(cell)) for cell in cells] == wanted


def test_cells_come_from_one_pool_or_from_one_for_each_host() -> None:
    shared = pools(ORDER, [PLAIN, CARD])
    assert shared["plain"] is shared["card"]
    assert shared["plain"].take("plain") == [CPU]
    assert shared["card"].take("card") == [CUDA]
    own = pools(replace(ORDER, each=True), [PLAIN, CARD])
    assert own["plain"].take("plain") == [CPU]
    assert own["card"].take("card") == [CPU, CUDA]


def test_what_precedes_the_first_batch() -> None:
    """Builds for the devices of the cells that the host takes; bundles, of the chosen configs where some are chosen."""
    base = ["py", "-m", "harness"]
    cpu = ("build for cpu", [*base, "build", "--device", "cpu"])
    cuda = ("build for cuda", [*base, "build", "--device", "cuda", "--arch", "9.0a", "--arch", "12.0"])
    bundles = ("bundles", [*base, "bundles"])
    assert step_lines(CARD, ORDER) == [cpu, cuda, bundles]
    assert step_lines(PLAIN, ORDER) == [cpu, bundles]
    assert step_lines(PLAIN, replace(ORDER, engine="reference")) == [bundles]
    some = replace(ORDER, filter="tiny or yarn", engine="reference")
    assert step_lines(CARD, some) == [("bundles", [*base, "bundles", "tiny", "yarn"])]


def test_a_batch_names_its_cells_but_where_all_of_the_matrix_are_meant() -> None:
    def line(cells: list[str], **changes: object) -> list[str]:
        return batch_line(CARD, replace(ORDER, arguments=("-n", "4"), **changes), cells, "/there")  # type: ignore[arg-type]

    base = ["py", "-m", "harness", "test", "--engine", "csrc", "--run-dir", "/there"]
    both = [*base, "--device", "cpu", "--device", "cuda", "--host-name", "card", "-n", "4"]
    ids = [f"tests/test_matrix.py::test_cell[{cell}]" for cell in (CPU, CUDA, TWO)]
    assert line([CPU, CUDA, TWO]) == both
    assert line([CPU, CUDA, TWO], filter="tiny or yarn") == [*both, *ids]
    assert line([CPU, CUDA]) == [*both, *ids[:2]]
    assert line([CPU]) == [*base, "--device", "cpu", "--host-name", "card", "-n", "4", ids[0]]


@pytest.mark.parametrize("own", [{}, {"PYTHONPATH": "/lib", "COLUMNS": "80", "MORE": "host"}])
def test_what_hosts_yaml_says_comes_before_the_runs_and_the_runs_before_ours(own: dict[str, str]) -> None:
    host = replace(CARD, environment=own)
    found = environment(host, "/far", "/there", wheels=False, extra={"COLUMNS": "90", "MORE": "run", "RUN": "1"})
    assert found == {
        "KDTREE_BUNDLES": "/there/cache/bundles",
        "KDTREE_BUILD": "/there/cache/build",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0a;12.0",
        "COLUMNS": "90",
        "MORE": "run",
        "RUN": "1",
        **own,
    }
    with_wheels = environment(host, "/far", "/there", wheels=True)["PYTHONPATH"]
    assert with_wheels == ("/far/site:/lib" if own else "/far/site")
    assert "TORCH_CUDA_ARCH_LIST" not in environment(PLAIN, "/far", "/there", wheels=False)
