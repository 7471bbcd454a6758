"""Hardware counters: what the profiler printed, read back; the profiler itself is on machines with a GPU."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from harness.bench import counters
from harness.bench.counters import CountersError, kernels, owners
from harness.cells import INFRASTRUCTURE

LOG = """
==PROF== Connected to process 1878 (/usr/bin/python3.12)
==PROF== Profiling "stream_kernel" - 0: 0%....50%....100% - 38 passes
case k26-linear-int4-bf16-k7168-n4096-m1
==PROF== Profiling "stream_kernel" - 1: 0%....50%....100% - 38 passes
==PROF== Profiling "router_kernel" - 2: 0%....50%....100% - 38 passes
case k26-moe_block-int4-bf16-k7168-n2048-e384-m1
==PROF== Profiling "rank_kernel" - 3: 0%....50%....100% - 38 passes
==PROF== Disconnected from process 1878
"""
HEAD = (
    '"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def table(*lines: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO("\n".join([HEAD, *lines]))))


def test_a_case_owns_the_kernels_printed_before_it() -> None:
    assert owners(LOG) == {
        0: "k26-linear-int4-bf16-k7168-n4096-m1",
        1: "k26-moe_block-int4-bf16-k7168-n2048-e384-m1",
        2: "k26-moe_block-int4-bf16-k7168-n2048-e384-m1",
    }


def test_figures_are_numbers_under_their_units() -> None:
    kernel = (
        '"void kdtree::cuda::<unnamed>::stream_kernel<kdtree::<unnamed>::Shape<(int)2, (int)1>>(kdtree::cuda::Params)"'
    )
    start = f'"0","1878",{kernel},"(256, 1, 1)","(128, 1, 1)"'
    other = '"1","1878","next_kernel","(32, 1, 1)","(1, 1, 1)","Occupancy","Achieved Occupancy","%","50"'
    rows = table(
        '"","","","","","","","",""',
        other,
        f'{start},"GPU Speed Of Light Throughput","Duration","ns","12,448"',
        f'{start},"GPU Speed Of Light Throughput","SM Frequency","hz","1860000000"',
        f'{start},"Memory Workload Analysis","Local Memory Spilling Requests","","0"',
        f'{start},"Occupancy","","",""',
        f'{start},"Occupancy","Achieved Occupancy","%",""',
    )
    found, following = kernels(rows, {0: "a case"})
    assert (following["case"], following["figures"]) == ("", {"Achieved Occupancy [%]": 50.0})
    assert found["kernel"] == "void stream_kernel<Shape<2, 1>>(Params)"
    assert found["figures"] == {"Duration [ns]": 12448.0, "Local Memory Spilling Requests": 0.0}
    assert (found["case"], found["grid"]) == ("a case", "(128, 1, 1)")
    with pytest.raises(CountersError, match="Duration in 'us', not in 'ns'"):
        kernels(table(f'{start},"GPU Speed Of Light Throughput","Duration","us","12.4"'), {})


def test_without_a_profiler_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert counters.main(["--filter", "k26-route"]) == INFRASTRUCTURE
    assert "ncu, Nsight Compute's command line, is not on PATH" in capsys.readouterr().err
