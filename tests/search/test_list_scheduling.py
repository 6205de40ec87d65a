"""The scheduler that the compiler's order of events and the search's estimate share."""

from __future__ import annotations

import pytest

from rldsl.passes import event_order
from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.search import step_time


def test_both_use_it() -> None:
    assert event_order.list_schedule is step_time.list_schedule is list_schedule


def test_what_can_start_first_comes_first() -> None:
    long, after_it, elsewhere = Task((0,), (), 10, 1), Task((0,), (0,), 1, 1), Task((1,), (), 5, 1)
    assert list_schedule([long, after_it, elsewhere]) == [0, 2, 1]


def test_at_equal_times_priority_then_program_order() -> None:
    assert list_schedule([Task((0,), (), 1, 1), Task((1,), (), 1, 0), Task((2,), (), 1, 1)]) == [1, 0, 2]


def test_a_task_waits_for_all_of_its_resources() -> None:
    assert list_schedule([Task((0,), (), 3, 1), Task((0, 1), (), 1, 1), Task((1,), (), 1, 1)]) == [0, 2, 1]


@pytest.mark.parametrize("tasks", [[Task((0,), (1,), 1, 1), Task((0,), (0,), 1, 1)], [Task((0,), (0,), 1, 1)]])
def test_tasks_that_wait_for_each_other_are_refused(tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        list_schedule(tasks)
