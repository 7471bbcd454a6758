"""Batch invariance at K2.6's sizes: of a thousand random (M, tree) pairs a shape, every row has the bits it has alone.

    python -m tests.cuda.pairs [-k SHAPE ...] [--pairs N] [--seed N] [--json FILE] [--list]

Each row of a pool is run by itself, as AR does. Then mixes of 1 to 64 of them run, a part of the pairs as one graph
whose launches overlap, and are compared on the device. A shape fails if a row differs, and also if what rows have
alone is not finite or the same for two of them: then equal bits would show nothing. Exit status 0 when all shapes hold,
1 otherwise, 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.cells import FAILED, INFRASTRUCTURE, PASSED
from harness.files import write_atomic
from harness.filters import matcher
from harness.gpu import survey
from harness.sources import Sources, describe
from tests.cuda.pair_shapes import Experts, Linear, Ops, Outputs, Router, Shape
from tests.cuda.pair_trees import Attention

PAIRS = 1000
TOGETHER = 50  # pairs a graph
K26 = (64, 512, 128, 64, 128)
NODES = 320
Make = Callable[[Ops], Shape]


@dataclass(frozen=True)
class Found:
    """What became of one shape."""

    shape: str
    pairs: int
    rows: int
    differing_rows: int
    differing: dict[str, int]
    """Rows by output, in the order in which outputs are computed."""
    widths: list[int]
    """M of the pairs in which a row differs."""
    unfit: str
    """What of the rows alone is of no use to compare with."""
    kernels: dict[str, int]
    """Launches of the pairs by counter."""
    seconds: float

    @property
    def good(self) -> bool:
        return not self.differing_rows and not self.unfit


def shapes() -> dict[str, Make]:
    """Those of issue 7's table, and the other products of a step of Kimi K2.6."""
    made: dict[str, Make] = {}

    def linear(name: str, kind: str, k: int, *n: int, normed: bool = False, epilogue: int = 0) -> None:
        made[name] = lambda ops: Linear(ops, name, kind, k, n, normed=normed, epilogue=epilogue)

    def experts(name: str, kind: str) -> None:
        made[name] = lambda ops: Experts(ops, name, kind, 7168, 2048, 2048, 384, 8)

    def attention(name: str, *contexts: int) -> None:
        made[name] = lambda ops: Attention(ops, name, K26, contexts, nodes=NODES, bf16=True)

    def linears(*kinds: str) -> None:
        for kind in kinds:
            for k, n in ((7168, 4096), (2048, 7168)):
                linear(f"linear-{kind}-k{k}-n{n}", kind, k, n)

    linears("int4-bf16", "bf16")
    for kind in ("int4-bf16", "bf16"):
        experts(f"experts-{kind}", kind)
    attention("mla-t1024", 1024, 1001)
    attention("mla-t4096", 4096, 4159)
    attention("mla-t32768", 32768, 32741)
    linear("router-product", "bf16", 7168, 384, normed=True)
    made["router-choice"] = lambda ops: Router(ops, "router-choice", 384, 8)
    linear("q_a-kv_a", "bf16", 7168, 1536, 576, normed=True)
    linear("q_b", "bf16", 1536, 12288, normed=True)
    linear("o", "bf16", 8192, 7168, epilogue=1)
    linear("dense-gate-up", "bf16", 7168, 18432, 18432, normed=True, epilogue=2)
    linear("dense-down", "bf16", 18432, 7168, epilogue=1)
    linear("head", "bf16", 7168, 163840, normed=True)
    linears("int4", "f32")
    return made


def unfit(alone: Outputs) -> str:
    """Why equal bits would show nothing, or ``""``."""
    rows = len(next(iter(alone.values())))
    sums = torch.zeros(rows, dtype=torch.int64, device=next(iter(alone.values())).device)
    for name, part in alone.items():
        if name != "ids" and not bool(
            part.view({2: torch.bfloat16, 4: torch.float32}[part.element_size()]).isfinite().all()
        ):
            return f"{name} is not finite"
        places = torch.arange(1, part.shape[1] + 1, device=part.device) * 0x9E3779B1
        sums += (part.to(torch.int64) * places).sum(-1)
    distinct = len(sums.unique())
    return "" if distinct == rows else f"{rows - distinct} of {rows} rows are the same as others"


