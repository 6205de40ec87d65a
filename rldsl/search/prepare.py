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
from rldsl.passes.settings import clause
from rldsl.placement.families import Family
from rldsl.placement.model import Call, Place, Placed
from rldsl.placement.place import Describe, place_graph
from rldsl.placement.rules import Choice, Option, names_of, resolve, specificity
from rldsl.search.costs import Entry
from rldsl.search.problem import Fixed
from rldsl.search.space import Block, Strategy

OF_STRATEGY = ("dp", "tp", "pp", "cp", "ep", "zero", "mbs", "recompute", "offload")


@dataclass(frozen=True, slots=True)
class Prepared:
    """placed: the program with every call that is free on all ranks, for its models. fixed: by node. more: options of
    calls left to the compiler that are none of a strategy."""

    placed: Placed
    fixed: Mapping[str, Fixed]
    free: frozenset[str]
    more: Mapping[str, tuple[Option, ...]]


def prepared(graph: g.Graph, place_file: str, cluster: Cluster, memory: int,
             free: Callable[[g.Node, Choice | None], bool], describe: Describe) -> Prepared:
    """free: whether the search is to place a call. Errors: those of placing the others."""
    choices = resolve(graph, place_file)
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    open_ = frozenset(n.id for n in calls if free(n, choices.get(n.id)))
    said = {i: c.options for i, c in choices.items() if i in open_ and c.auto}  # of others the search says it all
    own = {i: tuple(o for o in options if o[0] in OF_STRATEGY) for i, options in said.items()}
    kept = {i: g.Clause(c.mesh, c.options, c.span) for i, c in choices.items() if i not in open_}
    machine = g.Cluster(cluster.nodes, cluster.gpus, memory / 1e9)
    if graph.cluster is not None and replace(graph.cluster, span=None, path="") == machine:
        machine = graph.cluster
    bare = replace(graph, rules=(), cluster=machine,
                   items=mapped(graph.items, lambda n: replace(n, clause=kept.get(n.id))))
    placed = place_graph(bare, describe=describe)
    places = dict(placed.places)
    fixed = {i: Fixed(options=tuple((name, value) for name, value, _ in options)) for i, options in own.items()
             if options}
    fixed |= {n.id: _fixed(places[n.id]) for n in calls if n.id not in open_}
    more = {i: tuple(o for o in options if o[0] not in OF_STRATEGY) for i, options in said.items()}
    return Prepared(placed, fixed, open_, more)


def _fixed(p: Place) -> Fixed:
    start, stop = min(a for a, _ in p.mesh.ranks), max(b for _, b in p.mesh.ranks)
    x = p.layout
    return Fixed(Block(start, stop), Strategy(x.dp, x.tp, x.pp, x.cp, x.ep, x.zero, p.mbs, p.recompute == "full",
                                              p.offload))


def locked(graph: g.Graph, selectors: Collection[str]) -> Callable[[g.Node, Choice | None], bool]:
    """All calls are free but those that a selector of `--lock` names. Errors: RL0313 one that matches nothing."""
    every = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    for selector in selectors:
        if all(specificity(selector, n) < 0 for n in every):
            known = dict.fromkeys(f"{m}.{ways[0]}" for m, ways in map(names_of, every))
            raise fail("RL0313", f"`{selector}` matches no call of this program", place="--lock",
                       help=f"the program has: {', '.join(known)}")
    return lambda node, _: all(specificity(selector, node) < 0 for selector in selectors)


# --------------------------------------------------------------------------------------------------- back again


def places(prepared: Prepared, blocks: Mapping[str, Block], entries: Mapping[str, Entry],
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
                                   keep=not copied)
    return found


def written(prepared: Prepared, found: Mapping[str, Place]) -> g.Graph:
    """The program with these places at its calls."""
    graph = prepared.placed.graph

    def placed(n: g.Node) -> g.Node:
        if n.id not in found or (made := clause(found[n.id], n.span)) is None:
            return n
        more = prepared.more.get(n.id, ())
        kept = tuple(o for o in made.options if o[0] not in {name for name, _, _ in more})
        return replace(n, clause=replace(made, options=(*kept, *more)))

    return replace(graph, items=mapped(graph.items, placed))


def mapped(items: tuple[g.Item, ...], change: Callable[[g.Node], g.Node]) -> tuple[g.Item, ...]:
    """The same items with every node changed."""
    return tuple(change(i) if isinstance(i, g.Node) else replace(i, body=mapped(i.body, change)) for i in items)


def described(placed: Placed) -> Describe:
    """What has been read of the models' directories, as `place_graph` asks for it."""
    families = dict(placed.families)

    def known(path: str, kind: str, span: object = None, trained: bool = False) -> Family:
        return next(families[m.name] for m in placed.graph.models
                    if (m.path, m.kind, m.optimizer is not None) == (path, kind, trained))

    return known
