"""Loads, and offload and onload of frozen models.

In: a draft. Out: the same with one Load for each layout that starts with weights from the disk (a trained model's home;
every layout of a frozen one), and, for calls placed with offload=true, Offload after use and Onload before it.
Invariant: each copy is loaded once, before the loop, and is on the device when a call uses it.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.passes.draft import Draft, call_name, each_block, events
from rldsl.placement.model import Call, degrees_text, nodes
from rldsl.plan.model import Event, Generate, Infer, Item, Load, Offload, Onload, Save, Train


def loads(draft: Draft) -> Draft:
    """Models that nothing uses are not loaded."""
    found: dict[tuple[str, str], Load] = {}
    homes = {m.name: m for m in draft.placed.models}
    at = {m.name: str(m.span) for m in draft.placed.graph.models}
    for e in events(draft.body):
        if isinstance(e, Generate | Infer | Train | Save):
            model = homes[e.model]
            layout = draft.layouts[model.home or e.layout]
            because = (f"{'trained' if model.home else 'used'} with {degrees_text(layout.dp, layout.tp, layout.pp)}, "
                       f"from {model.path}")
            found.setdefault((e.model, layout.id), Load(
                id=0, mesh=layout.mesh, writes=(f"{e.model}@{layout.id}",), at=at[e.model], because=because,
                model=e.model, layout=layout.id))
    return replace(draft, setup=(*draft.setup, *found.values()))


def offloads(draft: Draft) -> Draft:
    """A copy is offloaded when every call under that layout asks for it."""
    wish: dict[tuple[str, str], bool] = {}
    places = dict(draft.placed.places)
    for n in nodes(draft.placed.graph.items):
        if isinstance(n, Call):
            copy = (n.model, places[n.id].layout.id)
            wish[copy] = wish.get(copy, True) and places[n.id].offload
    for e in events(draft.body):
        if isinstance(e, Save):
            wish[e.model, e.layout] = False
    away = {copy for copy, wished in wish.items() if wished}

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Generate | Infer) and (item.model, item.layout) in away:
                out += [_event(Onload, item, f"{call_name(item)} uses it"), item,
                        _event(Offload, item, "offload=true: in host memory between calls")]
            else:
                out.append(item)
        return tuple(out)

    after = tuple(_event(Offload, e, "offload=true: in host memory between calls") for e in draft.setup
                  if isinstance(e, Load) and (e.model, e.layout) in away)
    return replace(draft, setup=(*draft.setup, *after), body=each_block(draft.body, insert))


def _event(kind: type[Offload] | type[Onload], e: Generate | Infer | Load, because: str) -> Event:
    copy = f"{e.model}@{e.layout}"
    return kind(id=0, mesh=e.mesh, reads=(copy,), writes=(copy,), at=e.at, because=because, model=e.model,
                layout=e.layout)
