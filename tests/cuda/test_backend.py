"""The CUDA backend as a whole: graphs against eager in every bit, run after run, counters, memory, and how it fails."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import create
from engine.session import CsrcSession
from harness import environment, gpu
from harness.bundles import ensure
from harness.golden import Golden
from harness.protocol import Decoded, DecodeRequest, DeviceError, OutOfMemory
from refs import kdtr
from tests.cuda.operations import random_tree
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
RUNS = 100


@pytest.fixture(scope="module")
def bundle() -> Path:
    return ensure(["tiny"])["tiny"]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sessions(bundle: Path, precision: str) -> Iterator[tuple[CsrcSession, CsrcSession]]:
    """The same model with graphs and without."""
    engine = create("cuda")
    with engine.load(bundle, precision) as graphed, engine.load(bundle, precision, graphs=False) as eager:
        yield graphed, eager


@pytest.fixture(scope="module")
def requests(bundle: Path, precision: str) -> dict[str, DecodeRequest]:
    """An AR decode and a DDTree decode of the bundle, recorded."""
    golden = Golden.open(bundle, precision)
    return {
        "ar": replace(golden.request(), record=True),
        "ddtree": replace(golden.request("noisy"), record=True),
        "sampled": replace(golden.request("noisy"), record=True, temperature=0.8, seed=5),
    }


def _digest(decoded: Decoded) -> str:
    assert decoded.logits is not None
    rest = repr((decoded.tokens, decoded.accepted_per_round, decoded.rounds)).encode()
    return hashlib.sha256(decoded.logits.tobytes() + rest).hexdigest()


@pytest.mark.parametrize("kind", ["ar", "ddtree", "sampled"])
def test_one_hash(
    sessions: tuple[CsrcSession, CsrcSession],
    requests: dict[str, DecodeRequest],
    kind: str,
    bundle: Path,
    precision: str,
) -> None:
    """Captured, replayed, eager, in a session of its own, and a hundred times over: the same bits."""
    graphed, eager = sessions
    seen = {_digest(eager.decode(requests[kind])) for _ in range(3)}
    seen |= {_digest(graphed.decode(requests[kind])) for _ in range(RUNS)}
    with create("cuda").load(bundle, precision, poison=True, max_rows=17) as fresh:
        seen |= {_digest(fresh.decode(requests[kind])) for _ in range(2)}
        assert fresh.broken_guard() == ""
    assert len(seen) == 1


def test_every_width(sessions: tuple[CsrcSession, CsrcSession]) -> None:
    """Verify of widths 1 to 65, as a graph captured, replayed and eager, and as AR steps along every path."""
    graphed, eager = sessions
    rng = np.random.default_rng(8)
    prompt = rng.integers(0, 512, 40).tolist()
    stepped: dict[tuple[int, ...], bytes] = {}

    def ar(path: tuple[int, ...]) -> bytes:
        if path not in stepped:
            eager.reset()
            eager.prefill(prompt)
            for i in range(len(path)):
                stepped[path[: i + 1]] = eager.step(path[i]).tobytes()
        return stepped[path]

    for m in range(1, 66):
        tree = random_tree(rng, m)
        tokens = rng.integers(0, 512, m).tolist()
        results = []
        for session in (graphed, graphed, eager):
            session.reset()
            session.prefill(prompt)
            results.append(session.verify(tokens, tree.parents.tolist()))
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes(), f"width {m}"
        for row in {0, m // 2, m - 1}:
            path = tuple(tokens[r] for r in tree.path[row, : tree.depths[row] + 1])
            assert results[0][row].tobytes() == ar(path), f"width {m}, row {row}"


def test_replays_are_counted(sessions: tuple[CsrcSession, CsrcSession], requests: dict[str, DecodeRequest]) -> None:
    """Graphs and eager execution count the same launches, and few of them a layer."""
    graphed, eager = sessions
    counted = []
    for session in (graphed, eager):
        session.decode(requests["ddtree"])
        session.reset_counters()
        session.decode(requests["ddtree"])
        counted.append(dict(session.counters()))
    assert counted[0] == counted[1]
    graphed.reset_counters()
    short = graphed.decode(replace(requests["ar"], record=False, max_tokens=1))
    ends = dict(graphed.counters())
    graphed.reset_counters()
    longer = graphed.decode(replace(requests["ar"], record=False, max_tokens=11))
    launches = (sum(graphed.counters().values()) - sum(ends.values())) / (longer.forwards - short.forwards)
    assert launches <= 11 * 6 + 8, launches


def test_memory_is_counted_and_returned(bundle: Path) -> None:
    """The peak is at least what is held, and a hundred sessions one after the other leave nothing behind."""
    import torch

    engine = create("cuda")
    before, needed = 0, 0
    for i in range(101):
        with engine.load(bundle, "fp32", max_rows=4096) as session:
            held, needed = session.memory()
            assert 64 << 20 < held <= needed
        if i == 0:
            before = torch.cuda.mem_get_info()[0]
    lost = before - torch.cuda.mem_get_info()[0]
    assert lost < 60 * needed, "other workers may start beside this one, but not take as much as a leak would"


def test_out_of_memory_is_named(bundle: Path, tmp_path: Path) -> None:
    """A cache that no card can hold: the error says for what, how much, and what is free; the next load works."""
    file = kdtr.read(bundle)
    fields = {**file.fields, "max_context": 2**31 - 200}
    huge = tmp_path / "huge.kdtr"
    huge.write_bytes(kdtr.encode(fields, dict(file.tensors)))
    with pytest.raises(OutOfMemory, match=r"cuda:0: [a-z.]+: \d{10,13} bytes asked, \d+ of \d+ free"):
        create("cuda").load(huge, "fp32")
    with create("cuda").load(bundle, "fp32") as session:
        assert np.isfinite(session.prefill([1, 2, 3])).all()


def test_absent_device(bundle: Path) -> None:
    """A device number that is not there is an error that says how many are."""
    count = len(gpu.survey().gpus)
    with pytest.raises(DeviceError, match=rf"cuda:99 does not exist: {count} CUDA device\(s\) visible"):
        create("cuda:99").load(bundle, "fp32")


LOST = """
import numpy as np
from harness.protocol import DeviceError
from refs import kdtr
from tests.cuda.operations import Operations, Tree, state
ops = Operations("cuda")
for _ in range(2):
    try:
        out = np.zeros((1, 64), np.float32)
        ops("embed", out, np.zeros((4, 64), np.float32), Tree([-1], [1 << 29]).rows, state(n_rows=1))
        print("no error")
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""


