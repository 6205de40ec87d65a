"""States of the rows of a data source: who holds them, in which order they are read and written, and by whom.

In: tables with sound references. Out: diagnostics RL0545; for the events themselves RL0614 (reads and writes), RL0615
(fields that contradict each other) and RL0617 (the program of a weight). Rules: exactly the ranks that fetch from the
source hold its states; nothing else reads or writes them, or the row numbers of a batch; each event names the update
before it, so none can move past another; an update writes numbers that came from one rank per row, so that all copies
stay equal; a weight is computed from the numbers of one row.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import (
    Checkpoint,
    Collect,
    Draw,
    Fetch,
    Lookup,
    RowStates,
    Sample,
    Transfer,
    Update,
    split_buffer,
)
from rldsl.plan.model import State
from rldsl.plan.operators import OPERATORS
from rldsl.verify.tables import Tables, name, problem

WEIGHT = "weight"  # the output of a weight's program


def check_row_states(t: Tables) -> Iterator[Diagnostic]:
    yield from _holders(t)
    yield from _only_their_events(t)
    yield from _order(t)


def _states(t: Tables) -> dict[str, State]:
    return {s.value: s for s in t.plan.states if s.data}


def _holders(t: Tables) -> Iterator[Diagnostic]:
    for s in _states(t).values():
        for e, _ in t.events:
            if isinstance(e, Fetch) and e.data == s.data and t.event_ranks(e) != t.spread_ranks(s.spread):
                yield problem("RL0545", f"{name(e)} fetches from {s.data} on other ranks than those that hold "
                              f"{s.value}", e, ranks=t.event_ranks(e) ^ t.spread_ranks(s.spread))


def _only_their_events(t: Tables) -> Iterator[Diagnostic]:
    """Tables and row numbers are no values that any other event understands."""
    for e, _ in t.events:
        used = [b for b in (*e.reads, *e.writes, *e.frees) if split_buffer(b)[0] in t.values]
        extents = {t.values[split_buffer(b)[0]].extent: b for b in used}
        if "table" in extents and not isinstance(e, RowStates | Checkpoint):
            yield problem("RL0545", f"{name(e)} uses {extents['table']}, which only draws, lookups and updates may", e)
        frees = set(e.frees)
        if "row_numbers" in extents and extents["row_numbers"] not in frees and not isinstance(
                e, RowStates | Fetch | Collect):
            yield problem("RL0545", f"{name(e)} uses {extents['row_numbers']}, which are row numbers of a source", e)


def _order(t: Tables) -> Iterator[Diagnostic]:
    """Each event on a state names the update before it: the list is in the order of the program."""
    last: dict[str, str] = {}
    states, seen = _states(t), set[tuple[str, str]]()
    for e, _ in t.events:
        if not isinstance(e, RowStates):
            continue
        used = dict.fromkeys(v for v, _ in map(split_buffer, (*e.reads, *e.writes)) if v in states)
        expected = {v: last.get(v, "") for v in used}
        if dict(e.follows) != expected or len(e.follows) != len(expected):
            found = ", ".join(f"{v} of {at or 'the step before'}" for v, at in e.follows) or "no state"
            right = ", ".join(f"{v} of {at or 'the step before'}" for v, at in expected.items()) or "no state"
            yield problem("RL0545", f"{name(e)} is out of order: it works on {found}, but finds {right}", e)
        if isinstance(e, Update):
            if not e.at or (e.state, e.at) in seen:
                yield problem("RL0545", f"{name(e)} has the position of another update of {e.state}, or none", e)
            seen.add((e.state, e.at))
            last[e.state] = e.at


# ---------------------------------------------------------------------------------------------------- events


def check_draw(t: Tables, e: Draw) -> Iterator[Diagnostic]:
    states = {s.value: s for s in t.plan.states}
    if wrong := [v for _, v in e.inputs if v not in states or states[v].data not in ("", e.data)]:
        yield problem("RL0615", f"{name(e)} weighs rows of {e.data} by {wrong[0]}, which is no state of them", e)
        return
    if wrong := [c for _, c in e.columns if c not in t.data[e.data].numbers]:
        yield problem("RL0615", f"{name(e)} weighs rows of {e.data} by {wrong[0]}, which is no column of numbers", e)
    must = {f"{v}@{states[v].spread}" for _, v in e.inputs}
    fetches = [f for f, _ in t.events if isinstance(f, Fetch) and f.reads == e.writes]
    if {*e.reads} != must or len(e.reads) != len(must) or not _is_all(t, e.writes, f"{e.frame}.row_numbers"):
        yield problem("RL0614", f"{name(e)} must read {', '.join(sorted(must)) or 'nothing'} and write the row numbers "
                      f"of {e.frame}", e)
    if len(fetches) != 1 or fetches[0].data != e.data or fetches[0].frames[0] != e.frame:
        yield problem("RL0615", f"{name(e)} draws rows that no fetch from {e.data} reads", e)


def check_weight(t: Tables, e: Draw | Sample) -> Iterator[Diagnostic]:
    """The program of a draw or a sample: a number for one row, made of its own numbers."""
    program = t.programs[e.program]
    given = [n for n, _ in (*e.inputs, *(e.columns if isinstance(e, Draw) else e.fields))]
    if {*given} != {*program.inputs()} or len({*given}) != len(given):
        yield problem("RL0617", f"{name(e)}: program {program.id} takes {sorted(program.inputs())}, but gets "
                      f"{sorted(given)}", e)
    if [n for n, _ in program.outputs] != [WEIGHT]:
        yield problem("RL0617", f"{name(e)}: program {program.id} must have {WEIGHT} as its only output", e)
    for n in program.nodes:
        if n.level != "batch" or n.op not in ("input", "const") and OPERATORS[n.op].family != "elementwise":
            yield problem("RL0617", f"{name(e)}: {n.op} in program {program.id} cannot be computed for each row", e)
        elif n.op == "const" and isinstance(n.attr("value"), str):
            yield problem("RL0617", f"{name(e)}: program {program.id} has a constant that is no number", e)


def check_lookup(t: Tables, e: Lookup) -> Iterator[Diagnostic]:
    state = yield from _on_state(t, e)
    if state is None:
        return
    spread = split_buffer(e.writes[0])[1] if e.writes else ""
    if not _is_all(t, e.writes, e.value) or {*e.reads} != {f"{e.frame}.row_numbers@{spread}",
                                                         f"{e.state}@{state.spread}"} or len(e.reads) != 2:
        yield problem("RL0614", f"{name(e)} must read the row numbers of {e.frame} and {e.state}, and write {e.value} "
                      "for every row", e)
    v = t.values[e.value]
    if (v.frame, v.dtype) != (e.frame, "f32") or v.extent not in ("prompt", "row"):
        yield problem("RL0615", f"{name(e)} makes {e.value}, which is not a number per row of {e.frame}", e)


def check_update(t: Tables, e: Update) -> Iterator[Diagnostic]:
    state = yield from _on_state(t, e)
    if state is None:
        return
    own = f"{e.state}@{state.spread}"
    new = next((b for b in e.reads if split_buffer(b)[0] == e.value), "")
    numbers = next((b for b in e.reads if split_buffer(b)[0] == f"{e.frame}.row_numbers"), "")
    if {*e.reads} != {new, numbers, own} or len(e.reads) != 3 or e.writes != (own,) \
            or not _is_all(t, (new,), e.value):
        yield problem("RL0614", f"{name(e)} must read {e.value} and the row numbers of {e.frame} for every row, and "
                      f"read and write {own}", e)
        return
    v, frame = t.values[e.value], t.frames[e.frame]
    if v.dtype != "f32" or v.extent not in ("prompt", "row") or not v.frame:
        yield problem("RL0615", f"{name(e)} writes {e.value}, which is not a number per row", e)
        return
    of = t.frames[v.frame]
    if of.origins[of.prompt_index if v.level == "prompt" else 0] != frame.row_space:
        yield problem("RL0615", f"{name(e)} writes {e.value}, a value of {v.frame}, whose rows are not those of "
                      f"{e.frame}", e)
    for writer, _ in t.events:
        if new in writer.writes and not (isinstance(writer, Transfer) and _one_owner(t, writer)):
            yield problem("RL0545", f"{name(e)} writes {new}, which {name(writer)} makes on several ranks: copies of "
                          f"{e.state} may differ", e, writer)


def _on_state(t: Tables, e: Lookup | Update) -> Generator[Diagnostic, None, State | None]:
    """The state that an event works on, if its fields fit together."""
    state = _states(t).get(e.state)
    numbers = t.values.get(f"{e.frame}.row_numbers")
    if state is None or state.data != e.data or t.frames[e.frame].data != e.data or numbers is None \
            or (numbers.frame, numbers.extent) != (e.frame, "row_numbers"):
        yield problem("RL0615", f"{name(e)}: {e.state} is no state of the rows of {e.frame}", e)
        return None
    return state


def _one_owner(t: Tables, e: Transfer) -> bool:
    """Whether each row is on one rank where it comes from."""
    src = t.spreads[e.src]
    return src.granularity != "all" and t.layouts[src.layout].dp == len(t.spread_ranks(e.src)) and src.epochs == 1


def _is_all(t: Tables, buffers: tuple[str, ...], value: str) -> bool:
    """Whether it is one buffer, of this value, that every rank of its spread holds in full."""
    if len(buffers) != 1 or "@" not in buffers[0]:
        return False
    left, right = split_buffer(buffers[0])
    return left == value and right in t.spreads and t.spreads[right].granularity == "all"
