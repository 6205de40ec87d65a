"""All passes in their order. In: a `PlacedGraph`. Out: the finished `Draft`, and the plan with its proof.

A pass is data: its name, its function, and the check of what it promises, where that is cheap. The plan is checked by
the independent verifier, which proves all of it again: a failure of either is an internal compiler error (RL0699).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rldsl.diag import internal_error
from rldsl.memory import curves
from rldsl.memory.curve import Curve, Peak, peak, peaks
from rldsl.passes import (
    checkpoint,
    copy_lifetimes,
    event_order,
    loads,
    log,
    offloads,
    reallocs,
    run_ahead,
    transfers,
    value_lifetimes,
)
from rldsl.passes.draft import Draft, events
from rldsl.passes.emit import emit
from rldsl.passes.lengths import check_lengths, lengths
from rldsl.passes.node_events import node_events
from rldsl.placement.model import PlacedGraph
from rldsl.plan.model import Plan
from rldsl.plan.projection import rank_classes
from rldsl.progress import garbage_collection_paused, stage
from rldsl.verify import Proof, verify


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, its proof, and what its ranks hold when."""

    plan: Plan  # the plan
    proof: Proof  # that it can run
    curves: tuple[Curve, ...]  # the memory of its ranks

    @property
    def peaks(self) -> dict[int, Peak]:
        """The peak of every rank."""
        return peaks(self.curves)


@dataclass(frozen=True, slots=True)
class CompilerPass:
    """One step from placed calls to ordered events."""

    name: str  # `rlc compile --print-after NAME`
    about: str  # what the pass adds to the events
    run: Callable[[Draft], Draft]  # makes the next draft
    check: Callable[[Draft, Draft], None] | None = None  # (before, after); raises RL0699 where its promise is broken


def _of_result(check: Callable[[Draft], None]) -> Callable[[Draft, Draft], None]:
    return lambda _, after: check(after)


PASSES: tuple[CompilerPass, ...] = (
    CompilerPass("node_events", "an event for each call in program order, with the division of its rows among ranks",
                 lambda draft: replace(node_events(draft.placed), sized=draft.sized)),
    CompilerPass("transfers", "values transferred to the ranks that read them", transfers.transfers,
                 _of_result(transfers.check_transfers)),
    CompilerPass("lengths", "row lengths where rows are divided by length, and the mesh of each fetch", lengths,
                 _of_result(check_lengths)),
    CompilerPass("loads", "weights loaded from disk", loads.loads),
    CompilerPass("reallocs", "parameters resharded from layout to layout", reallocs.reallocs,
                 _of_result(reallocs.check_reallocs)),
    CompilerPass("log", "metrics written to the log", log.log),
    CompilerPass("run_ahead", "with `lag`, how many steps each event runs ahead", run_ahead.run_ahead,
                 _of_result(run_ahead.check_run_ahead)),
    CompilerPass("order", "each block ordered so that disjoint meshes work at the same time", event_order.order,
                 event_order.check_order),
    CompilerPass("offloads", "copies moved to host memory after use, and back", offloads.offloads),
    CompilerPass("prefetch", "offloaded copies moved back early, during the work between calls", offloads.prefetch,
                 _of_result(lambda draft: offloads.check_offloads(draft.body))),
    CompilerPass("value_lifetimes", "every value freed after its last use", value_lifetimes.value_lifetimes,
                 _of_result(value_lifetimes.check_value_lifetimes)),
    CompilerPass("copy_lifetimes", "copies with keep=false freed after their last use", copy_lifetimes.copy_lifetimes,
                 _of_result(copy_lifetimes.check_copy_lifetimes)),
    CompilerPass("checkpoint", "the checkpoint at the end of the step", checkpoint.checkpoint),
)
NAMES = tuple(p.name for p in PASSES)


@garbage_collection_paused()
def run(placed: PlacedGraph, sized: bool = True) -> Draft:
    """From placed calls to ordered events. sized: see `Draft`."""
    draft = Draft(placed, sized=sized)
    for i, step in enumerate(PASSES):
        stage(f"pass {step.name}", i, len(PASSES))
        before, draft = draft, step.run(draft)
        check_pass(step, before, draft)
    return draft


def check_pass(step: CompilerPass, before: Draft, after: Draft) -> None:
    """What every pass promises, and what this one does. Errors: RL0699."""
    for event in events((*after.setup, *after.body)):
        if event.mesh not in after.meshes or not after.meshes[event.mesh].ranks:
            raise internal_error(f"{event.display_name} has no ranks", f"pass {step.name}")
    if step.check is not None:
        step.check(before, after)


def after(placed: PlacedGraph, name: str) -> Draft:
    """The events as they are after the pass `name`, of `NAMES`, whether or not its own check holds."""
    draft = Draft(placed)
    for step in PASSES:
        before, draft = draft, step.run(draft)
        if step.name == name:
            break
        check_pass(step, before, draft)
    return draft


@garbage_collection_paused()
def planned(draft: Draft, compiler: str) -> tuple[Plan, tuple[Curve, ...]]:
    """The plan, its classes with their peaks of memory, and the memory curves of its ranks."""
    stage("estimating memory")
    plan = emit(draft, compiler)
    found = curves(plan)
    bytes = {rank: p.bytes for rank, p in peaks(found).items()}
    return replace(plan, classes=rank_classes(plan.meshes, plan.body, plan.header.world, bytes)), found


@garbage_collection_paused()
def memory_bound(placed: PlacedGraph) -> int:
    """A lower bound of the fullest rank's peak in bytes: without buffers of reallocs, which take longest to size."""
    plan = emit(run(placed, sized=False), "")
    return max(peak(c).bytes for c in curves(plan, realloc_buffers=False))


def finish(plan: Plan, found: tuple[Curve, ...]) -> Compiled:
    """Verify. Raises Failure (RL05xx, RL06xx) if the compiler made a plan that the verifier rejects."""
    return Compiled(plan, verify(plan), found)
