"""The time of a step under an assignment, without compiling it: an estimate of what the simulator computes.

In: a block for every call, the seconds of every job, the reshards of parameters. Out: seconds of a step in the steady
state. Jobs are ordered as the compiler orders them (`passes/event_order.py`). Three steps, and as many as the lag, are
then played on *atoms*, the ranges of ranks that no block divides, and the last one counts, as in
`simulate/simulate.py`; so work of one step may overlap with the step before. Everything that a job waits for comes
earlier in the order, so one pass over it is enough; and the order depends on the blocks alone, so a call that takes
longer never makes a step shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.plan.events import Compute, Generate, Infer, Train
from rldsl.search.overheads import Overheads
from rldsl.search.problem import Problem
from rldsl.search.reshard_costs import ReshardCost
from rldsl.search.space import Block

ORDER_COST = {"": Compute.traits.order_cost} | {e.kind: e.traits.order_cost for e in (Generate, Infer, Train)}
NUM_STEPS = 3


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """A job, or a point at which ranks wait for each other, in the order of a step."""

    job: int  # its number; -1: an exchange of lengths, or the metrics
    atoms: tuple[int, ...]  # that take part
    predecessors: tuple[int, ...]  # items that the list scheduler puts before it
    cost: int  # `Traits.order_cost`
    priority: int  # as `Task.priority`: the smaller goes first
    lengths_of: int = -1  # the `generate` whose lengths are exchanged here; -1: none


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """The part of an assignment's evaluation that depends on its blocks alone."""

    atoms: tuple[tuple[int, int], ...]  # ranks (start, stop)
    order: tuple[ScheduledItem, ...]  # in which items start
    job_atoms: tuple[tuple[int, ...], ...]  # by job number
    ahead: tuple[int, ...]  # by job number: steps by which it runs ahead of the step (`lag`)
    overhead_seconds: tuple[float, ...]  # by job number, besides the work of the job
    length_exchange_seconds: Mapping[int, float]  # `generate` -> seconds of exchanging the lengths of its rows
    fetch_seconds: float  # reading data, at the start of a step
    # What is played of `order`, in order: (job number, or -1 for an exchange of lengths; its atoms; seconds of the
    # exchange; the jobs that the job waits for, and how many turns later than its own they work for its step).
    played: tuple[tuple[int, tuple[int, ...], float, tuple[tuple[int, int], ...]], ...]

    @property
    def jobs(self) -> tuple[int, ...]:
        """Their numbers, in order."""
        return tuple(i.job for i in self.order if i.job >= 0)


JobAtoms = tuple[tuple[int, ...], ...]  # by job number
# A cache. Key: (job atoms, whether the first atom begins with rank 0).
Orders = dict[tuple[JobAtoms, bool], tuple[ScheduledItem, ...]]


def schedule_step(problem: Problem, overheads: Overheads, blocks: Sequence[Block], orders: Orders) -> StepSchedule:
    """blocks: by job number; a computation has the block of the call that it is placed with."""
    ends = sorted({e for b in blocks for e in b})
    atoms = [(a, b) for a, b in pairwise(ends) if any(x.start <= a and b <= x.stop for x in blocks)]
    job_atoms = tuple([tuple([i for i, (a, z) in enumerate(atoms) if b.start <= a and z <= b.stop]) for b in blocks])
    overhead = tuple([overheads.job_seconds(j, blocks[j.number].size) for j in problem.jobs])
    ahead = problem.steps_ahead([frozenset(x) for x in job_atoms]) if problem.graph.lag else (0,) * len(blocks)
    key = job_atoms, atoms[0][0] == 0
    if key not in orders:
        items = _step_items(problem, *key, ahead)
        tasks = [Task(item.atoms, item.predecessors, item.cost, item.priority) for item in items]
        orders[key] = tuple(items[i] for i in list_schedule(tasks))
    exchanges = {}
    for item in orders[key]:
        if item.lengths_of >= 0:
            ranks = sum([atoms[a][1] - atoms[a][0] for a in item.atoms])
            exchanges[item.lengths_of] = overheads.length_exchange_seconds(problem.jobs[item.lengths_of], ranks)
    played = tuple([
        (n, item.atoms, 0.0 if n >= 0 else exchanges[item.lengths_of],
         tuple([(b, ahead[n] - ahead[b]) for b in problem.jobs[n].depends_on]) if n >= 0 else ())
        for item in orders[key] for n in [item.job] if n >= 0 or item.lengths_of >= 0])  # metrics go without waiting
    return StepSchedule(tuple(atoms), orders[key], job_atoms, ahead, overhead, exchanges, overheads.fetch_seconds,
                        played)


