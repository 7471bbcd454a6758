"""Tests of the CUDA backend. Those that need a GPU are collected only where one is; the header says so."""

from __future__ import annotations

import pytest

from harness.environment import survey

NEED_A_GPU = [
    "test_rows.py", "test_mla_k26.py", "test_products.py", "test_step_k26.py", "test_decoding.py", "test_backend.py",
    "test_cluster.py", "test_ranks.py",
]  # fmt: skip


collect_ignore = [] if survey().gpus else NEED_A_GPU


def pytest_report_header() -> str:
    """Which GPU is tested, or why the tests that need one are left out."""
    seen = survey()
    names = ", ".join(f"{g.name} (sm_{g.arch})" for g in seen.gpus)
    if names:
        return f"tests/cuda: on {names}" + ("" if len(seen.gpus) > 1 else ", which ranks share; NCCL is left out")
    return f"tests/cuda: {', '.join(NEED_A_GPU)} left out: {seen.reason}"


@pytest.fixture(scope="session")
def cuda():  # type: ignore[no-untyped-def]
    """Operations on the first visible GPU, with poisoned memory."""
    from tests.cuda.operations import Operations

    with Operations("cuda") as operations:
        yield operations


@pytest.fixture(scope="session")
def cpu():  # type: ignore[no-untyped-def]
    """The same operations on the CPU: written by other hands, and exact where the contract is exact."""
    from tests.cuda.operations import Operations

    with Operations("cpu") as operations:
        yield operations
