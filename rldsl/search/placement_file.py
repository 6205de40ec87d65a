"""The text of a placement file.

In: an answer. Out: source text, with a header that says what it is for and how good it is. It also has the places that
the program, a placement file or the command line gave to other calls, so that it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.diag import counted
from rldsl.graph import model as g
from rldsl.placement.model import Call
from rldsl.placement.rules import names_of, selector_of
from rldsl.plan.notation import seconds_text
from rldsl.search.answer import Answer
from rldsl.search.prepared_program import PreparedProgram, can_be_named
from rldsl.search.settings import Setting, clause_text
from rldsl.simulate.lengths import Lengths


def format_placement_file(p: PreparedProgram, answer: Answer, version: str, cluster: str, stopped_by: str,
                          lines: Sequence[str] = ()) -> str:
    """cluster: its name. stopped_by: as of `format_answer`. lines: more of the header."""
    best, machine, size = answer.best[0], p.placed.graph.cluster, answer.problem.cluster
    header = [f"Placement of {p.placed.graph.program} by rldsl {version}.", "",
              f"cluster    {cluster}: {counted(size.nodes, 'node')} of {counted(size.gpus, 'device')}",
              f"predicted  {seconds_text(best.seconds)} per step ({_lengths_text(answer.problem.lengths)})"]
    if answer.result.bound:
        header.append(f"bound      {seconds_text(answer.bound)}: no placement in the search space is faster; "
                      f"gap {answer.gap:.2%}")
        header.append(f"search     {answer.result.num_nodes} search nodes"
                      f"{f', stopped by {stopped_by}' if stopped_by else ''}; deterministic, no random seed")
    header += lines
    comments = "".join(f"# {line}".rstrip() + "\n" for line in header)
    memory = f" memory_gb={_number_text(machine.memory_gb)}" if machine and machine.memory_gb else ""
    rules = place_rules(p.placed.graph, {**p.fixed_placements, **best.placements})
    return f"{comments}\ncluster nodes={size.nodes} gpus={size.gpus}{memory}\n\n" + "".join(
        f"place {rule}\n" for rule in rules)


def place_rules(graph: g.Graph, placements: Setting) -> list[str]:
    """One rule for each node that has a place here. Calls are selected by model and method if that is unambiguous, or
    if they have no name, and otherwise by `@name`, which takes precedence; computations by name or text."""
    every = tuple(g.nodes(graph.items))
    calls = [n for n in every if isinstance(n, Call)]
    rules = []
    for n in every:
        if n.id not in placements:
            continue
        if not isinstance(n, Call):
            rules.append((selector_of(n, every), clause_text(placements[n.id])))
            continue
        model, methods = names_of(n)
        same = [o for o in calls if model and names_of(o) == names_of(n)]
        texts = {clause_text(placements[o.id]) if o.id in placements else "" for o in same}
        selector = f"{model}.{methods[0]}" if len(texts) == 1 or not can_be_named(n) else f"@{n.id}"
        rules.append((selector, clause_text(placements[n.id])))
    width = max((len(selector) for selector, _ in rules), default=0)
    return [f"{selector:<{width}} {text}" for selector, text in dict.fromkeys(rules)]


def _number_text(x: float) -> str:
    """Without loss, and without an exponent."""
    return f"{x:.12f}".rstrip("0").rstrip(".")


def _lengths_text(x: Lengths) -> str:
    if x == Lengths():
        return "sequences at their maximum length"
    return f"prompts of {x.prompt:g} tokens, responses of {x.response:g}, longest {x.longest:g}; 0: the maximum"
