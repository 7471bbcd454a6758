"""The command: its JSON and plot, its filters, and its exit statuses."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from harness import environment
from harness.bench import ceilings, clock, command, ops, plot, reading, step
from harness.bench.ceilings import Ceilings
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import main
from harness.describe import WIDTH
from harness.sources import ROOT

LIMITS = Ceilings(1e10, {"f32": 1e11}, None, 1 << 16, lambda size: size / 1e4)
FIELDS = {"case", "op", "M", "K", "N", "T", "device", "us", "bytes", "flops", "x_floor", "peers"}


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device: LIMITS)


def test_what_is_printed_of_a_case_fits_a_terminal() -> None:
    """Of a committed record, with all its peers and targets. The case stands on a line that is not indented."""
    record = ROOT / "docs" / "evidence" / "bench-cuda.json"
    for case in json.loads(record.read_text("utf-8"))["cases"]:
        line = ops.Line(**{one.name: case[one.name] for one in fields(ops.Line)})
        first, *more = f"[99/99] {ops.text(line)}".splitlines()
        assert max(map(len, [first, *more])) <= WIDTH
        assert line.case in first
        assert all(peer in "".join(more) for peer in line.peers)
        assert all(part.startswith("    ") for part in more)


@pytest.mark.slow
@pytest.mark.usefixtures("known_ceilings")
def test_ops_and_step_write_json_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    arguments = ["bench", "ops", "step", "--filter", "tiny-linear-f32-k64-n128-m1", "--filter", "step-fp32-ar-tiny-m1"]
    arguments += ["--seconds", "0.001", "--config", "tiny", "--json", str(out), "--plot", str(picture)]
    assert main(arguments) == PASSED
    found = json.loads(out.read_text())
    [line] = found["cases"]
    assert set(line) >= FIELDS
    assert (line["M"], line["K"], line["N"], line["bytes"]) == (1, 64, 128, 4 * (64 * 128 + 64 + 128))
    assert line["x_floor"] == pytest.approx(line["us"] / (line["bytes"] / 1e4), abs=1e-4)  # records have four decimals
    assert line["roofline"] == pytest.approx(1e6 * line["bytes"] / 1e10 / line["us"], abs=1e-4)
    assert line["peers"]["torch"] > 0
    [step] = found["steps"]
    assert step["tokens_per_second"] == pytest.approx(1e6 * step["tokens"] / (step["us"] * step["forwards"]))
    assert step["tokens_per_gigabyte"] == pytest.approx(1e9 / step["bytes"])
    assert step["x_floor"] == pytest.approx(step["us"] / (step["bytes"] / 1e4), abs=1e-4)
    assert set(found["header"]) >= {"device", "commit", "threads", "ceilings", "peers", "load_average"}
    assert found["not_measured"] == {"ops": {}}
    assert "tiny-linear-f32-k64-n128-m1" in picture.read_text()
    assert "% of the roofline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--filter", "no such case"], "chooses nothing"),
        (["ops", "--filter", "step-"], "chooses nothing"),
        (["step", "--filter", "tiny-linear"], "chooses nothing"),
        (["--k26", "7"], "--k26 7"),
        (["speed"], "'speed' is none of"),
        (["--runs", "0", "--list"], "'0' is no whole number from 1 on"),
        (["--seconds", "0"], "not above 0"),
        (["--width", "1"], "below 2"),
        (["step", "--plot", "out.svg"], "--plot shows operations, and none is chosen"),
    ],
)
def test_wrong_arguments_are_3(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == INFRASTRUCTURE
    assert reason in capsys.readouterr().err


def test_the_list_is_the_filtered_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--filter", "tree_build-n163840", "--filter", "step-int4-*-tiny-m4"]) == PASSED
    said = capsys.readouterr().out.split()
    assert said == [
        "k26-tree_build-n163840-l15-b16-m17",
        "k26-tree_build-n163840-l15-b64-m65",
        "step-int4-ddtree-tiny-m4",
    ]


def test_the_cache_size_is_the_largest_of_the_first_processor(tmp_path: Path) -> None:
    for index, size in enumerate(("32K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert ceilings.cpu_cache_bytes(tmp_path) == 32 << 20
    assert ceilings.cpu_cache_bytes(tmp_path / "none") == ceilings.DEFAULT_CACHE


def test_ceilings_are_of_the_fastest_sample_and_floors_of_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        bytes = 1000

        def __init__(self, data: Any, threads: int) -> None:
            assert (data.numel() * data.element_size(), threads) == (4096, 3)

        def timed(self, seconds: float) -> clock.Timing:
            return clock.Timing(50.0, 45.0, 60.0, 40.0, 9)

    monkeypatch.setenv("KDTREE_THREADS", "3")
    monkeypatch.setattr(reading, "Reader", Reader)
    monkeypatch.setattr(clock, "wall", lambda calls, seconds: clock.Timing(200.0, 150.0, 300.0, 100.0, 9))
    monkeypatch.setattr(ceilings, "READ_BYTES", {"cpu": 4096})
    monkeypatch.setattr(ceilings, "MATMUL", {"cpu": 8})
    before = torch.get_num_threads()
    try:
        found = ceilings._cpu()
    finally:
        torch.set_num_threads(before)
    assert found.read == pytest.approx(1000 / 40e-6)
    assert found.matmul == {"f32": pytest.approx(2 * 8**3 / 100e-6)}
    assert found.floor_us(500) == 25.0


@pytest.mark.parametrize(
    ("own", "omp", "threads"), [("3", "5", 3), ("0", "5", 5), ("x", "1", 1), ("", "", 7), ("-2", "0", 7)]
)
def test_threads_are_the_engines(monkeypatch: pytest.MonkeyPatch, own: str, omp: str, threads: int) -> None:
    monkeypatch.setenv("KDTREE_THREADS", own)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(environment, "processors", lambda: 7)
    assert ceilings.threads() == threads


def test_the_roofline_is_the_slower_of_reading_and_computing() -> None:
    assert LIMITS.roofline_us(10**7, 0, "f32") == 1e3
    assert LIMITS.roofline_us(10**7, 10**9, "f32") == 1e4
    assert LIMITS.roofline_us(0, 10**9, "int4") == 1e4


def test_bars_are_as_long_as_their_shares() -> None:
    svg = ElementTree.fromstring(plot.roofline('a & "b"', [("x<y", 0.5, True), ("z", 1.7, False), ("w", 0.0, True)]))
    bars = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert [float(bar.get("width", "")) for bar in bars] == [plot.BAR / 2, plot.BAR, 0.0]
    assert [bar.get("class") for bar in bars] == ["bar", "warm", "bar"]
    texts = "".join(svg.itertext())
    assert "x<y" in texts
    assert "170.0 %" in texts


@pytest.mark.usefixtures("known_ceilings")
def test_what_was_measured_before_an_error_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(step, "run", fails)
    out = tmp_path / "bench.json"
    arguments = ["bench", "--filter", "tiny-accept-m1", "--filter", "step-fp32-ar-tiny-m1", "--seconds", "0.001"]
    assert main([*arguments, "--config", "tiny", "--json", str(out)]) == INFRASTRUCTURE
    found = json.loads(out.read_text())
    assert [line["case"] for line in found["cases"]] == ["tiny-accept-m1"]
    assert found["not_measured"]["rest"] == "OSError: the disk is full"


@pytest.mark.usefixtures("known_ceilings")
@pytest.mark.parametrize(
    ("error", "rest"), [(KeyboardInterrupt, "interrupted"), (BrokenPipeError, "whoever read the output left")]
)
def test_what_was_measured_before_an_interrupt_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], rest: str
) -> None:
    measured = ops.measure

    def once(bench: object, case: Any, *others: Any) -> Any:
        if case.M != 1:
            raise error
        return measured(bench, case, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "measure", once)
    out = tmp_path / "bench.json"
    with pytest.raises(error):
        command.main(["ops", "--filter", "tiny-accept-m*", "--seconds", "0.001", "--json", str(out)])
    found = json.loads(out.read_text())
    assert [line["case"] for line in found["cases"]] == ["tiny-accept-m1"]
    assert found["not_measured"]["rest"] == rest
    [us] = (line["us"] for line in found["cases"])
    assert us == round(us, 4)
