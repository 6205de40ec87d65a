"""What a proof costs: by classes and ranges, not by ranks. Counted in calls of functions, which no busy machine
changes."""

from __future__ import annotations

import math
import sys
from types import FrameType

from benchmarks.verify import no_two_alike, ppo_70b
from rldsl.plan.model import Plan
from rldsl.verify import verify


def proof(plan: Plan) -> tuple[int, int]:
    """Entries of the plan, and the calls of functions (Python's and C's) of one proof."""
    calls = 0

    def count(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return verify(plan).entries, calls
    finally:
        sys.setprofile(before)


def test_a_hundred_thousand_entries_cost_about_two_calls_each() -> None:
    """1,024 ranks in 1,024 classes with 98 events."""
    entries, calls = proof(no_two_alike(1024))
    assert entries > 100_000 and calls < 3 * entries


def test_ten_times_the_ranks_cost_about_the_same() -> None:
    """PPO on a 70B model; at 4,096 ranks a proof has more than 100,000 entries."""
    (few, first), (many, last) = proof(ppo_70b(384)), proof(ppo_70b(4096))
    assert many > 9 * few and many > 100_000
    assert math.log(last / first) / math.log(many / few) < 0.25, (first, last)
