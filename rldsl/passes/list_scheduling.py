"""List scheduling (Graham 1969): the one scheduler of the compiler's order of events and of the search's estimate.

In: tasks with predecessors, the resources that each keeps busy, costs and priorities. Out: an order. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Task(NamedTuple):
    """What is to be ordered."""

    resources: Collection[int]  # that it keeps busy: ranks, or stretches of ranks
    after: Collection[int]  # the tasks that must come before it
    cost: int  # how long it takes
    priority: int  # at equal start times the lowest comes first, then program order


def list_schedule(tasks: Sequence[Task]) -> list[int]:
    """Indices of tasks in the order found: of the tasks whose predecessors are done, the one that can start first.

    Errors: ValueError if tasks wait for each other."""
    clock: dict[int, int] = defaultdict(int)  # resource -> when it is free
    inputs = [0] * len(tasks)  # when all predecessors are done
    missing = [len(task.after) for task in tasks]
    successors: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for earlier in task.after:
            successors[earlier].append(i)
    ready = [i for i, n in enumerate(missing) if not n]
    out: list[int] = []
    while ready:
        best, first = -1, 0
        for i in ready:
            task, start = tasks[i], inputs[i]
            for resource in task.resources:
                if clock[resource] > start:
                    start = clock[resource]
            if best < 0 or (start, task.priority, i) < (first, tasks[best].priority, best):
                best, first = i, start
        end = first + tasks[best].cost
        for resource in tasks[best].resources:
            clock[resource] = end
        ready.remove(best)
        for i in successors[best]:
            missing[i] -= 1
            inputs[i] = max(inputs[i], end)
            if not missing[i]:
                ready.append(i)
        out.append(best)
    if len(out) < len(tasks):
        raise ValueError("tasks wait for each other")
    return out
