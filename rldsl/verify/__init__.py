"""The proof that a plan can run: an independent reader of the file. It takes no claim of the compiler for granted but
the estimate of memory, which it makes again with the compiler's functions.

In: a `Plan`. Out: a `Proof`, or a Failure with one diagnostic for each fault (codes RL05xx and RL06xx, the events,
their source positions and the ranks). A check may be several files, and relies on the stages before its own, never on
another check of its stage: names and records are sound when the others look things up, and dataflow and versions read
schedules that are known to be right.

Some results are computed again here although the compiler has computed them: a proof that shares code with what it
proves repeats its mistakes. `transfer_slices` derives the cell of each rank; `box_classes` and `saves`, who holds a
box; `derive` and `collect`, the frame of a value; `class_schedules`, the ranks of a class; `programs`, which nodes are
conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Plan
from rldsl.progress import garbage_collection_paused, stage
from rldsl.verify import (
    class_schedules,
    dataflow,
    generation,
    groups,
    issue_order,
    lag,
    loops,
    losses,
    memory,
    operations,
    programs,
    records,
    references,
    reshards,
    row_division,
    row_states,
    saves,
    sizes,
    total_order,
    versions,
)
from rldsl.verify.tables import Tables, class_ranks, tables

Check = Callable[[Tables], Iterator[Diagnostic]]

# Stages: the checks of one may rely on those of the stages before it.
STAGES: tuple[tuple[tuple[str, Check], ...], ...] = (
    (("references", references.check_references), ("records", records.check_records)),
    (("programs", programs.check_programs), ("losses", losses.check_losses),
     ("schedule", class_schedules.check_class_schedules), ("order", total_order.check_total_order),
     ("issue order", issue_order.check_issue_order), ("groups", groups.check_groups), ("loops", loops.check_loops),
     ("lag", lag.check_lag),
     ("operations", operations.check_operations), ("turns", generation.check_turns),
     ("division", row_division.check_row_division), ("row states", row_states.check_row_states),
     ("sizes", sizes.check_sizes), ("reallocs", reshards.check_reshards), ("saves", saves.check_saves)),
    (("data flow", dataflow.check_dataflow), ("versions", versions.check_versions)),
    (("memory", memory.check_memory),),
)


@dataclass(frozen=True, slots=True)
class Proof:
    """That every check has passed, and how much was checked."""

    events: int  # in the plan
    entries: int  # events in the lists of all ranks together
    checks: tuple[str, ...]  # names of the checks, in order
    ages: tuple[generation.Age, ...] = ()  # of what is generated for training, where some of it is of an earlier step


@garbage_collection_paused()
def verify(plan: Plan) -> Proof:
    """Every check on `plan`. Raises Failure with all diagnostics of the first stage that finds any."""
    t = tables(plan)
    total, done = sum(map(len, STAGES)), 0
    for checks in STAGES:
        found: list[Diagnostic] = []
        for name, check in checks:
            stage(f"verifying {name}", done, total)
            found += check(t)
            done += 1
        if found:
            raise Failure(found)
    entries = sum(len(class_ranks(c, plan.header.world)) * len(c.events) for c in plan.classes)
    return Proof(len(t.events), entries, tuple(name for checks in STAGES for name, _ in checks),
                 generation.ages(t))
