"""Good assignments, found quickly: the result of mode `heuristic`, and the start of the search.

In: an evaluator, blocks for its calls. Out: an evaluated assignment that fits, or None. Every call starts with its
fastest strategy; while it does not fit, the change that costs the least time per byte saved is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.space import Block


def choose_candidates(evaluator: Evaluator, blocks: Sequence[Block]) -> Evaluation | None:
    """The assignment on these blocks."""
    candidates: list[Candidate] = []
    for job, b in zip(evaluator.calls, blocks, strict=True):
        train = evaluator.problem.train_index.get(job.model)
        options = evaluator.table.candidates(job, b.size)
        if train is not None and job.kind == "train" and train < len(candidates):  # the layout of the first training
            options = tuple(e for e in options if e.strategy.degrees == candidates[train].strategy.degrees)
        if not options:
            return None
        candidates.append(options[0])
    chosen: tuple[Candidate, ...] | None = tuple(candidates)
    while chosen is not None:
        peak, call = evaluator.estimate_peak(blocks, chosen)
        if evaluator.fits(peak):
            evaluation = evaluator.evaluate(Assignment(tuple(blocks), chosen))
            if evaluator.fits(evaluation.bytes):
                return evaluation
        chosen = _with_cheapest_saving(evaluator, blocks, chosen, call)
    return None


def _with_cheapest_saving(evaluator: Evaluator, blocks: Sequence[Block], candidates: tuple[Candidate, ...],
                          running: int) -> tuple[Candidate, ...] | None:
    """The change of one call (with all trainings of its model) that saves bytes while call `running` runs, at the least
    time per byte; None if no change saves any. Each change lowers `_held_by_all`, so a sequence of changes ends."""
    best: tuple[float, tuple[Candidate, ...]] | None = None
    for c, job in enumerate(evaluator.calls):
        if not blocks[c].overlaps(blocks[running]):
            continue
        now = candidates[c]
        for e in evaluator.table.candidates(job, blocks[c].size):
            saved = now.resident_bytes - e.resident_bytes + (now.active_bytes - e.active_bytes if c == running else 0)
            if saved <= 0:
                continue
            price = max(e.seconds + e.onload_seconds - now.seconds - now.onload_seconds, 0.0) / saved
            if best is not None and price >= best[0] or (changed := evaluator.with_candidate(candidates, c, e)) is None:
                continue
            if _held_by_all(changed) < _held_by_all(candidates):
                best = price, changed
    return best[1] if best else None


def _held_by_all(candidates: Sequence[Candidate]) -> int:
    """What the calls hold in total while each of them runs, if all are on the same ranks."""
    return sum([len(candidates) * e.resident_bytes + e.active_bytes for e in candidates])


def greedy_evaluation(evaluator: Evaluator) -> Evaluation | None:
    """Every free call on all ranks."""
    return choose_candidates(evaluator, [next(evaluator.problem.blocks(job, ())) for job in evaluator.calls])
