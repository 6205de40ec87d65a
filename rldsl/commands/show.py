"""`rlc show`: a plan, one rank's list or one event, as text or JSON.

In: the path of a plan. Out: text; an event with its line of the program. Errors: RL0608 no such rank or event, and
those of reading a plan.
"""

from __future__ import annotations

from pathlib import Path

from rldsl.commands import Usage
from rldsl.files import read_bytes
from rldsl.inspect.show import show as text
from rldsl.inspect.view import event_json, plan_json
from rldsl.plan import disk_paths
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.json_output import json_output
from rldsl.plan.visible_plan import visible_plan
from rldsl.python.sources import event_quote, sources_of


def show(file: str, rank: int | None, event: int | None, touched: bool, as_json: bool) -> str:
    """touched: only what a run reads and writes."""
    if touched and (rank is not None or event is not None):
        raise Usage("--paths describes the whole plan: omit --rank and --event")
    if rank is not None and event is not None:
        raise Usage("--rank and --event cannot be combined")
    data = read_bytes(file)
    plan = decode(data, file)
    if touched:
        found_paths = disk_paths.paths(plan if as_json else visible_plan(plan))
        if as_json:
            return json_output({"format": 1, "id": plan_id(data)} | disk_paths.as_json(found_paths))
        return disk_paths.text(found_paths)
    source = event_quote(plan, event, sources_of(plan, Path(file).parent)) if event is not None else ""
    if not as_json:
        return text(visible_plan(plan), rank, event, source)
    found = plan_json(plan, plan_id(data), rank) if event is None else event_json(plan, plan_id(data), event, source)
    return json_output(found)
