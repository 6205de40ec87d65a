"""Lifetimes of copies of parameters: one of a trained model with keep=false is freed after its last use.

In: an ordered draft. Out: the same with a Free of each such copy after the last event that uses it before its next
version, in the block of the realloc that wrote it. Invariant: a copy that a realloc writes is freed in the same block,
once, and nothing uses it between that and the next realloc.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.graph.model import nodes
from rldsl.passes.draft import Draft, each_block, events
from rldsl.passes.run_ahead import together
from rldsl.placement.model import Call
from rldsl.plan.events import EVERY_ITERATION, Event, Free, Item, Load, Loop, Realloc, When

Copies = frozenset[tuple[str, str]]  # (model, layout)


def copies_not_kept(draft: Draft) -> Copies:
    """The copies with keep=false: every call under the layout says so, and it is not the trained copy."""
    aliases = {(e.model, e.layout) for e in draft.setup if isinstance(e, Load) and e.alias_of}
    train_layouts, placements = {m.name: m.train_layout for m in draft.placed.models}, dict(draft.placed.placements)
    kept: dict[tuple[str, str], bool] = {}
    for n in nodes(draft.placed.graph.items):
        if isinstance(n, Call):
            copy = (n.model, placements[n.id].layout.id)
            kept[copy] = kept.get(copy, False) or placements[n.id].keep
    return frozenset((m, x) for (m, x), keep in kept.items()
                     if not keep and train_layouts[m] not in ("", x) and (m, x) not in aliases)


def copy_lifetimes(draft: Draft) -> Draft:
    not_kept = {f"{m}@{x}" for m, x in copies_not_kept(draft)}

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        last: dict[str, int] = {}
        ends: dict[int, list[str]] = defaultdict(list)
        for i, item in enumerate(items):
            own = list(events([item]))
            written = {b for e in own if isinstance(e, Realloc) for b in e.writes} & not_kept
            for b in last.keys() - written:
                if any(b in e.reads for e in own):
                    last[b] = i
            if isinstance(item, Realloc):
                for b in written:
                    if b in last:
                        ends[last[b]].append(b)
                    last[b] = i
        for b, i in last.items():
            ends[i].append(b)
        return tuple(x for i, item in enumerate(items)
                     for x in (item, *(_free(draft, b, item) for b in sorted(ends.get(i, ())))))

    def in_every_iteration(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(replace(i, ahead=EVERY_ITERATION) if isinstance(i, Free) and i.buffers[0] in not_kept
                     else replace(i, body=in_every_iteration(i.body)) if isinstance(i, When)
                     else together(i) if isinstance(i, Loop) else i for i in items)

    body = each_block(draft.body, insert)
    return replace(draft, body=in_every_iteration(body) if draft.placed.graph.lag else body)


def _free(draft: Draft, buffer: str, after: Item) -> Free:
    user = draft.labels.event(after).display_name if isinstance(after, Event) else "the preceding block"
    return Free(id=0, mesh=draft.layouts[buffer.partition("@")[2]].mesh, buffers=(buffer,),
                at=after.at if isinstance(after, Event) else "",
                because=f"keep=false, last used by {user}")


def check_copy_lifetimes(draft: Draft) -> None:
    """In each block, a copy with keep=false is freed between two reallocs to it and at the end, once."""
    not_kept = {f"{m}@{x}" for m, x in copies_not_kept(draft)}

    def block(items: tuple[Item, ...]) -> tuple[Item, ...]:
        allocated: set[str] = set()
        for e in (i for i in items if isinstance(i, Realloc | Free)):
            mine = not_kept & {*(e.buffers if isinstance(e, Free) else e.writes)}
            if not (mine <= allocated if isinstance(e, Free) else not mine & allocated):
                raise internal_error(f"{e.display_name} of {sorted(mine)}, while {sorted(allocated)} are allocated",
                                     "pass copy_lifetimes")
            allocated = allocated - mine if isinstance(e, Free) else allocated | mine
        if allocated:
            raise internal_error(f"copies are not freed: {', '.join(sorted(allocated))}", "pass copy_lifetimes")
        return items

    each_block(draft.body, block)
