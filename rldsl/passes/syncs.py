"""Syncs: from which copy of the source a new version comes, and how the target's other copies get it.

In: the sync of one statement, a Realloc between two models without bytes, and the copies that are current there. Out:
that event filled in, then a Realloc of the target to each other layout that it is loaded under. Invariant: after them
every copy of the target is current.

The source's copy is the one from which fewest bytes move, among those that hold its numbers in full: where the source
trains in float32, a bfloat16 copy serves only a copy in bfloat16. So placement never changes numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rldsl.passes.draft import Draft, events, union
from rldsl.plan.events import Load, Realloc
from rldsl.plan.model import Mesh, Model
from rldsl.plan.notation import degrees_of
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import joined, summary
from rldsl.sharding.dtypes import in_wire_dtypes, storage_dtype


class Syncs:
    def __init__(self, draft: Draft):
        self.draft, self.models = draft, {m.name: m for m in draft.placed.models}
        self.copies = tuple((e.model, e.layout) for e in events(draft.setup) if isinstance(e, Load))
        self.known: dict[tuple[str, str, str, str, bool], Realloc] = {}
        self.meshes: list[Mesh] = []

    def moves(self, e: Realloc, current: Iterable[tuple[str, str]]) -> list[Realloc]:
        """e: of a statement. current: (model, layout) that hold a current version."""
        source, target = self.models[e.source], self.models[e.model]
        layouts = [e.src, *sorted(x for m, x in current if m == source.name and x != e.src)]
        choices = [self._filled(replace(e, src=x)) for x in layouts
                   if self._same_numbers(source, x, e.src, target, e)]
        first = min(choices, key=lambda c: c.bytes)  # at equal bytes the source's own layout
        return [first, *(self._follow(e, x) for m, x in self.copies if m == e.model and x != e.dst)]

    def _same_numbers(self, source: Model, layout: str, anchor: str, target: Model, e: Realloc) -> bool:
        """Whether the copy under `layout` gives the same numbers as that under `anchor`."""
        mine, full = storage_dtype(source, layout), storage_dtype(source, anchor)
        return mine == full or not e.decay and storage_dtype(target, e.dst) == mine

    def _follow(self, e: Realloc, layout: str) -> Realloc:
        src, dst = self.draft.layouts[e.dst], self.draft.layouts[layout]
        because = f"{_statement(e)}: {degrees_of(src)} -> {degrees_of(dst)}, where {e.model} is also used"
        return self._filled(Realloc(id=0, mesh=e.mesh, at=e.at, because=because, model=e.model, src=src.id, dst=dst.id))

    def _filled(self, e: Realloc) -> Realloc:
        """With its moves, its mesh, and what it reads and writes."""
        draft, source, model = self.draft, self.models[e.origin], self.models[e.model]
        src, dst = draft.layouts[e.src], draft.layouts[e.dst]
        key = (source.name, e.src, e.model, e.dst, e.decay > 0)
        if key not in self.known:
            where = src, draft.meshes[src.mesh], dst, draft.meshes[dst.mesh], draft.placed.devices_per_node
            total = joined([summary(plan_reshard(part, *where), part)
                            for part in in_wire_dtypes(source, e.src, model, e.dst, e.decay)])
            self.known[key] = replace(e, bytes=total.bytes, messages=total.messages, digest=total.digest)
        known, mesh = self.known[key], union(draft, (src.mesh, dst.mesh))
        self.meshes.append(mesh)
        old = (f"{e.model}@{e.dst}",) if e.decay else ()
        because = e.because or f"{_statement(e)}: {degrees_of(src)} -> {degrees_of(dst)}"
        return replace(e, mesh=mesh.id, reads=(f"{source.name}@{e.src}", *old), writes=(f"{e.model}@{e.dst}",),
                       bytes=known.bytes, messages=known.messages, digest=known.digest, because=because)


def _statement(e: Realloc) -> str:
    """The statement, as it is written."""
    return f"`ema {e.model} from {e.source} {e.decay:g}`" if e.decay else f"`sync {e.model} from {e.source}`"
