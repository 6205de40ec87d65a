"""Every call uses the current version of its model, on the device.

In: tables with sound references, classes and operations. Out: diagnostics RL0515 (a copy is freed that is not there),
RL0520 (not loaded, or freed), RL0521 (stale), RL0528
(not the version, or not the events, that the plan declares for a model that follows others), RL0522
(realloc without need), RL0523 (load twice or in a loop), RL0524 (train or realloc of the wrong layout or a frozen
model), RL0525 (offload and onload do not alternate). A copy is `model@layout`. Load makes it current, Train makes
its own copy the only current one, and so does a Realloc from another model; a Realloc of the model itself makes its
destination current. A Free ends a copy, until a Realloc brings it again. What holds at the top of a loop is what holds
on entry and after an iteration too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rldsl.diag import Diagnostic
from rldsl.plan.events import Checkpoint, Event, Item, Load, Loop, Offload, Onload, Realloc, Train, split_buffer
from rldsl.verify.tables import Tables, name, problem

Copies = frozenset[tuple[str, str]]  # (model, layout)


@dataclass(frozen=True, slots=True)
class State:
    """current: copies of the current version, whatever way led here. away: copies in host memory. built: copies that
    were loaded from a directory. there: copies that have memory, of whatever version. one: copies that are one with
    what is trained. parked: those whose optimizer's state is in host memory."""

    current: Copies = frozenset()
    away: Copies = frozenset()
    built: Copies = frozenset()
    there: Copies = frozenset()
    one: Copies = frozenset()
    parked: Copies = frozenset()

    @property
    def sides(self) -> frozenset[tuple[str, str, str]]:
        """What is in host memory."""
        return frozenset({(*c, "parameters") for c in self.away} | {(*c, "optimizer") for c in self.parked})


