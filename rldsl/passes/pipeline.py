"""All passes in their order. In: a `Placed`. Out: the finished `Draft`, and the plan with its proof.

A pass whose invariant is cheap to look at is followed by a check of it, and the plan by the independent verifier, which
proves all of them again: a failure of either is a mistake of the compiler, not of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rldsl.memory import curves
from rldsl.memory.curve import Curve, Peak, peaks
from rldsl.passes import checkpoint, drops, event_order, frees, loads, log, offloads, reallocs, transfers
from rldsl.passes.draft import Draft
from rldsl.passes.emit import emit
from rldsl.passes.lengths import lengths
from rldsl.passes.lower import lower
from rldsl.placement.model import Placed
from rldsl.plan.model import Plan
from rldsl.plan.projection import rank_classes
from rldsl.verify import Proof, verify


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, its proof, and what its ranks hold when."""

    plan: Plan
    proof: Proof
    curves: tuple[Curve, ...]

    @property
    def peaks(self) -> dict[int, Peak]:
        """Of every rank."""
        return peaks(self.curves)


def run(placed: Placed) -> Draft:
    """From calls in places to ordered events."""
    draft = transfers.transfers(lower(placed))
    transfers.check(draft)
    draft = lengths(draft)
    draft = loads.loads(draft)
    draft = reallocs.reallocs(draft)
    reallocs.check(draft)
    draft = offloads.offloads(draft)
    before = log.log(draft)
    draft = event_order.order(before)
    event_order.check(before, draft)
    draft = offloads.prefetch(draft)
    offloads.check(draft.body)
    draft = frees.frees(draft)
    frees.check(draft)
    draft = drops.drops(draft)
    drops.check(draft)
    return checkpoint.checkpoint(draft)


def planned(draft: Draft, compiler: str) -> tuple[Plan, tuple[Curve, ...]]:
    """The plan, its classes with their peaks of memory, and what its ranks hold when."""
    plan = emit(draft, compiler)
    found = curves(plan)
    bytes = {rank: p.bytes for rank, p in peaks(found).items()}
    return replace(plan, classes=rank_classes(plan.meshes, plan.body, plan.header.world, bytes)), found


def finish(plan: Plan, found: tuple[Curve, ...]) -> Compiled:
    """Verify. Raises Failure (RL05xx, RL06xx) if the compiler made a plan that the verifier rejects."""
    return Compiled(plan, verify(plan), found)
