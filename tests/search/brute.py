"""Every assignment of a problem, one by one: what the search must find, found without it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.problem import Job
from rldsl.search.space import Block


def assignments(i: Evaluator, few: int) -> Iterator[Assignment]:
    """All blocks, without regard to symmetry, and the first `few` entries of each call on each."""
    options: list[list[tuple[Block, Candidate]]] = [
        [(b, e) for b in _blocks(i, job) for e in i.table.candidates(job, b.size)[:few]] for job in i.calls]
    for picked in product(*options):
        yield Assignment(tuple(b for b, _ in picked), tuple(e for _, e in picked))


def _blocks(i: Evaluator, job: Job) -> tuple[Block, ...]:
    fixed = i.problem.fixed.get(job.number)
    return (fixed.block,) if fixed is not None and fixed.block is not None else i.tree.all_blocks


def best(i: Evaluator, few: int) -> float:
    """Seconds of the best that fits; inf where nothing does."""
    found = inf
    for a in assignments(i, few):
        judged = i.evaluate(a)
        if judged.seconds < found and i.fits(judged.bytes):
            found = judged.seconds
    return found
