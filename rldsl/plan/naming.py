"""What the events of a plan mean to a person: names of the program and places on the machines, never ids of the plan.

In: a plan and its events. Out: short texts. Two compilations of one program say the same here, whatever their ids are.
What an event is called is declared with its kind (`plan/events.py`); every reader gets it from `describe_event`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.plan.events import Event, split
from rldsl.plan.model import Plan
from rldsl.plan.notation import degrees_of, mesh_text
from rldsl.plan.references import Reference, Role, named

MOST_ITEMS = 3  # of a list in a title


@dataclass(frozen=True, slots=True)
class EventText:
    """An event in words."""

    kind: str  # as the plan file writes it: "generate"
    name: str  # what messages call it: "actor.generate", "adv"
    makes: tuple[str, ...]  # names that the program gives to what it returns
    subject: str  # what it is about: "gen = actor.generate", "gen.tokens, gen.logprobs", "actor"
    title: str  # a label of its own: "actor.generate", "transfer gen.tokens, gen.logprobs"
    line: str  # the line of the program: "ppo.rlf:22"
    reason: str  # why the compiler inserted it, where that is of interest

    @property
    def sentence(self) -> str:
        """All of it in a line: "ppo.rlf:22 actor (its parameters changed)"."""
        return f"{self.line} {self.subject}{f' ({self.reason})' if self.reason else ''}".strip()


def describe_event(event: Event) -> EventText:
    """An event in words, for every reader: messages, views, traces, timelines, pages."""
    is_call, is_bookkeeping = event.traits.family == "call", event.traits.family == "bookkeeping"
    title = event.called if is_call else f"{event.kind} {_shortened(event.subject)}".strip()
    return EventText(event.kind, event.called, event.makes, event.subject, title, line_of(event.at),
                     "" if is_bookkeeping else event.because)


def _shortened(items: str) -> str:
    """"a, b, c, d, e" -> "a, b, c and 2 more"."""
    first, *more = items.split(", ")
    kept = [first, *more][:MOST_ITEMS]
    left = 1 + len(more) - len(kept)
    return ", ".join(kept) + (f" and {left} more" if left else "")


def line_of(at: str) -> str:
    """The line of a source position, without its column: "ppo.rlf:22:3" -> "ppo.rlf:22"."""
    head, _, last = at.rpartition(":")
    return head if last.isdecimal() and head.rpartition(":")[2].isdecimal() else at


def quote(texts: Mapping[str, str], at: str) -> str:
    """The line of a source position; "" where its source is not among `texts`, by path."""
    path, _, number = line_of(at).rpartition(":")
    lines = texts.get(path, "").splitlines()
    return lines[int(number) - 1] if number.isdecimal() and 0 < int(number) <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class PlaceTexts:
    """Meshes, layouts and spreads of a plan as text, by id."""

    meshes: dict[str, str]
    layouts: dict[str, str]
    spreads: dict[str, str]

    @staticmethod
    def of(plan: Plan) -> PlaceTexts:
        meshes = {m.id: mesh_text(m.ranks) for m in plan.meshes}
        layouts = {x.id: f"{meshes.get(x.mesh, x.mesh)} {degrees_of(x)}" for x in plan.layouts}
        spreads = {s.id: layouts.get(s.layout) or meshes.get(s.mesh, s.mesh) for s in plan.spreads}
        return PlaceTexts(meshes, layouts, spreads)

    def where(self, event: Event) -> str:
        """Where an event runs, or from where to where it moves something."""
        ends = [r for r in named(event, *event.traits.participants) if r.role in (Role.LAYOUT, Role.SPREAD)]
        if event.traits.drawing == "move" and len(ends) == 2:
            return " -> ".join(map(self._end, ends))
        if len(ends) == 1 and ends[0].role is Role.LAYOUT:
            return self._end(ends[0])
        return self.meshes.get(event.mesh, event.mesh)

    def _end(self, end: Reference) -> str:
        return (self.layouts if end.role is Role.LAYOUT else self.spreads).get(str(end.id), str(end.id))

    def holder(self, buffer: str) -> str:
        """What holds a buffer: "mesh(0:4) tp=2"."""
        _, at = split(buffer)
        return self.layouts.get(at) or self.spreads.get(at, at)
