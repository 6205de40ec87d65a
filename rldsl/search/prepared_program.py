"""From a program to a problem, and from an assignment back to the program.

In: a graph with its rules, a cluster, what is to stay as the program has it. Out: the program with the calls that are
free unplaced, and what is said of them; or with all of them placed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rldsl.clusters import Cluster
from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.budget import decoded
from rldsl.placement.model import Call, Place, Placed
from rldsl.placement.place import Describe, place_graph, places_of
from rldsl.placement.rules import Choice, Option, names_of, resolve, specificity
from rldsl.plan.model import Frame
from rldsl.search.call_costs import Candidate
from rldsl.search.problem import FixedCall
from rldsl.search.settings import clause
from rldsl.search.space import Block, Strategy

OF_STRATEGY = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "mbs", "mbt", "recompute", "offload", "backend")


@dataclass(frozen=True, slots=True)
class PreparedProgram:
    """placed: the program with every call that is free on all ranks, for its models. fixed: by node. more: options of
    free calls, given without a mesh, that are none of a strategy. kept: the places of all other nodes that something is
    said of."""

    placed: Placed
    fixed: Mapping[str, FixedCall]
    free: frozenset[str]
    more: Mapping[str, tuple[Option, ...]]
    kept: Mapping[str, Place]


def prepare_program(graph: g.Graph, place_file: str, cluster: Cluster, memory: int,
             free: Callable[[g.Node, Choice | None], bool], describe: Describe) -> PreparedProgram:
    """free: whether the search is to place a call. Errors: those of placing the others."""
    choices = resolve(graph, place_file)
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    open_ = frozenset(n.id for n in calls if free(n, choices.get(n.id)))
    said = {i: c.options for i, c in choices.items() if i in open_ and (c.auto or c.mesh is None)}
    own = {i: tuple(o for o in options if o[0] in OF_STRATEGY) for i, options in said.items()}
    machine = g.Cluster(cluster.nodes, cluster.gpus, memory / 1e9)
    if graph.cluster is not None and replace(graph.cluster, span=None, path="") == machine:
        machine = graph.cluster
    clauses = _fixed_clauses(replace(graph, rules=(), cluster=machine), choices, open_)
    bare = replace(graph, rules=(), cluster=machine,
                   items=map_nodes(graph.items, lambda n: replace(n, clause=clauses.get(n.id))))
    placed = place_graph(bare, describe=describe)
    places, frames = dict(placed.places), {f.id: f for f in graph.frames}
    fixed = {i: FixedCall(options=tuple((name, value) for name, value, _ in options)) for i, options in own.items()
             if options}
    fixed |= {n.id: _fixed_call(n, places[n.id], frames) for n in calls if n.id not in open_}
    more = {i: tuple(o for o in options if o[0] not in OF_STRATEGY) for i, options in said.items()}
    return PreparedProgram(placed, fixed, open_, more, {i: places[i] for i in clauses if i in places})


def _fixed_clauses(graph: g.Graph, choices: Mapping[str, Choice], free: Collection[str]) -> dict[str, g.Clause]:
    """Of what is not free, a clause for where it stands: its own, or for a call without a mesh what the program places
    it by, another call of its model perhaps, which may be free."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    own = {i: g.Clause(c.mesh, c.options, c.span) for i, c in choices.items() if i not in free}
    late = [n for n in calls if n.id not in free and (n.id not in own or own[n.id].mesh is None)]
    if not late:
        return own
    models = {n.model for n in late}
    near = {n.id for n in calls if n.model in models and n.id in choices and not choices[n.id].auto}
    shown = own | {i: g.Clause(choices[i].mesh, choices[i].options, choices[i].span) for i in near}
    there = places_of(replace(graph, items=map_nodes(graph.items, lambda n: replace(n, clause=shown.get(n.id)))))
    made = {n.id: clause(there[n.id], n.span) for n in late}
    return own | {i: c for i, c in made.items() if c is not None}


def _fixed_call(node: g.Node, p: Place, frames: Mapping[str, Frame]) -> FixedCall:
    """Ranks of which the program says only how many count as the first."""
    ranks = (p.given or p.mesh).ranks
    if isinstance(node, g.Generate):
        p = replace(p, mbs=decoded(frames[node.frame], p), mbt=0)
    return FixedCall(Block(ranks[0][0], ranks[-1][1]), Strategy.of(p))


def unless_locked(graph: g.Graph, selectors: Collection[str]) -> Callable[[g.Node, Choice | None], bool]:
    """All calls are free but those that a selector of `--lock` names. Errors: RL0313 one that matches nothing."""
    every = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    for selector in selectors:
        if all(specificity(selector, n) < 0 for n in every):
            known = dict.fromkeys(f"{m}.{ways[0]}" for m, ways in map(names_of, every))
            raise fail("RL0313", f"`{selector}` matches no call of this program", place="--lock",
                       help=f"calls of the program: {', '.join(known)}")
    return lambda node, _: all(specificity(selector, node) < 0 for selector in selectors)


# --------------------------------------------------------------------------------------------------- back again


def places_of_assignment(prepared: PreparedProgram, blocks: Mapping[str, Block], entries: Mapping[str, Candidate],
           keep: bool) -> dict[str, Place]:
    """Call -> its place, of those that are free. keep: copies of trained models stay from step to step."""
    adapted = {m.name for m in prepared.placed.graph.models if m.lora is not None}
    found = {}
    for node in g.nodes(prepared.placed.graph.items):
        if node.id in prepared.free:
            e, mesh = entries[node.id], blocks[node.id].mesh()
            copied = e.copy > 0 and not keep and node.model not in adapted  # type: ignore[union-attr]
            away = e.strategy.offload and not (e.own and not isinstance(node, g.Train))
            found[node.id] = Place(mesh, e.strategy.layout(mesh), mbs=e.strategy.mbs, offload=away, span=node.span,
                                   why="search", recompute="full" if e.strategy.recompute else "none",
                                   keep=not copied, mbt=e.strategy.mbt)
    first: dict[object, Place] = {}  # no rule tells calls without a name apart
    return {n.id: found[n.id] if can_be_named(n) else first.setdefault(names_of(n), found[n.id])
            for n in g.nodes(prepared.placed.graph.items) if n.id in found}


def can_be_named(node: g.Node) -> bool:
    """Whether a rule can name it: not a call inside an expression, behind another one of the same method."""
    return "#" not in node.id


def with_places(prepared: PreparedProgram, found: Mapping[str, Place]) -> g.Graph:
    """The program with these places at its calls."""
    graph = prepared.placed.graph

    def placed(n: g.Node) -> g.Node:
        if n.id not in found or (made := clause(found[n.id], n.span)) is None:
            return n
        more = prepared.more.get(n.id, ())
        kept = tuple(o for o in made.options if o[0] not in {name for name, _, _ in more})
        return replace(n, clause=replace(made, options=(*kept, *more)))

    return replace(graph, items=map_nodes(graph.items, placed))


def map_nodes(items: tuple[g.Item, ...], change: Callable[[g.Node], g.Node]) -> tuple[g.Item, ...]:
    """The same items with every node changed."""
    return tuple(change(i) if isinstance(i, g.Node) else replace(i, body=map_nodes(i.body, change)) for i in items)


def known_families(placed: Placed) -> Describe:
    """What has been read of the models' directories, as `place_graph` asks for it."""
    families = dict(placed.families)

    def known(path: str, kind: str, span: object = None, trained: bool = False) -> Family:
        return next(families[m.name] for m in placed.graph.models
                    if (m.path, m.kind, m.optimizer is not None) == (path, kind, trained))

    return known
