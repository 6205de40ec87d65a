"""`lag=k`: how far each event of a step runs ahead.

In: a draft in program order, whose events of nodes that run ahead say so. Out: the same for the events that passes
inserted: what brings a value runs as early as its earliest reader needs it, so no rank that trains waits for the rows
of a later step; and copies of parameters are refreshed, moved and freed in every turn of the step loop. Invariant: what
makes a value of a step runs at least as far ahead as what reads it.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, events, lengths_spread_ids, uses
from rldsl.plan.events import EVERY_TURN, Event, Item, ahead_of


def run_ahead(draft: Draft) -> Draft:
    if not draft.placed.graph.lag:
        return draft
    values, lengths_in = draft.values, lengths_spread_ids(draft)
    wanted: dict[str, int] = {}  # buffer -> how far ahead of the step loop the earliest reader runs
    out: list[Item] = []
    for item in reversed(draft.body):
        if isinstance(item, Event) and item.refreshes:
            item = replace(item, ahead=EVERY_TURN)
        elif isinstance(item, Event) and item.traits.family == "movement" and not item.versions().defs:
            item = replace(item, ahead=max((wanted.get(b, 0) for b in item.writes), default=0))
        for event in events([item]):
            for buffer in uses(draft, event, values, lengths_in):
                wanted[buffer] = max(wanted.get(buffer, 0), ahead_of(event))
        out.append(item)
    return replace(draft, body=tuple(reversed(out)))


def check_run_ahead(draft: Draft) -> None:
    """What is read has been made in the same turn or an earlier one, and nothing in a block runs ahead."""
    if not draft.placed.graph.lag:
        return
    values, lengths_in, made = draft.values, lengths_spread_ids(draft), dict[str, int]()
    for item in draft.body:
        for event in events([item]):
            if item is not event and event.ahead:
                raise internal_error(f"{event.called} in a block runs ahead", "pass run_ahead")
            for buffer in uses(draft, event, values, lengths_in):
                if made.get(buffer, event.ahead) < event.ahead:
                    raise internal_error(f"{event.called} needs {buffer} before it is made", "pass run_ahead")
            if event.ahead != EVERY_TURN:
                made |= dict.fromkeys(event.writes, event.ahead)
