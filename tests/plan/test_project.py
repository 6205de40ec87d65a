"""What of a plan concerns one rank, and how a plan is shown."""

from __future__ import annotations

import pytest

from rldsl.diag import Failure
from rldsl.inspect.show import show
from rldsl.plan.events import When
from rldsl.plan.notation import human
from rldsl.plan.projection import class_of, event_paths, ranges, rank_classes, schedule, walk
from tests.plan.sample import grpo


def test_projection():
    plan = grpo()
    for rank in range(4):
        mine = [e.id for e, _ in walk(schedule(plan.body, plan.meshes, rank))]
        assert (
            mine
            == list(class_of(plan, rank).events)
            == [e.id for e, _ in event_paths(plan) if any(a <= rank < b for a, b in ranges(plan, e))]
        )
    assert [c.ranks for c in plan.classes] == [((0, 2),), ((2, 4),)]
    assert not any(isinstance(x, When) for x in schedule(plan.body, plan.meshes, 3)[-1].body)
    assert [c.ranks for c in rank_classes(plan.meshes, plan.body, 4, {0: 1, 3: 1})] == [
        ((0, 1),),
        ((1, 2),),
        ((2, 3),),
        ((3, 4),),
    ]
    with pytest.raises(Failure):
        class_of(plan, 4)


def test_show():
    plan = grpo()
    text = show(plan)
    assert "loop step x10 {" in text and "because gen reads actor on L2" in text and "grpo.rlf:9" in text
    assert "infer" not in show(plan, rank=0) and "infer" in show(plan, rank=2)
    assert "ranks         2-3, 2 of 4" in show(plan, event=8)
    assert [human(n) for n in (-1, 0, 1023, 1536, 3 << 30)] == ["?", "0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    for bad in ({"rank": 4}, {"event": 99}):
        with pytest.raises(Failure):
            show(plan, **bad)
