"""Lifetimes of values: each is freed where nothing reads it any more.

In: an ordered draft. Out: the same with a Free after the last use of each buffer that a block writes, in that block.
Parameters stay: they are rewritten in place. Invariant: a block ends with the buffers that it began with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, LengthsSpreads, events, union, uses
from rldsl.plan.events import Event, Free, Item, Loop, When, ahead_of, split_buffer
from rldsl.plan.model import Mesh
from rldsl.plan.naming import Labels


def value_lifetimes(draft: Draft) -> Draft:
    models = {m.name for m in draft.placed.models}
    values, labels = draft.values, draft.labels
    lengths_in = LengthsSpreads.of(draft)
    meshes: list[Mesh] = []

    def block(items: tuple[Item, ...], kept: frozenset[str]) -> tuple[Item, ...]:
        items = tuple(replace(i, body=block(i.body, kept | _held(i))) if isinstance(i, When | Loop) else i
                      for i in items)
        own = {b for i in items for b in _made(i) if split_buffer(b)[0] not in models and b not in kept}
        last: dict[str, tuple[int, int]] = {}  # buffer -> (the steps by which its last use runs ahead, its index)
        for i, item in enumerate(items):
            used = dict.fromkeys(_made(item), ahead_of(item))
            for e in events([item]):
                for b in (*uses(draft, e, values, lengths_in), *e.writes):
                    used[b] = min(e.ahead, used.get(b, e.ahead))
            for b in used.keys() & own:
                if b not in last or used[b] <= last[b][0]:  # in a later iteration, or later in the iteration
                    last[b] = used[b], i
        ends: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for b, (ahead, i) in last.items():
            ends[i][ahead].append(b)
        out: list[Item] = []
        for i, item in enumerate(items):
            out.append(item)
            out += (_free(draft, labels, sorted(found), item, ahead, meshes) for ahead, found in ends[i].items())
        return tuple(out)

    body = block(draft.body, draft.lasting | {draft.stops_on})
    return replace(draft, body=body).with_meshes(*meshes)


def _held(item: When | Loop) -> frozenset[str]:
    """What a block's events write and the loop itself looks after."""
    return frozenset((*item.collects, item.until)) if isinstance(item, Loop) else frozenset()


def _made(item: Item) -> tuple[str, ...]:
    return item.writes if isinstance(item, Event) else item.collects if isinstance(item, Loop) else ()


def _free(draft: Draft, labels: Labels, buffers: list[str], after: Item, ahead: int, meshes: list[Mesh]) -> Free:
    """ahead: of the last use."""
    mesh = union(draft, {draft.spreads[split_buffer(b)[1]].mesh for b in buffers})
    meshes.append(mesh)
    reader = labels.event(after).display_name if isinstance(after, Event) else "the preceding block"
    return Free(id=0, mesh=mesh.id, because=f"last used by {reader}", buffers=tuple(buffers),
                ahead=ahead)


def check_value_lifetimes(draft: Draft) -> None:
    """Written in a block = freed in it, once."""
    models = {m.name for m in draft.placed.models}

    def block(items: tuple[Item, ...], kept: frozenset[str]) -> None:
        own = [e for e in items if isinstance(e, Event)]
        wrote = sorted(b for i in items for b in _made(i) if split_buffer(b)[0] not in models and b not in kept)
        freed = sorted(b for e in own for b in e.frees)
        if wrote != freed:
            raise internal_error(f"buffers leak: {', '.join(sorted(set(wrote) ^ set(freed)))}", "pass value_lifetimes")
        for item in items:
            if isinstance(item, When | Loop):
                block(item.body, kept | _held(item))

    block(draft.body, draft.lasting | {draft.stops_on})
