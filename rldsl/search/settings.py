"""Settings: a placement for each of some calls. The placement search and the memory advice write programs with them.

In: placements. Out: other placements; a graph with them; texts for `--on` and for placement files. All options of a
clause (`degrees.OPTIONS`) are carried, so that a setting that is written and placed again is the same setting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace

from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.degrees import DEGREES, OPTIONS
from rldsl.placement.model import PlacedGraph, Placement, layout_of, mesh_of_range
from rldsl.placement.place import Describe
from rldsl.plan.expr import Scalar
from rldsl.plan.model import Layout, Mesh
from rldsl.source import Span

Setting = Mapping[str, Placement]  # node id -> placement
OF_LAYOUT = tuple(f.name for f in fields(Layout) if f.name not in ("id", "mesh"))


def options(p: Placement) -> dict[str, Scalar]:
    """The options of a clause for this placement, by name, besides its mesh."""
    return {name: getattr(p.layout if name in OF_LAYOUT else p, name) for name in OPTIONS}


# -------------------------------------------------------------------------------------------- other settings


def with_options(setting: Setting, ids: Collection[str], **changes: Scalar) -> Setting:
    """With these options for the calls `ids`; all others as they are."""
    return {i: _with_options(p, changes) if i in ids else p for i, p in setting.items()}


def _with_options(p: Placement, changes: Mapping[str, Scalar]) -> Placement:
    of_layout = {name: value for name, value in changes.items() if name in OF_LAYOUT}
    of_place = {name: value for name, value in changes.items() if name not in OF_LAYOUT}
    layout = with_degrees(p.layout, p.mesh, **of_layout) if of_layout else p.layout
    return replace(p, layout=layout, **of_place)  # type: ignore[arg-type]  # by name, from `OPTIONS`


def with_degrees(x: Layout, mesh: Mesh, **changes: Scalar) -> Layout:
    """The layout on another mesh, or with other degrees; all others stay."""
    return layout_of(mesh, **({name: getattr(x, name) for name in OF_LAYOUT} | changes))


def with_min_degrees(setting: Setting, tp: int, pp: int) -> Setting:
    """At least these degrees on every mesh. Where a mesh has too few ranks, pp is halved first, then tp."""
    return {i: _with_min_degrees(p, tp, pp) for i, p in setting.items()}


def _with_min_degrees(p: Placement, tp: int, pp: int) -> Placement:
    size, t, s = p.mesh.size // p.layout.cp, max(tp, p.layout.tp), max(pp, p.layout.pp)
    while size % (t * s) and s > p.layout.pp:
        s //= 2
    while size % (t * s) and t > p.layout.tp:
        t //= 2
    if size % (t * s) or size // (t * s) % p.layout.ep:
        return p
    return replace(p, layout=with_degrees(p.layout, p.mesh, dp=size // (t * s), tp=t, pp=s))


def on_all_ranks(setting: Setting, world: int) -> Setting:
    """Every call on every rank of a cluster."""
    mesh = mesh_of_range(world)
    return {i: replace(p, mesh=mesh, given=None, layout=with_degrees(
        p.layout, mesh, dp=world // (p.layout.tp * p.layout.pp * p.layout.cp))) for i, p in setting.items()}


# ---------------------------------------------------------------------------------------------- in a program


def clause(p: Placement, span: Span, mesh_only: bool = False) -> g.Clause | None:
    """The clause that places a call there. None for ranks that are not contiguous, which no clause can name."""
    mesh = p.given or p.mesh
    if len(mesh.ranks) != 1:
        return None
    of_place = () if mesh_only else tuple((name, value, span) for name, value in options(p).items())
    return g.Clause(g.MeshRef(None, mesh.ranks[0], span, p.given is not None), of_place, span)


def with_clauses(graph: g.Graph, clauses: Mapping[str, g.Clause | None]) -> g.Graph:
    """The program with these clauses at its nodes, and without rules; nodes that are not named keep theirs."""
    return replace(graph, rules=(), items=_map_nodes(graph.items, lambda n: replace(
        n, clause=clauses[n.id]) if n.id in clauses else n))


def _map_nodes(items: tuple[g.Item, ...], change: Callable[[g.Node], g.Node]) -> tuple[g.Item, ...]:
    return tuple(change(i) if isinstance(i, g.Node) else replace(i, body=_map_nodes(i.body, change)) for i in items)


def known_families(placed: PlacedGraph) -> Describe:
    """The families that `placed` has read from the models' directories, as `place_graph` asks for them."""
    families = dict(placed.families)

    def find_family(path: str, kind: str, span: Span | None = None, trained: bool = False) -> Family:
        return next(families[m.name] for m in placed.graph.models
                    if (m.path, m.head_name, m.optimizer is not None) == (path, kind, trained))

    return find_family


# ---------------------------------------------------------------------------------------------------- as text


def clause_text(p: Placement) -> str:
    """`on mesh(0:8) dp=4 tp=2 mbs=1`: dp, and the options that are not the default."""
    usual, own = options(Placement(p.mesh, layout_of(p.mesh))), options(p)
    ranks = p.given.size if p.given else p.mesh.id
    return " ".join([f"on mesh({ranks})", *_option_texts(own, {n for n in OPTIONS if n == "dp" or own[n] != usual[n]})])


def difference_text(old: Placement, new: Placement) -> str:
    """The part of the new placement's clause that differs from the old one's; with another mesh, all of it."""
    before, after = options(old), options(new)
    moved = old.mesh != new.mesh
    usual = options(Placement(new.mesh, layout_of(new.mesh)))
    named = {name for name in OPTIONS if (after[name] != usual[name] if moved else after[name] != before[name])}
    if moved or named & {*DEGREES}:  # all degrees, as those that are left out would be inferred
        named |= {"dp", "tp", "pp"} | {name for name in DEGREES if after[name] != usual[name]}
        named |= {name for name in OF_LAYOUT if name in OPTIONS and after[name] != usual[name]}
    return " ".join([*([f"on mesh({new.mesh.id})"] if moved else []), *_option_texts(after, named)])


def _option_texts(values: Mapping[str, Scalar], names: Collection[str]) -> list[str]:
    """`name=value` in the order of `OPTIONS`, as a program has it."""
    return [f"{name}={str(values[name]).lower() if isinstance(values[name], bool) else values[name]}"
            for name in OPTIONS if name in names]
