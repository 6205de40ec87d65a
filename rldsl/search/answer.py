"""The whole of a search: from a prepared program to a placement that compiles, or to the cluster that it would take.

In: a program, a cluster, options. Out: an `Answer`. Errors: RL0402 where no placement of the space fits a device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from rldsl.clusters import Cluster
from rldsl.diag import Failure, fail
from rldsl.plan.notation import human
from rldsl.progress import stage
from rldsl.search.branch_and_bound import GAP, MOST, Result, branch_and_bound
from rldsl.search.compiled_placements import CompiledPlacement, compile_assignment
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import greedy_evaluation
from rldsl.search.prepared_program import PreparedProgram
from rldsl.search.problem import Problem, build_problem
from rldsl.simulate import Lengths
from rldsl.verify import verify

FEW = 3  # of the best are compiled, and compared by what the simulator says
TRIES = 4  # with more and more of a device kept free, where the estimate was too low
NEIGHBORS = 8  # of the best, compiled where the evaluation says that they are faster
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
    """What a search found."""

    problem: Problem
    instance: Evaluator
    result: Result
    best: tuple[CompiledPlacement, ...]  # the placements that were compiled and simulated, the fastest first
    accepted_gap: float = GAP  # that was good enough
    refused: tuple[Assignment, ...] = ()  # need too much memory once compiled, though the evaluation says they fit

    @property
    def bound(self) -> float:
        """Seconds that no placement of the space is faster than; 0 for what was not searched for."""
        return min(self.result.bound, self.best[0].seconds)

    @property
    def outcomes(self) -> Mapping[Assignment, str]:
        """What became of assignments that the evaluation calls faster than the best."""
        return dict.fromkeys(self.refused, "needs too much memory once compiled") | {
            other.judged.assignment: "slower when simulated" for other in self.best[1:]}

    @property
    def gap(self) -> float:
        return self.best[0].seconds / self.bound - 1 if self.bound else 0.0


def find_placement(p: PreparedProgram, cluster: Cluster, memory: int, options: Options = Options()) -> Answer:
    """memory: bytes of a device; 0: not known."""
    asked = build_problem(p.placed, cluster, options.lengths, memory, p.fixed)
    reserve = memory // 100
    stage("searching placements")
    for _ in range(TRIES):
        instance, result = run_search(asked, reserve, options)
        if not result.best:
            raise nothing_fits_error(asked, cluster)
        best, over = _compile_best(p, instance, result, cluster, options.lengths)
        if best:
            more, refused = _compile_faster_neighbors(p, instance, best, cluster, options.lengths)
            best += more
            return Answer(asked, instance, result, tuple(sorted(best, key=lambda b: b.seconds)),
                          options.gap, tuple(refused))
        reserve += over + memory // 200
    raise nothing_fits_error(asked, cluster)


def run_search(asked: Problem, reserve: int, options: Options) -> tuple[Evaluator, Result]:
    """Offload is tried where nothing fits without."""
    with _garbage_collection_paused():
        return _search_with_offload(asked, reserve, options)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Nothing of a search refers to itself, so a collection of garbage finds nothing, and goes through all that torch
    has: a fifth of the time."""
    there = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if there:
            gc.enable()


def _search_with_offload(asked: Problem, reserve: int, options: Options) -> tuple[Evaluator, Result]:
    for offload in (False, True):
        instance = Evaluator(asked, reserve, offload)
        if options.mode == "heuristic":
            found = greedy_evaluation(instance)
            result = Result((found,) if found else (), 0.0, 0, False)
        else:
            result = branch_and_bound(instance, options.gap, options.most, _reporting(options.going))
        if result.best or not asked.memory:
            break
    return instance, result


def _reporting(going: Callable[[Result], bool]) -> Callable[[Result], bool]:
    """`going`, and the state of the search for whoever waits."""
    def report_and_ask(result: Result) -> bool:
        if result.best:
            stage("searching placements", detail=f"best {result.best[0].seconds:.4g} s, bound {result.bound:.4g} s, "
                                                 f"gap {result.gap:.2%}")
        return going(result)

    return report_and_ask


