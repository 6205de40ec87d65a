"""Good assignments, found quickly: what `heuristic` answers, and what the search begins with.

In: an instance, blocks for its calls. Out: an assignment that fits, or None. Every call begins with its fastest
strategy; while a device is too small, the change that costs least time for the bytes that it saves is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.space import Block


def choose_candidates(i: Evaluator, blocks: Sequence[Block]) -> Evaluation | None:
    """Entries for given blocks."""
    entries: list[Candidate] = []
    for job, b in zip(i.calls, blocks, strict=True):
        home = i.homes.get(job.model)
        options = i.table.entries(job, b.size)
        if home is not None and job.kind == "train" and home < len(entries):  # as the first one trains
            options = tuple(e for e in options if e.strategy.degrees == entries[home].strategy.degrees)
        if not options:
            return None
        entries.append(options[0])
    picked: tuple[Candidate, ...] | None = tuple(entries)
    while picked is not None:
        if i.fits(i.roughly(blocks, picked)) and i.fits((now := i.judge(Assignment(tuple(blocks), picked))).bytes):
            return now
        picked = _with_cheapest_saving(i, blocks, picked)
    return None


def _with_cheapest_saving(i: Evaluator, blocks: Sequence[Block], entries: tuple[Candidate, ...]) -> tuple[Candidate, ...] | None:
    """The change of one call (with all trainings of its model) that saves bytes at the least cost in time for each. All
    bytes together become fewer each time, so there is an end of it."""
    best: tuple[float, tuple[Candidate, ...]] | None = None
    for c, job in enumerate(i.calls):
        now = entries[c]
        mine = now.resident + now.active
        for e in i.table.entries(job, blocks[c].size):
            if (least := mine - e.resident - e.active) <= 0:
                continue
            price = max(e.seconds + e.away - now.seconds - now.away, 0.0) / least
            if best is not None and price >= best[0] or (then := i.changed(entries, c, e)) is None:
                continue
            if sum(a.resident + a.active - b.resident - b.active for a, b in zip(entries, then, strict=True)) > 0:
                best = price, then
    return best[1] if best else None


def greedy_evaluation(i: Evaluator) -> Evaluation | None:
    """Every call that is free on all ranks."""
    return choose_candidates(i, [next(i.blocks(job, ())) for job in i.calls])
