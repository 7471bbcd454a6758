"""Cells of the bf16 precisions: honest arithmetic passes, every rounding left out, cut off or done twice does not.

Faults are planted in the reference's own arithmetic, so nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import harness.runner
import refs.model
from harness import widths
from harness.cells import Cell, Check, Findings, Verdict
from harness.golden import Golden
from harness.golden_bf16_checks import clear_tokens, tokens
from harness.matrix import Point
from harness.protocol import Decoded
from harness.reference_engine import ReferenceEngine, ReferenceSession
from harness.rounding import BOUND, operations
from harness.runner import Runner
from refs import generate, kdtr, recipe
from refs.attention import attend
from refs.elementary import F
from refs.exact import bf16_nearest
from refs.golden_bf16 import clearance, divergence, nmse
from refs.model import Model
from tests.harness.conftest import SMALL

AR, TREE = Point("bf16", "ar", "micro16", "", "cpu"), Point("int4-bf16", "ddtree", "micro16", "noisy", "cpu")


@pytest.fixture(scope="module")
def micro16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``micro`` with goldens of the bf16 precisions alone."""
    folder = tmp_path_factory.mktemp("micro16")
    (folder / "tiny.yaml").write_bytes((recipe.CONFIGS / "tiny.yaml").read_bytes())
    made = {**SMALL, "name": "micro16", "precisions": ["bf16", "int4-bf16"]}
    (folder / "micro16.yaml").write_text(yaml.safe_dump(made))
    path = folder / "micro16.kdtr"
    kdtr.write(path, *generate.layout(generate.generate(recipe.load("micro16", folder))))
    return path


@pytest.fixture(autouse=True)
def few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("MAX_ROWS", 6), ("PATHS", 2), ("DEPTH", 3)):
        monkeypatch.setattr(widths, name, few)


def run(path: Path, point: Point, model: Callable[[Path, str], Model] | None = None) -> Cell:
    """One cell of the reference, or of an engine over another ``model``."""

    class Engine(ReferenceEngine):
        def load(self, path: Path, precision: str, **_: Any) -> ReferenceSession:
            return ReferenceSession(model(path, precision), 65) if model else super().load(path, precision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.runner, "create", lambda name, device, ranks=1: Engine(device))
        runner = Runner("reference", {"micro16": path}, seconds=60, host="here", worker="")
        try:
            return runner.run(point, lambda cell: None)
        finally:
            runner.close()


@pytest.mark.parametrize("point", [AR, replace(AR, precision="int4-bf16"), TREE, replace(TREE, precision="bf16")])
def test_the_reference_passes(micro16: Path, point: Point) -> None:
    cell = run(micro16, point)
    assert (cell.verdict, cell.detail) == (Verdict.PASS, "")


@pytest.mark.parametrize("summation", ["tree", "strided"])
@pytest.mark.parametrize("precision", ["bf16", "int4-bf16"])
def test_float32_is_far_within_the_bound(micro16: Path, precision: str, summation: str) -> None:
    golden = Golden.open(micro16, precision)
    rows = (*golden.prompt, *golden.tokens)
    model = Model.open(micro16, precision, np.float32, summation=summation, rounding=True)
    checks, divergence = operations(golden, rows, model.taps(rows, operations=True))
    assert divergence is None
    assert max(check.value for check in checks) < BOUND / 10


def truncated(x: F) -> F:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32).astype(x.dtype))


def twice(x: F) -> F:
    """Rounded, moved off the grid of bf16 and back, and rounded again: the error of two roundings is left."""
    off = x.dtype.type(1.3)
    return bf16_nearest(bf16_nearest(x * off) / off)


@pytest.mark.parametrize("wrong", [lambda x: x, truncated, twice], ids=["left out", "truncated", "twice"])
def test_a_wrong_rounding_is_seen_where_it_first_is(micro16: Path, wrong: Callable[[F], F]) -> None:
    def faulty(path: Path, precision: str) -> Model:
        model = Model.open(path, precision, rounding=True)
        model._held = wrong
        return model

    cell = run(micro16, AR, faulty)
    assert cell.verdict is Verdict.FAIL_LOGITS
    assert cell.divergence is not None
    assert cell.divergence.tap == "layers.0.mla.q_a"


