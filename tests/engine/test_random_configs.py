"""DDTree against AR to the bit over configs, drafters and budgets that are drawn, far beyond those of refs/configs.

Each seed draws sizes around the kernels' edges (1, 15 to 17, 31 to 33, 63 to 65, 127 to 129, 255 to 257), from one
expert to all of them chosen, groups, any share of dense layers, YaRN's edges; a precision, an instruction set and
threads; ties in router and head. Then tables of draft logits that are right, wrong, equal, infinite or denormal, with
any budget, block, first position and costs. A decode with trees must have AR's tokens, logits and cache in every bit,
and the rounds that the reference's trees give for those tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_ops import same_bits

from engine.library import library
from engine.session import CsrcEngine, CsrcSession
from harness.protocol import Decoded, DecodeRequest, Draft
from refs import kdtr
from refs.config import PRECISIONS, ModelConfig
from refs.decode import Request, replay
from refs.exact import rounded_to_bf16

Array = npt.NDArray[Any]
QUICK, ALL = 4, 40
DECODES = 4
KINDS = ("right", "wrong", "often right", "rounded", "equal", "some -inf", "rows of -inf", "huge", "zeros", "denormal")


def draw_config(r: random.Random) -> ModelConfig:
    groups = r.choice([1, 1, 1, 2, 3, 5])
    per_group = r.choice([1, 1, 2, 3, 7, 40]) if groups == 1 else r.randint(2, 6)
    kept = r.randint(1, groups)
    layers = r.randint(1, 3)

    def size(*edges: int) -> int:
        return r.choice([*edges, r.randint(1, 70)])

    fields = {
        "hidden_size": size(1, 2, 31, 32, 33, 63, 65, 127, 128, 129),
        "num_layers": layers,
        "first_k_dense": r.choice([0, 0, 1, layers]),
        "intermediate_size": size(1, 15, 16, 17, 24, 25),
        "moe_intermediate_size": size(1, 16, 31, 32, 33, 96, 128, 129),
        "vocab_size": r.choice([1, 2, 3, 5, 17, 64, 127, 300]),
        "num_heads": r.choice([1, 2, 3, 5, 7, 16, 17, 33]),
        "q_lora_rank": size(1, 15, 16, 17),
        "kv_lora_rank": size(1, 3, 16, 255, 256, 257),
        "qk_nope_head_dim": size(1, 63, 64, 65),
        "qk_rope_head_dim": 2 * r.choice([1, 2, 3, 8, 9, 17]),
        "v_head_dim": size(1, 63, 64, 65),
        "n_routed_experts": groups * per_group,
        "n_shared_experts": r.randint(0, 2),
        "num_experts_per_tok": r.choice([1, min(2, kept * per_group), kept * per_group]),
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": r.randint(0, 1),
        "rope_original_context": r.choice([1, 4, 64, 4096]),
        "max_context": r.choice([2, 3, 8, 40, 70, 130]),
        "eos_id": -1,
        "mask_id": -1,
        "routed_scaling_factor": r.choice([1.0, 2.5, 0.0, -1.0]),
        "rms_norm_eps": r.choice([1e-6, 1e-3]),
        "inner_norm_eps": r.choice([1e-6, 1e-3]),
        "rope_theta": r.choice([1.0001, 2.0, 1e4, 5e6]),
        "rope_factor": r.choice([1.0, 1.0, 1.5, 40.0, 1e6]),
        "rope_beta_fast": r.choice([32.0, 1.0, 0.001]),
        "rope_beta_slow": r.choice([1.0, 32.0]),
        "rope_mscale": r.choice([1.0, 0.0, 0.7]),
        "rope_mscale_all_dim": r.choice([1.0, 0.0, 0.5]),
    }
    return ModelConfig.of(fields, "drawn")


def draw_weights(config: ModelConfig, precision: str, rng: np.random.Generator, ties: bool) -> dict[str, Array]:
    """Of a spread at which every part of the model matters; nibbles of every value, scales of zero and below normal.

    ``ties``: equal rows of router and head, so that every choice is between equals.
    """
    out: dict[str, Array] = {}
    for name, (shape, kind) in config.stored(precision).items():
        if kind == "u8":  # a row is padded with nibble 8
            nibbles = rng.integers(0, 16, (*shape[:-1], 2 * shape[-1]))
            nibbles[..., config.shapes()[name.removesuffix("qw") + "w"][-1] :] = 8
            out[name] = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8)
            continue
        values = rng.normal(size=shape)
        if name.endswith(".sc"):
            values *= 0.2 * shape[-1] ** -0.5
            values[rng.random(shape) < 0.1] = 0.0
            values[rng.random(shape) < 0.02] = 1e-39
        elif "norm" in name:
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values *= 0.2
        elif "embed" not in name:
            values *= shape[-1] ** -0.5
        if ties and ("router" in name or "lm_head" in name):
            values[:] = values[:1]
        narrow = values.astype(np.float32)
        out[name] = rounded_to_bf16(narrow) if kind == "bf16" else narrow
    return out


def draw_table(r: random.Random, rng: np.random.Generator, following: list[int], vocab: int) -> Array:
    """Draft logits [rows, V] around the tokens that follow the first one."""
    kind = r.choice(KINDS)
    rows = max(0, len(following) + r.choice([-2, -1, 0, 3]))
    table: Array = rng.normal(size=(rows, vocab)) * 2
    known = np.arange(min(rows, len(following)))
    tokens = np.array(following, np.int64)[: len(known)]
    if kind == "right":
        table[known, tokens] = 12
    elif kind == "wrong":
        table[known, tokens] = -np.inf
    elif kind == "often right":
        some = rng.random(len(known)) < 0.6
        table[known[some], tokens[some]] = 9
    elif kind == "rounded":
        table = np.rint(table)
    elif kind == "equal":
        table[:] = r.choice([0.0, -5.0, 1e30])
    elif kind == "some -inf":
        table[rng.random(table.shape) < 0.7] = -np.inf
    elif kind == "rows of -inf":
        table[rng.random(rows) < 0.5] = -np.inf
    elif kind == "huge":
        table = np.where(rng.random(table.shape) < 0.5, 3e38, -3e38)
    elif kind == "zeros":
        table = np.where(rng.random(table.shape) < 0.5, 0.0, -0.0)
    elif kind == "denormal":
        table = rng.integers(-3, 4, table.shape) * 1e-45
    return table.astype(np.float32)


def caches(session: CsrcSession) -> list[bytes]:
    return [part.tobytes() for layer in range(session.layers) for part in session.cache(layer)]


def check(session: CsrcSession, request: DecodeRequest, ar: Decoded, unstopped: tuple[int, ...]) -> None:
    """``request`` drafts; ``ar`` is the same decode without, ``unstopped`` its tokens had there been no EOS."""
    done = session.decode(request)
    assert (done.tokens, done.stopped) == (ar.tokens, ar.stopped)
    assert done.logits is not None
    assert ar.logits is not None
    same_bits(done.logits, ar.logits, "DDTree's logits against AR's, [step, token]")
    assert session.length == len(request.prompt) + len(done.tokens)
    assert done.forwards == len(done.rounds) == len(done.accepted_per_round)
    assert sum(done.accepted_per_round) == len(done.tokens)
    assert isinstance(request.draft, Draft)
    given = Request(
        request.prompt, request.max_tokens, request.draft.logits, request.draft.first, request.block_size,
        request.budget, request.temperature, request.seed, chain=request.chain, costs=request.costs,
    )  # fmt: skip
    want = replay(given, done.tokens, unstopped, session.eos_id)
    assert [(tree.tokens, tree.parents, path) for tree, path in want] == [
        (found.tokens, found.parents, found.accepted) for found in done.rounds
    ]


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")  # of the reference: logits 6e38 apart
@pytest.mark.parametrize("seed", [s if s < QUICK else pytest.param(s, marks=pytest.mark.slow) for s in range(ALL)])
def test_trees_change_no_bit_whatever_the_config(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    r, rng = random.Random(f"config {seed}"), np.random.default_rng(seed)
    config, precision = draw_config(r), r.choice(PRECISIONS)
    tensors = draw_weights(config, precision, rng, ties=r.random() < 0.25)
    monkeypatch.setenv("KDTREE_THREADS", str(r.choice([1, 2, 3])))
    monkeypatch.setenv("KDTREE_ISA", r.choice(["", *library("cpu").isa_names().split()]))
    n = min(r.choice([1, 1, 2, config.max_context - 1, r.randint(1, config.max_context)]), config.max_context)
    prompt = [r.choice([0, config.vocab_size - 1, r.randrange(config.vocab_size)]) for _ in range(n)]
    most = min(config.max_context - n, 30)
    plain = DecodeRequest(
        prompt, r.choice([most, r.randint(0, most)]), temperature=r.choice([0.0, 0.0, 1.3, 1e-300]),
        seed=r.choice([0, 77, 2**64 - 1]), record=True,
    )  # fmt: skip
    max_rows = r.choice([1, 2, 5, 17, 65])
    path = tmp_path / "drawn.kdtr"
    eos, unstopped = -1, None
    while True:  # at first without EOS, then perhaps with one that was emitted
        kdtr.write(path, config.fields() | {"eos_id": eos}, tensors)
        with CsrcEngine("cpu").load(path, precision, max_rows=max_rows, poison=True) as session:
            ar = session.decode(plain)
            unstopped = unstopped or ar.tokens
            cache = caches(session)
            for _ in range(DECODES):
                table = draw_table(r, rng, list(unstopped[1:]), config.vocab_size)
                budget = r.randint(0, max_rows - 1)
                fields = {**vars(plain), "draft": Draft(table, n + 1 + r.choice([0, 0, -3, 2])), "budget": budget}
                fields |= {"block_size": r.choice([1, 2, 4, 8, 100]), "chain": r.random() < 0.2}
                fields |= {"costs": [r.uniform(0.5, 3) for _ in range(budget + 1)] if r.random() < 0.3 else ()}
                check(session, DecodeRequest(**fields), ar, unstopped)
                assert caches(session) == cache
            assert session.broken_guard() == ""
        if eos >= 0 or not unstopped or r.random() < 0.6:
            break
        eos = r.choice(unstopped)
