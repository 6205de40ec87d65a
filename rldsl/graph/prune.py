"""Dead code elimination: derived frames and collections make a value for each one that might be used; those that
nothing reads are removed.

In: the items, values and frames of a flow. Out: those that are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from rldsl.graph import model as g
from rldsl.graph.derive import INDEX
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.model import Value
from rldsl.plan.spaces import IndexedFrame


def prune(items: tuple[g.Item, ...], used: set[str]) -> tuple[g.Item, ...]:
    """`items` without the values of derived frames and collections that nothing reads. used: values that are logged."""
    nodes = list(g.nodes(items))
    chosen = [n for n in nodes if isinstance(n, g.Derive | g.Collect)]
    indices = [n for n in nodes if _is_index(n)]
    reads = used | {v for n in nodes if n not in chosen and n not in indices for v in n.reads}
    reads |= {v for n in chosen if isinstance(n, g.Derive) for v in (n.key, *n.also_reads)}
    while True:
        more = reads | {v for n in chosen for v, w in n.values if _needed(n, w, reads)}
        more |= {v for n in indices if not reads.isdisjoint(n.writes) for v in n.reads}
        if more == reads:
            return _pruned(items, reads)
        reads = more


def _is_index(item: g.Item) -> TypeGuard[g.Compute]:
    """Whether it computes what `pick` makes for `pair` to compare."""
    return isinstance(item, g.Compute) and all(w.startswith(f"{INDEX}#") for w in item.writes)


def _needed(node: g.Derive | g.Collect, made: str, reads: set[str]) -> bool:
    """Tokens of new rows stay: the exchange of their lengths begins at them."""
    return made in reads or isinstance(node, g.Derive) and DERIVE_OPS[node.op].makes_rows and made.endswith(".tokens")


def _pruned(items: tuple[g.Item, ...], reads: set[str]) -> tuple[g.Item, ...]:
    out: list[g.Item] = []
    for item in items:
        if isinstance(item, g.When | g.Repeat | g.Until | g.Eval):
            item = replace(item, body=_pruned(item.body, reads))
        elif _is_index(item) and reads.isdisjoint(item.writes):
            continue
        elif isinstance(item, g.Derive | g.Collect):
            pairs = tuple((v, w) for v, w in item.values if _needed(item, w, reads))
            more = (*([item.key] if item.key else []), *item.also_reads) if isinstance(item, g.Derive) else ()
            item = replace(item, values=pairs, reads=tuple(dict.fromkeys((*more, *(v for v, _ in pairs)))),
                           writes=tuple(dict.fromkeys(w for _, w in pairs)))
            if isinstance(item, g.Derive) and not pairs:
                continue
        out.append(item)
    return tuple(out)


def tables(items: tuple[g.Item, ...], values: tuple[Value, ...],
           frames: dict[str, IndexedFrame]) -> tuple[tuple[Value, ...], tuple[IndexedFrame, ...]]:
    """The values and frames that the items still name. A Collect alone does not keep a frame."""
    nodes = list(g.nodes(items))
    made = {w for n in nodes for w in (*n.reads, *n.writes)}
    held = {v.frame for v in values if v.id in made} | {f for n in nodes if isinstance(n, g.Compute) for f in n.frames}
    for frame in reversed(list(frames.values())):  # what a selection was taken from comes before it
        if frame.id in held:
            held |= {frame.selected_from, frame.picked_from, frame.present_in}
    return (tuple(v for v in values if v.id in made or v.extent == "lengths" and v.frame in held),
            tuple(f for f in frames.values() if f.id in held))
