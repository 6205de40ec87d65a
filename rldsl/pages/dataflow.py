"""The dataflow of one step as nodes and links: calls, computations, and what moves between them.

In: a plan. Out: `Dataflow`. A node is an event; a transfer or a realloc is one that stands on the way of a link. What a
step reads of the one before comes from a separate node, so that the picture has no cycle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard

from rldsl.pages.texts import block_text
from rldsl.plan.events import Collect, Compute, Event, Fetch, Log, Loop, Realloc, Save, split_buffer
from rldsl.plan.model import Plan
from rldsl.plan.naming import PlaceTexts
from rldsl.plan.notation import human
from rldsl.plan.projection import Path, event_paths
from rldsl.plan.traits import Drawing


@dataclass(frozen=True, slots=True)
class Node:
    """A box of the picture: an event, or a result of the step before."""

    id: str  # unique
    what: Drawing | Literal["before"]  # a call of a model, work on values, a movement, or a result of the step before
    event: int  # its id
    mesh: str  # id
    title: str  # the first line
    lines: tuple[str, ...] = ()  # below the title
    block: str = ""  # the loop around it within the step: "every 100"; "": none
    about: str = ""  # where it runs, or from where to where it moves something
    realloc: bool = False  # whether parameters move
    late: bool = False  # drawn near what needs it, not near what it needs


@dataclass(frozen=True, slots=True)
class Link:
    """Values or parameters that go from node to node."""

    source: str  # id of a node
    target: str  # id of a node
    names: tuple[str, ...]  # of the values, or of the model whose parameters move
    parameters: bool = False  # whether parameters move


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The dataflow of a step."""

    nodes: tuple[Node, ...]  # in the order of the plan, so that no link goes backwards
    links: tuple[Link, ...]  # between nodes


def dataflow(plan: Plan) -> Dataflow:
    """Of the step; what is done once before it (loads) and bookkeeping (free, log, lengths) is left out."""
    shown = [(e, path) for e, path in event_paths(plan) if e.traits.drawing != "none"]
    places, metrics, frame_of = PlaceTexts.of(plan), _metrics(plan), {v.id: v.frame for v in plan.values}
    models, frames = {m.name for m in plan.models}, {f.id for f in plan.frames}
    later = {b: e for e, _ in shown for b in e.writes}  # buffer -> the last event of a step that writes it
    writer: dict[str, str] = {}
    maker: dict[str, str] = {}  # frame -> the node that it comes from
    nodes: dict[str, Node] = {}
    links: dict[tuple[str, str, bool], list[str]] = {}
    for event, path in shown:
        if _is_bookkeeping(event):
            maker |= {event.into: maker[event.frame]} if event.frame in maker else {}
            continue
        id = f"e{event.id}"
        nodes[id] = _node(event, path, places, metrics)
        for buffer in event.reads:
            name = split_buffer(buffer)[0]
            source = writer.get(buffer)
            if source is None and buffer in later and later[buffer] is not event:
                before = later[buffer]
                source = f"before-{id}-e{before.id}"
                nodes[source] = Node(source, "before", before.id, before.mesh, name, ("of the previous step",),
                                     about=f"as left by {before.display_name} in the previous step", late=True)
            if source is not None:
                names = links.setdefault((source, id, name in models), [])
                names += [] if name in names else [name]
        if isinstance(event, Compute):  # that reads only lengths of a frame
            known = {frame_of.get(split_buffer(b)[0]) for b in event.reads}
            links |= {(maker[f], id, False): [f] for f in event.frames if f in maker and f not in known}
        writer |= dict.fromkeys(event.writes, id)
        maker |= {frame: id for frame in event.result_names if frame in frames}
    kept = tuple(Link(a, b, tuple(names), parameters) for (a, b, parameters), names in links.items())
    order = sorted(nodes.values(), key=lambda n: n.what != "before")
    return Dataflow(tuple(order), kept)


def _is_bookkeeping(event: Event) -> TypeGuard[Collect]:
    """What collects lengths, which the compiler inserts next to the lengths themselves."""
    return isinstance(event, Collect) and bool(event.because)


def _metrics(plan: Plan) -> dict[str, str]:
    """Value -> the metric that it is logged as."""
    return {split_buffer(b)[0]: name for e, _ in event_paths(plan) if isinstance(e, Log) for name, b in e.metrics}


def _node(event: Event, path: Path, places: PlaceTexts, metrics: dict[str, str]) -> Node:
    what = event.traits.drawing
    title, about = _title(event, metrics)
    where = places.where(event) if what == "call" else places.meshes[event.mesh]
    lines = () if what == "move" else tuple(x for x in (about, where) if x)
    if isinstance(event, Realloc) and event.bytes > 0:
        lines = (human(event.bytes),)
    return Node(f"e{event.id}", what, event.id, event.mesh, title, lines, _block(path), places.where(event),
                isinstance(event, Realloc), what == "move" or event.traits.family == "data")


def _title(event: Event, metrics: dict[str, str]) -> tuple[str, str]:
    """What a node does, and what comes of it."""
    name, made = event.display_name, event.result_names
    if event.traits.drawing == "move":
        return event.subject.replace(" -> ", " → "), ""
    if isinstance(event, Fetch):
        return f"{event.data}.next", ", ".join(made)
    if isinstance(event, Save):
        return f"save {event.model}", ""
    if isinstance(event, Compute):
        logged = [metrics[m] for m in made if m in metrics and "#" in m]
        return ("metric " + ", ".join(logged) if len(logged) == len(made) else ", ".join(made)), ""
    return name, ", ".join(made)


def _block(path: Path) -> str:
    """The blocks around an event within a step: "every 100", "repeat, at most 3"."""
    inner = path[1:] if path and isinstance(path[0], Loop) else path
    return ", ".join(map(block_text, inner))