def _compile_best(p: PreparedProgram, instance: Evaluator, result: Result, cluster: Cluster,
              lengths: Lengths) -> tuple[list[CompiledPlacement], int]:
    """The best that fit, verified, and by how many bytes others did not."""
    found: list[CompiledPlacement] = []
    over = 0
    for judged in distinct_evaluations(result.best):
        stage("compiling the best placements", len(found), FEW)
        one = compile_assignment(p, instance, judged, cluster, lengths)
        if p.placed.memory and one.bytes > p.placed.memory:
            over = max(over, one.bytes - p.placed.memory)
            continue
        verify(one.plan)
        found.append(one)
        if len(found) == FEW:
            break
    return found, over


def _compile_faster_neighbors(p: PreparedProgram, instance: Evaluator, best: list[CompiledPlacement], cluster: Cluster,
                              lengths: Lengths) -> tuple[list[CompiledPlacement], list[Assignment]]:
    """The simulated best need not be the one that the evaluation calls fastest: those next to it that should be faster
    are simulated, too, so that the answer is faster than every neighbor that the report names. Returns these, and those that need too much memory once compiled."""
    more: list[CompiledPlacement] = []
    refused: list[Assignment] = []
    while len(more) + len(refused) < NEIGHBORS:
        now = min([*best, *more], key=lambda b: b.seconds).judged
        known = {one.judged.assignment for one in [*best, *more]} | {*refused}
        open_ = [j for j in instance.faster_neighbors(now.assignment, now.seconds) if j.assignment not in known]
        if not open_:
            break
        judged = min(open_, key=lambda j: j.seconds)
        one = compile_assignment(p, instance, judged, cluster, lengths)
        if p.placed.memory and one.bytes > p.placed.memory:
            refused.append(judged.assignment)
        else:
            verify(one.plan)
            more.append(one)
    return more, refused


def distinct_evaluations(best: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """The fastest of those that the estimate cannot tell apart by more than a part in ten thousand, and all others."""
    return tuple(j for k, j in enumerate(best) if not k or j.seconds > best[k - 1].seconds * 1.0001)


def nothing_fits_error(asked: Problem, cluster: Cluster) -> Failure:
    """With the smallest number of equal nodes on which something fits, or what to do where none does."""
    many = f"{asked.cluster.world} device{'s' * (asked.cluster.world > 1)} of {human(asked.memory)}"
    span = asked.graph.cluster.span if asked.graph.cluster else None
    help = "use larger devices or shorter sequences"
    if asked.fixed and fits_on_nodes(asked, asked.cluster.nodes):
        names = dict.fromkeys(j.name for j in asked.calls if j.number in asked.fixed)
        help = f"a placement exists if the search may also place {', '.join(names)}"
    elif nodes := smallest_num_nodes(asked):
        help = f"the smallest cluster that fits: {nodes} nodes of this type, {nodes * cluster.gpus} devices"
    if span is not None:
        return fail("RL0402", f"no placement fits {many}", span, "every placement needs more memory", help=help)
    return fail("RL0402", f"no placement fits {many}", place=cluster.name, help=help)


def fits_on_nodes(asked: Problem, nodes: int) -> bool:
    """Whether something fits so many nodes, where the program says nothing of its calls."""
    there = replace(asked, cluster=replace(asked.cluster, nodes=nodes), fixed={})
    return greedy_evaluation(Evaluator(there, asked.memory // 100, offload=True)) is not None


def smallest_num_nodes(asked: Problem) -> int:
    """How many nodes something fits on, more than there are and at most `LARGEST`; 0: on none."""
    low, high = asked.cluster.nodes, 2 * asked.cluster.nodes
    while not fits_on_nodes(asked, high):
        low, high = high, 2 * high
        if high > LARGEST:
            return 0
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits_on_nodes(asked, middle) else (middle, high)
    return high
