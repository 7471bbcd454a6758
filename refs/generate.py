"""A recipe becomes a bundle (docs/bundles.md): the same bytes on every machine.

python -m refs.generate --out DIR [CONFIG ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from refs import counter, draw, golden_bf16, kdtr, recipe
from refs.config import BF16_PRECISIONS
from refs.drafters import DFLASH
from refs.edges import EDGES
from refs.errors import RefError
from refs.exact import SUMMATIONS
from refs.golden import MULTIPLE, Golden, Rejected, compute, emitted
from refs.model import Model
from refs.recipe import Recipe

Array = npt.NDArray[Any]
ATTEMPTS = 200
DISTINCT_SHARE = 3
"""An output of T tokens holds at least T/3 different ones: a model that goes round in circles shows less."""


class GenerateError(Exception):
    """No attempt gave goldens that can be used."""


@dataclass(frozen=True)
class Result:
    """One recipe's model and goldens, before they are laid out as a bundle."""

    recipe: Recipe
    attempt: int
    eos: int
    tensors: Mapping[str, Array]
    goldens: Mapping[str, Golden]


def generate(wanted: Recipe, tensors: Mapping[str, Array] | None = None) -> Result:
    """Draw until every margin and every edge of the recipe holds; `GenerateError` names what never did.

    ``tensors``: the weights where they do not depend on the attempt and are there already.
    """
    reasons: dict[str, int] = {}
    for attempt in range(ATTEMPTS):
        try:
            return _attempt(wanted, attempt, tensors)
        except Rejected as reason:
            kind = str(reason).split(" margin ")[0]
            reasons[kind] = reasons.get(kind, 0) + 1
    listed = "; ".join(f"{kind} ({count}x)" for kind, count in sorted(reasons.items(), key=lambda item: -item[1]))
    raise GenerateError(f"{wanted.name}: none of {ATTEMPTS} attempts can be used: {listed}")


def _attempt(wanted: Recipe, attempt: int, made: Mapping[str, Array] | None) -> Result:
    fields, tensors = _fields(wanted), made or draw.weights(wanted, attempt)
    prompt = draw.prompt(wanted, attempt)
    exact = {p: Model(fields, tensors, p, file=wanted.name) for p in wanted.precisions}
    rows = {p: emitted(exact[p], wanted, prompt) for p in wanted.precisions}
    unstopped = {p: tokens for p, (tokens, _) in rows.items()}
    eos = _eos(wanted, unstopped)
    goldens = {}
    for precision in wanted.precisions:
        rounding = precision in BF16_PRECISIONS
        narrow = {
            order: Model(fields, tensors, precision, np.float32, summation=order, rounding=rounding, file=wanted.name)
            for order in SUMMATIONS
        }
        if rounding:
            of = (attempt, prompt, *rows[precision], eos)
            goldens[precision] = golden_bf16.compute(wanted, exact[precision], narrow, *of)
        else:
            models = {"exact": exact[precision]} | narrow
            goldens[precision] = compute(wanted, models, precision, attempt, prompt, *rows[precision], eos)
        tokens = goldens[precision].tokens
        if len(set(tokens)) * DISTINCT_SHARE < len(tokens):
            raise Rejected(f"{precision}: output goes round in circles")
    _check_precisions_differ(goldens)
    result = Result(wanted, attempt, eos, tensors, goldens)
    for edge in wanted.edges:
        for precision in wanted.precisions:
            if precision not in BF16_PRECISIONS and not EDGES[edge](result, precision):
                raise Rejected(f"{precision}: edge {edge} is not shown")
    return result


def _fields(wanted: Recipe) -> dict[str, int | float]:
    return wanted.model.fields() | (wanted.drafter.fields() if wanted.drafter else {})


def _eos(wanted: Recipe, unstopped: Mapping[str, tuple[int, ...]]) -> int:
    """The id declared EOS; one that both precisions emit at a place of the wanted kind."""
    if wanted.run.eos == "none":
        return wanted.model.eos_id
    places = [{token: out.index(token) for token in out} for out in unstopped.values()]
    block = wanted.run.block_size
    for token in unstopped[wanted.precisions[0]]:
        at = [place.get(token, -1) for place in places]
        if wanted.run.eos == "first" and at == [0] * len(at):
            return token
        # The oracle commits whole blocks: inside a path is neither a block's first place nor its last.
        if wanted.run.eos == "mid_path" and all(i > block and 0 < i % block < block - 1 for i in at):
            return token
    raise Rejected(f"no token for the EOS rule {wanted.run.eos}")


