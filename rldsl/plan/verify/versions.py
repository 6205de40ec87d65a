"""Every call uses the current version of its model, on the device.

In: tables with sound references, classes and operations. Out: diagnostics RL0520 (not loaded), RL0521 (stale), RL0522
(realloc without need), RL0523 (load twice or in a loop), RL0524 (train or realloc of the wrong layout or a frozen
model), RL0525 (offload and onload do not alternate). A copy is `model@layout`. Load makes it current, Train makes
its own copy the only current one, Realloc makes its destination current. What holds at the top of a loop is what
holds on entry and
after an iteration too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rldsl.diag import Diagnostic
from rldsl.plan.model import Event, Generate, Infer, Item, Load, Loop, Offload, Onload, Realloc, Save, Train
from rldsl.plan.verify.tables import Tables, name, problem

Copies = frozenset[tuple[str, str]]  # (model, layout)


@dataclass(frozen=True, slots=True)
class State:
    """current: copies of the current version, whatever way led here. away: copies in host memory."""

    current: Copies = frozenset()
    away: Copies = frozenset()


def check(t: Tables) -> Iterator[Diagnostic]:
    found: list[Diagnostic] = []
    _run(t, t.plan.body, State(), found)
    yield from found
    built = {
        (e.model, e.dst if isinstance(e, Realloc) else e.layout) for e, _ in t.events if isinstance(e, Load | Realloc)
    }
    for event, _ in t.events:
        if isinstance(event, Offload | Onload) and (event.model, event.layout) not in built:
            yield problem(
                "RL0520",
                f"{name(event)}: nothing loads {event.model}@{event.layout}",
                event,
                ranks=t.event_ranks(event),
            )
    loaded: set[tuple[str, str]] = set()
    for event, path in t.events:
        if isinstance(event, Load):
            copy = (event.model, event.layout)
            if path or copy in loaded:
                yield problem(
                    "RL0523",
                    f"{name(event)} loads {event.model}@{event.layout} " + ("inside a loop" if path else "again"),
                    event,
                    ranks=t.event_ranks(event),
                )
            loaded.add(copy)


def _run(t: Tables, body: tuple[Item, ...], state: State, found: list[Diagnostic]) -> State:
    for item in body:
        if isinstance(item, Event):
            found += _problems(t, item, state)
            state = _after(item, state)
        elif isinstance(item, Loop):
            top = state
            while (end := _meet(top, _run(t, item.body, top, []))) != top:
                top = end
            if (end := _run(t, item.body, top, found)).away != state.away:
                found.append(_unbalanced(f"loop {item.id}", end, state))
            state = end if item.trips else state
        else:
            end = _run(t, item.body, state, found)
            if end.away != state.away:
                found.append(_unbalanced(f"every {item.period}", end, state))
            state = _meet(state, end)
    return state


def _meet(a: State, b: State) -> State:
    return State(a.current & b.current, a.away)


def _unbalanced(where: str, end: State, start: State) -> Diagnostic:
    copies = ", ".join(sorted(f"{m}@{x}" for m, x in end.away ^ start.away))
    return problem("RL0525", f"{where} ends with {copies} on the other side of offload than it began")


def _after(e: Event, s: State) -> State:
    match e:
        case Load():
            return replace(s, current=s.current | {(e.model, e.layout)})
        case Realloc():
            return replace(s, current=s.current | {(e.model, e.dst)})
        case Train():
            return replace(s, current=frozenset(c for c in s.current if c[0] != e.model) | {(e.model, e.layout)})
        case Offload():
            return replace(s, away=s.away | {(e.model, e.layout)})
        case Onload():
            return replace(s, away=s.away - {(e.model, e.layout)})
    return s


def _problems(t: Tables, e: Event, s: State) -> Iterator[Diagnostic]:
    ranks = t.event_ranks(e)
    match e:
        case Generate() | Infer() | Save() | Train():
            used = ((e.model, e.layout),)
        case Realloc():
            used = ((e.model, e.src),)
        case Offload() | Onload():
            copy = (e.model, e.layout)
            if (copy in s.away) != isinstance(e, Onload):
                yield problem("RL0525", f"{name(e)}: {e.model}@{e.layout} is there already", e, ranks=ranks)
            return
        case _:
            return
    home = t.models[e.model].home
    for model, layout in used:
        if (model, layout) not in s.current:
            stale = bool(home) and (model, home) in s.current
            yield problem(
                "RL0521" if stale else "RL0520",
                f"{name(e)} uses {model}@{layout}, which "
                + ("is not the current version" if stale else "is not there: nothing loads it"),
                e,
                ranks=ranks,
                help=f"a realloc from {model}@{home} must come before" if stale else "",
            )
        if (model, layout) in s.away:
            yield problem("RL0525", f"{name(e)} uses {model}@{layout}, which is offloaded", e, ranks=ranks)
    if isinstance(e, Realloc):
        if (e.model, e.dst) in s.current:
            yield problem("RL0522", f"{name(e)} brings {e.model}@{e.dst}, which is current already", e, ranks=ranks)
        if (e.model, e.dst) in s.away:
            yield problem("RL0525", f"{name(e)} writes {e.model}@{e.dst}, which is offloaded", e, ranks=ranks)
        if not home or e.dst == home:
            yield problem(
                "RL0524",
                f"{name(e)} overwrites the home of {e.model}"
                if home
                else f"{name(e)} moves {e.model}, which is frozen: load it there instead",
                e,
                ranks=ranks,
            )
    if isinstance(e, Train) and e.layout != home:
        yield problem(
            "RL0524",
            f"{name(e)} trains {e.model} under {e.layout}, but its home is {home or 'nowhere: it is frozen'}",
            e,
            ranks=ranks,
        )
