"""A checkout small enough to have one for each test: configs, sources, waivers, and a git commit over them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import runs


def git(root: Path, *arguments: str) -> None:
    """Run git in ``root`` with an identity of its own."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def make(root: Path) -> None:
    """The matrix of ``runs.TABLE`` as a committed tree."""
    for folder in ("refs/configs", "csrc", "engine", "harness", "tests"):
        (root / folder).mkdir(parents=True)
    for config, drafters in runs.TABLE.items():
        text = f"run:\n  drafters: [{', '.join(drafters)}]\n"
        (root / "refs" / "configs" / f"{config}.yaml").write_text(text)
    (root / "refs" / "bundles.lock").write_text("hashes\n")
    (root / "csrc" / "model.cpp").write_text("int model();\n")
    (root / "waivers.yaml").write_text("waivers: []\n")
    git(root, "init", "-q", "-b", "main", "--template=")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")