def test_a_lost_context_is_named() -> None:
    """An illegal address is a DeviceError whose text the harness takes for sticky; the process still ends by itself."""
    done = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("DeviceError cuda")
    assert gpu.is_sticky(first)
    assert gpu.is_sticky(second)
    assert done.returncode >= 0, f"ended by signal {-done.returncode}: {done.stderr}"


ASSERTED = """
import numpy as np
from harness.build import build
import engine.library as library
library.use("cuda", build("cuda", debug=True))
from refs import kdtr
from tests.cuda.operations import Operations, Tree, state
tree = Tree([-1, 0])
tree.path[1, 1] = 1000
ops = Operations("cuda")
q = [np.zeros((2, 1, 32), np.float32), np.zeros((2, 1, 8), np.float32)]
cache = [np.zeros((10, 32), np.float32), np.zeros((10, 8), np.float32)]
out = np.zeros((2, 1, 32), np.float32)
try:
    ops("mla_attention", [1, 32, 16, 8, 16], 1.0, *q, *cache, out, 10, tree.rows, state(kv_len=3, n_rows=2))
except Exception as error:
    print(type(error).__name__)
"""


def test_debug_build_says_what_was_violated() -> None:
    """A device-side assert carries its message, the file and the block."""
    done = subprocess.run(
        [sys.executable, "-c", ASSERTED], cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )
    assert "mla_attention: a key outside the cache" in done.stdout, done.stdout + done.stderr
    assert "mla_attention.cu" in done.stdout
    assert "DeviceError" in done.stdout


def test_memory_and_steps_from_cpp(tmp_path: Path) -> None:
    """Guard zones, poison, accounting, and steps whose body fails: ``backend_probe.cu``, built against csrc/cuda."""
    compiler, _ = environment.nvcc()
    arch = gpu.survey().gpus[0].arch.replace(".", "")
    program = tmp_path / "probe"
    sources = [ROOT / "tests" / "cuda" / "backend_probe.cu", *sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]
    flags = ["-std=c++17", "-O1", "-DKDTREE_CUDA", "-t", "0", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
