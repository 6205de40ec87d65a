"""All passes in their order. In: a `Placed`. Out: the finished `Draft`, and the plan with its proof.

Every pass is followed by a cheap check of its invariant, and the plan by the independent verifier: a failure of either
is a mistake of the compiler, not of the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.passes import checkpoint, frees, loads, log, order, reallocs, transfers
from rldsl.passes.draft import Draft
from rldsl.passes.emit import emit
from rldsl.passes.lengths import lengths
from rldsl.passes.lower import lower
from rldsl.placement.memory import Peak
from rldsl.placement.model import Placed
from rldsl.plan.model import Plan
from rldsl.plan.verify import Proof, verify


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, its proof, and the estimate of memory for each rank."""

    plan: Plan
    proof: Proof
    peaks: Mapping[int, Peak]


def run(placed: Placed) -> Draft:
    """From calls in places to ordered events."""
    draft = transfers.transfers(lower(placed))
    transfers.check(draft)
    draft = lengths(draft)
    draft = loads.loads(draft)
    draft = reallocs.reallocs(draft)
    reallocs.check(draft)
    draft = loads.offloads(draft)
    before = log.log(draft)
    draft = order.order(before)
    order.check(before, draft)
    draft = frees.frees(draft)
    frees.check(draft)
    return checkpoint.checkpoint(draft)


def finish(draft: Draft, peaks: Mapping[int, Peak], compiler: str) -> Compiled:
    """Emit and verify. Raises Failure (RL05xx, RL06xx) if the compiler made a plan that the verifier rejects."""
    plan = emit(draft, {rank: p.bytes for rank, p in peaks.items()}, compiler)
    return Compiled(plan, verify(plan), peaks)