def _check_precisions_differ(goldens: Mapping[str, Golden]) -> None:
    if not {"fp32", "int4"} <= goldens.keys():
        return
    a, b = goldens["fp32"], goldens["int4"]
    least = 2 * MULTIPLE * max(a.noise["logits"], b.noise["logits"])
    if not float(np.abs(a.logits[0] - b.logits[0]).max()) > least:
        raise Rejected("the precisions' logits differ by less than the tolerance")


def meta(result: Result) -> dict[str, Any]:
    """What ``meta.json`` holds."""
    run = dataclasses.asdict(result.recipe.run)
    kept = ("max_tokens", "block_size", "budget", "drafters", "temperature", "seed")
    multiples = {p: golden_bf16.MULTIPLE if p in BF16_PRECISIONS else MULTIPLE for p in result.goldens}
    return {
        "attempt": result.attempt,
        "config": result.recipe.name,
        "edges": list(result.recipe.edges),
        "exact_ties": result.recipe.exact_ties,
        "margins": {p: dict(g.margins) for p, g in result.goldens.items()},
        "multiple": MULTIPLE,
        "noise": {p: dict(g.noise) for p, g in result.goldens.items()},
        "purpose": result.recipe.purpose,
        "run": {key: run[key] for key in kept} | ({"widths": run["widths"]} if run["widths"] else {}),
        "tolerance": {p: {k: multiples[p] * v for k, v in g.noise.items()} for p, g in result.goldens.items()},
    }


def layout(result: Result) -> tuple[dict[str, int | float], dict[str, Array]]:
    """The bundle's fields and tensors."""
    fields = _fields(result.recipe) | {"eos_id": result.eos}
    tensors = dict(result.tensors)
    text = json.dumps(meta(result), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    tensors["meta.json"] = np.frombuffer(text.encode(), np.uint8)
    run = result.recipe.run
    for precision, golden in result.goldens.items():
        key = precision.replace("-", "_")  # a tensor's name has no hyphen
        at = f"golden.{key}."
        tensors["golden.prompt"] = np.array(golden.prompt, np.int32)
        tensors[at + "tokens"] = np.array(golden.tokens, np.int32)
        tensors[at + "logits"] = golden.logits
        for name in golden.noise:
            if name in golden.taps and name != "logits":
                kind = "cache." if ".mla." in name else "taps."
                tensors[at + kind + name.replace(".mla.", ".")] = golden.taps[name]
        if golden.decided is not None:
            tensors[at + "decided"] = golden.decided.astype(np.uint8)
        for drafter, rounds in golden.rounds.items():
            drafted = f"{at}{DFLASH}.logits" if drafter == DFLASH else f"draft.{key}.{drafter}"
            tensors[drafted] = golden.drafts[drafter]
            trees = [tree for tree, _ in rounds]
            tensors[f"{at}{drafter}.size"] = np.array([tree.size for tree in trees], np.int32)
            tensors[f"{at}{drafter}.tokens"] = _padded([tree.tokens for tree in trees], run.budget + 1)
            tensors[f"{at}{drafter}.parents"] = _padded([tree.parents for tree in trees], run.budget + 1)
            tensors[f"{at}{drafter}.accepted"] = _padded([path for _, path in rounds], run.block_size)
    return fields, tensors


def _padded(rows: list[tuple[int, ...]], width: int) -> Array:
    out = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def write(name: str, path: Path) -> Result:
    """Generate the bundle of the recipe ``name`` and write it, whole or not at all."""
    wanted = recipe.load(name)
    if not wanted.weights.counter:
        result = generate(wanted)
        kdtr.write(path, *layout(result))
        return result
    # The weights go to the disk first and are mapped from there, so that no model is too large for memory.
    model = path.with_name(f".{path.name}.model.part")
    try:
        kdtr.write_parts(
            model, wanted.model.fields(), counter.declared(wanted), lambda name: counter.parts(wanted, name)
        )
        result = generate(wanted, kdtr.read(model).tensors)
        kdtr.write(path, *layout(result))
    finally:
        model.unlink(missing_ok=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Write bundles without looking at the lock; exit status 0, or 3 with a message."""
    parser = argparse.ArgumentParser(prog="python -m refs.generate", description="write bundles, unchecked")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="default: all")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.configs or recipe.names():
        started = time.perf_counter()
        try:
            result = write(name, options.out / f"{name}.kdtr")
        except (RefError, GenerateError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        size = (options.out / f"{name}.kdtr").stat().st_size
        seconds = time.perf_counter() - started
        print(f"{name}: attempt {result.attempt}, {size / 1e6:.2f} MB, {seconds:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
