"""What the compiler knows of a program while it is being written: levels of values, kinds of batches, places of calls.

In: the graph of the program, or None while it has none. Out: `Facts`, by the names that the user wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rldsl.graph import model as g
from rldsl.placement.model import Call, Placement, label
from rldsl.source import Span


@dataclass(frozen=True, slots=True)
class CallFact:
    """A model call or computation of the flow, and where it runs."""

    name: str               # "actor.generate"
    span: Span              # of the statement
    placement: Placement    # where and how it runs
    clause: Span | None     # the placement as written; None: none was written
    given: tuple[str, ...]  # the degrees that the clause names


@dataclass(frozen=True, slots=True)
class Facts:
    """What the compiler found out about a program, as far as it got."""

    levels: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # value -> (level, frame)
    batches: Mapping[str, str] = field(default_factory=dict)  # frame -> its kind and size, in words
    calls: tuple[CallFact, ...] = ()  # in the order of the program

    def shown(self, name: str) -> str:
        """"token value of gen", "batch of ...", or ""."""
        if name in self.batches:
            return self.batches[name]
        if name in self.levels:
            level, frame = self.levels[name]
            return f"{level} value" + (f" of {frame}" if frame and level != "batch" else "")
        return ""


def facts(graph: g.Graph | None, placements: Mapping[str, Placement]) -> Facts:
    if graph is None:
        return Facts()
    levels = {v.id: (v.level, v.frame) for v in graph.values}
    every = list(g.nodes(graph.items))
    batches: dict[str, str] = {}
    for frame in graph.frames:
        rows = f"{frame.count} sequences" if frame.max_response_tokens else f"{frame.count} prompts"
        some = "at most " if frame.present_in else ""
        each = f", {frame.per_prompt} per prompt" if frame.per_prompt > 1 else ""
        batches[frame.id] = (f"batch of {some}{rows}{each}, at most {frame.max_prompt_tokens} + "
                             f"{frame.max_response_tokens} tokens")
    calls = tuple(_call(n, placements[n.id]) for n in every if isinstance(n, Call) and n.id in placements)
    return Facts(levels, batches, calls)


def _call(node: Call, placement: Placement) -> CallFact:
    clause = node.clause
    given = tuple(name for name, _, _ in clause.options) if clause is not None else ()
    return CallFact(label(node), node.span, placement, clause.span if clause else None, given)
