"""A `Diff` as text and as JSON (docs/plans.md describes it).

In: a diff, and what the two plans are called. Out: text; objects of plain types. `+` came, `-` went, `~` changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rldsl.inspect.diff import Change, Diff, EventChange, Moved
from rldsl.inspect.event_matching import Found
from rldsl.plan.notation import human, seconds_text

FORMAT = 1
SAME = "no differences"
BARE = ("save", "checkpoint", "derive", "collect")  # what these are about does not say what they do


def text(diff: Diff, before: str, after: str) -> str:
    """before, after: the two files, as their reader knows them."""
    sections = (
        ("program", map(_change, diff.program)),
        ("models, data, blocks", map(_change, diff.tables)),
        ("calls", (line for call in diff.calls for line in _event(call))),
        ("inserted", (line for event in diff.inserted for line in _event(event))),
        ("metrics", (f"  {_sign(c.before, c.after)} {c.name}" for c in diff.metrics)),
        ("bytes moved between ranks per step", map(_moved, diff.moved)),
        ("peak memory", (f"  ~ ranks {p.ranks:<10}  {_bytes(p.before)} -> {_bytes(p.after)}{_ratio(p.before, p.after)}"
                         for p in diff.peaks)),
        ("others", (f"  ~ the {kind} records differ in ways not listed above" for kind in diff.others)),
    )
    lines = [f"{before} -> {after}"]
    for title, found in sections:
        if shown := list(found):
            lines += [title, *shown]
    if diff.same:
        lines.append(SAME)
    if diff.seconds is not None:
        lines += ["predicted time of a step", f"  {'=' if diff.seconds[0] == diff.seconds[1] else '~'} "
                  f"{seconds_text(diff.seconds[0])} -> {seconds_text(diff.seconds[1])}{_ratio(*diff.seconds)}"]
    return "\n".join(lines)


def _sign(before: object, after: object) -> str:
    return "+" if before is None else "-" if after is None else "~"


def _change(c: Change) -> str:
    head = f"  {_sign(c.before, c.after)} {c.what} {c.name}" + (f" {c.field}" if c.field else "")
    if c.before is None or c.after is None:
        value = c.after or c.before
        return head + (f"  {value}" if value else "")
    return f"{head}  {c.before or 'none'} -> {c.after or 'none'}"


def _event(change: EventChange) -> Iterator[str]:
    """A line for the event, then one for each thing that changed. A call that moved has that in its first line; of what
    was inserted, its earlier place is on the line below."""
    now, where = change.now, next((c for c in change.changes if c.field == "where"), None)
    shown = f"{now.kind} {now.about}".rstrip() if now.inserted or now.kind in BARE else now.about
    place = f"{where.before} -> {where.after}" if where and not now.inserted else now.where
    yield f"  {_sign(change.before, change.after)} {shown}  {place}  {now.at}".rstrip()
    if now.because and (change.before is None or change.after is None):
        yield f"      because {now.because}"
    if where and now.inserted:
        yield f"      was  {where.before}"
    for c in change.changes:
        if c.field != "where":
            values = (_size(v) if c.field == "bytes" else v or "none" for v in (c.before, c.after))
            yield f"      {c.field}  {' -> '.join(map(str, values))}"


def _size(text: str | None) -> str:
    return human(int(text or 0)) if text != "-1" else "known at run time"


def _moved(m: Moved) -> str:
    known = f"{human(m.before)} -> {human(m.after)}{_ratio(m.before, m.after)}" if m.before != m.after else ""
    ragged = (f"{m.ragged_before:g} -> {m.ragged_after:g} with sizes known only at run time"
              if m.ragged_before != m.ragged_after else "")
    return f"  ~ {m.kind:<8}  " + ", ".join(x for x in (known, ragged) if x)


def _bytes(size: int | None) -> str:
    return "none" if size is None else human(size)


def _ratio(before: float | None, after: float | None) -> str:
    return f"  ({(after - before) / before:+.0%})" if before and after is not None and before != after else ""


# ----------------------------------------------------------------------------------------------------------- as JSON


def as_json(diff: Diff, before: str, after: str) -> dict[str, Any]:
    """before, after: ids of the plans."""
    return {
        "format": FORMAT, "before": before, "after": after, "same": diff.same,
        "program": _changes(diff.program), "tables": _changes(diff.tables),
        "calls": [_event_json(e) for e in diff.calls], "inserted": [_event_json(e) for e in diff.inserted],
        "metrics": _changes(diff.metrics),
        "moved": [{"kind": m.kind, "before": m.before, "after": m.after, "ragged_before": m.ragged_before,
                   "ragged_after": m.ragged_after} for m in diff.moved],
        "peaks": [{"ranks": p.ranks, "before": p.before, "after": p.after} for p in diff.peaks],
        "others": list(diff.others),
        "seconds": {"before": diff.seconds[0], "after": diff.seconds[1]} if diff.seconds else None,
    }


def _changes(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [{"what": c.what, "name": c.name, "field": c.field, "before": c.before, "after": c.after} for c in changes]


def _event_json(change: EventChange) -> dict[str, Any]:
    return {"change": {"+": "added", "-": "removed", "~": "changed"}[_sign(change.before, change.after)],
            "moved": change.moved, "before": _found(change.before), "after": _found(change.after),
            "changes": [{"field": c.field, "before": c.before, "after": c.after} for c in change.changes]}


def _found(event: Found | None) -> dict[str, Any] | None:
    return None if event is None else {
        "kind": event.kind, "about": event.about, "where": event.where, "inside": event.block, "because": event.because,
        "at": event.at, "bytes": None if event.bytes < 0 else event.bytes}
