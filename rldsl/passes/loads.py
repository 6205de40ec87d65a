"""Loads: which copies begin with weights from the disk.

In: a draft. Out: the same with one Load for each layout that starts with weights from the disk (a trained model's
training layout; every layout of a frozen one, and of one with adapters, whose base is frozen) or shares the storage of
the trained copy.
Invariant: each copy is loaded once, before the loop.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.passes.draft import Draft, events
from rldsl.plan.events import Load
from rldsl.plan.model import Layout, Model
from rldsl.plan.notation import degrees_of
from rldsl.reshard.alias import share_one_copy


def loads(draft: Draft) -> Draft:
    """Models that nothing uses are not loaded."""
    found: dict[tuple[str, str], Load] = {}
    models = {m.name: m for m in draft.placed.models}
    at = {m.name: str(m.span) for m in draft.placed.graph.models}
    for e in events(draft.body):
        for name, used in e.copies():
            model = models[name]
            layout = draft.layouts[used if model.base else model.train_layout or used]
            because = (f"{'trained' if model.train_layout == layout.id else 'used'} with {degrees_of(layout)}, "
                       f"from {model.path}")
            found.setdefault((name, layout.id), Load(
                id=0, mesh=layout.mesh, writes=(f"{name}@{layout.id}",), at=at[name], because=because,
                model=name, layout=layout.id))
            if layout.id != used and _is_alias(draft, model, layout, draft.layouts[used]):
                mine = draft.layouts[used]
                found.setdefault((name, used), Load(
                    id=0, mesh=mine.mesh, reads=(f"{name}@{layout.id}",), writes=(f"{name}@{used}",), at=at[name],
                    because=f"same shards with {degrees_of(mine)} as with {degrees_of(layout)}: one copy",
                    model=name, layout=used, alias_of=layout.id))
    return replace(draft, setup=(*draft.setup, *found.values()))


def _is_alias(draft: Draft, model: Model, a: Layout, b: Layout) -> bool:
    """Whether the copy under `b` is the trained copy, under `a`: each rank holds the same shard in both."""
    return bool(model.train_layout) and not model.base and share_one_copy(
        model, a, draft.meshes[a.mesh], b, draft.meshes[b.mesh])
