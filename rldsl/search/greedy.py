"""Good assignments, found quickly: what `heuristic` answers, and what the search begins with.

In: an instance, blocks for its calls. Out: an assignment that fits, or None. Every call begins with its fastest
strategy; while a device is too small, the change that costs least time for the bytes that it saves is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.search.costs import Entry
from rldsl.search.instance import Assignment, Instance, Judged
from rldsl.search.space import Block


def chosen(i: Instance, blocks: Sequence[Block]) -> Judged | None:
    """Entries for given blocks."""
    entries: list[Entry] = []
    for job, b in zip(i.calls, blocks):
        home = i.homes.get(job.model)
        options = i.table.entries(job, b.size)
        if home is not None and job.kind == "train" and home < len(entries):  # as the first one trains
            options = tuple(e for e in options if e.strategy.degrees == entries[home].strategy.degrees)
        if not options:
            return None
        entries.append(options[0])
    picked: tuple[Entry, ...] | None = tuple(entries)
    while picked is not None:
        if i.fits(i.roughly(blocks, picked)) and i.fits((now := i.judge(Assignment(tuple(blocks), picked))).bytes):
            return now
        picked = _lighter(i, blocks, picked)
    return None


def _lighter(i: Instance, blocks: Sequence[Block], entries: tuple[Entry, ...]) -> tuple[Entry, ...] | None:
    """The change of one call that saves bytes at the least cost in time for each."""
    best: tuple[float, int, Entry] | None = None
    for c, job in enumerate(i.calls):
        now = entries[c]
        for e in i.table.entries(job, blocks[c].size):
            saved = now.resident + now.active - e.resident - e.active
            if saved > 0:
                price = max(e.seconds + e.away - now.seconds - now.away, 0.0) / saved
                if (best is None or price < best[0]) and _with(i, entries, c, e) is not None:
                    best = price, c, e
    return _with(i, entries, best[1], best[2]) if best else None


def _with(i: Instance, entries: tuple[Entry, ...], c: int, e: Entry) -> tuple[Entry, ...] | None:
    """With another entry of one call; other train calls of its model follow under its layout."""
    out = list(entries)
    out[c] = e
    job = i.calls[c]
    for k, other in enumerate(i.calls):
        if k != c and job.kind == other.kind == "train" and other.model == job.model:
            same = [x for x in i.table.entries(other, e.size) if x.strategy.degrees == e.strategy.degrees]
            if not same:
                return None
            out[k] = same[0]
    return tuple(out)


def heuristic(i: Instance) -> Judged | None:
    """Every call that is free on all ranks."""
    return chosen(i, [next(i.blocks(job, ())) for job in i.calls])
