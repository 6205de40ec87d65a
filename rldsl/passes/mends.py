"""Placements that need less memory, tried by estimating them.

In: a `Placed` that needs more than a device has. Out: the mildest change found that fits, as rules for `--on`; or the
least memory, or the number of nodes, that would do. Mild to hard: smaller micro-batches, recomputation, copies that
are dropped after use, frozen models in host memory, then trained ones, more tensor or pipeline parallelism, more ranks.
What is tried goes through the whole of placement and passes, so that a mend that is named is one that compiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.passes.emit import emit
from rldsl.passes.pipeline import run
from rldsl.placement.families import Family
from rldsl.placement.model import Call, Place, Placed, layout_of, mesh_of
from rldsl.placement.place import place_graph
from rldsl.placement.rules import names_of
from rldsl.plan.memory import curves
from rldsl.plan.memory.curve import peak
from rldsl.source import Span

Setting = Mapping[str, Place]  # node -> place, of every call
Change = Callable[[Setting], Setting]
MOST = 64  # times as many nodes as there are, and ranks of a tp or pp degree, that are tried


@dataclass(frozen=True, slots=True)
class Mend:
    """rules: for `--on`. bytes: what a rank then needs at most. nodes: of the cluster."""

    rules: tuple[str, ...]
    bytes: int
    nodes: int


@dataclass
class Search:
    """placed: what does not fit."""

    placed: Placed

    def __post_init__(self) -> None:
        self.calls = [n for n in g.nodes(self.placed.graph.items) if isinstance(n, Call)]
        places = dict(self.placed.places)
        self.old: Setting = {n.id: places[n.id] for n in self.calls}
        self.families = dict(self.placed.families)
        self.trained = {m.name for m in self.placed.models if m.home}
        self.known: dict[tuple[object, ...], int | None] = {}

    def best(self) -> Mend | None:
        """The mildest change that fits this cluster."""
        for ways in (self._mild(), self._together(), self._divided(self._as_is), self._divided(self._everywhere)):
            for setting in ways:
                if self._fits(setting):
                    return self._mend(self._pruned(setting))
        return None

    def least(self) -> Mend:
        """What needs least of all that can be tried here."""
        hard = self._hard
        every = [self.old, *self._together(), *self._degrees(hard)[-4:], *self._degrees(self._everywhere(hard))[-4:]]
        sizes = [(size, i) for i, s in enumerate(every) if (size := self.bytes(s)) is not None]
        return self._mend(every[min(sizes)[1]])

    def larger(self) -> Mend | None:
        """On the fewest times as many nodes that do."""
        for nodes in (self._nodes * 2**k for k in range(1, MOST.bit_length())):
            for setting in self._degrees(self._on_all(self._hard, nodes))[-4:]:
                if self._fits(setting, nodes):
                    return self._mend(setting, nodes)
        return None

    # ------------------------------------------------------------------------------------------- changes

    def _mild(self) -> Iterator[Setting]:
        """One change of one call or model."""
        for n in self._names:
            if self._fits(_at(self.old, self._of(n), mbs=1)):
                yield self._loosened(_at(self.old, self._of(n), mbs=1), n)
        yield from (_at(self.old, self._trains(m), recompute="full") for m in sorted(self.trained))
        yield from (_at(self.old, self._of(n), keep=False) for n in self._copied)
        yield from (_at(self.old, self._of_model(m), offload=True) for m in self._frozen)
        yield from (_at(self.old, self._trains(m), offload=True) for m in sorted(self.trained))

    def _together(self) -> Iterator[Setting]:
        """All of them at once, one kind after the other."""
        setting = _at(self.old, self.old, mbs=1)
        yield setting
        setting = _at(setting, [i for m in self.trained for i in self._trains(m)], recompute="full")
        yield setting
        setting = _at(setting, [i for n in self._copied for i in self._of(n)], keep=False)
        yield setting
        setting = _at(setting, [i for m in self._frozen for i in self._of_model(m)], offload=True)
        yield setting
        yield _at(setting, [i for m in self.trained for i in self._trains(m)], offload=True)

    @cached_property
    def _hard(self) -> Setting:
        return list(self._together())[-1]

    def _divided(self, meshes: Change) -> Iterator[Setting]:
        """The least division that fits when all that is mild is done too: needs shrink as it grows."""
        ways = self._degrees(meshes(self._hard))
        at = bisect_left(ways, True, key=self._fits)
        yield from ways[at : at + 1]

    def _degrees(self, setting: Setting) -> list[Setting]:
        """With at least tp and pp for every call, within a node and its model; the least division first."""
        gpus, families = self.placed.devices_per_node, [self.families[n.model] for n in self.calls]
        tps = [t for t in _powers(gpus) if gpus % t == 0 and all(_can_tp(f, t) for f in families)]
        pps = [p for p in _powers(MOST) if all(p == 1 or p <= f.layers and not f.pp_problem for f in families)]
        return [_divide(setting, tp, pp) for tp, pp in sorted(product(tps, pps), key=lambda x: (x[0] * x[1], x[1]))]

    def _as_is(self, setting: Setting) -> Setting:
        return setting

    def _everywhere(self, setting: Setting) -> Setting:
        return self._on_all(setting, self._nodes)

    def _on_all(self, setting: Setting, nodes: int) -> Setting:
        """Every call on every rank of a cluster."""
        mesh = mesh_of(range(nodes * self.placed.devices_per_node))
        size = len(mesh.members())
        return {i: replace(p, mesh=mesh, given=None, layout=layout_of(
            mesh, size // (p.layout.tp * p.layout.pp * p.layout.cp), p.layout.tp, p.layout.pp, p.layout.cp,
            ep=p.layout.ep)) for i, p in setting.items()}

    # --------------------------------------------------------------------------------------------- names

    @property
    def _nodes(self) -> int:
        return self.placed.world // self.placed.devices_per_node

    @cached_property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(_selector(n) for n in self.calls))

    @cached_property
    def _frozen(self) -> list[str]:
        return sorted({n.model for n in self.calls} - self.trained)

    @cached_property
    def _copied(self) -> list[str]:
        """Calls of trained models that have copies of their own."""
        homes = {m.name: m.home for m in self.placed.models if m.home and not m.base}
        return list(dict.fromkeys(_selector(n) for n in self.calls if n.model in homes and not isinstance(n, g.Train)
                                  and self.old[n.id].layout.id != homes[n.model]))

    def _of(self, name: str) -> list[str]:
        return [n.id for n in self.calls if _selector(n) == name]

    def _of_model(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model]

    def _trains(self, model: str) -> list[str]:
        return [n.id for n in self.calls if n.model == model and isinstance(n, g.Train)]

    # ------------------------------------------------------------------------------------------ judging

    def bytes(self, setting: Setting, nodes: int = 0) -> int | None:
        """What a rank needs at most; None where the placement is not possible."""
        key = (nodes, *((i, p.layout, p.mbs, p.recompute, p.offload, p.keep) for i, p in setting.items()))
        if key not in self.known:
            try:
                plan = emit(run(place_graph(self._graph(setting, nodes), describe=self._describe)), "")
                self.known[key] = max(peak(c).bytes for c in curves(plan))
            except Failure:
                self.known[key] = None
        return self.known[key]

    def _fits(self, setting: Setting, nodes: int = 0) -> bool:
        size = self.bytes(setting, nodes)
        return size is not None and size <= self.placed.memory

    def _pruned(self, setting: Setting) -> Setting:
        """Without what it does not take, the hardest first."""
        for model in sorted({n.model for n in self.calls}):
            ids = self._of_model(model)
            setting = self._without(setting, ids, "mesh", "layout")
        for name in self._names:
            for field in ("offload", "keep", "recompute", "mbs"):
                setting = self._without(setting, self._of(name), field)
        for name in self._names:
            if setting[self._of(name)[0]].mbs == 1 != self.old[self._of(name)[0]].mbs:
                setting = self._loosened(setting, name)
        return setting

    def _without(self, setting: Setting, ids: list[str], *fields: str) -> Setting:
        back = {i: replace(p, **{f: getattr(self.old[i], f) for f in fields}) if i in ids else p
                for i, p in setting.items()}
        return back if back != setting and self._fits(back) else setting

    def _loosened(self, setting: Setting, name: str) -> Setting:
        """With the largest micro-batches of one call that fit: a power of two."""
        size = 1
        while (not self.old[self._of(name)[0]].mbs or 2 * size < self.old[self._of(name)[0]].mbs) and size < 1 << 16:
            if not self._fits(_at(setting, self._of(name), mbs=2 * size)):
                break
            size *= 2
        return _at(setting, self._of(name), mbs=size)

    def _describe(self, path: str, kind: str, span: Span | None = None, trained: bool = False) -> Family:
        return next(self.families[m.name] for m in self.placed.graph.models
                    if (m.path, m.kind, m.optimizer is not None) == (path, kind, trained))

    def _graph(self, setting: Setting, nodes: int) -> g.Graph:
        """The same program with every place written at its call."""
        graph, places = self.placed.graph, dict(self.placed.places)
        assert graph.cluster is not None
        cluster = replace(graph.cluster, nodes=nodes) if nodes else graph.cluster

        def clause(n: g.Node) -> g.Clause | None:
            if n.id in setting:
                return _clause(setting[n.id], n.span)
            said = places.get(n.id)
            return None if said is None or said.why.startswith("default") else _clause(said, n.span, mesh_only=True)

        items = _mapped(graph.items, lambda n: replace(n, clause=clause(n)))
        return replace(graph, rules=(), cluster=cluster, items=items)

    def _mend(self, setting: Setting, nodes: int = 0) -> Mend:
        said: dict[str, str] = {}
        for n in self.calls:
            if text := _difference(self.old[n.id], setting[n.id]):
                said[_selector(n)] = text
        for model in {n.model for n in self.calls}:  # one rule for all calls of a model, where they change alike
            mine = [_selector(n) for n in self.calls if n.model == model]
            texts = {said.get(s) for s in mine}
            if len(set(mine)) > 1 and len(texts) == 1 and None not in texts:
                said = {s: t for s, t in said.items() if s not in mine} | {f"{model}.*": said[mine[0]]}
        return Mend(tuple(f"{s} {t}" for s, t in said.items()), self.bytes(setting, nodes) or 0, nodes or self._nodes)


def _powers(most: int) -> Iterator[int]:
    return (2**k for k in range(most.bit_length()) if 2**k <= most)


def _selector(n: Call) -> str:
    model, methods = names_of(n)
    return f"{model}.{methods[0]}"


def _at(setting: Setting, ids: object, **fields: object) -> Setting:
    chosen = set(ids)  # type: ignore[call-overload]
    return {i: replace(p, **fields) if i in chosen else p for i, p in setting.items()}  # type: ignore[arg-type]


def _can_tp(f: Family, tp: int) -> bool:
    return tp == 1 or not (f.tp_problem or f.heads % tp or f.kv_heads % tp and tp % f.kv_heads)


def _divide(setting: Setting, tp: int, pp: int) -> Setting:
    """At least these degrees on every mesh, or as much of them as it has ranks for, stages going first."""
    def divided(p: Place) -> Place:
        size, t, s = len(p.mesh.members()) // p.layout.cp, max(tp, p.layout.tp), max(pp, p.layout.pp)
        while size % (t * s) and s > p.layout.pp:
            s //= 2
        while size % (t * s) and t > p.layout.tp:
            t //= 2
        if size % (t * s) or size // (t * s) % p.layout.ep:
            return p
        return replace(p, layout=layout_of(p.mesh, size // (t * s), t, s, p.layout.cp, p.layout.backend, ep=p.layout.ep))

    return {i: divided(p) for i, p in setting.items()}


def _clause(p: Place, span: Span, mesh_only: bool = False) -> g.Clause:
    (start, stop), = (p.given or p.mesh).ranks
    x, options = p.layout, {}
    if not mesh_only:
        options = dict(dp=x.dp, tp=x.tp, pp=x.pp, cp=x.cp, ep=x.ep, mbs=p.mbs, recompute=p.recompute, offload=p.offload,
                       keep=p.keep, backend=x.backend)
    mesh = g.MeshRef(None, (start, stop), span, p.given is not None)
    return g.Clause(mesh, tuple((k, v, span) for k, v in options.items()), span)


def _mapped(items: tuple[g.Item, ...], change: Callable[[g.Node], g.Node]) -> tuple[g.Item, ...]:
    return tuple(change(i) if isinstance(i, g.Node) else replace(i, body=_mapped(i.body, change)) for i in items)


def _difference(old: Place, new: Place) -> str:
    """The new place as a clause that says what is new of it; with a mesh, all of it."""
    x, moved = new.layout, old.mesh != new.mesh
    parts = [f"on mesh({new.mesh.id})"] if moved else []
    if moved or (old.layout.dp, old.layout.tp, old.layout.pp) != (x.dp, x.tp, x.pp):
        parts.append(f"dp={x.dp} tp={x.tp} pp={x.pp}" + (f" cp={x.cp}" if x.cp > 1 else "") + (f" ep={x.ep}" if x.ep > 1 else ""))
    if new.mbs != old.mbs or moved and new.mbs:
        parts.append(f"mbs={new.mbs}")
    if new.recompute != old.recompute or moved and new.recompute != "none":
        parts.append(f"recompute={new.recompute}")
    if new.offload != old.offload or moved and new.offload:
        parts.append("offload=true")
    if new.keep != old.keep or moved and not new.keep:
        parts.append("keep=false")
    return " ".join(parts)
