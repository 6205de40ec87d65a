"""Automatic placement: `rlc compile --place MODE` and `place ... auto`.

In: a graph with its rules, a mode. Out: the graph with a clause at every call that was free, or as it was.
A mode places every call except those that the command line places; without one, only `auto` calls are searched for.
A mode is `manual`, `heuristic`, `search`, or a pattern: one division of all calls, such as `d2p2t2`, `pipe_data` and
`pipe_model`. The last two are ReaL's names: one pipeline stage per node, with data or tensor parallelism inside it.
Errors: RL0329 `auto` without a cluster, RL0304 a pattern that does not fill it, RL0402 nothing fits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

from rldsl.clusters import Cluster, find, preset
from rldsl.diag import Failure, fail, internal_error
from rldsl.graph import model as g
from rldsl.placement.degrees import DEGREES
from rldsl.placement.model import Call
from rldsl.placement.place import Describe
from rldsl.placement.rules import Choice, names_of, resolve_choices, specificity, tier
from rldsl.search.answer import Answer, Mode, Options, find_placement
from rldsl.search.prepared_program import prepare_program, with_placements
from rldsl.search.settings import with_clauses

MANUAL, HEURISTIC, SEARCH = "manual", "heuristic", "search"
MODES = (MANUAL, HEURISTIC, SEARCH)
ASSUMED = "h100x8"  # the preset whose speeds are assumed for a cluster that gives none
COMMAND_LINE = 3  # its tier among rules
PATTERN, PATTERN_PART = re.compile(r"(?:[dptc][1-9]\d{0,5}){1,4}"), re.compile(r"([dptc])(\d+)")
DEGREE_OF_LETTER = {"d": "dp", "p": "pp", "t": "tp", "c": "cp"}
NAMED_PATTERNS = ("pipe_data", "pipe_model")


def is_mode(text: str) -> bool:
    return text in MODES or is_pattern(text)


def place_by_mode(graph: g.Graph, place_file: str, mode: str, describe: Describe,
                  num_processes: int = 1) -> tuple[g.Graph, Answer | None]:
    """(the graph with its free calls placed, the answer of the search); the graph as it is where no call is free.
    num_processes: as of `Options`."""
    choices = resolve_choices(graph, place_file)
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    given = [r for r in graph.rules if tier(r, place_file) == COMMAND_LINE and r.clause.mesh is not None]
    following = {n.model for n in calls if n.id in choices and choices[n.id].auto} - {
        n.model for n in calls if n.id in choices and choices[n.id].mesh is not None}

    def free(node: g.Node, choice: Choice | None) -> bool:
        if mode == MANUAL:  # a call that follows an `auto` call is free, too
            own = choice is not None and choice.mesh is not None
            return not own and (choice is not None and choice.auto or names_of(node)[0] in following)
        return all(specificity(r.selector, node) < 0 for r in given)

    free_calls = [n for n in calls if free(n, choices.get(n.id))]
    if not free_calls:
        return graph, None
    if graph.cluster is None:
        auto = next((c.span for n in free_calls if (c := choices.get(n.id)) is not None and c.auto), None)
        raise fail("RL0329", "automatic placement needs a cluster", auto or free_calls[0].span,
                   "the number of devices is unknown",
                   help='declare it: `cluster nodes=1 gpus=8`, or `cluster "h100x64"`')
    if is_pattern(mode):
        degrees = pattern_degrees(mode, graph.cluster.nodes, graph.cluster.gpus)
        return _all_with_degrees(graph, choices, {n.id for n in free_calls}, degrees), None
    cluster = assumed_cluster(graph.cluster)
    memory = int(graph.cluster.memory_gb * 1e9)
    p = prepare_program(graph, place_file, cluster, memory, free, describe)
    search_mode: Mode = "heuristic" if mode == HEURISTIC else "search"
    answer = find_placement(p, cluster, memory, Options(search_mode, num_processes=num_processes))
    return replace(with_placements(p, answer.best[0].placements), cluster=graph.cluster), answer


def assumed_cluster(declared: g.Cluster) -> Cluster:
    """A program's cluster with the speeds of its file, or else of the preset `ASSUMED`."""
    known = None
    if declared.path:
        try:
            known = find(declared.path)
        except Failure:  # a path relative to another directory; the compiler reported a file that it could not read
            known = None
    if known is None or replace(known, gpus=declared.gpus, nodes=declared.nodes).unknown():
        known = preset(ASSUMED)
    if known is None:
        raise internal_error(f"no preset {ASSUMED}", "placement modes")
    return replace(known, nodes=declared.nodes, gpus=declared.gpus, memory_gb=declared.memory_gb)


def _all_with_degrees(graph: g.Graph, choices: dict[str, Choice], free: set[str], degrees: dict[str, int]) -> g.Graph:
    """The free calls on all ranks, with these degrees; a `generate` has dp where other calls have cp."""
    world = graph.cluster.nodes * graph.cluster.gpus if graph.cluster is not None else 0

    def make_clause(n: g.Node) -> g.Clause | None:
        if n.id not in free:
            c = choices.get(n.id)
            return g.Clause(c.mesh, c.options, c.span) if c is not None else None
        own = {k: v for k, v in degrees.items() if k != "cp"} if isinstance(n, g.Generate) else degrees
        own = own | {"dp": world // (own.get("tp", 1) * own.get("pp", 1) * own.get("cp", 1))}
        given = choices[n.id].options if n.id in choices else ()
        others = tuple(o for o in given if o[0] not in DEGREES and (choices[n.id].auto or choices[n.id].mesh is None))
        options = (*((k, v, n.span) for k, v in own.items()), *others)
        return g.Clause(g.MeshRef(None, (0, world), n.span), options, n.span)

    return with_clauses(graph, {n.id: make_clause(n) for n in g.nodes(graph.items)})


# -------------------------------------------------------------------------------------------------- patterns


def is_pattern(text: str) -> bool:
    return text in NAMED_PATTERNS or bool(_parse_pattern(text))


def _parse_pattern(text: str) -> dict[str, int]:
    """Degrees by name; empty for a text that is no pattern."""
    if PATTERN.fullmatch(text) is None:
        return {}
    parts = PATTERN_PART.findall(text)
    degrees = {DEGREE_OF_LETTER[letter]: int(n) for letter, n in parts}
    return degrees if len(degrees) == len(parts) else {}


def pattern_degrees(name: str, nodes: int, gpus: int) -> dict[str, int]:
    """name: a pattern, as `is_pattern` decides."""
    if name in NAMED_PATTERNS:
        return {"pp": nodes, "dp" if name == "pipe_data" else "tp": gpus}
    degrees, world = _parse_pattern(name), nodes * gpus
    product = prod(degrees.values())
    if product != world:
        rest = product // degrees.get("dp", 1)
        fits = f"`d{world // rest}" + "".join(f"{k[0]}{v}" for k, v in degrees.items() if k != "dp") + "` does"
        raise fail("RL0304", "degrees do not fill the cluster", place=name,
                   notes=(f"{name} is {product} rank{'s' * (product != 1)}; the cluster has {world}",),
                   help=fits if world % rest == 0 else f"their product must be {world}")
    return degrees
