"""Reallocs: where a call runs under another layout than the one that holds the current version of its model.

In: a draft. Out: the same with a Realloc before each such call. A copy is current from its load or realloc until the
next train call of the model; what holds at the top of a loop is what holds on entry and after every iteration, so a
copy that a train call of step i made stale is brought up to date in step i+1. Frozen models are loaded under each
layout instead. A copy with keep=false lives in the block whose realloc writes it, and never across a train call. A sync
makes a new version of its target, everywhere at once (`syncs.py`).
Invariant: before every call the copy under its layout is current, and no realloc writes a copy that already is: the
verifier proves that (`verify/versions.py`). Checked here is what makes versions at all.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.graph.model import nodes
from rldsl.passes.copy_lifetimes import copies_not_kept
from rldsl.passes.draft import Draft, events, union
from rldsl.passes.syncs import Syncs
from rldsl.placement.model import Call
from rldsl.plan.events import Item, Load, Loop, ModelCall, Realloc, Train, When
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.notation import degrees_of, human
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import Summary, joined, summary
from rldsl.sharding.dtypes import in_wire_dtypes

Copies = frozenset[tuple[str, str]]  # (model, layout) that hold the current version


def reallocs(draft: Draft) -> Draft:
    worker = _Reallocs(draft)
    top = frozenset((e.model, e.layout) for e in draft.setup if isinstance(e, Load))
    # Fixed point: which copies are current at the top depends on what the last iteration left. Start from
    # what is current on entry, run the body, keep only what is current after it too; the set only shrinks.
    while (end := top & worker.block(draft.body, top)[1]) != top:
        top = end
    body, _ = worker.block(draft.body, top)
    return replace(draft, body=body).with_meshes(*worker.meshes, *worker.syncs.meshes)


class _Reallocs:
    def __init__(self, draft: Draft):
        self.draft, self.models = draft, {m.name: m for m in draft.placed.models}
        self.not_kept = copies_not_kept(draft)
        # copies that are aliases of the trained one
        self.aliases = {(e.model, e.layout) for e in draft.setup if isinstance(e, Load) and e.alias_of}
        placements = dict(draft.placed.placements)
        # of a mesh that leaves its ranks free: the first ranks, in order, instead of those that the compiler chose
        self.first_ranks = {(n.model, placements[n.id].layout.id): placements[n.id].given
                            for n in nodes(draft.placed.graph.items) if isinstance(n, Call)}
        self.known: dict[tuple[str, str], Summary] = {}
        self.meshes: list[Mesh] = []
        self.syncs = Syncs(draft)
        self.blocks: dict[tuple[int, Copies], tuple[tuple[Item, ...], Copies]] = {}

    def block(self, items: tuple[Item, ...], current: Copies) -> tuple[tuple[Item, ...], Copies]:
        """The items of a block with the reallocs that they need, and what is current after them. The result for the
        same items and current copies is reused, so that nested loops are not walked again and again."""
        if (key := (id(items), current)) not in self.blocks:
            self.blocks[key] = self._block(items, current)
        return self.blocks[key]

    def _block(self, items: tuple[Item, ...], current: Copies) -> tuple[tuple[Item, ...], Copies]:
        out: list[Item] = []
        begin = current
        for item in items:
            if isinstance(item, When):
                current = self._current_inside(current, item)
                body, end = self.block(item.body, current)
                out.append(replace(item, body=body))
                current &= end
            elif isinstance(item, Loop):
                current, trained = self._current_inside(current, item), _trained(item)
                for e in events(item.body):  # of a model that the loop does not train one realloc before it is enough
                    if isinstance(e, ModelCall) and e.model not in trained:
                        out, current = self._ensure_current(e, out, current)
                top = current
                while (end := top & self.block(item.body, top)[1]) != top:
                    top = end
                body, current = self.block(item.body, top)
                out.append(replace(item, body=body))
            elif isinstance(item, Realloc):
                moves = self.syncs.moves(item, current)
                out += moves
                current = frozenset(c for c in current if c[0] != item.model) | {(item.model, m.dst) for m in moves}
            else:
                if isinstance(item, ModelCall):
                    out, current = self._ensure_current(item, out, current)
                out.append(item)
                if isinstance(item, Train):
                    trained_copies = {(item.model, item.layout), *(c for c in self.aliases if c[0] == item.model)}
                    current = frozenset(c for c in current if c[0] != item.model) | trained_copies
        return tuple(out), frozenset(c for c in current if c not in self.not_kept or c in begin)

    def _current_inside(self, current: Copies, block: When | Loop) -> Copies:
        """What stays current inside a block. Copies with keep=false of a model that the block trains do not: the block
        makes its own."""
        return current - {c for c in self.not_kept if c[0] in _trained(block)}

    def _ensure_current(self, e: ModelCall, out: list[Item], current: Copies) -> tuple[list[Item], Copies]:
        """`out` with a realloc if the copy that `e` uses is not current, and what is current then."""
        if (e.model, e.layout) in current:
            return out, current
        return [*out, self._realloc(self.models[e.model], e)], current | {(e.model, e.layout)}

    def _realloc(self, model: Model, e: ModelCall) -> Realloc:
        draft = self.draft
        src, dst = draft.layouts[model.train_layout], draft.layouts[e.layout]
        if src == dst:
            raise internal_error(f"{e.display_name} needs a realloc of {model.name} to its training layout",
                                 "pass reallocs")
        mesh = union(draft, (src.mesh, dst.mesh))
        self.meshes.append(mesh)
        because = (f"{e.display_name} runs with {degrees_of(dst)} on {dst.mesh}, training with "
                   f"{degrees_of(src)} on {src.mesh}")
        unsized = Realloc(id=0, mesh=mesh.id, reads=(f"{model.name}@{src.id}",), writes=(f"{model.name}@{dst.id}",),
                          at=e.at, because=because, model=model.name, src=src.id, dst=dst.id)
        if not draft.sized:
            return unsized
        total = self._total(model, src, dst, draft.meshes[dst.mesh])
        first = self.first_ranks.get((model.name, dst.id))
        if first is not None and first != draft.meshes[dst.mesh]:
            other = self._total(model, src, replace(dst, id=f"{dst.id} in order", mesh=first.id), first)
            because += (f"; the ranks of mesh({first.size}) are free to choose, and {human(other.bytes)} "
                        f"would move to {first.id}")
        return replace(unsized, because=because, bytes=total.bytes, messages=total.messages, digest=total.digest)

    def _total(self, model: Model, src: Layout, dst: Layout, mesh: Mesh) -> Summary:
        if (model.name, dst.id) not in self.known:
            where = src, self.draft.meshes[src.mesh], dst, mesh, self.draft.placed.devices_per_node
            self.known[model.name, dst.id] = joined([
                summary(plan_reshard(part, *where), part)
                for part in in_wire_dtypes(model, src.id, model, dst.id, 0.0)])
        return self.known[model.name, dst.id]


def _trained(block: When | Loop) -> set[str]:
    return {e.model for e in events(block.body) if isinstance(e, Train)}


def check_reallocs(draft: Draft) -> None:
    """Each trained model is written by its loads, trains and own reallocs only, and the reallocs start from its
    training layout."""
    train_layouts = {m.name: m.train_layout for m in draft.placed.models}
    for e in events(draft.body):
        if isinstance(e, Realloc) and train_layouts[e.model]:
            if e.source:
                raise internal_error(f"{e.model} is trained, and follows {e.source}", "pass reallocs")
            if not train_layouts[e.model] == e.src != e.dst:
                raise internal_error(f"a realloc of {e.model} goes from {e.src} to {e.dst}, but its training layout is "
                                     f"{train_layouts[e.model]}", "pass reallocs")
        if isinstance(e, Train) and train_layouts[e.model] != e.layout:
            raise internal_error(f"{e.model} is trained outside its training layout", "pass reallocs")
