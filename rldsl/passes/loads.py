"""Loads, and offload and onload of frozen models.

In: a draft. Out: the same with one Load for each layout that starts with weights from the disk (a trained model's home;
every layout of a frozen one, and of one with adapters, whose base is frozen), and, for calls placed with offload=true,
Offload after use and Onload before it.
Invariant: each copy is loaded once, before the loop, and is on the device when a call uses it.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.graph.model import nodes
from rldsl.passes.draft import Draft, each_block, events
from rldsl.placement.model import Call
from rldsl.plan.events import Event, Generate, Infer, Item, Load, Offload, Onload, Realloc, Save, Train
from rldsl.plan.meaning import call_name
from rldsl.plan.texts import degrees_of


def loads(draft: Draft) -> Draft:
    """Models that nothing uses are not loaded."""
    found: dict[tuple[str, str], Load] = {}
    homes = {m.name: m for m in draft.placed.models}
    at = {m.name: str(m.span) for m in draft.placed.graph.models}
    for e in events(draft.body):
        for name, used in _copies(e):
            model = homes[name]
            layout = draft.layouts[used if model.base else model.home or used]
            because = (f"{'trained' if model.home == layout.id else 'used'} with {degrees_of(layout)}, "
                       f"from {model.path}")
            found.setdefault((name, layout.id), Load(
                id=0, mesh=layout.mesh, writes=(f"{name}@{layout.id}",), at=at[name], because=because,
                model=name, layout=layout.id))
    return replace(draft, setup=(*draft.setup, *found.values()))


def _copies(e: Event) -> tuple[tuple[str, str], ...]:
    """The (model, layout) whose parameters an event works on."""
    match e:
        case Generate() | Infer() | Train() | Save():
            return ((e.model, e.layout),)
        case Realloc():
            return ((e.source or e.model, e.src), (e.model, e.dst))
    return ()


def offloads(draft: Draft) -> Draft:
    """A copy is offloaded when every call under that layout asks for it."""
    wish: dict[tuple[str, str], bool] = {}
    places = dict(draft.placed.places)
    for n in nodes(draft.placed.graph.items):
        if isinstance(n, Call):
            copy = (n.model, places[n.id].layout.id)
            wish[copy] = wish.get(copy, True) and places[n.id].offload
    for e in events(draft.body):
        if isinstance(e, Save) or draft.placed.graph.checkpoint and isinstance(e, Realloc) and e.source:
            wish[e.model, e.layout if isinstance(e, Save) else e.dst] = False  # it is written from the device
    away = {copy for copy, wished in wish.items() if wished}

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Generate | Infer) and (item.model, item.layout) in away:
                out += [_event(Onload, item, f"{call_name(item)} uses it"), item,
                        _event(Offload, item, "offload=true: in host memory between calls")]
            elif isinstance(item, Realloc):
                copies = [c for c in _copies(item) if c in away]
                out += [_moved(draft, Onload, c, item, f"{call_name(item)} moves its parameters") for c in copies]
                out.append(item)
                out += [_moved(draft, Offload, c, item, "offload=true: in host memory between calls") for c in copies]
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


def _moved(draft: Draft, kind: type[Offload] | type[Onload], copy: tuple[str, str], e: Realloc, because: str) -> Event:
    model, layout = copy
    buffer = f"{model}@{layout}"
    return kind(id=0, mesh=draft.layouts[layout].mesh, reads=(buffer,), writes=(buffer,), at=e.at, because=because,
                model=model, layout=layout)
