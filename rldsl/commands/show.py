"""`rlc show`: a plan, one rank's list or one event, as text or JSON.

In: the path of a plan. Out: text; an event with its line of the program. Errors: RL0608 no such rank or event, and
those of reading a plan.
"""

from __future__ import annotations

import json
from hashlib import sha256
from importlib import resources
from pathlib import Path

from rldsl import api
from rldsl.commands import Usage
from rldsl.plan import paths
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.model import Plan
from rldsl.plan.project import events
from rldsl.plan.show import show as text
from rldsl.plan.view import event_json, plan_json


def show(file: str, rank: int | None, event: int | None, touched: bool, as_json: bool) -> str:
    """touched: only what a run reads and writes."""
    if touched and (rank is not None or event is not None or as_json):
        raise Usage("--paths is of the whole plan, as text: leave --rank, --event and --json out")
    if rank is not None and event is not None:
        raise Usage("--rank shows a list and --event one event: give one of them")
    data = api.read_bytes(file)
    plan = decode(data, file)
    if touched:
        return paths.text(paths.paths(plan))
    source = quote(plan, event, Path(file).parent) if event is not None else ""
    if not as_json:
        return text(plan, rank, event, source)
    found = plan_json(plan, plan_id(data), rank) if event is None else event_json(plan, plan_id(data), event, source)
    return json.dumps(found, indent=1, ensure_ascii=False)


def quote(plan: Plan, event: int, beside: Path) -> str:
    """The line of the program that asked for an event; "" when the source is not there, or changed since it was
    compiled. beside: where the plan lies; the source is looked for here, and there."""
    at = next((e.at for e, _ in events(plan) if e.id == event), "")
    for path, digest in plan.header.sources:
        if at.startswith(f"{path}:"):
            number = at[len(path) + 1 :].partition(":")[0]
            text = source_text(path, digest, beside)
            lines = text.splitlines()
            return lines[int(number) - 1] if number.isdecimal() and 0 < int(number) <= len(lines) else ""
    return ""


def source_text(path: str, digest: str, beside: Path) -> str:
    """The text of a source with this sha256, or ""."""
    name = Path(path).name
    found = [Path(path), beside / name, beside / "sources" / f"{digest[:12]}-{name}"]  # the last is that of a run
    if path.startswith("std/"):
        found.append(Path(str(resources.files("rldsl.stdlib").joinpath(name))))
    for file in found:
        try:
            data = file.read_bytes()
            if sha256(data).hexdigest() == digest:
                return data.decode()
        except (OSError, ValueError):
            continue
    return ""
