"""What `rlc compile --place MODE` and `place ... auto` leave to the compiler.

In: a graph with its rules, a mode. Out: the graph with a clause at every call that was free, or as it was.
A mode places every call but those that the command line places; without one, only what is `auto` is searched for.
Errors: RL0329 `auto` without a cluster, RL0304 a pattern that does not fill it, RL0402 nothing fits.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.clusters import Cluster, find, preset
from rldsl.diag import Failure, fail
from rldsl.graph import model as g
from rldsl.placement.degrees import DEGREES
from rldsl.placement.model import Call
from rldsl.placement.place import Describe
from rldsl.placement.rules import Choice, names_of, resolve, specificity, tier
from rldsl.search.answer import Answer, Options
from rldsl.search.answer import find_placement as look
from rldsl.search.patterns import is_pattern, pattern_degrees
from rldsl.search.prepared_program import map_nodes, prepare_program, with_places

MANUAL, HEURISTIC, SEARCH = "manual", "heuristic", "search"
MODES = (MANUAL, HEURISTIC, SEARCH)
ASSUMED = "h100x8"  # how fast the devices are of a cluster that does not say
ALL = 3  # the tier of the command line


def is_mode(text: str) -> bool:
    return text in MODES or is_pattern(text)


def place_by_mode(graph: g.Graph, place_file: str, mode: str, describe: Describe) -> tuple[g.Graph, Answer | None]:
    """The graph with its free calls placed, and how they were found; as it is where none is free."""
    choices = resolve(graph, place_file)
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    line = [r for r in graph.rules if tier(r, place_file) == ALL and r.clause.mesh is not None]
    following = {n.model for n in calls if n.id in choices and choices[n.id].auto} - {
        n.model for n in calls if n.id in choices and choices[n.id].mesh is not None}

    def free(node: g.Node, choice: Choice | None) -> bool:
        if mode == MANUAL:  # what would follow a call that is `auto`, is so too
            own = choice is not None and choice.mesh is not None
            return not own and (choice is not None and choice.auto or names_of(node)[0] in following)
        return all(specificity(r.selector, node) < 0 for r in line)

    opened = [n for n in calls if free(n, choices.get(n.id))]
    if not opened:
        return graph, None
    if graph.cluster is None:
        auto = next((c.span for n in opened if (c := choices.get(n.id)) is not None and c.auto), None)
        raise fail("RL0329", "automatic placement needs a cluster", auto or opened[0].span,
                   "the number of devices is unknown",
                   help='declare it: `cluster nodes=1 gpus=8`, or `cluster "h100x64"`')
    if is_pattern(mode):
        said = pattern_degrees(mode, graph.cluster.nodes, graph.cluster.gpus)
        return _all_with_degrees(graph, choices, {n.id for n in opened}, said), None
    cluster = assumed_cluster(graph.cluster)
    memory = int(graph.cluster.memory_gb * 1e9)
    p = prepare_program(graph, place_file, cluster, memory, free, describe)
    answer = look(p, cluster, memory, Options(HEURISTIC if mode == HEURISTIC else SEARCH))
    found = with_places(p, answer.best[0].places)
    return replace(found, cluster=graph.cluster), answer


def assumed_cluster(said: g.Cluster) -> Cluster:
    """What is known of the devices of a program's cluster: its file, or else the preset `ASSUMED`."""
    known = None
    if said.path:
        try:
            known = find(said.path)
        except Failure:  # relative to another directory: the compiler has read it, and said so if it could not
            known = None
    if known is None or replace(known, gpus=said.gpus, nodes=said.nodes).unknown():
        known = preset(ASSUMED)
    assert known is not None
    return replace(known, nodes=said.nodes, gpus=said.gpus, memory_gb=said.memory_gb)


def _all_with_degrees(graph: g.Graph, choices: dict[str, Choice], free: set[str], said: dict[str, int]) -> g.Graph:
    """The calls that are free on all ranks, with these degrees; a `generate` has dp where others have cp."""
    assert graph.cluster is not None
    world = graph.cluster.nodes * graph.cluster.gpus

    def clause(n: g.Node) -> g.Clause | None:
        if n.id not in free:
            c = choices.get(n.id)
            return g.Clause(c.mesh, c.options, c.span) if c is not None else None
        own = {k: v for k, v in said.items() if k != "cp"} if isinstance(n, g.Generate) else said
        own = own | {"dp": world // (own.get("tp", 1) * own.get("pp", 1) * own.get("cp", 1))}
        kept = choices[n.id].options if n.id in choices else ()
        more = tuple(o for o in kept if o[0] not in DEGREES and (choices[n.id].auto or choices[n.id].mesh is None))
        options = (*((k, v, n.span) for k, v in own.items()), *more)
        return g.Clause(g.MeshRef(None, (0, world), n.span), options, n.span)

    return replace(graph, rules=(), items=map_nodes(graph.items, lambda n: replace(n, clause=clause(n))))
