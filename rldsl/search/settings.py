"""Settings of calls: a place for each call, which can be changed, and written as clauses and rules.

In: places. Out: other places, clauses of a graph, texts for `--on`. All options of a clause (`degrees.OPTIONS`) are
carried, so that a setting that is written and placed again is the same setting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from rldsl.graph import model as g
from rldsl.placement.degrees import DEGREES, OPTIONS
from rldsl.placement.model import Place, layout_of, mesh_of
from rldsl.plan.expr import Scalar
from rldsl.plan.model import Layout, Mesh
from rldsl.source import Span

Setting = Mapping[str, Place]  # node -> place, of every call
OF_LAYOUT = tuple(f.name for f in fields(Layout) if f.name not in ("id", "mesh"))


def options(p: Place) -> dict[str, Scalar]:
    """What a clause says of a place, by name, besides its mesh."""
    return {name: getattr(p.layout if name in OF_LAYOUT else p, name) for name in OPTIONS}


def with_options(setting: Setting, ids: Collection[str], **said: Scalar) -> Setting:
    """With these options for some calls, and all others as they are."""
    return {i: _place_with_options(p, said) if i in ids else p for i, p in setting.items()}


def _place_with_options(p: Place, said: Mapping[str, Scalar]) -> Place:
    of_layout = {name: value for name, value in said.items() if name in OF_LAYOUT}
    own = {name: value for name, value in said.items() if name not in OF_LAYOUT}
    layout = with_degrees(p.layout, p.mesh, **of_layout) if of_layout else p.layout
    return replace(p, layout=layout, **own)  # type: ignore[arg-type]


def with_degrees(x: Layout, mesh: Mesh, **said: Scalar) -> Layout:
    """On another mesh, or with other degrees; what is not said stays."""
    return layout_of(mesh, **({name: getattr(x, name) for name in OF_LAYOUT} | said))  # type: ignore[arg-type]


def with_min_degrees(setting: Setting, tp: int, pp: int) -> Setting:
    """At least these degrees on every mesh, or as much of them as it has ranks for, stages going first."""
    return {i: _place_with_min_degrees(p, tp, pp) for i, p in setting.items()}


def _place_with_min_degrees(p: Place, tp: int, pp: int) -> Place:
    size, t, s = len(p.mesh.members()) // p.layout.cp, max(tp, p.layout.tp), max(pp, p.layout.pp)
    while size % (t * s) and s > p.layout.pp:
        s //= 2
    while size % (t * s) and t > p.layout.tp:
        t //= 2
    if size % (t * s) or size // (t * s) % p.layout.ep:
        return p
    return replace(p, layout=with_degrees(p.layout, p.mesh, dp=size // (t * s), tp=t, pp=s))


def on_all_ranks(setting: Setting, world: int) -> Setting:
    """Every call on every rank of a cluster."""
    mesh = mesh_of(range(world))
    return {i: replace(p, mesh=mesh, given=None, layout=with_degrees(
        p.layout, mesh, dp=world // (p.layout.tp * p.layout.pp * p.layout.cp))) for i, p in setting.items()}


def clause(p: Place, span: Span, mesh_only: bool = False) -> g.Clause | None:
    """A clause that places a call there. None for ranks that no clause can name, as they are not one run."""
    mesh = p.given or p.mesh
    if len(mesh.ranks) != 1:
        return None
    said = () if mesh_only else tuple((name, value, span) for name, value in options(p).items())
    return g.Clause(g.MeshRef(None, mesh.ranks[0], span, p.given is not None), said, span)


def difference_text(old: Place, new: Place) -> str:
    """The new place as a clause that says what is new of it; with a mesh, all of it."""
    before, after = options(old), options(new)
    moved = old.mesh != new.mesh
    usual = options(Place(new.mesh, layout_of(new.mesh)))
    said = {name for name in OPTIONS if (after[name] != usual[name] if moved else after[name] != before[name])}
    if moved or said & {*DEGREES}:  # all degrees, as those that are not said would be inferred
        said |= {"dp", "tp", "pp"} | {name for name in DEGREES if after[name] != usual[name]}
        said |= {name for name in OF_LAYOUT if name in OPTIONS and after[name] != usual[name]}
    parts = [f"on mesh({new.mesh.id})"] if moved else []
    return " ".join([*parts, *(f"{name}={_value_text(after[name])}" for name in OPTIONS if name in said)])


def _value_text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
