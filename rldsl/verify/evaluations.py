"""Evaluations: a loop over a data source changes nothing that lasts.

In: tables with sound references. Out: diagnostics RL0530. Rules: such a loop fetches from its source once per
iteration and from no other, so that every row counts once; it holds no block, and no event that makes a new
version of a model, a state, or a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event, Item, Loop, When, split_buffer
from rldsl.plan.projection import Path
from rldsl.plan.references import Role, references
from rldsl.verify.tables import Tables, name, problem


def check_evaluations(t: Tables, items: Sequence[Item], inside: bool = False) -> Iterator[Diagnostic]:
    for item in items:
        if isinstance(item, Loop) and item.over:
            yield from _loop(t, item, inside)
        elif isinstance(item, Loop | When):
            yield from check_evaluations(t, item.body, True)


def over(path: Path) -> str:
    """The source that the loop right around an event goes over; "" where it goes over none."""
    inner = path[-1] if path else None
    return inner.over if isinstance(inner, Loop) else ""


def _loop(t: Tables, loop: Loop, inside: bool) -> Iterator[Diagnostic]:
    where = f"the evaluation of {loop.over} ({loop.id})"
    own = [e for e in loop.body if isinstance(e, Event)]
    fetches = [(e, r.id) for e in own if e.new_rows for r in references(e) if r.role is Role.DATA]
    if not inside or loop.until or len(own) != len(loop.body):
        yield problem("RL0530", f"{where} must be a simple loop inside the step", *own[:1])
    if [data for _, data in fetches] != [loop.over]:
        yield problem("RL0530", f"{where} must fetch from its source once per iteration, and from no other source",
                      *(e for e, _ in fetches))
    states = {split_buffer(b)[0] for b in t.plan.lasting}
    for e in own:
        lasting = e.versions().defs & t.models.keys() or states & {split_buffer(b)[0] for b in e.writes}
        if lasting or e.traits.family == "disk":
            yield problem("RL0530", f"{name(e)} inside {where} changes the training", e)
