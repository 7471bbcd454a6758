"""The barrier of clusters by itself: what a block wrote the others read, under the traffic that the products make."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import environment, gpu, toolchain
from tests.waiting import PATIENCE

PROBE = Path(__file__).with_name("cluster_probe.cu")


@pytest.mark.slow
def test_the_barrier_of_a_cluster(tmp_path: Path) -> None:
    """A billion reads; beside it, printed and not judged, how often weaker barriers are wrong (docs/kernels.md)."""
    seen = gpu.survey().gpus
    if not seen or int(seen[0].arch.split(".")[0]) < 9:
        pytest.skip("clusters need Hopper or newer")
    compiler, _ = environment.nvcc()
    number = toolchain.specific(seen[0].arch).replace(".", "")
    program = tmp_path / "probe"
    flags = ["-std=c++17", "-O3", "-DKDTREE_CUDA", f"-gencode=arch=compute_{number},code=sm_{number}"]
    subprocess.run([compiler, *flags, str(PROBE), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    name, wrong, of = done.stdout.splitlines()[0].split()
    assert name == "engine"
    assert int(wrong) == 0
    assert int(of) > 10**9
