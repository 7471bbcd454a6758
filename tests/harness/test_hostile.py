"""Both readers refuse every hostile file by its name; an engine that opens anything fails every one of the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import engines
from harness.cells import Verdict
from harness.mutants import hostile
from harness.protocol import EngineError, FormatError


@pytest.mark.parametrize("engine", ["csrc", "reference"])
def test_every_file_is_refused_by_name(micro: Path, tmp_path: Path, engine: str) -> None:
    checks = list(hostile.check_files(engines.create(engine, "cpu"), micro, tmp_path))
    assert [f"{check.name}: {check.detail}" for check in checks if not check.ok] == []
    assert checks[-1].name == "loader.valid"
    assert list(tmp_path.iterdir()) == []


def test_files_differ_and_cover_the_page(micro: Path) -> None:
    files = list(hostile.corpus(micro))
    assert len({file.name for file in files}) == len(files)
    assert len({file.data for file in files}) == len(files)
    told = " ".join(file.field for file in files)
    for field in ("magic", "version", "order", "flags", "reserved", "file_size", "field_count", "tensor_count"):
        assert f"header.{field}" in told
    for field in (
        ".name",
        ".dtype",
        ".ndim",
        ".shape",
        ".offset",
        ".size",
        ".kind",
        ".value",
        "header.crc",
        "data_offset",
    ):
        assert field in told


class Careless:
    """Opens whatever it is given, or raises ``error`` for it."""

    name, device = "careless", "cpu"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def load(self, path: Path, precision: str, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self

    def prefill(self, tokens: list[int]) -> Any:
        return np.full((len(tokens), 4), np.nan, np.float32)

    def close(self) -> None: ...

    def kernels(self, precision: str, moe: bool) -> frozenset[str]:
        return frozenset()


def test_an_engine_that_opens_anything_fails_every_check(micro: Path, tmp_path: Path) -> None:
    checks = list(hostile.check_files(Careless(), micro, tmp_path))
    assert not any(check.ok for check in checks)
    assert {check.verdict for check in checks} == {Verdict.ERROR}


@pytest.mark.parametrize("error", [FormatError("no: field"), EngineError("header"), KeyError("magic")])
def test_another_error_is_not_good_enough(micro: Path, tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "x.kdtr"
    for file in hostile.corpus(micro):
        assert hostile.refusal(Careless(error), file, path) != ""
