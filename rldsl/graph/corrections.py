"""A warning for a training on responses of an earlier policy whose loss does not know that policy.

In: a graph with a lag, or with responses that continue in later steps. Out: RL0909 for each `train` of the model that
generated its rows, whose loss weighs them by values none of which is made from the log-probs that they were sampled
with. A loss without such values, like `sft`, and one of pairs, like `dpo`, does not assume that the rows are those of
the current policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rldsl.diag import Diagnostic, Label
from rldsl.graph import model as g


def uncorrected(graph: g.Graph) -> Iterator[Diagnostic]:
    every = tuple(g.nodes(graph.items))
    made_from = _made_from(every)
    earlier = {n.frame: n for n in every if isinstance(n, g.Generate) and (n.id in graph.ahead or n.per_step)}
    for node in every:
        if not isinstance(node, g.Train) or len(node.frames) != 1 or not node.data_inputs:
            continue
        rows = _closure([f"{node.frames[0]}.tokens"], made_from)
        given = _closure([v for _, v in node.data_inputs], made_from)
        for frame, made in earlier.items():
            if made.model == node.model and f"{frame}.tokens" in rows and f"{frame}.logprobs" not in given:
                why = "`lag`" if made.id in graph.ahead else "`per_step`"
                yield Diagnostic(
                    "RL0909", f"this loss takes responses of an earlier `{node.model}` for those of the current one",
                    node.span, f"it does not read `{made.draws_as}.logprobs`",
                    (Label(made.span, f"with {why}, the parameters that sample them are older"),),
                    help="give it the log-probs of the policy that sampled, such as "
                         f"`old={made.draws_as}.logprobs`, or multiply the advantage by a weight of `std.correction`",
                    severity="warning")
                break


def _made_from(every: Iterable[g.Node]) -> dict[str, tuple[str, ...]]:
    """Of each value those that it is made from. What only carries rows over, one by one."""
    found: dict[str, tuple[str, ...]] = {}
    for node in every:
        if isinstance(node, g.Derive | g.Collect):
            for value, becomes in node.values:
                found[becomes] = (*found.get(becomes, ()), value)
        for value in node.writes:
            found.setdefault(value, node.reads)
    return found


def _closure(values: Iterable[str], made_from: dict[str, tuple[str, ...]]) -> frozenset[str]:
    """Some values, and all that they are made from within a step."""
    found, waiting = set[str](), list(values)
    while waiting:
        if (value := waiting.pop()) not in found:
            found.add(value)
            waiting += made_from.get(value, ())
    return frozenset(found)
