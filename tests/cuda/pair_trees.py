"""MLA for `tests.cuda.pairs`: trees cut out of a large one, of which every node is known as AR computes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tests.cuda.operations import Tree
from tests.cuda.pair_shapes import EPS, MOST, UNWRITTEN, Call, Mix, Ops, Outputs, spare_rows, taken, whole

ROOT = Tree([-1])


def forest(rng: np.random.Generator, nodes: int) -> list[list[int]]:
    """Children by node of a tree with a star of MOST rows, a chain of as many and anything between them.

    Node 0 is the root, its last child begins the chain.
    """
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        if node < MOST:
            parent = 0
        elif node < nodes - MOST + 1:
            parent = node - 1 if rng.random() < 0.5 else int(rng.integers(1, node))
        else:
            parent = 0 if node == nodes - MOST + 1 else node - 1
        children[parent].append(node)
    return children


def cut(rng: np.random.Generator, children: Sequence[Sequence[int]], count: int, shape: str) -> tuple[list[int], Tree]:
    """``count`` nodes that hang together below the root, parents first, and the tree they form.

    shape: ``star`` and ``chain`` take the node found first and last of those that may follow, ``any`` a random one of
    them with a taste for either end.
    """
    nodes, parents = [0], [-1]
    open_ends = [(child, 0) for child in children[0]]
    first, last = {"star": (1.0, 0.0), "chain": (0.0, 1.0)}.get(shape, rng.dirichlet((0.5, 0.5, 0.5))[:2])
    while len(nodes) < count:
        lot = rng.random()
        at = 0 if lot < first else len(open_ends) - 1 if lot < first + last else int(rng.integers(len(open_ends)))
        node, parent = open_ends.pop(at)
        open_ends += [(child, len(nodes)) for child in children[node]]
        nodes.append(node)
        parents.append(parent)
    return nodes, Tree(parents)


class Attention:
    """MLA of one layer from the raw projections to the heads' values: prepare, attention, values, the last two as one.

    A row is one node of the forest after one of the contexts.
    """

    def __init__(
        self,
        ops: Ops,
        name: str,
        dims: tuple[int, int, int, int, int],
        contexts: Sequence[int],
        *,
        nodes: int,
        bf16: bool,
    ) -> None:
        self.ops, self.name, self.dims, self.contexts, self.bf16 = ops, name, dims, contexts, bf16
        heads, rank, nope, rope, v = dims
        self.scale = 0.1446796 if nope + rope == 192 else (nope + rope) ** -0.5
        self.children = forest(np.random.default_rng(nodes), nodes)
        self.parents = [-1] * nodes
        for node, below in enumerate(self.children):
            for child in below:
                self.parents[child] = node
        self.q, self.kv = ops.normal(nodes, heads * (nope + rope)), ops.normal(nodes, rank + rope)
        self.norm = ops.normal(rank).abs() + 0.5
        self.up = taken(ops.normal(heads * (nope + v), rank, bf16=bf16, spread=rank**-0.5))
        angles = ops.normal(max(contexts) + MOST, rope // 2)
        self.table = torch.stack([angles.cos(), angles.sin()], -1)
        self.context = [ops.normal(max(contexts), size, bf16=bf16) for size in (rank, rope)]

    def draw(self, rng: np.random.Generator, number: int) -> Mix:
        """A star and a chain of all rows for each context, then any tree."""
        at, turn = number % len(self.contexts), number // len(self.contexts)
        count = int(rng.integers(1, MOST + 1)) if turn > 1 else MOST
        nodes, tree = cut(rng, self.children, count, ("star", "chain")[turn] if turn < 2 else "any")
        spare = spare_rows(rng, count)
        whole_tree = Tree([*tree.parents.tolist(), *[0] * spare]) if spare else tree
        return Mix([at * len(self.parents) + node for node in nodes], whole_tree, spare)

    def cache(self, context: int) -> list[torch.Tensor]:
        """Of this many committed keys, and room for a step that holds no number."""
        parts = []
        for part in self.context:
            filled = part.new_empty((context + MOST, part.shape[1]))
            filled[:context] = part[:context]
            filled[context:].view(torch.int16 if self.bf16 else torch.int32).fill_(UNWRITTEN)
            parts.append(filled)
        return parts

    def steps(
        self, at: list[int], tree: Tree, count: int, kv_len: int, cache: list[torch.Tensor]
    ) -> tuple[list[Call], Outputs]:
        """The calls for these nodes as the rows of a tree behind ``kv_len`` keys of ``cache``."""
        ops, (heads, rank, _, rope, v) = self.ops, self.dims
        m, keys = len(at), kv_len + int(tree.depths.max()) + 1
        index = ops.put(at, np.int64)
        q_lat, q_rope, o_lat, unseen = (ops.blank(m, heads, size, bf16=self.bf16) for size in (rank, rope, rank, rank))
        o, fused = (ops.blank(m, heads * v, bf16=self.bf16) for _ in range(2))
        rows, step = [ops.put(part) for part in tree.rows], ops.state(count, kv_len)
        dims, held = list(self.dims), [taken(part) for part in cache]
        query = [taken(q_lat), taken(q_rope)]
        calls: list[Call] = [
            (
                "mla_prepare",
                [
                    dims, self.q[index], self.kv[index], self.norm, EPS, self.up, self.table, *query, *held, rows, step,
                ],
            ),
            ("mla_attention", [dims, self.scale, *query, *held, taken(o_lat), keys, rows, step]),
            ("mla_value", [dims, taken(o_lat), self.up, taken(o), step]),
            ("mla_output", [dims, self.scale, *query, *held, taken(unseen), keys, self.up, taken(fused), rows, step]),
        ]  # fmt: skip
        latent, k_rope = (part[kv_len : kv_len + m] for part in cache)
        written = {
            "q_lat": q_lat, "q_rope": q_rope, "latent": latent, "k_rope": k_rope, "o_lat": o_lat, "value": o,
            "output": fused,
        }  # fmt: skip
        return calls, {name: whole(part)[:count] for name, part in written.items()}

    def calls(self, mix: Mix) -> tuple[list[Call], Outputs]:
        context = self.contexts[mix.rows[0] // len(self.parents)]
        at = [row % len(self.parents) for row in mix.rows] + [0] * mix.spare
        return self.steps(at, mix.tree, mix.count, context, self.cache(context))

    def alone(self) -> Outputs:
        """Every node with its ancestors' rows, which were computed alone before it, in the cache."""
        found: list[Outputs] = []
        for context in self.contexts:
            rows: list[Outputs] = []
            cache = self.cache(context)
            for node, parent in enumerate(self.parents):
                above: list[int] = []
                while parent >= 0:
                    above.insert(0, parent)
                    parent = self.parents[parent]
                for part, name in zip(cache, ("latent", "k_rope"), strict=True):
                    if above:
                        integers = part.view(torch.int16 if self.bf16 else torch.int32)
                        integers[context : context + len(above)] = torch.cat([rows[a][name] for a in above])
                calls, out = self.steps([node], ROOT, 1, context + len(above), cache)
                for name, arguments in calls:
                    self.ops(name, arguments)
                rows.append({name: part.clone() for name, part in out.items()})
            found += rows
        return {name: torch.cat([out[name] for out in found]) for name in found[0]}
