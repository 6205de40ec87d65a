"""Offload and onload: what a placement keeps in host memory between its uses.

In: a draft with loads and reallocs. Out: the same with an Onload before each use of a copy that is offloaded and an
Offload behind it; of a model that is trained, of its parameters and, around training, of what its optimizer has. After
ordering, `prefetch` issues each Onload earlier. Invariant: a block ends with each copy on the side on which it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.passes.draft import Draft, each_block
from rldsl.placement.model import Call
from rldsl.plan.events import CopyPart, Event, Item, Load, ModelCall, Offload, Onload, Realloc, Train

Copy = tuple[str, str]  # model, layout
WHY: dict[CopyPart, str] = {"parameters": "offload=true: in host memory between calls",
                        "optimizer": "offload=true: optimizer state in host memory between train calls"}


def offloads(draft: Draft) -> Draft:
    """A copy is offloaded when every call under that layout asks for it; what is trained, when its training does."""
    trained = _trained(draft)
    shared = {(e.model, e.alias_of) for e in draft.setup if isinstance(e, Load) and e.alias_of}
    away = _frozen(draft) | trained - shared

    def side(kind: type[Offload] | type[Onload], copy: Copy, what: CopyPart, at: str, because: str) -> Event:
        model, layout = copy
        buffer = (f"{model}@{layout}",)  # an optimizer's state comes after the parameters, and goes before them
        writes = buffer if what == "parameters" else ()
        return kind(id=0, mesh=draft.layouts[layout].mesh, reads=buffer, writes=writes, at=at, because=because,
                    model=model, layout=layout, part=what)

    def around(e: Event) -> list[Item]:
        parts: list[tuple[Copy, CopyPart]] = [(c, "parameters") for c in dict.fromkeys(e.copies()) if c in away]
        if isinstance(e, Train) and (e.model, e.layout) in trained:
            parts.append(((e.model, e.layout), "optimizer"))
        why = {"parameters": f"{e.called} {'moves its parameters' if isinstance(e, Realloc) else 'uses it'}",
               "optimizer": f"{e.called} uses the optimizer state"}
        return [*(side(Onload, c, what, e.at, why[what]) for c, what in parts), e,
                *(side(Offload, c, what, e.at, WHY[what]) for c, what in reversed(parts))]

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(x for i in items for x in (around(i) if isinstance(i, Event) else [i]))

    parts: tuple[tuple[CopyPart, set[Copy]], ...] = (("optimizer", trained), ("parameters", away))
    after = [side(Offload, (e.model, e.layout), what, e.at, WHY[what]) for what, those in parts
             for e in draft.setup if isinstance(e, Load) and (e.model, e.layout) in those]
    return replace(draft, setup=(*draft.setup, *after), body=each_block(draft.body, insert))


def _trained(draft: Draft) -> set[Copy]:
    """Homes of the models whose training asks for it."""
    places = dict(draft.placed.places)
    asked: dict[Copy, bool] = {}
    for n in g.nodes(draft.placed.graph.items):
        if isinstance(n, g.Train):
            copy = (n.model, places[n.id].layout.id)
            asked[copy] = asked.get(copy, True) and places[n.id].offload
    return {copy for copy, wished in asked.items() if wished}


def _frozen(draft: Draft) -> set[Copy]:
    homes, places = {m.name: m.train_layout for m in draft.placed.models}, dict(draft.placed.places)
    asked: dict[Copy, bool] = {}
    for n in g.nodes(draft.placed.graph.items):
        if isinstance(n, Call) and not homes[n.model]:
            copy = (n.model, places[n.id].layout.id)
            asked[copy] = asked.get(copy, True) and places[n.id].offload
    return {copy for copy, wished in asked.items() if wished}


def prefetch(draft: Draft) -> Draft:
    """An ordered draft with each Onload right behind the call before on its ranks, and behind what goes from there: it
    then runs beside what is between calls (transfers, rewards, computations), and no rank needs more memory. What would
    go and come back before another call stays."""
    def stay(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Onload) and (at := _went(draft, item, out)) is not None:
                del out[at]
            else:
                out.append(item)
        return tuple(out)

    def earlier(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            at = len(out)
            if isinstance(item, Onload):
                while at and _passes(draft, item, out[at - 1]):
                    at -= 1
            out.insert(at, item)
        return tuple(out)

    return replace(draft, body=each_block(each_block(draft.body, stay), earlier))


def _went(draft: Draft, onload: Onload, before: Sequence[Item]) -> int | None:
    """Where it was sent away, when nothing runs on its ranks between."""
    for at in range(len(before) - 1, -1, -1):
        item = before[at]
        if isinstance(item, Offload) and _what(item) == _what(onload):
            return at
        if not isinstance(item, Event) or _runs(draft, item, onload):
            return None
    return None


def _what(e: Offload | Onload) -> tuple[str, str, CopyPart]:
    return e.model, e.layout, e.part


def _runs(draft: Draft, item: Event, onload: Onload) -> bool:
    return isinstance(item, ModelCall) and bool(draft.ranks(item.mesh) & draft.ranks(onload.mesh))


def _passes(draft: Draft, onload: Onload, before: Item) -> bool:
    """Whether an onload may be issued before an item that stands before it."""
    if not isinstance(before, Event) or isinstance(before, Onload):
        return False
    if (onload.model, onload.layout) in before.copies():
        return False
    if isinstance(before, Offload):
        return not draft.ranks(before.mesh) & draft.ranks(onload.mesh)
    return not _runs(draft, before, onload)


def check_offloads(items: Sequence[Item]) -> None:
    """In each block, what is brought or sent away ends where it began."""
    away: dict[tuple[str, str, str], list[type[Event]]] = {}
    for item in items:
        if isinstance(item, Offload | Onload):
            away.setdefault((item.model, item.layout, item.part), []).append(type(item))
        elif not isinstance(item, Event):
            check_offloads(item.body)
    for copy, kinds in away.items():
        if kinds != [Onload, Offload] * (len(kinds) // 2):
            order = ", ".join(kind.kind for kind in kinds)
            raise internal_error(f"the {copy[2]} of {copy[0]}@{copy[1]} move in the order {order}", "pass prefetch")
