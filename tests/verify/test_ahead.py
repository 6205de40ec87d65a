"""Every other number of steps by which one event could run ahead: the verifier refuses what no rank could execute, and
what would train on other responses than the program says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rldsl.plan.events import EVERY_ITERATION, Event, Loop, When
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from tests.verify.faults import faults
from tests.verify.mutate import edited
from tests.verify.plans import compiled
from tests.verify.stepper import simulate


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(what was changed, the plan): one event, the first turn, or the lag of the header."""
    for event, _ in event_paths(plan):
        for ahead in {EVERY_ITERATION, 0, 1, 2, 3} - {event.ahead}:
            def edit(x: object, event: Event = event, ahead: int = ahead) -> tuple[Event, ...] | None:
                return (replace(event, ahead=ahead),) if x is event else None
            yield f"{event.display_name} {event.id}: {event.ahead} -> {ahead}", replace(plan, body=edited(plan.body, edit))
    for first in (-3, -2, 0, 1, 2):
        body = tuple(replace(x, first=first) if isinstance(x, Loop) else x for x in plan.body)
        yield f"first turn {first}", replace(plan, body=body)
    for block in {id(b): b for _, path in event_paths(plan) for b in path if isinstance(b, When)}.values():
        for aheads in {(), (0,), (0, 1), (1,), (0, 2), (0, 1, 2)} - {block.aheads}:
            def other(x: object, block: When = block, aheads: tuple[int, ...] = aheads) -> tuple[When, ...] | None:
                return (replace(block, aheads=aheads),) if x is block else None
            yield f"{block.head}: {block.aheads} -> {aheads}", replace(plan, body=edited(plan.body, other))
    for lag in (-1, 0, 1, 3):
        yield f"lag {lag}", replace(plan, header=replace(plan.header, lag=lag))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lag", "ahead"])
def test_no_event_may_run_earlier_or_later(name: str) -> None:
    """A change that leaves the meaning as it is may be accepted: a reward may be computed a turn later."""
    plan = compiled()[name]
    meaning = simulate(plan, random.Random(0)).meaning
    verdicts: Counter[tuple[str, bool]] = Counter()
    holes = []
    for told, mutant in mutants(plan):
        refused, found = bool(faults(mutant)), simulate(mutant, random.Random(1))
        kind = "harmful" if not found.ends else "same" if found.meaning == meaning else "other"
        verdicts[kind, refused] += 1
        if not refused and kind != "same":
            holes.append(f"{told}: {found.why or 'other numbers'}")
    assert not holes, holes
    assert verdicts["harmful", True] > 50 and verdicts["other", True] > 5, verdicts
