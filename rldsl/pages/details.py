"""Every event of a plan in words: what a page shows of it when it is chosen.

In: a plan, and the texts of its sources. Out: `Detail`s, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.inspect.show import LABEL, field_text
from rldsl.inspect.view import View, views
from rldsl.pages.texts import block_text, ranges_text
from rldsl.plan.events import Event
from rldsl.plan.model import Plan
from rldsl.plan.naming import line_of, quote
from rldsl.plan.notation import count, human, joined

PLACES = ("layout", "spread", "src", "dst")  # ids of the plan, which `where` shows as text
Sources = Mapping[str, str]  # path, as the plan names it -> text


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of an event."""

    verb: str  # "reads", "writes" or "frees"
    name: str  # as of `Touch`
    where: str  # as of `Touch`
    others: tuple[tuple[str, tuple[int, ...]], ...]  # ("read by", ids of the other events that read it), and so on


@dataclass(frozen=True, slots=True)
class Detail:
    """One event in full, as text."""

    id: int  # of the event
    kind: str  # of the event
    about: str  # its subject
    at: str  # "file:line:column"
    quote: str  # that line of the program; "": the source is not available
    because: str  # why the compiler inserted it; "": the program asks for it
    ranks: str  # its participants
    inside: str  # the blocks around it
    where: str  # as of `View`
    size: str  # bytes between ranks; "": none
    fields: tuple[tuple[str, str], ...]  # (name, value) of those of its kind
    buffers: tuple[Buffer, ...]  # what it reads, writes and frees


def details(plan: Plan, sources: Sources) -> tuple[Detail, ...]:
    return tuple(_detail(plan, v, sources) for v in views(plan))


def _detail(plan: Plan, view: View, sources: Sources) -> Detail:
    event = view.event
    shown = ((LABEL.get(name, name).replace("_", " "), field_text(value)) for name, value in view.fields
            if name not in PLACES)
    ranks = f"{ranges_text(joined(view.ranks))} · {count(view.ranks):,} of {plan.header.world:,}"
    inside = " › ".join(map(block_text, view.inside))
    line = quote(sources, event.at).strip()
    return Detail(event.id, event.kind, event.subject, line_of(event.at), line, event.because, ranks, inside,
                  view.where, size_text(event), tuple((name, text) for name, text in shown if text), _buffers(view))


def size_text(event: Event) -> str:
    return human(event.bytes) if event.bytes > 0 else "known at run time" if event.bytes < 0 else ""


def _buffers(view: View) -> tuple[Buffer, ...]:
    found = []
    for t in view.touches:
        mine = view.event.id
        verb = "writes" if t.write else "reads" if mine in t.read_by else "frees"
        others = (("written by", t.written_by), ("read by", t.read_by), ("freed by", t.freed_by))
        found.append(Buffer(verb, t.buffer, t.where, tuple(
            (word, tuple(i for i in ids if i != mine)) for word, ids in others if any(i != mine for i in ids))))
    return tuple(found)
