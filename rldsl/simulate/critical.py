"""The critical path: what would have to be faster for the step to be.

In: a played simulation. Out: hops backwards from the end of a step: the work that ended last, the message that it
waited for, the work of the class that was last ready for that message, and so on. Each hop begins where the one
before ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from rldsl.simulate.engine import Played
from rldsl.simulate.model import Hop


def critical(played: Played, c: int, stop: float, start: float) -> tuple[Hop, ...]:
    """The path that ends with class `c` at `stop`, back to `start`; times from `start`."""
    hops: list[Hop] = []
    at = stop
    ends = [[p.stop for p in pieces] for pieces in played.pieces]
    while at > start:
        i = bisect_left(ends[c], at)
        piece = played.pieces[c][i]
        assert piece.stop == at, f"class {c} did nothing that ended at {at}"
        if piece.key is None:
            hops.append(Hop(c, piece.begin.event, max(piece.start, start) - start, at - start, "work"))
            at = piece.start
            continue
        message = played.messages[piece.key]
        assert message.at is not None
        if message.done > message.began:
            hops.append(Hop(c, message.at.event, max(message.began, start) - start, at - start, "message"))
        at, c = message.began, message.last
    return _joined(reversed(hops))


def _joined(hops: Iterable[Hop]) -> tuple[Hop, ...]:
    """Hops of the same kind, class and event after each other as one."""
    found: list[Hop] = []
    for hop in hops:
        last = found[-1] if found else None
        if last is not None and (last.rank_class, last.event, last.kind) == (hop.rank_class, hop.event, hop.kind):
            found[-1] = replace(last, stop=hop.stop)
        else:
            found.append(hop)
    return tuple(found)
