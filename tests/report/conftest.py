"""A checkout of its own for each test that changes one."""

from __future__ import annotations

import shutil
from pathlib import Path

import checkouts
import pytest


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; never changed."""
    root = tmp_path_factory.mktemp("committed")
    checkouts.make(root)
    return root


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    root = tmp_path / "checkout"
    shutil.copytree(committed, root)
    return root
