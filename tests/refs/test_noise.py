"""The tolerance lets honest float32 engines pass and lets no planted fault pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from harness import bundles
from harness.golden import Golden
from refs import attention, elementary, exact
from refs.config import F32_PRECISIONS
from refs.kdtr import Kdtr
from refs.model import Model

CONFIGS = ("tiny", "tiny2", "odd", "groups", "outliers")


def serial(p: Any) -> Any:
    for i in range(1, len(p)):
        p[0] += p[i]
    return p[0]


def lanes(n: int) -> Callable[[Any], Any]:
    def total(p: Any) -> Any:
        for start in range(n, len(p), n):
            stop = min(start + n, len(p))
            p[: stop - start] += p[start:stop]
        return exact.tree_sum(p[: min(n, len(p))])

    return total


ORDERS: dict[str, Callable[[Any], Any]] = {
    "serial": serial,
    "backwards": lambda p: serial(p[::-1].copy()),
    "8 lanes": lanes(8),
    "shuffled": lambda p: serial(p[np.random.default_rng(len(p)).permutation(len(p))]),
}


@pytest.fixture(scope="module")
def golden() -> Callable[[str, str], Golden]:
    paths = bundles.ensure(CONFIGS)
    return lambda config, precision: Golden.open(paths[config], precision)


def errors(made: Golden, fields: Mapping[str, Any], tensors: Mapping[str, Any], **options: Any) -> dict[str, float]:
    """Greatest error of a float32 model over the bundle's tolerance, for each tap and the logits."""
    m = Model(fields, tensors, made.precision, np.float32, **options)
    taps = m.taps([*made.prompt, *made.tokens])
    out = {}
    for name, want in {**made.taps, "logits": made.logits}.items():
        error = float(np.abs(taps[name][-len(want) :] - want).max())
        out[name] = error / made.tolerance(name) if made.tolerance(name) else float(error > 0)
    return out


@pytest.mark.parametrize("precision", F32_PRECISIONS)
@pytest.mark.parametrize("config", CONFIGS)
def test_other_orders_and_another_exp_stay_within_half_the_tolerance(
    config: str, precision: str, golden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = golden(config, precision)
    worst: dict[str, float] = {}
    for name, order in ORDERS.items():
        monkeypatch.setitem(exact.SUMMATIONS, name, order)
        worst[name] = max(errors(made, made.file.fields, made.file.tensors, summation=name).values())
    for module in (attention, exact):
        monkeypatch.setattr(module, "exp", lambda x: np.exp(x))
    monkeypatch.setattr(elementary, "exp", np.exp)
    worst["numpy's exp"] = max(errors(made, made.file.fields, made.file.tensors, summation="serial").values())
    assert max(worst.values()) < 0.5, worst
    assert min(worst.values()) > 0.02, worst  # else the tolerance is far above what it bounds


def scale_off_by_one_step(file: Kdtr) -> Any:
    name = "layers.1.experts.down.sc"
    scales = file.tensor(name).copy()
    scales[0] += 1
    return dict(file.fields), {**file.tensors, name: scales}


def changed(name: str, value: Any) -> Callable[[Kdtr], Any]:
    return lambda file: ({**file.fields, name: value}, file.tensors)


def swapped_nibbles(file: Kdtr) -> Any:
    name = "layers.1.experts.up.qw"
    packed = file.tensor(name)
    return dict(file.fields), {**file.tensors, name: (packed << 4) | (packed >> 4)}


def without_bias(file: Kdtr) -> Any:
    zeros = {k: np.zeros_like(v) for k, v in file.tensors.items() if k.endswith("router.bias")}
    return dict(file.fields), {**file.tensors, **zeros}


FAULTS: dict[str, Callable[[Kdtr], Any]] = {
    "one expert's scales one bf16 step off": scale_off_by_one_step,
    "nibbles swapped": swapped_nibbles,
    "router bias left out": without_bias,
    "inner eps of the outer norm": changed("inner_norm_eps", 1e-5),
    "YaRN scale left out": changed("rope_mscale_all_dim", 1e-9),
    "experts' weights not normalised": changed("norm_topk_prob", 0),
    "YaRN ramp left out": changed("rope_beta_slow", 1e-6),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_exceed_the_tolerance(fault: str, golden: Any) -> None:
    made = golden("tiny", "int4")
    assert errors(made, made.file.fields, made.file.tensors)["logits"] < 0.5
    fields, tensors = FAULTS[fault](made.file)
    found = errors(made, fields, tensors)
    assert found["logits"] > 2, found
