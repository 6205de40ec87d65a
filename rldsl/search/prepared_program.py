"""From a program to a placement problem, and from an assignment back to the program.

In: a graph with its rules, a cluster, the calls that the search may not move. Out: the program with all free calls on
all ranks, and what the program fixes of them; or the program with all calls placed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rldsl.clusters import Cluster
from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.placement.budget import decode_batch_size
from rldsl.placement.model import Call, PlacedGraph, Placement
from rldsl.placement.place import Describe, place_graph, placements_of
from rldsl.placement.rules import (
    Choice,
    Option,
    check_selector,
    names_of,
    resolve_choices,
    selector_span,
    specificity,
    written_selector,
)
from rldsl.plan.spaces import IndexedFrame
from rldsl.search.call_costs import Candidate
from rldsl.search.problem import FixedCall
from rldsl.search.settings import Setting, clause, with_clauses
from rldsl.search.space import Block, Strategy

OF_STRATEGY = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "mbs", "mbt", "recompute", "offload", "backend")


@dataclass(frozen=True, slots=True)
class PreparedProgram:
    """A program with the calls that the search may place."""

    placed: PlacedGraph  # the program with every free call on all ranks, for its models
    fixed: Mapping[str, FixedCall]  # by node id
    free: frozenset[str]  # node ids of the calls to place
    other_options: Mapping[str, tuple[Option, ...]]  # of free calls, given without a mesh, besides those of a strategy
    fixed_placements: Setting  # of all other nodes that the program places


def prepare_program(graph: g.Graph, place_file: str, cluster: Cluster, memory: int,
                    free: Callable[[g.Node, Choice | None], bool], describe: Describe) -> PreparedProgram:
    """free: whether the search places a call. Errors: those of placing the others."""
    choices = resolve_choices(graph, place_file)
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    free_ids = frozenset(n.id for n in calls if free(n, choices.get(n.id)))
    given = {i: c.options for i, c in choices.items() if i in free_ids and (c.auto or c.mesh is None)}
    of_strategy = {i: tuple(o for o in options if o[0] in OF_STRATEGY) for i, options in given.items()}
    machine = g.Cluster(cluster.nodes, cluster.gpus, memory / 1e9)
    if graph.cluster is not None and replace(graph.cluster, span=None, path="") == machine:
        machine = graph.cluster
    graph_on = replace(graph, rules=(), cluster=machine)
    clauses = _fixed_clauses(graph_on, choices, free_ids)
    placed = place_graph(with_clauses(graph_on, {n.id: clauses.get(n.id) for n in g.nodes(graph.items)}),
                         describe=describe)
    placements, frames = dict(placed.placements), {f.id: f for f in graph.frames}
    fixed = {i: FixedCall(options=tuple((name, value) for name, value, _ in options))
             for i, options in of_strategy.items() if options}
    fixed |= {n.id: _fixed_call(n, placements[n.id], frames) for n in calls if n.id not in free_ids}
    others = {i: tuple(o for o in options if o[0] not in OF_STRATEGY) for i, options in given.items()}
    return PreparedProgram(placed, fixed, free_ids, others, {i: placements[i] for i in clauses if i in placements})


def _fixed_clauses(graph: g.Graph, choices: Mapping[str, Choice], free: Collection[str]) -> dict[str, g.Clause]:
    """A clause for every node that is not free: its own, or for a call without a mesh the place that the program infers
    for it, perhaps from another call of its model, which may itself be free."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    own = {i: g.Clause(c.mesh, c.options, c.span) for i, c in choices.items() if i not in free}
    inferred = [n for n in calls if n.id not in free and (n.id not in own or own[n.id].mesh is None)]
    if not inferred:
        return own
    models = {n.model for n in inferred}
    same_model = {n.id for n in calls if n.model in models and n.id in choices and not choices[n.id].auto}
    given = own | {i: g.Clause(choices[i].mesh, choices[i].options, choices[i].span) for i in same_model}
    placements = placements_of(with_clauses(graph, {n.id: given.get(n.id) for n in g.nodes(graph.items)}))
    made = {n.id: clause(placements[n.id], n.span) for n in inferred}
    return own | {i: c for i, c in made.items() if c is not None}


