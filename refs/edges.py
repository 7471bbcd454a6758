"""The edges a bundle can be about: each a predicate over its goldens, so that a purpose is shown and not only claimed.

Only what generation cannot guarantee by construction is here. A predicate is asked for both precisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from refs.elementary import F64
from refs.exact import sigmoid, top_k
from refs.router import group_scores, route

if TYPE_CHECKING:
    from refs.generate import Result

    Edge = Callable[["Result", str], bool]


def _moe_layers(result: Result) -> range:
    return range(result.recipe.model.first_k_dense, result.recipe.model.num_layers)


def _router(result: Result, precision: str, layer: int) -> tuple[F64, F64, npt.NDArray[np.int64]]:
    """Router logits [rows, E], bias [E] and the chosen ids [rows, k]."""
    taps = result.goldens[precision].taps
    bias = np.asarray(result.tensors[f"layers.{layer}.router.bias"], np.float64)
    logits = taps[f"layers.{layer}.moe.router_logits"].astype(np.float64)
    return logits, bias, taps[f"layers.{layer}.moe.ids"].astype(np.int64)


def eos_first(result: Result, precision: str) -> bool:
    """The prompt's first continuation is EOS: one forward, one token."""
    return result.goldens[precision].tokens == (result.eos,)


def eos_mid_path(result: Result, precision: str) -> bool:
    """The oracle's tree holds nodes below an accepted EOS that is not its root."""
    tree, path = result.goldens[precision].rounds["oracle"][-1]
    return len(path) > 1 and tree.tokens[path[-1]] == result.eos and max(tree.depths) > tree.depths[path[-1]]


def eos_rejected(result: Result, precision: str) -> bool:
    """EOS is drafted in a round that does not accept it, and decoding goes on."""
    for rounds in result.goldens[precision].rounds.values():
        for tree, path in rounds[:-1]:
            if any(tree.tokens[row] == result.eos and row not in path for row in range(1, tree.size)):
                return True
    return False


def token_zero(result: Result, precision: str) -> bool:
    """Token id 0 is drafted and accepted."""
    return any(tree.tokens[row] == 0 for tree, path in result.goldens[precision].rounds["oracle"] for row in path[1:])


def chunk_crossing(result: Result, precision: str) -> bool:
    """An accepted path starts in one 64-key chunk and ends in the next."""
    at = len(result.goldens[precision].prompt)
    for _, path in result.goldens[precision].rounds["oracle"]:
        if at // 64 != (at + len(path) - 1) // 64:
            return True
        at += len(path)
    return False


def unused_experts(result: Result, precision: str) -> bool:
    """In every MoE layer some expert gets no row."""
    experts = result.recipe.model.n_routed_experts
    return all(len(np.unique(_router(result, precision, i)[2])) < experts for i in _moe_layers(result))


def bias_matters(result: Result, precision: str) -> bool:
    """Without the router's bias some row would have other experts."""
    for layer in _moe_layers(result):
        logits, bias, ids = _router(result, precision, layer)
        if not np.array_equal(route(result.recipe.model, logits, np.zeros_like(bias))[0], ids):
            return True
    return False


def groups_matter(result: Result, precision: str) -> bool:
    """Without groups some row would have other experts."""
    for layer in _moe_layers(result):
        logits, bias, ids = _router(result, precision, layer)
        if not np.array_equal(top_k(sigmoid(logits) + bias, ids.shape[1]), ids):
            return True
    return False


def negative_groups(result: Result, precision: str) -> bool:
    """Were biased scores below zero taken for zero in the groups' sums, some row would have other experts."""
    model = result.recipe.model
    for layer in _moe_layers(result):
        logits, bias, ids = _router(result, precision, layer)
        biased = sigmoid(logits) + bias
        kept = top_k(group_scores(model, np.maximum(biased, 0.0)), model.topk_group)
        groups = np.arange(model.n_routed_experts) // (model.n_routed_experts // model.n_group)
        is_open = (groups[None, :, None] == kept[:, None, :]).any(axis=2)
        if not np.array_equal(top_k(np.where(is_open, biased, -np.inf), ids.shape[1]), ids):
            return True
    return False