def check(ops: Ops, shape: Shape, pairs: int, seed: int) -> Found:
    """Every row of ``pairs`` mixes against the row alone."""
    start, rng = time.monotonic(), np.random.default_rng(seed)
    alone = shape.alone()
    wrong: dict[str, list[torch.Tensor]] = {name: [] for name in alone}
    counts: list[int] = []
    before = ops.counters()
    for first in range(0, pairs, TOGETHER):
        mixes = [shape.draw(rng, number) for number in range(first, min(pairs, first + TOGETHER))]
        made = [shape.calls(mix) for mix in mixes]
        ops.together([call for calls, _ in made for call in calls])
        rows = ops.put([row for mix in mixes for row in mix.rows], np.int64)
        for name, known in alone.items():
            wrong[name].append((torch.cat([out[name] for _, out in made]) != known[rows]).any(-1))
        counts += [mix.count for mix in mixes]
    masks = {name: torch.cat(parts) for name, parts in wrong.items()}
    by_row = torch.stack([*masks.values()]).any(0)
    width = ops.put(np.repeat(counts, counts))
    return Found(
        shape=shape.name,
        pairs=len(counts),
        rows=len(by_row),
        differing_rows=int(by_row.sum()),
        differing={name: int(mask.sum()) for name, mask in masks.items()},
        widths=sorted(width[by_row].unique().tolist()),
        unfit=unfit(alone),
        kernels={name: n - before.get(name, 0) for name, n in ops.counters().items() if n > before.get(name, 0)},
        seconds=round(time.monotonic() - start, 2),
    )


def text(found: Found) -> str:
    """One shape on one line."""
    said = f"{found.shape:<26} {found.pairs} pairs, {found.rows} rows, {found.differing_rows} differ"
    if found.differing_rows:
        said += f" ({', '.join(f'{n} {name}' for name, n in found.differing.items() if n)}; M {found.widths})"
    return f"{said}{f'; UNFIT: {found.unfit}' if found.unfit else ''}  {found.seconds:.1f} s"


def run(
    device: str, chosen: dict[str, Make], pairs: int, seed: int, keep: Callable[[Sequence[Found]], None]
) -> list[Found]:
    """The chosen shapes one after the other; the memory of one is free before the next. ``keep`` gets what is found
    so far, after each."""
    results: list[Found] = []
    for make in chosen.values():
        ops = Ops(device)
        try:
            results.append(check(ops, make(ops), pairs, seed))
        finally:
            ops.close()
        if device == "cuda":
            torch.cuda.empty_cache()
        keep(results)
    return results


def record(results: Sequence[Found], judged: Sources, seed: int, seconds: float) -> dict[str, Any]:
    """As ``docs/evidence/pairs-<device>.json`` holds it."""
    return {
        "commit": judged.commit,
        "engine": judged.engine,
        "gpu": [gpu.name for gpu in survey().gpus],
        "torch": torch.__version__,
        "seed": seed,
        "seconds": round(seconds, 1),
        "shapes": [asdict(found) for found in results],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The shapes that were asked for; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.pairs", description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="SHAPE", default="", help="only the shapes whose name this chooses")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of each shape (default: {PAIRS})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--list", action="store_true", help="print the shapes, and run none")
    options = parser.parse_args(arguments)
    holds = matcher(options.k) if options.k else lambda names: True
    chosen = {name: make for name, make in shapes().items() if holds([name])}
    if not chosen:
        parser.error(f"-k {options.k!r} matches none of {', '.join(shapes())}")
    if options.list:
        print("\n".join(chosen))
        return PASSED
    if not survey().gpus:
        print(f"pairs: no GPU: {survey().reason}", file=sys.stderr)
        return INFRASTRUCTURE
    judged, start = describe(), time.monotonic()

    def keep(results: Sequence[Found]) -> None:
        print(text(results[-1]), flush=True)
        if options.json:
            found = record(results, judged, options.seed, time.monotonic() - start)
            write_atomic(options.json, (json.dumps(found, indent=1) + "\n").encode())

    results = run("cuda", chosen, options.pairs, options.seed, keep)
    rows, differ = sum(found.rows for found in results), sum(found.differing_rows for found in results)
    print(f"{len(results)} shapes, {rows} rows, {differ} differ: {time.monotonic() - start:.1f} s")
    return PASSED if all(found.good for found in results) else FAILED


if __name__ == "__main__":
    sys.exit(main())
