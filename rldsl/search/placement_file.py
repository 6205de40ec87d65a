"""A placement as the source of a placement file.

In: an answer. Out: text, with a header that says what it is for and how good it is. What the program, a placement file
or the command line said of other calls is in it too, so that it stands by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rldsl.graph import model as g
from rldsl.placement.model import Call, Place
from rldsl.placement.rules import names_of
from rldsl.plan.notation import seconds_text
from rldsl.search.answer import Answer
from rldsl.search.prepared_program import PreparedProgram, can_be_named
from rldsl.search.space import Strategy
from rldsl.simulate.lengths import Lengths


def format_placement_file(p: PreparedProgram, answer: Answer, version: str, cluster: str, cut: bool, lines: Sequence[str] = ()) -> str:
    """cut: whether time ended the search. lines: more of the header."""
    best = answer.best[0]
    graph = p.placed.graph
    told = [f"Placement of {graph.program} by rldsl {version}.", "",
            f"cluster    {cluster}: {answer.problem.cluster.nodes} nodes of {answer.problem.cluster.gpus} devices",
            f"predicted  {seconds_text(best.seconds)} per step ({_lengths_text(answer.problem.lengths)})"]
    if answer.result.bound:
        told.append(f"bound      {seconds_text(answer.bound)}: no placement in the search space is faster; gap "
                    f"{answer.gap:.2%}")
        told.append(f"search     {answer.result.parts} parts of the space"
                    f"{', ended by --seconds' if cut else ''}; seed 0 (nothing is drawn)")
    told += lines
    machine = graph.cluster
    header = "".join(f"# {line}".rstrip() + "\n" for line in told)
    memory = f" memory_gb={_number_text(machine.memory_gb)}" if machine and machine.memory_gb else ""
    size = f"cluster nodes={answer.problem.cluster.nodes} gpus={answer.problem.cluster.gpus}{memory}\n"
    return header + "\n" + size + "\n" + "".join(f"place {rule}\n" for rule in place_rules(graph, {**p.kept, **best.places}))


def place_rules(graph: g.Graph, places: Mapping[str, Place]) -> list[str]:
    """One rule for each node that has a place here; of calls by model and method where these tell them apart, or where
    they have no name: `@name` is stronger."""
    calls = [n for n in g.nodes(graph.items) if isinstance(n, Call)]
    found = []
    for n in g.nodes(graph.items):
        if n.id not in places:
            continue
        model, methods = names_of(n)
        same = [o for o in calls if model and names_of(o) == names_of(n)]
        texts = {clause_text(places[o.id]) if o.id in places else "" for o in same}
        name = f"{model}.{methods[0]}" if len(texts) == 1 or not can_be_named(n) else f"@{n.id}"
        found.append((name, clause_text(places[n.id])))
    width = max((len(name) for name, _ in found), default=0)
    return [f"{name:<{width}} {said}" for name, said in dict.fromkeys(found)]


def clause_text(p: Place) -> str:
    """`on mesh(0:8) dp=4 tp=2 mbs=1`."""
    ranks = len(p.given.members()) if p.given else p.mesh.id
    return f"on mesh({ranks}) {Strategy.of(p).text()}{'' if p.keep else ' keep=false'}"


def _number_text(x: float) -> str:
    """Without loss, and without an exponent."""
    return f"{x:.12f}".rstrip("0").rstrip(".")


def _lengths_text(x: Lengths) -> str:
    if x == Lengths():
        return "sequences at their maximum length"
    return f"prompts of {x.prompt:g} tokens, responses of {x.response:g}, longest {x.longest:g}; 0: the maximum"
