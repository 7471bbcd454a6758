"""``kdtree demo``: AR beside DDTree, and what it is asked that it cannot do."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest

from harness import cli
from harness.demo import main as demo
from harness.describe import WIDTH
from harness.matrix import F32_PRECISIONS, PRECISIONS, config_precisions
from harness.prepare import Infrastructure
from harness.reference_engine import ReferenceSession


def test_a_wrong_config_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harness.prepare.create", lambda *_: pytest.fail("an engine was built"))
    assert cli.main(["demo", "--config", "nosuch"]) == 3
    assert "nosuch.yaml: file: there is no such config" in capsys.readouterr().err


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
        (60, [], "oracle, made from the AR tokens"),
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
    assert max(map(len, text.split("\n"))) <= WIDTH


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


def test_demo_closes_what_it_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(ReferenceSession, "close", lambda self: closed.append(1))
    assert demo(["--engine", "reference", "--tokens", "1"]) == 0
    assert closed == [1, 1]
