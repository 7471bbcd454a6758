"""What a token and a draft-tree round of ``tiny`` take on this GPU, and where the time goes.

    python -m tests.cuda.latency [--json FILE] [--profile]

Medians over runs of whole decodes after one that captures the graphs; a round is one forward, the host's share (launch,
transfer of what was accepted) included. The draft is random, so that a round of DDTree accepts its root alone and
every round builds, verifies and commits a tree of all its nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from engine import create
from engine.session import CsrcSession
from harness import gpu
from harness.bundles import ensure
from harness.files import write_atomic
from harness.golden import Golden
from harness.protocol import DecodeRequest, Draft
from harness.sources import describe

RUNS = 15
TOKENS = (24, 400)
"""The bundle's own length, and one at which attention has keys to walk."""


def requests(golden: Golden, tokens: int) -> dict[str, DecodeRequest]:
    """AR, and DDTree with trees of 8 nodes below the root."""
    vocab = golden.field("vocab_size")
    table = np.random.default_rng(0).standard_normal((tokens, vocab)).astype(np.float32)
    prompt = golden.prompt
    tree = {"draft": Draft(table, len(prompt) + 1), "block_size": 8, "budget": 8}
    return {"ar": DecodeRequest(prompt, tokens), "ddtree": DecodeRequest(prompt, tokens, **tree)}


def measure(session: CsrcSession, request: DecodeRequest) -> dict[str, float]:
    """Milliseconds a forward: median, fastest and slowest run."""
    session.decode(request)
    times = []
    for _ in range(RUNS):
        decoded = session.decode(request)
        times.append(1e3 * decoded.decode_seconds / decoded.forwards)
    return {"ms": statistics.median(times), "fastest": min(times), "slowest": max(times)}


def profile(session: CsrcSession, request: DecodeRequest) -> dict[str, list[float]]:
    """Kernels of a decode: name -> [launches a forward, mean microseconds]."""
    import torch

    session.decode(request)
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as trace:
        forwards = session.decode(request).forwards
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.replace("(anonymous namespace)::", "").split("(")[0].split("::")[-1]
            total[name] += event.time_range.elapsed_us()
            count[name] += 1
    return {name: [round(count[name] / forwards, 2), round(t / count[name], 2)] for name, t in total.most_common()}


def main() -> int:
    """Measure both precisions and both decoders."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.latency", description="milliseconds a forward of tiny")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--profile", action="store_true", help="kernel times from a traced run")
    options = parser.parse_args()
    path = ensure(["tiny"])["tiny"]
    seen = gpu.survey()
    if not seen.gpus:
        parser.exit(3, f"{parser.prog}: {seen.reason}\n")
    with gpu.Lease(seen.gpus[0], run="latency"):  # nobody else's tests beside a measurement
        figures = _figures(seen, path, options.profile)
    if options.json:
        write_atomic(options.json, (json.dumps(figures, indent=1) + "\n").encode())
    return 0


def _figures(seen: gpu.Survey, path: Path, traced: bool) -> dict[str, Any]:
    judged = describe()
    figures: dict[str, Any] = {"commit": judged.commit, "engine": judged.engine}
    figures |= {"gpu": seen.gpus[0].name, "driver": seen.driver, "config": "tiny"}
    for precision in ("fp32", "int4"):
        golden = Golden.open(path, precision)
        with create("cuda").load(path, precision) as session:
            for tokens in TOKENS:
                for decoder, request in requests(golden, tokens).items():
                    found: dict[str, Any] = measure(session, request)
                    session.reset_counters()
                    forwards = session.decode(request).forwards
                    found["launches"] = round(sum(session.counters().values()) / forwards, 1)
                    name = f"{precision}-{decoder}-{tokens}"
                    figures[name] = found
                    print(f"{name}: {found['ms']:.4f} ms a forward, {found['launches']} launches", flush=True)
    if traced:
        with create("cuda").load(path, "fp32") as session:
            for decoder, request in requests(Golden.open(path, "fp32"), 60).items():
                figures[f"kernels-{decoder}"] = profile(session, request)
                for name, (launches, us) in figures[f"kernels-{decoder}"].items():
                    print(f"{decoder:7} {launches:7.2f} x {us:7.2f} us  {name}")
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
