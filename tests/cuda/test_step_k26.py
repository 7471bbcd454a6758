"""A step of Kimi K2.6's sizes by the kernels on tensor cores: every row has the bits of AR, operation by operation.

Operations that are called again and again with the same inputs (`test_products.py`, `test_mla_k26.py`) do not see what
a whole step sees: weights that come from memory and not from L2, shared memory that another kernel left full of its own
numbers, and launches that overlap and read what the launch before them has only now written. So here are one dense and
two MoE layers with all 384 experts, 11 GB, by eager calls (which can be looked into) and by graphs, with and without
overlap. The first tap that differs is the operation that went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine import create, plan
from engine.session import CsrcSession
from harness.bench import k26
from refs.config import ModelConfig


def lacking() -> str:
    """What this machine has not that these tests need."""
    if not torch.cuda.is_available():
        return "a GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "Hopper or newer"
    return "24 GB of GPU memory" if torch.cuda.mem_get_info()[1] < 24 << 30 else ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() != "", reason=f"needs {lacking()}")]
ROWS = 24
WIDTHS = (2, 3, 8, 9, 16, 17, 24)
REPEATS = 8
TREES = (2, 4, 8, 16, 33, 64)
OVERLAP = pytest.mark.parametrize("overlap", ["1", "0"], ids=["overlapping", "one-by-one"])
F32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return k26.model(num_layers=3, vocab_size=8192)


@pytest.fixture(scope="module")
def model(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k26") / "k26.kdtr"
    k26.write(path, config, print, f32=False)
    return path


@contextmanager
def opened(path: Path, *, overlap: str, tensor: str = "1") -> Iterator[CsrcSession]:
    """The backend reads its switches when a session opens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KDTREE_CUDA_TENSOR", tensor)
        patch.setenv("KDTREE_CUDA_OVERLAP", overlap)
        session = create("cuda").load(path, "int4-bf16", max_rows=max(TREES))
    assert isinstance(session, CsrcSession)
    with session:
        yield session


def one_by_one(session: CsrcSession, tokens: list[int]) -> dict[str, F32]:
    """Every operation's rows as AR has them, in the order in which operations run."""
    session.reset()
    rows: dict[str, list[F32]] = {}
    for token in tokens:
        for name, row in session.verify_taps([token], [-1]).items():
            rows.setdefault(name, []).append(row)
        session.step(token)
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def agree(want: dict[str, F32], got: dict[str, F32], what: str) -> None:
    """In every bit; what does not is named by its first operation, and where in it."""
    for name, rows in got.items():
        wrong = np.argwhere(rows.view(np.uint32) != want[name][: len(rows)].view(np.uint32))
        if not len(wrong):
            continue
        row, column = wrong[0]
        pytest.fail(
            f"{what}: {name} is the first to differ, in {len(wrong)} of {rows.size} numbers, of rows "
            f"{sorted(set(wrong[:, 0].tolist()))}; [{row}, {column}] is {rows[row, column]!r}, alone it is "
            f"{want[name][row, column]!r}; differing columns of that row begin "
            f"{wrong[wrong[:, 0] == row][:12, 1].tolist()}"
        )


@OVERLAP
def test_every_operation(model: Path, config: ModelConfig, overlap: str) -> None:
    """Chains of all widths against AR, again and again; and AR against itself."""
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, ROWS).tolist()
    with opened(model, overlap=overlap) as session:
        alone = one_by_one(session, tokens)
        assert {name for name, rows in alone.items() if not np.isfinite(rows).all()} == set()
        for repeat in range(REPEATS):
            for m in WIDTHS:
                session.reset()
                got = dict(session.verify_taps(tokens[:m], [*range(-1, m - 1)]))
                agree(alone, got, f"{m} rows, repeat {repeat}")
        agree(alone, one_by_one(session, tokens), "AR once more")
        counted = session.counters()
    assert counted["linear_bf16_stream"] > 0
    assert counted["experts_int4_bf16_stream"] > 0
    assert "mla_attention_bf16_hopper" in counted or torch.cuda.get_device_capability()[0] != 9


@OVERLAP
def test_decodes(model: Path, config: ModelConfig, overlap: str) -> None:
    """AR and trees as graphs: the same tokens, and logits with the same bits, every time."""
    requests = k26.requests(config, TREES, 8)
    with opened(model, overlap=overlap) as session:
        first = session.decode(replace(requests[1], record=True))
        assert first.logits is not None
        assert np.isfinite(first.logits).all()
        for repeat in range(REPEATS):
            for m, request in requests.items():
                decoded = session.decode(replace(request, record=True))
                assert decoded.logits is not None
                assert decoded.tokens == first.tokens, f"width {m}, repeat {repeat}"
                wrong = np.argwhere(decoded.logits.view(np.uint32) != first.logits.view(np.uint32))
                where = f"width {m}, repeat {repeat}: {len(wrong)} logits, the first at {wrong[:1].tolist()}"
                assert not len(wrong), where


def test_the_dense_layer_is_near_the_generic_kernels(model: Path, config: ModelConfig) -> None:
    """They add in another order, so that a value may round to its neighbour; the router has no say yet."""
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, 9).tolist()
    found = []
    for tensor in ("1", "0"):
        with opened(model, overlap="1", tensor=tensor) as session:
            found.append(session.verify_taps(tokens, [*range(-1, 8)])["layers.0.out"].astype(np.float64))
    assert ((found[0] - found[1]) ** 2).mean() < 1e-5 * (found[1] ** 2).mean()


def test_what_it_allocates_is_planned(model: Path, config: ModelConfig) -> None:
    """Scratch of attention's splits and of the experts' products included, and without the weights in its way."""
    planned = plan.plan(config, "int4-bf16", 1, config.max_context, max(TREES))
    with opened(model, overlap="1") as session:
        held, weights = session.memory()[0], sum(planned.weights.values())
    assert 0 < held - weights <= planned.cache + planned.workspace
    assert planned.total <= 1.1 * held
