"""`lag=k`: how far each event of a step runs ahead. With `ahead=a` it works in iteration i for step i + a.

In: a draft in program order, whose events of nodes that run ahead say so. Out: the same for the events that passes
inserted: what brings a value runs as early as its earliest reader needs it, so no rank that trains waits for the rows
of a later step; and copies of parameters are refreshed, moved and freed in every iteration of the step loop. Invariant:
what makes a value of a step runs at least as far ahead as what reads it. A loop runs ahead as a whole; in a block that
runs in some steps only, each event runs ahead by its own number of steps, and copies are refreshed in the iterations in
which anything else of the block runs.

Generation, and what it is made from, runs `lag` steps ahead on any ranks: the program says so. What else may run ahead
(`graph/lag.py`) does so on ranks that do not train, for otherwise a step would wait there for a reward of its own rows
while those that generate wait, too. On the ranks that generate, it runs lag - 1
steps ahead (at least 1): there a step more would only delay the next generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from rldsl.diag import internal_error
from rldsl.graph import model as g
from rldsl.graph.lag import inputs_of, of_steps
from rldsl.passes.draft import Draft, LengthsSpreads, each_block, events, uses
from rldsl.plan.events import EVERY_ITERATION, Event, Item, Loop, When, ahead_of, split_buffer


class RankSet(Protocol):
    """Some ranks."""

    def __and__(self, other: Any, /) -> Any: ...


def steps_ahead(graph: g.Graph, ranks: Mapping[str, RankSet]) -> dict[str, int]:
    """By how many steps each node runs ahead, where it does. ranks: of nodes, by their ids; a node without any runs
    where its inputs are."""
    found = dict.fromkeys(graph.ahead, graph.lag)
    if not graph.may_run_ahead:
        return found
    top = list(of_steps(graph.items))
    working = [ranks[n.id] for n in g.nodes(i for i in graph.items if not isinstance(i, g.Eval))
               if isinstance(n, g.Train | g.Infer) and n.id not in graph.ahead | graph.may_run_ahead]
    generating = [ranks[n.id] for n in g.nodes(graph.items)
                  if isinstance(n, g.Generate) and (n.id in graph.ahead or n in top)]
    made = {v: graph.lag for n in g.nodes(graph.items) if n.id in graph.ahead for v in n.writes}
    inputs, held_by = inputs_of(graph.items, graph.values), dict[str, RankSet]()
    for node in top:
        own = ranks.get(node.id)
        if isinstance(node, g.Derive):  # where the rows are that it is made of
            own = held_by.get(node.values[0][0], own)
        if own is not None:
            held_by |= dict.fromkeys(node.writes, own)
        if node.id not in graph.may_run_ahead or own is not None and any(own & x for x in working):
            continue
        most = graph.lag if own is None or any(own & x for x in generating) else max(graph.lag - 1, 1)
        found[node.id] = min([most, *(made.get(v, 0) for v in inputs(node))])
        made |= dict.fromkeys(node.writes, found[node.id])
    return {id: ahead for id, ahead in found.items() if ahead}


def run_ahead(draft: Draft) -> Draft:
    if not draft.placed.graph.lag:
        return draft
    values, lengths_in = draft.values, LengthsSpreads.of(draft)
    wanted: dict[str, int] = {}  # buffer -> how far ahead of the step loop the earliest reader runs

    def block(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in reversed(items):
            if isinstance(item, When):
                out.append(replace(item, body=block(item.body)))
                continue
            if isinstance(item, Loop):
                item = together(item)
            elif item.refreshes:
                item = replace(item, ahead=EVERY_ITERATION)
            elif item.traits.family == "movement" and not item.versions().defs:
                item = replace(item, ahead=max((wanted.get(b, 0) for b in item.writes), default=0))
            for event in events([item]):
                for buffer in uses(draft, event, values, lengths_in):
                    wanted[buffer] = max(wanted.get(buffer, 0), ahead_of(event))
            out.append(item)
        return tuple(reversed(out))

    return replace(draft, body=block(draft.body))


def together(loop: Loop) -> Loop:
    """A loop with all of its events as far ahead as those that are furthest: it runs as a whole."""
    ahead = ahead_of(loop)
    return replace(loop, body=each_block(loop.body, lambda items: tuple(
        replace(i, ahead=ahead) if isinstance(i, Event) else i for i in items)))


def check_run_ahead(draft: Draft) -> None:
    """What is read has been made in the same iteration or an earlier one, and a loop runs ahead as a whole. What lasts,
    such as parameters, is read as it is at its place in the iteration."""
    if not draft.placed.graph.lag:
        return
    values, lengths_in, made = draft.values, LengthsSpreads.of(draft), dict[str, int]()

    def block(items: tuple[Item, ...]) -> None:
        for item in items:
            if isinstance(item, When):
                block(item.body)
                continue
            if isinstance(item, Loop) and together(item) != item:
                raise internal_error(f"a part of {item.id} runs ahead", "pass run_ahead")
            for event in events([item]):
                for buffer in uses(draft, event, values, lengths_in):
                    if made.get(buffer, event.ahead) < event.ahead:
                        raise internal_error(f"{event.display_name} needs {buffer} before it is made", "pass run_ahead")
                if event.ahead != EVERY_ITERATION:
                    made.update({b: event.ahead for b in event.writes
                                 if split_buffer(b)[0] in values and b not in draft.lasting})

    block(draft.body)