def _step_items(problem: Problem, job_atoms: JobAtoms, from_zero: bool, ahead: Sequence[int]) -> list[ScheduledItem]:
    """Jobs in program order; after each `generate` the exchange of lengths among all jobs that work on its rows, or,
    where it runs ahead, before everything else among those of its step; at the end the metrics, from the first rank of
    each mesh to rank 0. A job of another step is no predecessor."""
    items: list[ScheduledItem] = []
    position: dict[int, int] = {}  # job number -> index in `items`
    for j in problem.jobs:
        if j.kind == "generate" and ahead[j.number]:
            atoms = sorted({a for o in problem.length_readers[j.number] for a in job_atoms[o]})
            items.append(ScheduledItem(-1, tuple(atoms), (), 1, 0, j.number))
    for j in problem.jobs:
        position[j.number] = len(items)
        predecessors = tuple(position[b] for b in problem.predecessors[j.number] if ahead[b] == ahead[j.number])
        items.append(ScheduledItem(j.number, job_atoms[j.number], predecessors, ORDER_COST[j.kind], 1))
        if j.kind == "generate" and not ahead[j.number]:
            atoms = sorted({a for o in problem.length_readers[j.number] for a in job_atoms[o]})
            items.append(ScheduledItem(-1, tuple(atoms), (position[j.number],), 1, 0, j.number))
    logged = [j for j in problem.jobs if j.number in problem.logged_jobs]
    firsts = sorted({job_atoms[j.number][0] for j in logged} | ({0} if from_zero else set()))
    if logged:
        items.append(ScheduledItem(-1, tuple(firsts), tuple(position[j.number] for j in logged), 1, 3))
    return items


def step_seconds(problem: Problem, s: StepSchedule, seconds: Sequence[float], sync_ranks: Sequence[int],
                 reshards: Mapping[int, tuple[ReshardCost, int]], onloads: Mapping[int, float]) -> float:
    """seconds: of every job. sync_ranks: how many ranks of each job wait for each other; 0: all. reshards: the job
    whose copy is updated at the start of the step -> (its cost, the train call that it comes from). onloads: a job ->
    seconds of its onload, which begins when the ranks are done with the job before."""
    free = [0.0] * len(s.atoms)  # the time until which each atom is busy
    job_atoms, overhead = s.job_atoms, s.overhead_seconds
    ends: list[float] = [0.0]
    sizes = [stop - start for start, stop in s.atoms]
    independent = [bool(u) and min([sizes[a] for a in job_atoms[n]]) >= u for n, u in enumerate(sync_ranks)]
    turns: list[dict[int, float]] = []  # when each job was done, by turn of the step loop
    for turn in range(NUM_STEPS + problem.graph.lag):
        arrived: dict[int, float] = {}  # job -> when its copy is there
        done: dict[int, float] = {}
        turns.append(done)
        for n, (cost, train) in reshards.items():
            for a in job_atoms[train]:
                free[a] += cost.pack_seconds
            arrived[n] = max([free[a] for a in (*job_atoms[train], *job_atoms[n])]) + cost.transfer_seconds
        free = [f + s.fetch_seconds for f in free]
        for n, mine, exchange, waits in s.played:
            if n < 0:
                met = max([free[a] for a in mine]) + exchange
                for a in mine:
                    free[a] = met
                continue
            start, took = 0.0, seconds[n] + overhead[n]
            for b, later in waits:
                then = turn + later  # the turn in which the other job worked for this step
                if then >= 0 and turns[then][b] > start:
                    start = turns[then][b]
            if n in reshards:
                start, took = max(start, arrived[n]), took + reshards[n][0].unpack_seconds
            if n in onloads:
                start = max(start, max([free[a] for a in mine]) + onloads[n])
            if independent[n]:
                last = 0.0
                for a in mine:
                    free[a] = max(start, free[a]) + took
                    last = max(last, free[a])
            else:
                last = (free[mine[0]] if len(mine) == 1 else max([free[a] for a in mine]))
                last = (last if last > start else start) + took
                for a in mine:
                    free[a] = last
            done[n] = last
        ends.append(max(free))
    return ends[-1] - ends[-2]