def router_ties(result: Result, precision: str) -> bool:
    """The last expert chosen and the first left out are exactly equal in some row."""
    for layer in _moe_layers(result):
        logits, bias, ids = _router(result, precision, layer)
        biased = -np.sort(-(sigmoid(logits) + bias), axis=1, kind="stable")
        k = ids.shape[1]
        if (biased[:, k - 1] == biased[:, k]).any():
            return True
    return False


def argmax_ties(result: Result, precision: str) -> bool:
    """Some emitted token's logit is exactly that of another token."""
    return result.goldens[precision].ties["top1"] > 0


def draft_ties(result: Result, precision: str) -> bool:
    """Some emitted token ties in its draft row with another token, and both stand in one tree below one parent."""
    golden = result.goldens[precision]
    for name, rounds in golden.rounds.items():
        committed = 0
        for tree, path in rounds:
            for row in path[1:]:
                draft = golden.drafts[name][committed + tree.depths[row] - 1]
                twins = [
                    other
                    for other in range(tree.size)
                    if other != row
                    and tree.parents[other] == tree.parents[row]
                    and draft[tree.tokens[other]] == draft[tree.tokens[row]]
                ]
                if twins:
                    return True
            committed += len(path)
    return False


def limit_cuts_depth(result: Result, precision: str) -> bool:
    """The oracle's last tree is as deep as the tokens still allowed let it be; block and table reach further."""
    run, golden = result.recipe.run, result.goldens[precision]
    tree, path = golden.rounds["oracle"][-1]
    committed = len(golden.tokens) - len(path)
    reach = min(run.block_size - 1, golden.drafts["oracle"].shape[0] - committed)
    return bool(0 < max(tree.depths) == run.max_tokens - committed - 1 < reach)


def beyond_original(result: Result, precision: str) -> bool:
    """YaRN is on and most rows stand beyond the original context."""
    model, golden = result.recipe.model, result.goldens[precision]
    return model.rope_factor > 1 and len(golden.prompt) + len(golden.tokens) > 2 * model.rope_original_context


def extreme_nibbles(result: Result, precision: str) -> bool:
    """Some group reaches both q = 7 and q = -8, some group is all zero with scale 0."""
    both = zero = False
    for name, packed in result.tensors.items():
        if not name.endswith(".qw"):
            continue
        for expert, scales in zip(packed, result.tensors[name[:-2] + "sc"], strict=True):
            groups = np.asarray(expert, np.uint8).reshape(-1, 16)
            nibbles = np.concatenate([groups & 15, groups >> 4], axis=1)
            both = both or bool(((nibbles == 15).any(axis=1) & (nibbles == 0).any(axis=1)).any())
            zero = zero or bool((np.asarray(scales) == 0).any())
            if both and zero:  # a large model need not be read whole
                return True
    return False


def several_accepted(result: Result, precision: str) -> bool:
    """The noisy drafter has rounds that accept nothing, part and all of a path."""
    rounds = result.goldens[precision].rounds["noisy"]
    lengths = {len(path) for _, path in rounds}
    return len(lengths) > 2 and 1 in lengths


def scattered_path(result: Result, precision: str) -> bool:
    """The own drafter's tree has an accepted path that is not its first rows, and a round follows it."""
    rounds = result.goldens[precision].rounds["dflash"]
    return any(path != tuple(range(len(path))) for _, path in rounds[:-1])


EDGES: dict[str, Edge] = {
    edge.__name__: edge
    for edge in (
        eos_first,
        eos_mid_path,
        eos_rejected,
        token_zero,
        chunk_crossing,
        unused_experts,
        bias_matters,
        groups_matter,
        negative_groups,
        router_ties,
        argmax_ties,
        draft_ties,
        limit_cuts_depth,
        beyond_original,
        extreme_nibbles,
        several_accepted,
        scattered_path,
    )
}
