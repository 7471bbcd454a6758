"""Where the nodes of a draft tree are drawn, and which of them another tree does not have.

What an engine gave may be no tree at all, which is then what the drawing has to show: nothing is taken for granted.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.cells import Tree

PITCH_X, PITCH_Y = 58, 46  # between the middles of neighbours; a node is 50 x 22, wide enough for a six-digit token
DRAWN = 200  # rows; more are counted and not drawn


@dataclass(frozen=True)
class Node:
    """One row; ``x`` and ``y`` of its middle."""

    row: int
    token: int
    depth: int
    x: float
    y: float
    accepted: bool
    alien: bool
    """The other tree has no node with this path of tokens."""


@dataclass(frozen=True)
class Edge:
    """From a parent's middle to a child's."""

    x1: float
    y1: float
    x2: float
    y2: float
    accepted: bool


@dataclass(frozen=True)
class Drawing:
    """A tree ready to be drawn; ``summary`` says in words what it shows."""

    title: str
    summary: str
    width: int
    height: int
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def _parents(tree: Tree) -> list[int]:
    """The parent of each drawn row, -1 where it has none or names no earlier row."""
    count = min(len(tree.tokens), len(tree.parents), DRAWN)
    return [parent if 0 <= parent < row else -1 for row, parent in enumerate(tree.parents[:count])]


def _paths(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, _parents(tree), strict=False):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def _columns(parents: list[int]) -> list[float]:
    """Leaves stand side by side from left to right, a parent over the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    columns = [0.0] * len(parents)
    leaves = 0
    stack = [row for row in reversed(range(len(parents))) if parents[row] < 0]
    while stack:
        row = stack.pop()
        if children[row]:
            stack += reversed(children[row])
        else:
            columns[row] = leaves
            leaves += 1
    for row in reversed(range(len(parents))):
        if children[row]:
            columns[row] = (columns[children[row][0]] + columns[children[row][-1]]) / 2
    return columns


def _faults(tree: Tree) -> list[str]:
    faults = []
    if len(tree.tokens) != len(tree.parents):
        faults.append(f"{len(tree.tokens)} tokens but {len(tree.parents)} parents")
    wrong = [row for row, parent in enumerate(tree.parents) if not (0 <= parent < row if row else parent == -1)]
    if wrong:
        faults.append(f"row {wrong[0]} has parent {tree.parents[wrong[0]]}, which is no earlier row")
    beyond = [row for row in tree.accepted if not 0 <= row < len(tree.tokens)]
    if beyond:
        faults.append(f"row {beyond[0]} was accepted and does not exist")
    return faults


def draw(tree: Tree, other: Tree, title: str) -> Drawing:
    """``tree`` with the nodes marked that ``other`` does not have."""
    parents, paths, columns = _parents(tree), _paths(tree), _columns(_parents(tree))
    known = set(_paths(other))
    accepted = set(tree.accepted)
    nodes = tuple(
        Node(
            row=row,
            token=tree.tokens[row],
            depth=len(paths[row]) - 1,
            x=PITCH_X * (columns[row] + 0.5),
            y=PITCH_Y * (len(paths[row]) - 0.5),
            accepted=row in accepted,
            alien=paths[row] not in known,
        )
        for row in range(len(parents))
    )
    edges = tuple(
        Edge(nodes[parent].x, nodes[parent].y, nodes[row].x, nodes[row].y, {parent, row} <= accepted)
        for row, parent in enumerate(parents)
        if parent >= 0
    )
    aliens = sum(node.alien for node in nodes)
    said = [f"{len(tree.tokens)} rows, accepted {list(tree.accepted)}"]
    if aliens:
        said.append(f"{aliens} of them not in the other tree")
    elif paths != _paths(other) and sorted(paths) == sorted(_paths(other)):
        said.append("the same nodes as the other tree, in another order")
    if len(set(paths)) < len(paths):
        said.append("a node occurs twice")
    if len(tree.tokens) > DRAWN:
        said.append(f"the first {DRAWN} are drawn")
    return Drawing(
        title=title,
        summary="; ".join([*said, *_faults(tree)]),
        width=int(PITCH_X * (max(columns, default=0) + 1)),
        height=PITCH_Y * max([len(path) for path in paths], default=1),
        nodes=nodes,
        edges=edges,
    )
