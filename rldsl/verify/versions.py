"""Every call uses the current version of its model, on the device.

In: tables with sound references, classes and operations. Out: diagnostics
- RL0515: a copy is freed that does not exist;
- RL0520: a copy is used that was not loaded, or was freed;
- RL0521: a copy is used that is stale, or a KV cache of an earlier version;
- RL0522: a realloc to a copy that is current already;
- RL0523: a model is loaded twice, or in a loop;
- RL0524: train or realloc of the wrong layout or of a frozen model;
- RL0525: offload and onload do not alternate;
- RL0528: not the version, or not the events, that the plan declares for a model that is updated from others.

A copy is `model@layout`. Load makes it current, Train makes its own copy the only current one, and so does a Realloc
from another model; a Realloc of the model itself makes its destination current. A Free ends a copy, until a Realloc
brings it again. What holds at the top of a loop is what holds on entry and after every iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations, pairwise

from rldsl.diag import Diagnostic
from rldsl.plan.events import (
    EVERY_ITERATION,
    Checkpoint,
    Event,
    Generate,
    Item,
    Load,
    Loop,
    Offload,
    Onload,
    Realloc,
    Train,
    When,
    ahead_of,
    aheads_in,
    runs_in,
    split_buffer,
)
from rldsl.verify.tables import Tables, name, problem

Copies = frozenset[tuple[str, str]]  # (model, layout)


@dataclass(frozen=True, slots=True)
class CopyStates:
    """What is known of every copy at one point of the schedule: the abstract state of a forward dataflow analysis."""

    current: Copies = frozenset()  # of the current version, on every path to this point
    params_offloaded: Copies = frozenset()  # parameters are in host memory
    loaded_from_disk: Copies = frozenset()  # made by a load, which also reads the frozen parameters under adapters
    allocated: Copies = frozenset()  # exist, in whatever version
    aliases_of_trained: Copies = frozenset()  # share memory with the copy that is trained
    optimizer_offloaded: Copies = frozenset()  # optimizer state is in host memory
    # (frame, model, layout) of every KV cache that the current version of its model wrote
    caches: frozenset[tuple[str, str, str]] = frozenset()

    @property
    def offloaded_parts(self) -> frozenset[tuple[str, str, str]]:
        """(model, layout, part) of everything that is in host memory."""
        return frozenset({(*c, "parameters") for c in self.params_offloaded}
                         | {(*c, "optimizer") for c in self.optimizer_offloaded})


def check_versions(t: Tables) -> Iterator[Diagnostic]:
    problems: list[Diagnostic] = []
    _run(t, t.plan.body, CopyStates(), problems, {})
    yield from problems
    yield from _declared(t)
    made = {(e.model, e.dst if isinstance(e, Realloc) else e.layout) for e, _ in t.events
            if isinstance(e, Load | Realloc)}
    for event, _ in t.events:
        if isinstance(event, Offload | Onload) and (event.model, event.layout) not in made:
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
    """A model is updated from the models in its `updated_from`, in that order, and from the versions that the events
    declare: of the source, the one that the last event before in the list made."""
    made: dict[str, str] = {}  # model -> position of the event that made its last version
    sources: dict[str, list[str]] = defaultdict(list)
    for e, _ in t.events:
        if isinstance(e, Realloc) and e.source:
            if e.source_version != made.get(e.source, ""):
                yield problem(
                    "RL0528",
                    f"{name(e)} must copy the version of {e.source} from {e.source_version or 'before the step'}, but "
                    f"comes after the version from {made.get(e.source) or 'before the step'}",
                    e,
                    ranks=t.event_ranks(e),
                )
            sources[e.model].append(e.source)
        made |= dict.fromkeys(e.versions().defs, e.at)
    for m in t.plan.models:
        if tuple(sources[m.name]) != m.updated_from:
            yield problem("RL0528",
                          f"model {m.name} should be updated from {list(m.updated_from)}, but is updated from "
                          f"{sources[m.name]}")


def _run(t: Tables, body: tuple[Item, ...], state: CopyStates, problems: list[Diagnostic],
         cache: dict[tuple[int, CopyStates], CopyStates]) -> CopyStates:
    """The state after a block. problems: what is wrong in it is appended. cache: (loop, state at its top) -> the state
    after an iteration, so that nested loops are not analyzed again and again."""
    for item in body:
        if isinstance(item, Event):
            problems += _problems(t, item, state)
            state = _after(t, item, state)
        elif isinstance(item, Loop):
            state, needless = _before_first_step(t, item, state, problems, cache)
            top = state
            # Fixed point: which copies are current at the top depends on what the last iteration left. Start from
            # what is current on entry, run the body, keep only what is current after it too; the set only shrinks.
            while (end := _meet(top, _after_iteration(t, item, top, cache))) != top:
                top = end
            found: list[Diagnostic] = []
            if (end := _run(t, item.body, top, found, cache)).offloaded_parts != state.offloaded_parts:
                found.append(_unbalanced(f"loop {item.id}", end, state))
            problems += [d for d in found if d.code != "RL0522" or needless is None or d.title in needless]
            state = end if item.trips else state
        else:
            state = _after_block(t, item, state, problems, cache)
    return state


def _after_block(t: Tables, block: When, state: CopyStates, problems: list[Diagnostic],
                 cache: dict[tuple[int, CopyStates], CopyStates]) -> CopyStates:
    """The state after a block that runs in some steps. Where its events run ahead by different numbers of steps, any of
    them may run in an iteration without the others. A copy may be refreshed that is current in one of these cases
    only."""
    levels, ends, needless = aheads_in(block), [state], list[frozenset[str]]()
    for size in range(1, len(levels) + 1):
        for chosen in combinations(levels, size):
            found = list[Diagnostic]()
            end = _run(t, _part(block.body, chosen), state, found, cache)
            if end.offloaded_parts != state.offloaded_parts:
                found.append(_unbalanced(block.head, end, state))
            problems += [d for d in found if d.code != "RL0522" and d not in problems]
            needless.append(frozenset(d.title for d in found if d.code == "RL0522"))
            again = [d for d in found if d.code == "RL0522"]
            ends.append(end)
    problems += [d for d in again if all(d.title in titles for titles in needless)] if needless else []
    return reduce(_meet, ends)


def _part(items: tuple[Item, ...], ahead: Sequence[int]) -> tuple[Item, ...]:
    """The items that run so far ahead, and those of every iteration."""
    out: list[Item] = []
    for item in items:
        if not isinstance(item, When):
            out += [item] if ahead_of(item) in (*ahead, EVERY_ITERATION) else []
        elif body := _part(item.body, ahead):
            out.append(replace(item, body=body))
    return tuple(out)


def _before_first_step(t: Tables, loop: Loop, state: CopyStates, problems: list[Diagnostic],
                       cache: dict[tuple[int, CopyStates], CopyStates]) -> tuple[CopyStates, frozenset[str] | None]:
    """(the state after the iterations before the first step, the titles of RL0522 that are found in every one of them;
    None if there are none). Only events that run ahead take place in them, and those of every iteration. A copy may be
    refreshed there although it is current, since nothing has been trained, or although only these iterations need it.
    In the last iterations the events that run ahead are missing, which makes no version and no copy."""
    needless: frozenset[str] | None = None
    if loop.first >= 1:
        return state, needless
    levels = aheads_in(loop)
    begins = {loop.first, *(x for a in levels for x in (1 - a, loop.trips - a + 1) if loop.first < x < 1)}
    spans = sorted(x for x in begins if x < 1)  # in the iterations from one of these to the next, the same events run
    for first, end in pairwise([*spans, 1]):
        body = _part(loop.body, [a for a in levels if runs_in(first, a, loop.trips)])
        for _ in range(first, end):
            before, found = state, list[Diagnostic]()
            state = _run(t, body, before, found, cache)
            here = frozenset(d.title for d in found if d.code == "RL0522")
            needless = here if needless is None else needless & here
            problems += [d for d in found if d.code != "RL0522"]
            if state == before:  # so are all further iterations of the span
                break
    return state, needless


def _after_iteration(t: Tables, loop: Loop, top: CopyStates,
                     cache: dict[tuple[int, CopyStates], CopyStates]) -> CopyStates:
    """The state after one iteration that began with `top`."""
    if (key := (id(loop), top)) not in cache:
        cache[key] = _run(t, loop.body, top, [], cache)
    return cache[key]


def _meet(a: CopyStates, b: CopyStates) -> CopyStates:
    """What holds on both of two paths. Offloaded parts are taken from `a`: if they differ, `_unbalanced` has reported
    it."""
    return CopyStates(
        current=a.current & b.current, params_offloaded=a.params_offloaded,
        loaded_from_disk=a.loaded_from_disk & b.loaded_from_disk, allocated=a.allocated & b.allocated,
        aliases_of_trained=a.aliases_of_trained & b.aliases_of_trained, optimizer_offloaded=a.optimizer_offloaded,
        caches=a.caches & b.caches)


def _unbalanced(where: str, end: CopyStates, start: CopyStates) -> Diagnostic:
    copies = ", ".join(sorted({f"{m}@{x}" for m, x, _ in end.offloaded_parts ^ start.offloaded_parts}))
    return problem("RL0525", f"{where} ends with {copies} in a different offload state than at its start")


def _after(t: Tables, e: Event, s: CopyStates) -> CopyStates:
    """The state after an event: its transfer function."""
    if isinstance(e, Offload | Onload):
        return _after_move(e, s)
    if e.frees:
        freed = _freed(e)
        return replace(s, current=s.current - freed, loaded_from_disk=s.loaded_from_disk - freed,
                       caches=frozenset(c for c in s.caches if c[1:] not in freed),
                       allocated=s.allocated - freed)
    written = frozenset(_copies(t, e.writes))
    renewed = e.versions().defs  # models of which every copy that the event does not write is stale from here on
    if not (written or renewed or isinstance(e, Generate)):  # as of most events
        return s
    trained_too = {c for c in s.aliases_of_trained if c[0] in renewed and isinstance(e, Train)}
    after = replace(s, current=frozenset(c for c in s.current if c[0] not in renewed) | trained_too | written,
                    allocated=s.allocated | written)
    after = replace(after, caches=frozenset(c for c in s.caches if c[1] not in renewed and c[1:] not in written))
    if isinstance(e, Generate):
        kept = {b for b, _ in map(split_buffer, e.writes)} & {f"{e.frame}.cache"}
        after = replace(after, caches=after.caches | {(e.frame, e.model, e.layout) for _ in kept})
    if isinstance(e, Load):
        after = replace(after, loaded_from_disk=s.loaded_from_disk | written)
        if e.alias_of:
            after = replace(after, aliases_of_trained=s.aliases_of_trained | written)
    return after


def _after_move(e: Offload | Onload, s: CopyStates) -> CopyStates:
    copy = frozenset({(e.model, e.layout)})
    if e.part == "optimizer":
        offloaded = s.optimizer_offloaded
        return replace(s, optimizer_offloaded=offloaded | copy if isinstance(e, Offload) else offloaded - copy)
    offloaded = s.params_offloaded
    return replace(s, params_offloaded=offloaded | copy if isinstance(e, Offload) else offloaded - copy)


def _copies(t: Tables, buffers: Iterable[str]) -> list[tuple[str, str]]:
    """The buffers that are copies of parameters, as (model, layout)."""
    return [(left, right) for left, right in map(split_buffer, buffers) if left in t.models]


def _freed(e: Event) -> Copies:
    """Everything that it frees, copies and values."""
    return frozenset((left, right) for left, right in map(split_buffer, e.frees))


def _move_problems(t: Tables, e: Offload | Onload, s: CopyStates) -> Iterator[Diagnostic]:
    copy, ranks = (e.model, e.layout), t.event_ranks(e)
    if (copy in (s.params_offloaded if e.part == "parameters" else s.optimizer_offloaded)) != isinstance(e, Onload):
        where = "in host memory" if isinstance(e, Offload) else "on the device"
        yield problem("RL0525", f"{name(e)}: {e.model}@{e.layout} is already {where}", e, ranks=ranks)
    if e.part == "optimizer" and copy in s.params_offloaded:
        yield problem("RL0525", f"{name(e)}: gradients of {e.model}@{e.layout} exist without its parameters", e,
                      ranks=ranks)


def _problems(t: Tables, e: Event, s: CopyStates) -> Iterator[Diagnostic]:
    ranks = t.event_ranks(e)
    if isinstance(e, Offload | Onload):
        yield from _move_problems(t, e, s)
        return
    for model, layout in sorted(_copies(t, e.frees)):
        if (model, layout) in s.params_offloaded:
            yield problem("RL0525", f"{name(e)} frees {model}@{layout}, which is offloaded", e, ranks=ranks)
        elif (model, layout) not in s.allocated:
            yield problem("RL0515", f"{name(e)} frees {model}@{layout}, which does not exist", e, ranks=ranks)
    used = [c for c in _copies(t, e.reads) if "@".join(c) not in e.frees]
    for model, layout in used:
        if (model, layout) not in s.current:
            current = sorted(x for m, x in s.current if m == model) if t.models[model].updated_from else []
            current += [x for x in [t.models[model].train_layout] if x and (model, x) in s.current]
            yield problem(
                "RL0521" if current else "RL0520",
                f"{name(e)} uses {model}@{layout}, which "
                + ("is not the current version" if current else "does not exist: no event loads it"),
                e,
                ranks=ranks,
                help=f"a realloc from {model}@{current[0]} must come first" if current else "",
            )
        if isinstance(e, Train) and (model, layout) in s.optimizer_offloaded:
            yield problem("RL0525", f"{name(e)} trains {model}@{layout}, whose optimizer state is offloaded", e,
                          ranks=ranks)
        if (model, layout) in s.params_offloaded and not isinstance(e, Checkpoint):  # which reads host memory, too
            yield problem("RL0525", f"{name(e)} uses {model}@{layout}, which is offloaded", e, ranks=ranks)
    if isinstance(e, Generate) and e.cache_of and (e.cache_of, e.model, e.layout) not in s.caches:
        yield problem("RL0521", f"{name(e)} reads the KV cache of {e.cache_of}, which no generate of the current "
                                f"version of {e.model} wrote", e, ranks=ranks)
    if isinstance(e, Realloc):
        if t.models[e.model].base and (e.model, e.dst) not in s.loaded_from_disk:
            yield problem("RL0520", f"{name(e)} copies adapters to {e.model}@{e.dst}, whose base is never loaded", e,
                          ranks=ranks)
        train_layout, is_updated = t.models[e.model].train_layout, bool(t.models[e.model].updated_from)
        if not e.source and (e.model, e.dst) in s.current:
            yield problem("RL0522", f"{name(e)} refreshes {e.model}@{e.dst}, which is already current", e, ranks=ranks)
        if (e.model, e.dst) in s.params_offloaded:
            yield problem("RL0525", f"{name(e)} writes {e.model}@{e.dst}, which is offloaded", e, ranks=ranks)
        if train_layout and e.dst == train_layout or not train_layout and not is_updated:
            yield problem(
                "RL0524",
                f"{name(e)} overwrites the training layout of {e.model}"
                if train_layout
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
