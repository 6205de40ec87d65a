"""Two-tree broadcast (Sanders, Speck & Träff 2009): half of every message goes down each of two binary trees.

In: the number of nodes, numbered 0..count-1. Out: parents and children in either tree. Invariant: at most one node has
children in both trees, and no node has more than two children in a tree. So no node sends more than it receives, and
after about log2(count) steps all nodes receive. Both trees are the in-order binary tree over labels 1..count, in which
odd labels are leaves; the second tree shifts the labels by one, so that leaves and inner nodes change places.
"""

from __future__ import annotations

TREES = (0, 1)


def parent(count: int, tree: int, node: int) -> int | None:
    """The parent of a node in a tree; None for the root."""
    # The in-order tree: a label's lowest set bit is its height. Its parent clears that bit and sets the next:
    # 5 (101) -> 6 (110) -> 4 (100). If that label does not exist, the parent is the one with the bit just cleared.
    label = _label(count, tree, node)
    low = label & -label
    up = label ^ low | low << 1
    if up > count:
        up = label ^ low
    return _node(count, tree, up) if up else None


def children(count: int, tree: int, node: int) -> tuple[int, ...]:
    label = _label(count, tree, node)
    step = (label & -label) >> 1
    if not step:
        return ()
    labels = [label - step]
    while step and label + step > count:
        step >>= 1
    if step:
        labels.append(label + step)
    return tuple(_node(count, tree, x) for x in labels)


def root(count: int, tree: int) -> int:
    return _node(count, tree, 1 << count.bit_length() - 1)


def depth(count: int, tree: int, node: int) -> int:
    """Steps from the root."""
    steps = 0
    while (up := parent(count, tree, node)) is not None:
        node, steps = up, steps + 1
    return steps


def height(count: int) -> int:
    """The most steps from a root."""
    return count.bit_length() - 1


def _label(count: int, tree: int, node: int) -> int:
    return (node - tree) % count + 1


def _node(count: int, tree: int, label: int) -> int:
    return (label - 1 + tree) % count
