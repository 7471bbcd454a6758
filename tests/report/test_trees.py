"""Drawn trees: parents over their children, nothing on top of anything, and broken trees drawn as what they are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cells import Tree
from harness.reports.trees import DRAWN, PITCH_X, PITCH_Y, draw


def test_a_tree_by_hand() -> None:
    tree = Tree((7, 11, 12, 21), (-1, 0, 0, 1), (0, 1, 3))
    other = Tree((7, 11, 99, 21), (-1, 0, 0, 1), (0, 1))
    drawing = draw(tree, other, "golden")
    root, left, right, leaf = drawing.nodes
    assert (root.x, root.y) == (PITCH_X, PITCH_Y / 2)
    assert (left.x, right.x) == (PITCH_X / 2, PITCH_X * 3 / 2)
    assert leaf.x == left.x
    assert [node.depth for node in drawing.nodes] == [0, 1, 1, 2]
    assert [node.accepted for node in drawing.nodes] == [True, True, False, True]
    assert [node.alien for node in drawing.nodes] == [False, False, True, False]
    assert [edge.accepted for edge in drawing.edges] == [True, False, True]
    assert (drawing.width, drawing.height) == (2 * PITCH_X, 3 * PITCH_Y)
    assert "4 rows, accepted [0, 1, 3]" in drawing.summary
    assert "1 of them not in the other tree" in drawing.summary


def test_the_same_nodes_in_another_order_are_no_aliens() -> None:
    tree, other = Tree((7, 11, 12), (-1, 0, 0), (0,)), Tree((7, 12, 11), (-1, 0, 0), (0,))
    drawing = draw(tree, other, "t")
    assert not any(node.alien for node in drawing.nodes)
    assert "in another order" in drawing.summary


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (Tree((1, 2, 3), (-1, 0, 5), (0,)), "row 2 has parent 5, which is no earlier row"),
        (Tree((1, 2), (0, 0), (0,)), "row 0 has parent 0"),
        (Tree((1, 2, 3), (-1, 0), (0,)), "3 tokens but 2 parents"),
        (Tree((1, 2), (-1, 0), (0, 4)), "row 4 was accepted and does not exist"),
        (Tree((1, 2, 2), (-1, 0, 0), (0,)), "a node occurs twice"),
        (Tree((), (), ()), "0 rows"),
    ],
)
def test_what_is_no_tree_is_drawn_and_said(tree: Tree, says: str) -> None:
    drawing = draw(tree, Tree((1, 2), (-1, 0), (0,)), "engine")
    assert says in drawing.summary
    assert drawing.height >= PITCH_Y
    assert drawing.width >= PITCH_X


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 40)), max_size=40), st.lists(st.integers(-2, 50)))
def test_any_rows_are_drawn_apart_and_inside(rows: list[tuple[int, int]], accepted: list[int]) -> None:
    tree = Tree(tuple(t for t, _ in rows), tuple(p for _, p in rows), tuple(accepted))
    drawing = draw(tree, tree, "any")
    assert len(drawing.nodes) == len(rows)
    assert len({(node.x, node.y) for node in drawing.nodes}) == len(rows)
    for node in drawing.nodes:
        assert PITCH_X / 2 <= node.x <= drawing.width - PITCH_X / 2
        assert PITCH_Y / 2 <= node.y <= drawing.height - PITCH_Y / 2
    by_height: dict[float, list[float]] = {}
    for node in drawing.nodes:
        by_height.setdefault(node.y, []).append(node.x)
    for places in by_height.values():
        places.sort()
        assert all(b - a >= PITCH_X for a, b in itertools.pairwise(places))


def test_a_tree_wider_than_a_page_is_cut_and_counted() -> None:
    tree = Tree(tuple(range(DRAWN + 5)), (-1, *[0] * (DRAWN + 4)), (0,))
    drawing = draw(tree, tree, "t")
    assert len(drawing.nodes) == DRAWN
    assert f"{DRAWN + 5} rows" in drawing.summary
    assert f"the first {DRAWN} are drawn" in drawing.summary