def _fixed_call(node: g.Node, p: Placement, frames: Mapping[str, IndexedFrame]) -> FixedCall:
    """A mesh of which the program gives only the number of ranks counts as the first ranks."""
    ranks = (p.given or p.mesh).ranks
    if isinstance(node, g.Generate):
        p = replace(p, mbs=decode_batch_size(frames[node.frame], p), mbt=0)
    return FixedCall(Block(ranks[0][0], ranks[-1][1]), Strategy.of(p))


def unless_locked(graph: g.Graph, locks: Sequence[g.Rule],
                  kept: Sequence[g.Rule] = ()) -> Callable[[g.Node, Choice | None], bool]:
    """Whether a call is free: all are, except those that a selector of `--lock` names, or a rule that is kept. locks:
    the selectors, as rules of the command line. Errors: RL0313 a selector that matches nothing, several computations,
    or no call."""
    nodes = tuple(g.nodes(graph.items))
    for lock in locks:
        problem = check_selector(lock, nodes)
        if problem is None and not any(isinstance(n, Call) and specificity(lock.selector, n) >= 0 for n in nodes):
            calls = dict.fromkeys(f"{m}.{methods[0]}" for m, methods in map(names_of, nodes) if m)
            problem = Diagnostic("RL0313", f"`{written_selector(lock.selector)}` selects no call", selector_span(lock),
                                 "--lock keeps calls; the search does not move computations",
                                 help=f"omit it, or write one of {', '.join(f'`{c}`' for c in calls)}")
        if problem is not None:
            raise Failure([problem])
    return lambda node, _: all(specificity(rule.selector, node) < 0 for rule in (*locks, *kept))


# ------------------------------------------------------------------------------------------ back to a program


def placements_of_assignment(prepared: PreparedProgram, blocks: Mapping[str, Block],
                             candidates: Mapping[str, Candidate], keeps_copies: bool) -> dict[str, Placement]:
    """The places of the free calls, by node id. keeps_copies: copies of trained models stay from step to step."""
    adapted = {m.name for m in prepared.placed.graph.models if m.lora is not None}
    found = {}
    for node in g.nodes(prepared.placed.graph.items):
        if node.id in prepared.free and isinstance(node, Call):
            e, mesh = candidates[node.id], blocks[node.id].mesh()
            drops_copy = e.copy_bytes > 0 and not keeps_copies and node.model not in adapted
            offload = e.strategy.offload and not (e.on_trained_params and not isinstance(node, g.Train))
            found[node.id] = Placement(mesh, e.strategy.layout(mesh), mbs=e.strategy.mbs, offload=offload,
                                       span=node.span, why="search", keep=not drops_copy,
                                       recompute="full" if e.strategy.recompute else "none", mbt=e.strategy.mbt)
    first: dict[object, Placement] = {}  # calls that no rule can tell apart share one place
    return {n.id: found[n.id] if can_be_named(n) else first.setdefault(names_of(n), found[n.id])
            for n in g.nodes(prepared.placed.graph.items) if n.id in found}


def can_be_named(node: g.Node) -> bool:
    """Whether a rule can name it. It cannot name a call inside an expression that follows one of the same method."""
    return "#" not in node.id


def with_placements(prepared: PreparedProgram, placements: Setting) -> g.Graph:
    """The program with these places at its calls."""
    graph, clauses = prepared.placed.graph, {}
    for n in g.nodes(graph.items):
        if n.id in placements and (made := clause(placements[n.id], n.span)) is not None:
            given = prepared.other_options.get(n.id, ())
            others = tuple(o for o in made.options if o[0] not in {name for name, _, _ in given})
            clauses[n.id] = replace(made, options=(*others, *given))
    return with_clauses(graph, clauses)