def check_versions(t: Tables) -> Iterator[Diagnostic]:
    found: list[Diagnostic] = []
    _run(t, t.plan.body, State(), found, {})
    yield from found
    yield from _declared(t)
    built = {
        (e.model, e.dst if isinstance(e, Realloc) else e.layout) for e, _ in t.events if isinstance(e, Load | Realloc)
    }
    for event, _ in t.events:
        if isinstance(event, Offload | Onload) and (event.model, event.layout) not in built:
            yield problem(
                "RL0520",
                f"{name(event)}: no event loads {event.model}@{event.layout}",
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


def _declared(t: Tables) -> Iterator[Diagnostic]:
    """Each model is written by the others that it follows, in that order, from the versions that the events declare: of
    the source, what the last event before it in the list made."""
    made: dict[str, str] = {}
    written: dict[str, list[str]] = defaultdict(list)
    for e, _ in t.events:
        if isinstance(e, Realloc) and e.source:
            if e.source_version != made.get(e.source, ""):
                yield problem(
                    "RL0528",
                    f"{name(e)} must copy the version of {e.source} from {e.source_version or 'before the step'}, but "
                    "comes "
                    "after the version from "
                    + (f"{made[e.source]}" if made.get(e.source) else "before the step"),
                    e,
                    ranks=t.event_ranks(e),
                )
            written[e.model].append(e.source)
        made |= dict.fromkeys(e.versions().defs, e.at)
    for m in t.plan.models:
        if tuple(written[m.name]) != m.updated_from:
            yield problem("RL0528",
                          f"model {m.name} should be updated from {list(m.updated_from)}, but is updated from "
                          f"{written[m.name]}")


def _run(t: Tables, body: tuple[Item, ...], state: State, found: list[Diagnostic],
         known: dict[tuple[int, State], State]) -> State:
    """known: (loop, state at its top) -> the state after a turn, so that loops in loops are not walked again and
    again."""
    for item in body:
        if isinstance(item, Event):
            found += _problems(t, item, state)
            state = _after(t, item, state)
        elif isinstance(item, Loop):
            top = state
            # Fixed point: which copies are current at the top depends on what the last iteration left. Start from
            # what is current on entry, run the body, keep only what is current after it too; the set only shrinks.
            while (end := _meet(top, _end(t, item, top, known))) != top:
                top = end
            if (end := _run(t, item.body, top, found, known)).sides != state.sides:
                found.append(_unbalanced(f"loop {item.id}", end, state))
            state = end if item.trips else state
        else:
            end = _run(t, item.body, state, found, known)
            if end.sides != state.sides:
                found.append(_unbalanced(f"every {item.period}", end, state))
            state = _meet(state, end)
    return state


def _end(t: Tables, loop: Loop, top: State, known: dict[tuple[int, State], State]) -> State:
    """The state after one turn that began with `top`."""
    if (key := (id(loop), top)) not in known:
        known[key] = _run(t, loop.body, top, [], known)
    return known[key]


def _meet(a: State, b: State) -> State:
    return State(a.current & b.current, a.away, a.built & b.built, a.there & b.there, a.one & b.one, a.parked)


def _unbalanced(where: str, end: State, start: State) -> Diagnostic:
    copies = ", ".join(sorted({f"{m}@{x}" for m, x, _ in end.sides ^ start.sides}))
    return problem("RL0525", f"{where} ends with {copies} in a different offload state than at its start")


def _after(t: Tables, e: Event, s: State) -> State:
    if isinstance(e, Offload | Onload):
        return _moved(e, s)
    if e.frees:
        freed = _freed(e)
        return replace(s, current=s.current - freed, built=s.built - freed, there=s.there - freed)
    made = frozenset(_copies(t, e.writes))
    renewed = e.versions().defs  # models of which every copy that the event does not write is stale from here on
    same = {c for c in s.one if c[0] in renewed and isinstance(e, Train)}  # one memory with what is trained
    after = replace(s, current=frozenset(c for c in s.current if c[0] not in renewed) | same | made,
                    there=s.there | made)
    if isinstance(e, Load):
        after = replace(after, built=s.built | made, one=s.one | made if e.alias_of else s.one)
    return after


def _moved(e: Offload | Onload, s: State) -> State:
    copy = frozenset({(e.model, e.layout)})
    if e.part == "optimizer":
        return replace(s, parked=s.parked | copy if isinstance(e, Offload) else s.parked - copy)
    return replace(s, away=s.away | copy if isinstance(e, Offload) else s.away - copy)


def _copies(t: Tables, buffers: Iterable[str]) -> list[tuple[str, str]]:
    """Those that are parameters: (model, layout)."""
    return [(left, right) for left, right in map(split_buffer, buffers) if left in t.models]


def _freed(e: Event) -> Copies:
    """All that it frees, copies among it."""
    return frozenset((left, right) for left, right in map(split_buffer, e.frees))


def _side_problems(t: Tables, e: Offload | Onload, s: State) -> Iterator[Diagnostic]:
    copy, ranks = (e.model, e.layout), t.event_ranks(e)
    if (copy in (s.away if e.part == "parameters" else s.parked)) != isinstance(e, Onload):
        where = "in host memory" if isinstance(e, Offload) else "on the device"
        yield problem("RL0525", f"{name(e)}: {e.model}@{e.layout} is already {where}", e, ranks=ranks)
    if e.part == "optimizer" and copy in s.away:
        yield problem("RL0525", f"{name(e)}: gradients of {e.model}@{e.layout} exist without its parameters", e,
                      ranks=ranks)


def _problems(t: Tables, e: Event, s: State) -> Iterator[Diagnostic]:
    ranks = t.event_ranks(e)
    if isinstance(e, Offload | Onload):
        yield from _side_problems(t, e, s)
        return
    for model, layout in sorted(_copies(t, e.frees)):
        if (model, layout) in s.away:
            yield problem("RL0525", f"{name(e)} frees {model}@{layout}, which is offloaded", e, ranks=ranks)
        elif (model, layout) not in s.there:
            yield problem("RL0515", f"{name(e)} frees {model}@{layout}, which does not exist", e, ranks=ranks)
    used = [c for c in _copies(t, e.reads) if "@".join(c) not in e.frees]
    for model, layout in used:
        if (model, layout) not in s.current:
            there = sorted(x for m, x in s.current if m == model) if t.models[model].updated_from else []
            there += [x for x in [t.models[model].train_layout] if x and (model, x) in s.current]
            yield problem(
                "RL0521" if there else "RL0520",
                f"{name(e)} uses {model}@{layout}, which "
                + ("is not the current version" if there else "does not exist: no event loads it"),
                e,
                ranks=ranks,
                help=f"a realloc from {model}@{there[0]} must come first" if there else "",
            )
        if isinstance(e, Train) and (model, layout) in s.parked:
            yield problem("RL0525", f"{name(e)} trains {model}@{layout}, whose optimizer state is offloaded", e,
                          ranks=ranks)
        if (model, layout) in s.away and not isinstance(e, Checkpoint):  # a checkpoint is written from either side
            yield problem("RL0525", f"{name(e)} uses {model}@{layout}, which is offloaded", e, ranks=ranks)
    if isinstance(e, Realloc):
        if t.models[e.model].base and (e.model, e.dst) not in s.built:
            yield problem("RL0520", f"{name(e)} copies adapters to {e.model}@{e.dst}, whose base is never loaded", e,
                          ranks=ranks)
        home, follows = t.models[e.model].train_layout, bool(t.models[e.model].updated_from)
        if not e.source and (e.model, e.dst) in s.current:
            yield problem("RL0522", f"{name(e)} refreshes {e.model}@{e.dst}, which is already current", e, ranks=ranks)
        if (e.model, e.dst) in s.away:
            yield problem("RL0525", f"{name(e)} writes {e.model}@{e.dst}, which is offloaded", e, ranks=ranks)
        if home and e.dst == home or not home and not follows:
            yield problem(
                "RL0524",
                f"{name(e)} overwrites the training layout of {e.model}"
                if home
                else f"{name(e)} moves {e.model}, which is frozen: load it there instead",
                e,
                ranks=ranks,
            )
    if isinstance(e, Train) and e.layout != t.models[e.model].train_layout:
        yield problem(
            "RL0524",
            f"{name(e)} trains {e.model} under {e.layout}, but its training layout is "
            f"{t.models[e.model].train_layout or 'none (frozen)'}",
            e,
            ranks=ranks,
        )
