"""The committed fuzzing corpus, without a fuzzer: both readers give the same verdict on every input, by name."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import engine
from harness.protocol import ConfigError, FormatError, MissingTensor
from refs import kdtr
from tests.fuzz.seeds import CORPUS, seeds

FILES = sorted(CORPUS.iterdir())


def test_the_corpus_is_small_and_holds_its_seeds() -> None:
    assert 20 < len(FILES) < 200
    assert sum(p.stat().st_size for p in FILES) < 200_000
    for name, data in seeds().items():
        assert (CORPUS / name).read_bytes() == data, f"{name}: run python -m tests.fuzz.seeds"


def test_the_seeds_reach_what_they_are_for(tmp_path: Path) -> None:
    """The two models load and decode; the others are valid files without a model."""
    made = engine.create("cpu")
    for name in ("seed-dense", "seed-moe"):
        for precision in ("fp32", "int4"):
            with made.load(CORPUS / name, precision, max_rows=2) as session:
                assert session.prefill([0, 1, 2]).shape == (3, 3)
    for name in ("seed-empty", "seed-types"):
        with pytest.raises(ConfigError):
            made.load(CORPUS / name, "fp32")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_both_readers_agree(path: Path) -> None:
    try:
        kdtr.read(path)
        python = ""
    except kdtr.KdtrError as error:
        python = str(error)
    if python:
        with pytest.raises(FormatError) as caught:
            engine.create("cpu").load(path, "fp32", max_rows=1)
        assert str(caught.value).startswith(f"{path}: "), python
        return
    with contextlib.suppress(ConfigError, MissingTensor):  # the format is right, the model need not be
        engine.create("cpu").load(path, "fp32", max_rows=1).close()
