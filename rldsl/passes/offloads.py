"""Offload and onload: what a placement keeps in host memory between its uses.

In: an ordered draft. Out: the same with an Onload before each use of a copy that is offloaded and an Offload after it:
of its parameters and, around a train call, of its optimizer state; nothing is between them and the use, so that no
other call needs memory for the copy. `prefetch` then issues each Onload earlier. Invariant: each copy is in the same
memory at the end of a block as at its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.passes.draft import Draft, each_block
from rldsl.placement.model import Call
from rldsl.plan.events import (
    EVERY_ITERATION,
    CopyPart,
    Event,
    Item,
    Load,
    Loop,
    ModelCall,
    Offload,
    Onload,
    Realloc,
    Train,
)

Copy = tuple[str, str]  # model, layout
WHY: dict[CopyPart, str] = {"parameters": "offload=true: in host memory between calls",
                            "optimizer": "offload=true: optimizer state in host memory between train calls"}


def offloads(draft: Draft) -> Draft:
    """A copy is offloaded if every call under its layout asks for it; a trained one, if every train call does."""
    trained = _trained(draft)
    shared = {(e.model, e.alias_of) for e in draft.setup if isinstance(e, Load) and e.alias_of}
    offloaded = _not_trained(draft) | trained - shared

    def move(kind: type[Offload] | type[Onload], copy: Copy, part: CopyPart, at: str, because: str,
             ahead: int = 0) -> Event:
        model, layout = copy
        # optimizer state is moved in after the parameters, and out before them: it only reads their buffer
        buffer = (f"{model}@{layout}",)
        writes = buffer if part == "parameters" else ()
        return kind(id=0, mesh=draft.layouts[layout].mesh, reads=buffer, writes=writes, at=at, because=because,
                    ahead=ahead, model=model, layout=layout, part=part)

    def around(e: Event, in_loop: bool) -> list[Item]:
        """in_loop: whether the event is in a loop of a step, which runs ahead as a whole."""
        parts: list[tuple[Copy, CopyPart]] = [(c, "parameters") for c in dict.fromkeys(e.copies())
                                              if c in offloaded]
        if isinstance(e, Train) and (e.model, e.layout) in trained:
            parts.append(((e.model, e.layout), "optimizer"))
        why = {"parameters": f"{e.display_name} {'moves its parameters' if isinstance(e, Realloc) else 'uses it'}",
               "optimizer": f"{e.display_name} uses the optimizer state"}
        ahead = e.ahead if in_loop or not draft.placed.graph.lag else EVERY_ITERATION
        return [*(move(Onload, c, part, e.at, why[part], ahead) for c, part in parts), e,
                *(move(Offload, c, part, e.at, WHY[part], ahead) for c, part in reversed(parts))]

    def block(items: tuple[Item, ...], in_loop: bool = False) -> tuple[Item, ...]:
        return tuple(x for i in items for x in (
            around(i, in_loop) if isinstance(i, Event) else
            [replace(i, body=block(i.body, in_loop or isinstance(i, Loop)))]))

    def after_load(e: Event) -> list[Event]:
        """At once, so that models that do not fit together can be loaded one after another."""
        if not isinstance(e, Load):
            return []
        parts: tuple[tuple[CopyPart, set[Copy]], ...] = (("optimizer", trained), ("parameters", offloaded))
        return [move(Offload, (e.model, e.layout), part, e.at, WHY[part]) for part, copies in parts
                if (e.model, e.layout) in copies]

    setup = tuple(x for e in draft.setup for x in (e, *after_load(e)))
    return replace(draft, setup=setup, body=block(draft.body))


def _trained(draft: Draft) -> set[Copy]:
    """The trained copies of models whose train calls all ask for it."""
    placements = dict(draft.placed.placements)
    all_offload: dict[Copy, bool] = {}
    for n in g.nodes(draft.placed.graph.items):
        if isinstance(n, g.Train):
            copy = (n.model, placements[n.id].layout.id)
            all_offload[copy] = all_offload.get(copy, True) and placements[n.id].offload
    return {copy for copy, wished in all_offload.items() if wished}


def _not_trained(draft: Draft) -> set[Copy]:
    """The copies of models that are not trained whose calls all ask for it."""
    train_layouts, placements = {m.name: m.train_layout for m in draft.placed.models}, dict(draft.placed.placements)
    all_offload: dict[Copy, bool] = {}
    for n in g.nodes(draft.placed.graph.items):
        if isinstance(n, Call) and not train_layouts[n.model]:
            copy = (n.model, placements[n.id].layout.id)
            all_offload[copy] = all_offload.get(copy, True) and placements[n.id].offload
    return {copy for copy, wished in all_offload.items() if wished}


def prefetch(draft: Draft) -> Draft:
    """An ordered draft with each Onload as far ahead as possible: behind the previous call on its ranks, the offloads
    there, and whatever uses the copy. Onloads keep their order, and none leaves its block. It then overlaps what is
    between calls (transfers, rewards, computations), and no rank needs more memory. An offload and an onload of the
    same copy cancel out if no call on its ranks and no block is between them."""
    def cancel_round_trips(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Onload) and (at := _matching_offload(draft, item, out)) is not None:
                del out[at]
            else:
                out.append(item)
        return tuple(out)

    def hoist_onloads(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            at = len(out)
            if isinstance(item, Onload):
                while at and _can_hoist_above(draft, item, out[at - 1]):
                    at -= 1
            out.insert(at, item)
        return tuple(out)

    return replace(draft, body=each_block(each_block(draft.body, cancel_round_trips), hoist_onloads))


def _matching_offload(draft: Draft, onload: Onload, before: Sequence[Item]) -> int | None:
    """The index in `before` of the offload that `onload` reverts; None if a call on its ranks or a block is between
    them."""
    for at in range(len(before) - 1, -1, -1):
        item = before[at]
        if isinstance(item, Offload) and _copy_part(item) == _copy_part(onload):
            return at
        if not isinstance(item, Event) or _is_call_on_ranks_of(draft, item, onload):
            return None
    return None


def _copy_part(e: Offload | Onload) -> tuple[str, str, CopyPart]:
    return e.model, e.layout, e.part


def _is_call_on_ranks_of(draft: Draft, item: Event, onload: Onload) -> bool:
    return isinstance(item, ModelCall) and bool(draft.ranks(item.mesh) & draft.ranks(onload.mesh))


def _can_hoist_above(draft: Draft, onload: Onload, before: Item) -> bool:
    """Whether an onload may be issued before the item that precedes it."""
    if not isinstance(before, Event) or isinstance(before, Onload):
        return False
    if (onload.model, onload.layout) in before.copies():
        return False
    if isinstance(before, Offload):
        return not draft.ranks(before.mesh) & draft.ranks(onload.mesh)
    return not _is_call_on_ranks_of(draft, before, onload)


def check_offloads(items: Sequence[Item]) -> None:
    """In each block, onloads and offloads of a copy alternate, and it ends in the memory where it began."""
    moves: dict[tuple[str, str, str], list[type[Event]]] = {}
    for item in items:
        if isinstance(item, Offload | Onload):
            moves.setdefault((item.model, item.layout, item.part), []).append(type(item))
        elif not isinstance(item, Event):
            check_offloads(item.body)
    for copy, kinds in moves.items():
        if kinds != [Onload, Offload] * (len(kinds) // 2):
            order = ", ".join(kind.kind for kind in kinds)
            raise internal_error(f"the {copy[2]} of {copy[0]}@{copy[1]} move in the order {order}", "pass prefetch")
