"""Calls become events: every node of the graph, in program order, in its own spread.

In: a `Placed`. Out: a `Draft` whose events read each value in their own spread (or, for what a fetch writes, in the
spread that all its readers hold in full), whether or not anything brings it there: that is the next pass's work.
"""

from __future__ import annotations

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.passes.draft import Draft
from rldsl.placement.model import Call, Place, Placed, nodes
from rldsl.plan.model import (Compute, Event, Every, Fetch, Generate, Infer, Item, Layout, Loop, Mesh, Save, Spread,
                              Train)

NOWHERE = ""  # the mesh of a fetch is known when all readers are


def lower(placed: Placed) -> Draft:
    worker = _Lower(placed)
    body = worker.block(placed.graph.items)
    return Draft(placed, body, (), worker.meshes, worker.layouts, worker.spreads)


def spread_of(node: g.Node, place: Place) -> Spread:
    """How a call divides its rows: whole prompts by count for generation, rows by tokens otherwise, prompts by tokens
    for computations (so that reductions by prompt stay local)."""
    mesh, layout = place.mesh.id, place.layout.id
    match node:
        case g.Generate():
            return _named(Spread("", mesh, layout, (node.frame,), "prompt", "count"))
        case g.Infer():
            return _named(Spread("", mesh, layout, (node.frame,), "row", "tokens"))
        case g.Train():
            return _named(Spread("", mesh, layout, node.frames, "row", "tokens", node.minibatches, node.epochs,
                                 node.shuffle))
        case g.Compute() if node.frames:
            return _named(Spread("", mesh, layout, tuple(sorted(node.frames)), "prompt", "tokens"))
        case _:
            return Spread(f"all ranks {mesh}", mesh, unit="all")


def _named(s: Spread) -> Spread:
    batches = f" x{s.minibatches} x{s.epochs}{' shuffled' if s.shuffle else ''}" if s.minibatches * s.epochs > 1 else ""
    id = f"{s.layout} {s.unit} {s.weigh} {' '.join(s.frames)}{batches}"
    return Spread(id, s.mesh, s.layout, s.frames, s.unit, s.weigh, s.minibatches, s.epochs, s.shuffle)


class _Lower:
    def __init__(self, placed: Placed):
        self.placed, self.places = placed, dict(placed.places)
        self.homes = {m.name: m.home for m in placed.models}
        self.values = {v.id: v for v in placed.graph.values}
        self.meshes: dict[str, Mesh] = {}
        self.layouts: dict[str, Layout] = {}
        self.spreads: dict[str, Spread] = {}
        self.fetched: dict[str, str] = {}  # value -> its spread
        self.repeats = 0
        for place in self.places.values():
            self.meshes[place.mesh.id] = place.mesh
            self.layouts[place.layout.id] = place.layout

    def block(self, items: tuple[g.Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, g.Every):
                out.append(Every(item.period, self.block(item.body)))
            elif isinstance(item, g.Repeat):
                self.repeats += 1
                out.append(Loop(f"repeat{self.repeats}", item.times, self.block(item.body)))
            else:
                out.append(self.node(item))
        return tuple(out)

    def node(self, node: g.Node) -> Event:
        at = str(node.span)
        if isinstance(node, g.Fetch):
            spread = f"all {self._rows(node)}"
            self.fetched |= {v: spread for v in node.writes}
            return Fetch(id=0, mesh=NOWHERE, writes=tuple(f"{v}@{spread}" for v in node.writes), at=at, data=node.data,
                         frames=node.frames)
        if isinstance(node, g.Save):
            layout = self._save_layout(node)
            path = node.path if node.path is not None else "{out}/step-{step}/" + node.model
            return Save(id=0, mesh=self.layouts[layout].mesh, reads=(f"{node.model}@{layout}",), at=at,
                        model=node.model, layout=layout, path=path)
        place = self.places[node.id]
        spread = spread_of(node, place)
        self.spreads[spread.id] = spread
        reads = tuple(f"{v}@{self.fetched.get(v, spread.id)}" for v in node.reads)
        writes = tuple(f"{v}@{spread.id}" for v in node.writes)
        common = dict(id=0, mesh=place.mesh.id, at=at, spread=spread.id)
        match node:
            case g.Compute():
                return Compute(**common, reads=reads, writes=writes, program=node.program, frames=node.frames,
                               inputs=node.inputs, outputs=node.outputs)
            case g.Generate():
                return Generate(**common, **self._model(node.model, place), writes=writes,
                                reads=(self._copy(node.model, place), *reads), prompts=node.prompts, frame=node.frame,
                                sampling=node.sampling, mbs=place.mbs)
            case g.Infer():
                return Infer(**common, **self._model(node.model, place), writes=writes,
                             reads=(self._copy(node.model, place), *reads), frame=node.frame, what=node.what,
                             output=node.writes[0], temperature=node.temperature, mbs=place.mbs)
            case g.Train():
                copy = self._copy(node.model, place)
                return Train(**common, **self._model(node.model, place), reads=(copy, *reads), writes=(copy, *writes),
                             frames=node.frames, loss=node.loss, fresh=node.fresh, data=node.data, outputs=node.outputs,
                             mbs=place.mbs)
        raise AssertionError(f"no event for {type(node).__name__}")

    def _model(self, model: str, place: Place) -> dict[str, str]:
        return dict(model=model, layout=place.layout.id)

    def _copy(self, model: str, place: Place) -> str:
        return f"{model}@{place.layout.id}"

    def _rows(self, node: g.Fetch) -> str:
        return next(f.rows for f in self.placed.graph.frames if f.id == node.frames[0])

    def _save_layout(self, node: g.Save) -> str:
        """The home of a trained model; for a frozen one the first layout that it is used in."""
        if self.homes[node.model]:
            return self.homes[node.model]
        for call in nodes(self.placed.graph.items):
            if isinstance(call, Call) and call.model == node.model:
                return self.places[call.id].layout.id
        raise fail("RL0319", f"`{node.model}` is saved, but no call uses it", node.span, "nothing loads this model",
                   help="remove the `save`, or use the model")
