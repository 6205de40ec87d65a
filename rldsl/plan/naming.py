"""What the events of a plan mean to a person: names of the program and places on the machines, never ids of the plan.

In: a plan and its events. Out: short texts. Two compilations of one program say the same here, whatever their ids are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.plan.events import (
    Collect,
    Compute,
    Event,
    Fetch,
    Free,
    Generate,
    Infer,
    Lengths,
    Log,
    Offload,
    Onload,
    Realloc,
    Select,
    Train,
    Transfer,
    split,
)
from rldsl.plan.heads import CALL_OF
from rldsl.plan.model import Plan
from rldsl.plan.notation import degrees_of, mesh_text


def kind(event: Event) -> str:
    """As the plan file writes it: "generate"."""
    return type(event).__name__.lower()


def call_name(event: Event) -> str:
    """What messages call an event: "actor.generate", "ref.logprobs", "adv"."""
    match event:
        case Generate():
            return f"{event.model}.generate"
        case Infer():
            return f"{event.model}.{CALL_OF.get(event.what, event.what)}"
        case Train():
            return f"{event.model}.train"
        case Select() | Collect():
            return f"{kind(event)} {event.frame}"
        case Realloc(source=source) if source:
            return f"{event.model} from {source}"
        case Compute():
            return event.program if "#" not in event.program else event.outputs[0][1]
        case _:
            return kind(event)


def makes(event: Event) -> tuple[str, ...]:
    """The names that the program gives to what a call returns."""
    match event:
        case Generate():
            return (event.frame,)
        case Infer():
            return (event.output,)
        case Fetch():
            return event.frames
        case Compute():
            return tuple(value for _, value in event.outputs)
        case Select():
            return (event.frame,)
        case Collect():
            return (event.into,)
        case _:
            return ()


def subject(event: Event) -> str:
    """What an event is about: "gen = actor.generate", "gen.tokens, gen.logprobs", "actor"."""
    match event:
        case Generate() | Infer():
            return f"{makes(event)[0]} = {call_name(event)}"
        case Fetch():
            return f"{', '.join(event.frames)} = {event.data}.next"
        case Compute():
            return ", ".join(makes(event))
        case Train():
            return call_name(event)
        case Lengths():
            return f"{event.frame}.lengths"
        case Transfer():
            return ", ".join(event.values)
        case Realloc(source=source) if source:
            return f"{source} -> {event.model}"
        case Select() | Collect():
            return ", ".join(made for _, made in event.values) or makes(event)[0]
        case Free():
            return ", ".join(dict.fromkeys(split(b)[0] for b in event.buffers))
        case Log():
            return ", ".join(name for name, _ in event.metrics)
        case Offload(what="optimizer") | Onload(what="optimizer"):
            return f"optimizer of {event.model}"
        case _:
            return str(getattr(event, "model", ""))


def line_of(at: str) -> str:
    """The line of a source position, without its column: "ppo.rlf:22:3" -> "ppo.rlf:22"."""
    head, _, last = at.rpartition(":")
    return head if last.isdecimal() and head.rpartition(":")[2].isdecimal() else at


def quote(texts: Mapping[str, str], at: str) -> str:
    """The line of a source position; "" where its source is not among `texts`, by path."""
    path, _, number = line_of(at).rpartition(":")
    lines = texts.get(path, "").splitlines()
    return lines[int(number) - 1] if number.isdecimal() and 0 < int(number) <= len(lines) else ""


def told(event: Event) -> str:
    """One event in a line: where it stands in the program, what it is about, and why it is there."""
    because = f" ({event.because})" if event.because and not isinstance(event, Free) else ""
    return f"{line_of(event.at)} {subject(event)}{because}".strip()


@dataclass(frozen=True, slots=True)
class Places:
    """Meshes, layouts and spreads of a plan as text."""

    meshes: dict[str, str]
    layouts: dict[str, str]
    spreads: dict[str, str]

    @staticmethod
    def of(plan: Plan) -> Places:
        meshes = {m.id: mesh_text(m.ranks) for m in plan.meshes}
        layouts = {x.id: f"{meshes.get(x.mesh, x.mesh)} {degrees_of(x)}" for x in plan.layouts}
        spreads = {s.id: layouts.get(s.layout) or meshes.get(s.mesh, s.mesh) for s in plan.spreads}
        return Places(meshes, layouts, spreads)

    def where(self, event: Event) -> str:
        """Where an event runs, or from where to where it moves something."""
        match event:
            case Realloc():
                return f"{self.layouts.get(event.src)} -> {self.layouts.get(event.dst)}"
            case Transfer() | Collect():
                src, dst = self.spreads.get(event.src), self.spreads.get(event.dst)
                return f"{src} -> {dst}" if isinstance(event, Transfer) else str(dst)
            case _:
                layout = self.layouts.get(getattr(event, "layout", ""))
                return layout or self.meshes.get(event.mesh, event.mesh)

    def holder(self, buffer: str) -> str:
        """What holds a buffer: "mesh(0:4) tp=2"."""
        _, at = split(buffer)
        return self.layouts.get(at) or self.spreads.get(at, at)
