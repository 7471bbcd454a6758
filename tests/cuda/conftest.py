"""Tests of the CUDA backend. Those that need a GPU, or two, are collected only where they are; the header says so."""

from __future__ import annotations

import pytest

from harness.environment import survey

NEED_A_GPU = [
    "test_rows.py", "test_mla_k26.py", "test_products.py", "test_step_k26.py", "test_decoding.py", "test_backend.py",
    "test_cluster.py",
]  # fmt: skip
NEED_TWO = ["test_ranks.py"]


collect_ignore = [*([] if survey().gpus else NEED_A_GPU), *([] if len(survey().gpus) > 1 else NEED_TWO)]


def pytest_report_header() -> str:
    """Which GPU is tested, or why the tests that need one are left out."""
    seen = survey()
    names = ", ".join(f"{g.name} (sm_{g.arch})" for g in seen.gpus)
    if names:
        return f"tests/cuda: on {names}" + ("" if len(seen.gpus) > 1 else f"; {', '.join(NEED_TWO)} left out: one GPU")
    return f"tests/cuda: {', '.join([*NEED_A_GPU, *NEED_TWO])} left out: {seen.reason}"


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
