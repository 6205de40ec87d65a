"""What a proof costs: by classes and ranges, not by ranks. Counted in calls of functions, which no busy machine
changes."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.verify import no_two_alike, ppo_70b
from rldsl.plan.model import Plan
from rldsl.verify import verify
from tests.effort import calls


def proof(plan: Plan) -> tuple[int, int]:
    """Entries of the plan, and the calls of functions of one proof."""
    done: list[Any] = []
    count = calls(lambda: done.append(verify(plan)))
    return done[0].entries, count


def test_a_hundred_thousand_entries_cost_about_two_calls_each() -> None:
    """1,024 ranks in 1,024 classes with 98 events."""
    entries, calls = proof(no_two_alike(1024))
    assert entries > 100_000 and calls < 3 * entries


def test_ten_times_the_ranks_cost_about_the_same() -> None:
    """PPO on a 70B model; at 4,096 ranks a proof has more than 100,000 entries."""
    (few, first), (many, last) = proof(ppo_70b(384)), proof(ppo_70b(4096))
    assert many > 9 * few and many > 100_000
    assert math.log(last / first) / math.log(many / few) < 0.25, (first, last)
