"""The weight of one row, by which rows are drawn: `prompts.next(weight=...)`, `good.sample(64, weight=...)`.

In: a term over the numbers of a row, states and constants. Out: a program at batch level, which is evaluated for every
row. Errors: RL0203, RL0205, RL0212, each with its position.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from rldsl.plan.operators import in_family
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.terms import Term, program, walk
from rldsl.semantics.values import describe
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

WEIGHT = "weight"  # the output of the program


def row_weight(flow: FlowBuilder, term: Term | Bad, tree: ast.Expr, target: str, numbers: Collection[str],
               help_: str) -> tuple[str, tuple[str, ...]] | Bad:
    """(id of the program, its inputs). target: the batch that is drawn. numbers: the inputs that each row has. help_:
    what a weight may use."""
    if isinstance(term, Bad):
        return BAD
    if term.dtype == "text":
        return flow.errors.add("RL0203", "a weight must be a number", tree.span, f"this is {describe(term)}")
    if term.constant and not 0 < float(term.value) < inf:
        return flow.errors.add("RL0205", f"the weight of every row is {term.value:g}", tree.span,
                               help="weights must be finite and at least 0, and not all 0; without `weight`, all rows "
                                    "are equally likely")
    made: dict[int, Term] = {}
    for t in walk([term]):
        known = t.op == "input" and (t.name in numbers or t.name in flow.states)
        if not (known or t.constant or in_family(t.op, "elementwise")):
            what = {"input": "a value of the flow", "uniform": "a random number", "py": "a Python function"}.get(
                t.op, "a reduction or a function of sequences")
            return flow.errors.add("RL0212", f"{what} in a weight", t.at,
                                   "a weight is computed from the numbers of one row", help=help_)
        made[id(t)] = replace(t, args=tuple(made[id(a)] for a in t.args), level="batch", space="")
    id_ = flow.unique(f"{target} {WEIGHT}")
    flow.programs.append(program(id_, [(WEIGHT, made[id(term)])], str(tree.span)))
    return id_, flow.programs[-1].inputs()
