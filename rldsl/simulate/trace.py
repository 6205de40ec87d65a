"""A simulated step as Chrome trace JSON, in the form in which a run records its own (`plan/trace.py`)."""

from __future__ import annotations

from rldsl.plan import trace
from rldsl.plan.model import Plan
from rldsl.plan.naming import labelled
from rldsl.plan.projection import event_paths
from rldsl.simulate.model import Timeline

MAX_LINES = 512  # ranks that each get a line; of more, those of a class share one


def chrome(plan: Plan, timeline: Timeline) -> str:
    """The file. Each rank has a line, as in the recorded one; `args` also say how long a span works (busy)."""
    known = {e.id: e for e, _ in event_paths(labelled(plan))}
    alone = plan.header.world <= MAX_LINES
    first = min((s.start for s in timeline.spans), default=0.0)
    spans, alike = [], {}
    for s in timeline.spans:
        members = tuple(r for start, stop in timeline.classes[s.rank_class] for r in range(start, stop))
        alike[members[0]] = (members[0],) if alone else members
        spans += [trace.span(known[s.event], rank, plan.header.devices_per_node, 1, s.start - first, s.stop - s.start,
                             busy=round(s.busy, 6)) for rank in (members if alone else members[:1])]
    return trace.document(plan, spans, "simulated", alike)
