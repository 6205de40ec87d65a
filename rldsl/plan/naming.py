"""What the events of a plan mean to a person: names of the program and places on the machines, never ids of the plan.

In: a plan and its events. Out: short texts. Two compilations of one program say the same here, whatever their ids are.
What an event is called is declared with its kind (`plan/events.py`); every reader gets it from `describe_event`.
Where the compiler had to name a value or a frame itself (`expr#1`), its record has a label for people, the source text
with its line; `Labels` puts it in the place of the id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rldsl.plan.events import Event, Item, When, split_buffer
from rldsl.plan.expr import Node, Program
from rldsl.plan.model import Frame, Plan, Value
from rldsl.plan.notation import degrees_of, mesh_text
from rldsl.plan.references import Reference, Role, named, renamed

MAX_LISTED = 3  # of a list in a title


@dataclass(frozen=True, slots=True)
class EventText:
    """An event in words."""

    kind: str  # as the plan file writes it: "generate"
    name: str  # what messages call it: "actor.generate", "adv"
    result_names: tuple[str, ...]  # names that the program gives to what it returns
    subject: str  # what it is about: "gen = actor.generate", "gen.tokens, gen.logprobs", "actor"
    title: str  # a label that is complete without the kind: "actor.generate", "transfer gen.tokens, gen.logprobs"
    line: str  # the line of the program: "ppo.rlf:22"
    reason: str  # why the compiler inserted it, where that is of interest

    @property
    def sentence(self) -> str:
        """All of it in a line: "ppo.rlf:22 actor (its parameters changed)"."""
        return f"{self.line} {self.subject}{f' ({self.reason})' if self.reason else ''}".strip()


def describe_event(event: Event) -> EventText:
    """An event in words, for every reader: messages, views, traces, timelines, pages."""
    is_call, is_bookkeeping = event.traits.family == "call", event.traits.family == "bookkeeping"
    line = line_of(event.at)
    name, subject = (without_line(text, event.at) for text in (event.display_name, event.subject))
    title = name if is_call else f"{event.verb} {_shortened(subject)}".strip()
    reason = "" if is_bookkeeping else event.because
    return EventText(event.kind, name, event.result_names, subject, title, line, reason)


def without_line(text: str, at: str) -> str:
    """Labels in `text` without the line that they end in, where that is the line of `at`, which the reader knows."""
    return text.replace(line_suffix(line_of(at)), "")


def line_suffix(line: str) -> str:
    """The end of a label: "src/ppo.rlf:22" -> " (ppo.rlf:22)"."""
    return f" ({line.rpartition('/')[2]})"


def collected(name: str) -> str:
    """What people call the rows of all iterations of a block, where those of one are `name`."""
    return f"{name} (collected)"


def label_text(label: str) -> str:
    """A label without its line."""
    return re.sub(r" \([^() ]+:\d+\)( \[\d+\])?", "", label)


def _shortened(items: str) -> str:
    """"a, b, c, d, e" -> "a, b, c and 2 more"; a comma in brackets divides nothing."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(items):
        depth += (letter in "([{") - (letter in ")]}")
        if depth <= 0 and items.startswith(", ", i):
            parts.append(items[start:i])
            start = i + 2
    parts.append(items[start:])
    left = len(parts) - MAX_LISTED
    return ", ".join(parts[:MAX_LISTED]) + (f" and {left} more" if left > 0 else "")


@dataclass(frozen=True, slots=True)
class Labels:
    """What people call the values and frames that the compiler had to name itself. No two are equal."""

    of_id: Mapping[str, str]  # id -> label; the others are called by their ids

    @staticmethod
    def of(values: Iterable[Value], frames: Iterable[Frame]) -> Labels:
        """Of two records with the same label the second gets a number."""
        records: list[Value | Frame] = [*values, *frames]
        found: dict[str, str] = {}
        taken = {r.id for r in records}
        for record in records:
            if record.label and record.id not in found:
                name, number = record.label, 1
                while name in taken:
                    number += 1
                    name = f"{record.label} [{number}]"
                taken.add(name)
                found[record.id] = name
        return Labels(found)

    def name(self, id: str) -> str:
        return self.of_id.get(id, id)

    def buffer(self, buffer: str) -> str:
        """`expr#1@s2` with the label of the value."""
        value, at = split_buffer(buffer)
        return f"{self.name(value)}@{at}" if value in self.of_id else buffer

    def program(self, id: str) -> str:
        """A computation is called like the first value that it makes, and one that writes a state `id =`."""
        written = id.removesuffix(" =")
        return f"{self.name(written)} =" if written != id else self.name(id)

    def computation(self, program: Program) -> Program:
        """With the names of what it reads and makes as the events that run it have them."""
        def node(n: Node) -> Node:
            renames = {"input": {"name", "frame"}, "py": {k for k, _ in n.attrs} - {"function"}}.get(n.op, {"frame"})
            attrs = tuple((k, self.name(v) if k in renames and isinstance(v, str) else v) for k, v in n.attrs)
            fine = n.level in ("turn", "token", "entry")
            return replace(n, attrs=attrs, space=self.name(n.space) if fine else n.space)

        return replace(program, id=self.program(program.id), nodes=tuple(map(node, program.nodes)),
                       outputs=tuple((self.name(name), index) for name, index in program.outputs))

    def event(self, event: Event) -> Event:
        """The event with labels for ids."""
        if not self.of_id:
            return event
        changed = {name: x for name, x in renamed(event, self._renaming).items() if x != getattr(event, name)}
        named = {field: getattr(event, field, ()) for field in ("inputs", "outputs")}
        changed |= {field: self._pairs(pairs) for field, pairs in named.items() if pairs}
        return replace(event, **changed) if changed else event

    @property
    def _renaming(self) -> dict[Role, Callable[[str], str]]:
        return {Role.VALUE: self.name, Role.FRAME: self.name, Role.BUFFER: self.buffer, Role.PROGRAM: self.program}

    def _pairs(self, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((self.name(a), self.name(b)) for a, b in pairs)

    def items(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """Events and blocks with labels for ids."""
        return tuple(map(self._item, items))

    def _item(self, item: Item) -> Item:
        if isinstance(item, Event):
            return self.event(item)
        inner = replace(item, body=self.items(item.body))
        return inner if isinstance(inner, When) else replace(
            inner, until=self.buffer(inner.until), collects=tuple(map(self.buffer, inner.collects)))


def labelled(plan: Plan) -> Plan:
    """The plan with labels in the place of ids, for texts."""
    labels = Labels.of(plan.values, plan.frames)
    if not labels.of_id:
        return plan
    name = labels.name
    return replace(
        plan, body=labels.items(plan.body),
        programs=tuple(map(labels.computation, plan.programs)),
        values=tuple(replace(v, id=name(v.id), frame=name(v.frame)) for v in plan.values),
        frames=tuple(replace(f, id=name(f.id), selected_from=name(f.selected_from), picked_from=name(f.picked_from),
                             present_in=name(f.present_in))
                     for f in plan.frames),
        spreads=tuple(replace(s, frames=tuple(map(name, s.frames))) for s in plan.spreads),
        states=tuple(replace(s, value=name(s.value)) for s in plan.states))


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

    meshes: dict[str, str]  # mesh -> "mesh(0:4)"
    layouts: dict[str, str]  # layout -> its mesh and degrees
    spreads: dict[str, str]  # spread -> where its rows are

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
        _, at = split_buffer(buffer)
        return self.layouts.get(at) or self.spreads.get(at, at)