def test_attention_with_unrounded_weights_is_seen_in_its_output(micro16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden.open(micro16, "bf16")
    rows = (*golden.prompt, *golden.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(refs.model, "attend", lambda *a: attend(*a[:-1]))
        taps = Model.open(micro16, "bf16", rounding=True).taps(rows, operations=True)
    checks, found = operations(golden, rows, taps)
    assert [check.name for check in checks if not check.ok] == ["operations.mla.o_lat"]
    assert found is not None
    assert found.tap == "layers.0.mla.o_lat"


@pytest.mark.parametrize(("bits", "seen"), [(11, []), (10, ["operations.mla.o_lat"])])
def test_sums_of_weighted_latents_may_be_kept_in_eleven_bits(
    micro16: Path, monkeypatch: pytest.MonkeyPatch, bits: int, seen: list[str]
) -> None:
    """As docs/model.md allows; they are kept before they are divided, so off the grid of what is rounded afterwards."""
    off = 1.3

    def kept(*given: Any) -> F:
        parts, exponents = np.frexp(attend(*given) * off)
        return np.ldexp(np.rint(parts * 2.0**bits), exponents - bits) / off

    golden = Golden.open(micro16, "bf16")
    rows = (*golden.prompt, *golden.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(refs.model, "attend", kept)
        taps = Model.open(micro16, "bf16", rounding=True).taps(rows, operations=True)
    checks, _ = operations(golden, rows, taps)
    assert [check.name for check in checks if not check.ok] == seen


def test_experts_that_the_scores_do_not_give_are_seen(micro16: Path) -> None:
    golden = Golden.open(micro16, "bf16")
    rows = (*golden.prompt, *golden.tokens)
    taps = Model.open(micro16, "bf16", rounding=True).taps(rows, operations=True)
    name = "layers.1.moe.ids"
    left = next(e for e in range(8) if e not in taps[name][3])
    taps[name][3, -1] = left
    checks, _ = operations(golden, rows, taps)
    assert {check.name for check in checks if not check.ok} >= {"operations.moe.ids"}


@pytest.mark.parametrize("seed", range(3))
def test_clearance_is_the_least_change_that_moves_a_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    config = recipe.load("tiny").model
    biased = rng.random((50, 16))
    biased[:10, 1::2] = biased[:10, 0::2]  # twins
    gap = clearance(replace(config, num_experts_per_tok=3), biased)
    for row, least in zip(biased, gap, strict=True):
        chosen = np.argsort(-row, kind="stable")[:3]
        for i in range(16):
            for j in range(16):
                if i in chosen and j not in chosen and row[i] != row[j]:
                    assert row[i] - row[j] >= least - 1e-12
    plain = biased[10:]
    third, fourth = np.sort(plain, axis=1)[:, -3], np.sort(plain, axis=1)[:, -4]
    np.testing.assert_allclose(gap[10:], third - fourth)


def test_statistics_against_torch() -> None:
    rng = np.random.default_rng(1)
    want, got = rng.standard_normal((4, 30)), rng.standard_normal((4, 30))
    p, q = (torch.log_softmax(torch.from_numpy(x), -1) for x in (want, got))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(divergence(got, want), kl.numpy(), rtol=1e-9)
    assert nmse(got, want) == pytest.approx(float(((got - want) ** 2).mean() / (want**2).mean()))
    x = rng.standard_normal(1000).astype(np.float32) * np.float32(10) ** rng.integers(-30, 30, 1000).astype(np.float32)
    assert bf16_nearest(x).tobytes() == torch.from_numpy(x).to(torch.bfloat16).float().numpy().tobytes()


def test_tokens_may_part_only_where_no_lead_is_clear(micro16: Path) -> None:
    golden = Golden.open(micro16, "bf16")
    clear = clear_tokens(golden)[:-1]

    def judged(at: int) -> Check:
        other = (golden.tokens[at] + 1) % 64
        kept: Sequence[int] = (*golden.tokens[:at], other, *golden.tokens[at + 1 :])
        logits = golden.logits.astype(np.float32)
        found = Findings()
        tokens(found, golden, Decoded(tuple(kept), len(kept), "limit", (1,) * len(kept), logits))
        return next(check for check in found.checks if check.name == "tokens")

    assert clear.any()
    for at in range(len(clear)):
        assert judged(at).ok != bool(clear[at])


def test_a_failed_cell_is_traced_to_its_operation(micro16: Path) -> None:
    class OneLayer(Model):
        """The query of layer 1 is a thousandth too large."""

        def _pass(self, name: str, value: F) -> F:
            if name == "layers.1.mla.q":
                value = value * 1.001
            return super()._pass(name, value)

    cell = run(micro16, AR, lambda path, precision: OneLayer.open(path, precision, rounding=True))
    assert cell.verdict is Verdict.FAIL_LOGITS
    assert cell.detail.startswith("operations.mla.q: layer 1, mla.q: mean square error ")
    assert cell.divergence is not None
    assert cell.divergence.tap == "layers.1.mla.q"
