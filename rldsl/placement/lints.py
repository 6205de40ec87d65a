"""Warnings about `place` rules that change nothing (RL0902).

In: a graph whose rules are right. Out: diagnostics of severity "warning". A rule of the program that only a placement
file or the command line overrides is no slip: each rule is judged among those of its own rank and below.
"""

from __future__ import annotations

from rldsl.diag import Diagnostic, Label
from rldsl.graph.model import Clause, Compute, Graph, Node, Rule, nodes
from rldsl.placement.rules import clauses_of, specificity, tier, written_selector


def lint(graph: Graph, place_file: str = "") -> tuple[Diagnostic, ...]:
    """One warning for each rule that decides nothing."""
    every = tuple(nodes(graph.items))
    return tuple(d for rule in graph.rules if (d := _idle(rule, graph, every, place_file)))


def _idle(rule: Rule, graph: Graph, every: tuple[Node, ...], place_file: str) -> Diagnostic | None:
    rank = tier(rule, place_file)
    rules = [r for r in graph.rules if tier(r, place_file) <= rank]
    matched = [n for n in every if specificity(rule.selector, n) >= 0]
    stronger: Clause | None = None
    for node in matched:
        deciding = _deciding(clauses_of(node, rules, place_file), isinstance(node, Compute))
        if any(c is rule.clause for c in deciding):
            return None
        stronger = stronger or next(iter(deciding), None)
    if stronger is None and any(isinstance(n, Compute) for n in matched):
        return Diagnostic("RL0902", "this rule has no effect", rule.clause.span,
                          "these options do not apply to a computation",
                          help=f"give it a mesh: `place {written_selector(rule.selector)} on mesh(...)`",
                          severity="warning")
    labels = (Label(stronger.span, "this takes precedence"),) if stronger else ()
    return Diagnostic("RL0902", "this rule has no effect", rule.span,
                      "rules of higher precedence place everything that it matches",
                      labels,
                      help="remove it, or make it more specific: `@name` takes precedence over `model.call`, and that "
                           "over `model.*` and `*.call`; `on ...` at the call takes precedence over rules in the same "
                           "file",
                      severity="warning")


def _deciding(clauses: list[Clause], computation: bool) -> list[Clause]:
    """The `clauses`, strongest first, that decide something: the mesh, or an option that no stronger one decides."""
    found: list[Clause] = []
    settled: set[str] = set()
    for clause in clauses:
        if clause.mesh is not None or clause.auto:
            return [*found, clause]
        names = {name for name, _, _ in clause.options}
        if not computation and names - settled:
            found.append(clause)
            settled |= names
    return found
