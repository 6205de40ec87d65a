"""Two trees over the same nodes."""

import pytest

from rldsl.reshard.broadcast_trees import TREES, children, depth, height, parent, root


@pytest.mark.parametrize("count", [*range(1, 70), 127, 128, 1276])
def test_every_node_is_below_the_root_once(count):
    for tree in TREES:
        assert parent(count, tree, root(count, tree)) is None
        below = [c for node in range(count) for c in children(count, tree, node)]
        assert sorted([*below, root(count, tree)]) == list(range(count))
        assert all(parent(count, tree, c) == node for node in range(count) for c in children(count, tree, node))
        depths = [depth(count, tree, node) for node in range(count)]
        assert max(depths) == height(count) <= count.bit_length()
        assert all(depth(count, tree, parent(count, tree, n)) == d - 1 for n, d in enumerate(depths) if d)


@pytest.mark.parametrize("count", [*range(1, 70), 127, 128, 1276])
def test_nobody_passes_on_more_than_it_gets(count):
    """Half of a message goes down each tree, so two children in all."""
    for node in range(count):
        assert sum(len(children(count, tree, node)) for tree in TREES) <= 2
        assert not all(children(count, tree, node) for tree in TREES)


def test_one_node_is_a_root_alone():
    assert [root(1, t) for t in TREES] == [0, 0] and children(1, 0, 0) == () and height(1) == 0


def test_the_roots_differ():
    assert all(root(n, 0) != root(n, 1) for n in range(2, 50))
