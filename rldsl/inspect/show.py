"""A plan as text for people. In: a plan, and the rank or event of interest. Out: lines; nothing is recomputed.

`inspect/view.py` has the same as values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rldsl.diag import counted
from rldsl.inspect.view import Touch, View, check_rank, view
from rldsl.plan.events import Event, Item, Loop, Sampling, When
from rldsl.plan.model import Model, Plan
from rldsl.plan.notation import count, degrees_of, human, ranges_text
from rldsl.plan.projection import class_of, schedule

WIDTH = 120
UNTIL = "until "  # at the beginning of the label of a condition
LABEL = {"frame": "sequences", "frames": "sequences"}  # what users call a field


def show(plan: Plan, rank: int | None = None, event: int | None = None, source: str = "") -> str:
    """The whole plan, one rank's schedule, or one event in full. source: the line that asked for the event, if it can
    be quoted. Raises RL0608 for a rank or event that the plan does not have."""
    if event is not None:
        return "\n".join(_one(plan, view(plan, event), source))
    body: Sequence[Item] = plan.body
    if rank is not None:
        check_rank(plan, rank)
        body = schedule(plan.body, plan.meshes, rank)
    return "\n".join([*_head(plan, rank), "", *_items(plan, body, "")])


def _head(plan: Plan, rank: int | None) -> Iterator[str]:
    h = plan.header
    yield f"{h.program}  flow {h.flow}  {counted(h.world, 'rank')}  {counted(h.steps, 'step')}  seed {h.seed}"
    mine = {m.id for m in plan.meshes if rank is None or rank in m.members()}
    for m in plan.meshes:
        if m.id in mine:
            yield f"mesh {m.id}  ranks {ranges_text(m.ranks)}"
    for x in plan.layouts:
        if x.mesh in mine:
            yield f"layout {x.id}  mesh {x.mesh}  {degrees_of(x)}"
    for model in plan.models:
        yield f"model {model.name}  {model.head_name}  {model.path}  {model.dtype}  " + _life(model)
    for data in plan.data:
        yield f"data {data.name}  {data.format}  {data.path}  batch {data.batch}  {data.row_format}"
    if rank is not None:
        c = class_of(plan, rank)
        yield (
            f"rank {rank}  class of ranks {ranges_text(c.ranks)}  "
            f"{len(c.events)} events  peak {human(c.peak_bytes)}"
        )
    else:
        for c in plan.classes:
            yield f"class  ranks {ranges_text(c.ranks)}  {len(c.events)} events  peak {human(c.peak_bytes)}"


def _life(m: Model) -> str:
    """How the parameters of a model change in a run."""
    if m.train_layout:
        return f"trained on {m.train_layout}" + (f", adapters of rank {m.lora.r}" if m.lora else "")
    return f"updated from {', '.join(dict.fromkeys(m.updated_from))}" if m.updated_from else "frozen"


def _items(plan: Plan, items: Sequence[Item], indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, Loop | When):
            yield (
                f"{indent}loop {item.id} x{item.trips}{_first(item)}"
                f"{f' until {item.until.removeprefix(UNTIL)}' if item.until else ''}"
                f"{f' over {item.over}' if item.over else ''} {{"
                if isinstance(item, Loop)
                else f"{indent}{item.head} {{"
            )
            yield from _items(plan, item.body, indent + "  ")
            yield indent + "}"
        else:
            yield indent + line(item)


def _first(loop: Loop) -> str:
    return f" from iteration {loop.first}" if loop.first != 1 else ""


def line(event: Event) -> str:
    """One event on one line: id, kind, mesh, reads -> writes, bytes, reason, position."""
    touched = event.reads or event.frees
    flow = ", ".join(touched) + (" -> " + ", ".join(event.writes) if event.writes else "")
    parts = [f"e{event.id}", f"{event.kind:<8}", f"{event.mesh:<6}", flow]
    if event.bytes:
        parts.append(f"[{human(event.bytes)}]" if event.bytes > 0 else "[size known at run time]")
    if event.ahead:
        parts.append(f"for step {event.ahead:+}" if event.ahead > 0 else "in every iteration")
    if event.because:
        parts.append(f"because {event.because}")
    if event.at:
        parts.append(event.at)
    return "  ".join(parts).rstrip()


def _one(plan: Plan, found: View, source: str) -> Iterator[str]:
    event = found.event
    yield f"e{event.id}  {event.kind}  {event.subject}".rstrip()
    if event.at:
        yield f"  {event.at}" + (f"  | {source.strip()}" if source else "")
    yield from _row("because", event.because)
    yield from _row("ranks", f"{ranges_text(found.ranks)}, {count(found.ranks)} of {plan.header.world}")
    yield from _row("inside", " > ".join(
        f"loop {p.id} x{p.trips}" if isinstance(p, Loop) else p.head for p in found.inside))
    yield from _row("where", found.where)
    yield from _row("bytes", f"{human(event.bytes)} ({event.bytes})" if event.bytes > 0 else
                    "known at run time" if event.bytes < 0 else "")
    for name, value in found.fields:
        yield from _row(LABEL.get(name, name), field_text(value))
    for touch in found.touches:
        yield from _touch(event, touch)


def _row(label: str, text: str) -> Iterator[str]:
    if text:
        yield f"  {label:<12}  {text}"


def field_text(value: Any) -> str:
    """A field's value without Python's brackets; "" for nothing."""
    if value is None:
        return ""
    if isinstance(value, Sampling):
        return " ".join(f"{name}={field_text(getattr(value, name)) or '[]'}" for name in Sampling.__dataclass_fields__)
    if isinstance(value, tuple):
        return ", ".join(": ".join(dict.fromkeys(map(field_text, v))) if isinstance(v, tuple) else field_text(v)
                         for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _touch(event: Event, touch: Touch) -> Iterator[str]:
    """A buffer, and the other events that touch it."""
    found = (("written by", touch.written_by), ("read by", touch.read_by), ("freed by", touch.freed_by))
    others = [f"{word} {', '.join(f'e{i}' for i in ids if i != event.id)}"
              for word, ids in found if any(i != event.id for i in ids)]
    verb = "writes" if touch.write else "reads" if event.id in touch.read_by else "frees"
    yield from _row(verb, "  ".join([touch.buffer, touch.where, *others]))
