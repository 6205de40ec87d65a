"""What an event says that it moves is what its participants will move, and they count alike.

In: tables with sound references. Out: diagnostics RL0534. The rule by kind of event: lengths travel as 16 bytes per row
to each rank that does not hold the row; numbers of the batch as 8 bytes to each rank of the destination that is not in
the source; drawn row numbers as 8 bytes to each rank but the first; transfers of rows and metrics have a size that a
run decides (-1); a realloc's bytes are another check's; nothing else moves anything between events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, assert_never

from rldsl.diag import Diagnostic
from rldsl.plan.events import Draw, Event, Lengths, Realloc, Transfer
from rldsl.plan.traits import rule_for
from rldsl.verify.tables import Tables, name, problem

LENGTH, NUMBER, RAGGED = 16, 8, -1


def check_sizes(t: Tables) -> Iterator[Diagnostic]:
    for event, _ in t.events:
        if event.bytes != (due := _due(t, event)):
            yield problem("RL0534", f"{name(event)} records {_say(event.bytes)}, but moves {_say(due)}",
                          event, ranks=t.event_ranks(event))


def _due(t: Tables, e: Event) -> int:
    match e.traits.bytes_moved:
        case "none":
            return 0
        case "at run time":
            return RAGGED
        case "planned":
            return rule_for(RULES, e, "the verifier")(t, e)
        case unknown:
            assert_never(unknown)


def _lengths(t: Tables, e: Lengths) -> int:
    layout = t.layouts.get(t.spreads[e.spread].layout)
    holders = layout.tp * layout.pp * layout.cp if layout else 1  # of each row: the ranks of one dp rank
    return LENGTH * t.frames[e.frame].count * (len(t.event_ranks(e)) - holders)


def _transfer(t: Tables, e: Transfer) -> int:
    if any(t.values[v].level != "batch" for v in e.values):
        return RAGGED
    return NUMBER * len(t.spread_ranks(e.dst) - t.spread_ranks(e.src)) * len(e.values)


def _draw(t: Tables, e: Draw) -> int:
    return NUMBER * t.frames[e.frame].count * (len(t.event_ranks(e)) - 1)


def _realloc(t: Tables, e: Realloc) -> int:
    return e.bytes  # `reshards.py` finds them again


RULES: Mapping[type[Event], Callable[[Tables, Any], int]] = {
    Lengths: _lengths, Transfer: _transfer, Realloc: _realloc, Draw: _draw,
}


def _say(count: int) -> str:
    return "a size known only at run time" if count == RAGGED else f"{count} bytes"
