"""A timeline as Chrome trace JSON, which Perfetto and chrome://tracing read: recorded and simulated ones
alike.

In: events of a plan with begin and end on a rank. Out: trace events. A process is a node, a thread a rank; the name
of a span is the kind of its event and what it is about; its `args` say which event, of which step, of which line, and
why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rldsl.plan.events import Event
from rldsl.plan.model import Plan
from rldsl.plan.naming import describe_event
from rldsl.plan.notation import ranks_text

Span = dict[str, Any]


def span(event: Event, rank: int, per_node: int, step: int, start: float, seconds: float, **more: Any) -> Span:
    """start: seconds from the begin of the trace. more: further `args`."""
    text = describe_event(event)
    args = {"event": event.id, "at": event.at, "line": text.line, "step": step, "because": event.because} | more
    if event.ahead > 0:  # with a lag, what is done during this step for a later one
        args["for_step"] = step + event.ahead
    return {"name": text.title, "cat": text.kind, "ph": "X", "pid": rank // per_node, "tid": rank,
            "ts": round(start * 1e6, 3), "dur": round(max(seconds, 0.0) * 1e6, 3), "args": args}


def document(plan: Plan, spans: Iterable[Span], what: Literal["recorded", "simulated"],
             threads: Mapping[int, tuple[int, ...]] | None = None) -> str:
    """The whole file. threads: rank -> the ranks for which its line stands, where these are several."""
    per_node, shown = plan.header.devices_per_node, []
    every = list(spans)
    for node in sorted({s["pid"] for s in every}):
        shown.append(_label("process_name", node, 0, f"node {node} {what}"))
    for node, rank in sorted({(s["pid"], s["tid"]) for s in every}):
        alike = (threads or {}).get(rank, (rank,))
        text = f"rank {rank}" if len(alike) == 1 else f"ranks {ranks_text(alike)}"
        shown += [_label("thread_name", node, rank, text),
                  {"name": "thread_sort_index", "ph": "M", "pid": node, "tid": rank, "args": {"sort_index": rank}}]
    about = {"program": plan.header.program, "flow": plan.header.flow, "world": plan.header.world, "what": what,
             "devices_per_node": per_node}
    return json.dumps({"traceEvents": [*shown, *every], "displayTimeUnit": "ms", "otherData": about})


def _label(key: str, node: int, rank: int, text: str) -> Span:
    return {"name": key, "ph": "M", "pid": node, "tid": rank, "args": {"name": text}}
