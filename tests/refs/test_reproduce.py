"""The proof of equal bytes can fail: it sees a difference, and does not count what it could not try."""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import Any

import pytest

from harness import bundle_lock, reproduce
from harness.matrix import is_large
from harness.reproduce import NotTried, Outcome, Variant

CONFIGS = ["block1"]


def test_a_variant_that_makes_the_pinned_bytes_is_the_same() -> None:
    got = reproduce.attempt(Variant("with a hash seed", sys.executable, (("PYTHONHASHSEED", "7"),)), CONFIGS)
    assert (got.result, got.python, got.detail) == ("same", platform.python_version(), "")


@pytest.mark.slow
def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = bundle_lock.read_lock()
    pins["block1"] = {**pins["block1"], "sha256": "0", "tensors": {**pins["block1"]["tensors"], "lm_head.w": "0"}}
    monkeypatch.setattr(reproduce, "read_lock", lambda path: pins)
    got = reproduce.attempt(Variant("as it is", sys.executable), CONFIGS)
    assert got.result == "differs"
    assert "bundle block1: tensor lm_head.w is the first that differs" in got.detail
    monkeypatch.setattr(reproduce, "read_lock", lambda path: {})
    assert reproduce.attempt(Variant("as it is", sys.executable), CONFIGS).detail == "bundle block1: not in the lock"


@pytest.mark.slow
def test_sources_whose_exp_is_numpys_are_seen_to_differ(tmp_path: Any) -> None:
    sources = reproduce.frozen(tmp_path / "sources")
    same = reproduce.attempt(Variant("copy", sys.executable), CONFIGS, sources)
    assert same.result == "same"
    path = sources / "refs" / "elementary.py"
    path.write_text(
        path.read_text("utf-8").replace(
            "    t, key = x.dtype.type", "    return np.exp(x)\n    t, key = x.dtype.type", 1
        )
    )
    got = reproduce.attempt(Variant("copy", sys.executable), CONFIGS, sources)
    assert got.result == "differs"
    assert "golden.fp32" in got.detail


@pytest.mark.slow
def test_vector_dispatch_is_seen_to_be_off() -> None:
    got = reproduce.attempt(Variant("off", sys.executable, disable_simd=True), CONFIGS)
    if reproduce.describe_interpreter()["simd"]:
        assert (got.result, got.simd) == ("same", "none")
    else:
        assert (got.result, got.detail) == ("not tried", "numpy dispatches to no vector extension here")


@pytest.mark.parametrize("python", ["/bin/false", "/nonexistent/python"])
def test_an_interpreter_that_does_not_run_is_not_tried(python: str) -> None:
    got = reproduce.attempt(Variant("broken", python), CONFIGS)
    assert got.result == "not tried"
    assert got.detail


def test_an_environment_that_cannot_be_made_is_not_tried(tmp_path: Any) -> None:
    got = reproduce.installed_outcomes("/bin/false", "3.99.0", "oldest", CONFIGS, tmp_path)
    assert [(o.variant, o.result) for o in got] == [("Python 3.99.0, oldest numpy", "not tried")]


@pytest.mark.slow
def test_bounds_come_from_pyproject() -> None:
    assert reproduce.requirement('requires-python = "') == (3, 10)
    assert reproduce.requirement('"numpy') == (1, 26)
    with pytest.raises(NotTried, match="no lower bound"):
        reproduce.requirement("nonsense")
    found = reproduce.pythons()
    assert platform.python_version() in found
    assert all(reproduce.numbers(v) >= (3, 10) for v in found)


@pytest.mark.parametrize(
    ("results", "status"),
    [(["same", "same"], 0), (["same", "not tried"], 0), (["same", "differs"], 1), (["not tried"], 3)],
)
def test_exit_statuses(
    results: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Outcome(f"v{i}", r, detail="why" if r != "same" else "") for i, r in enumerate(results)]
    monkeypatch.setattr(reproduce, "run", lambda *_, **__: outcomes)
    assert reproduce.main(CONFIGS) == status
    text = capsys.readouterr().out
    tried = len(results) - results.count("not tried")
    assert f"{results.count('same')} of {tried} variants made the pinned bytes of 1 bundles" in text
    assert all(f"v{i}: {r}: why" in text for i, r in enumerate(results) if r != "same")
    assert reproduce.main(["--json", *CONFIGS]) == status
    assert [o["result"] for o in json.loads(capsys.readouterr().out)["outcomes"]] == results


def test_by_default_every_bundle_but_those_of_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(configs: list[str], **_: object) -> list[Outcome]:
        asked.append(configs)
        return [Outcome("v", "same")]

    monkeypatch.setattr(reproduce, "run", run)
    assert reproduce.main([]) == 0
    pinned = set(bundle_lock.read_lock())
    assert set(asked[0]) == {name for name in pinned if not is_large(name)}
    assert set(asked[0]) < pinned


def test_an_interrupt_waits_for_no_variant_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    def attempt(variant: Variant, *_: Any) -> Outcome:
        begun.append(variant.name)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.2)
        return Outcome(variant.name, "same")

    monkeypatch.setattr(reproduce, "attempt", attempt)
    monkeypatch.setattr(reproduce, "installed_outcomes", lambda *_: [])
    with pytest.raises(KeyboardInterrupt):
        reproduce.run(CONFIGS, quick=True, say=lambda _: None)
    assert len(begun) < len(reproduce.local_variants()) // 2


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 2)", "sys.exit('ERROR: Operation cancelled by user')"])
def test_after_a_child_that_an_interrupt_ended_no_other_is_begun(ends: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        reproduce._run([sys.executable, "-c", f"import os, signal, sys; signal.signal(2, signal.SIG_DFL); {ends}"])
