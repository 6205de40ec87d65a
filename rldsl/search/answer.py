"""The whole of a search: from a prepared program to a placement that compiles, or to the cluster that it would take.

In: a program, a cluster, options. Out: an `Answer`. Errors: RL0402 where no placement of the space fits a device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from rldsl.clusters import Cluster
from rldsl.diag import Failure, fail
from rldsl.plan.notation import human
from rldsl.search.branch import GAP, MOST, Result, search
from rldsl.search.exact import Proved, proved
from rldsl.search.greedy import heuristic
from rldsl.search.instance import Instance, Judged
from rldsl.search.prepare import Prepared
from rldsl.search.problem import Problem, problem
from rldsl.simulate import Lengths
from rldsl.verify import verify

FEW = 3  # of the best are compiled, and compared by what the simulator says
TRIES = 4  # with more and more of a device kept free, where the estimate was too low
LARGEST = 1 << 11  # nodes
Mode = Literal["heuristic", "search"]


@dataclass(frozen=True, slots=True)
class Options:
    """gap: that is good enough. most: parts of the space. going: asked now and then whether to go on."""

    mode: Mode = "search"
    gap: float = GAP
    most: int = MOST
    lengths: Lengths = Lengths()
    going: Callable[[Result], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Answer:
    """best: the placements that were compiled, the fastest first. bound: seconds that no placement of the space is
    faster than; 0 for what was not searched for."""

    problem: Problem
    instance: Instance
    result: Result
    best: tuple[Proved, ...]

    @property
    def bound(self) -> float:
        return min(self.result.bound, self.best[0].seconds)

    @property
    def gap(self) -> float:
        return self.best[0].seconds / self.bound - 1 if self.bound else 0.0


def find(p: Prepared, cluster: Cluster, memory: int, options: Options = Options()) -> Answer:
    """memory: bytes of a device; 0: not known."""
    asked = problem(p.placed, cluster, options.lengths, memory, p.fixed)
    reserve = memory // 100
    for _ in range(TRIES):
        instance, result = searched(asked, reserve, options)
        if not result.best:
            raise too_small(asked, cluster)
        best, over = _compiled(p, instance, result, cluster, options.lengths)
        if best:
            return Answer(asked, instance, result, tuple(sorted(best, key=lambda b: b.seconds)))
        reserve += over + memory // 200
    raise too_small(asked, cluster)


def searched(asked: Problem, reserve: int, options: Options) -> tuple[Instance, Result]:
    """Offload is tried where nothing fits without."""
    with _uncollected():
        return _searched(asked, reserve, options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing of a search refers to itself, so a collection of garbage finds nothing, and goes through all that torch
    has: a fifth of the time."""
    there = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if there:
            gc.enable()


def _searched(asked: Problem, reserve: int, options: Options) -> tuple[Instance, Result]:
    for offload in (False, True):
        instance = Instance(asked, reserve, offload)
        if options.mode == "heuristic":
            found = heuristic(instance)
            result = Result((found,) if found else (), 0.0, 0, False)
        else:
            result = search(instance, options.gap, options.most, options.going)
        if result.best or not asked.memory:
            break
    return instance, result


def _compiled(p: Prepared, instance: Instance, result: Result, cluster: Cluster,
              lengths: Lengths) -> tuple[list[Proved], int]:
    """The best that fit, verified, and by how many bytes others did not."""
    found: list[Proved] = []
    over = 0
    for judged in different(result.best):
        one = proved(p, instance, judged, cluster, lengths)
        if p.placed.memory and one.bytes > p.placed.memory:
            over = max(over, one.bytes - p.placed.memory)
            continue
        verify(one.plan)
        found.append(one)
        if len(found) == FEW:
            break
    return found, over


def different(best: tuple[Judged, ...]) -> tuple[Judged, ...]:
    """The fastest of those that the estimate cannot tell apart by more than a part in ten thousand, and all others."""
    return tuple(j for k, j in enumerate(best) if not k or j.seconds > best[k - 1].seconds * 1.0001)


def too_small(asked: Problem, cluster: Cluster) -> Failure:
    """With the smallest number of equal nodes on which something fits, or what to do where none does."""
    many = f"{asked.cluster.world} device{'s' * (asked.cluster.world > 1)} of {human(asked.memory)}"
    span = asked.graph.cluster.span if asked.graph.cluster else None
    help = "use larger devices or shorter sequences"
    if asked.fixed and room(asked, asked.cluster.nodes):
        names = dict.fromkeys(j.name for j in asked.calls if j.number in asked.fixed)
        help = f"a placement exists if the search may also place {', '.join(names)}"
    elif nodes := smallest(asked):
        help = f"the smallest cluster that fits: {nodes} nodes of this type, {nodes * cluster.gpus} devices"
    if span is not None:
        return fail("RL0402", f"no placement fits {many}", span, "every placement needs more memory", help=help)
    return fail("RL0402", f"no placement fits {many}", place=cluster.name, help=help)


def room(asked: Problem, nodes: int) -> bool:
    """Whether something fits so many nodes, where the program says nothing of its calls."""
    there = replace(asked, cluster=replace(asked.cluster, nodes=nodes), fixed={})
    return heuristic(Instance(there, asked.memory // 100, offload=True)) is not None


def smallest(asked: Problem) -> int:
    """How many nodes something fits on, more than there are and at most `LARGEST`; 0: on none."""
    low, high = asked.cluster.nodes, 2 * asked.cluster.nodes
    while not room(asked, high):
        low, high = high, 2 * high
        if high > LARGEST:
            return 0
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if room(asked, middle) else (middle, high)
    return high
