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
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.plan.events import Compute, Generate, Infer, Train
from rldsl.search.overheads import Overheads
from rldsl.search.problem import Problem
from rldsl.search.reshard_costs import ReshardCost
from rldsl.search.space import Block

ORDER_COST = {"": Compute.traits.order_cost} | {e.kind: e.traits.order_cost for e in (Generate, Infer, Train)}
NUM_STEPS = 3


class StepItem(NamedTuple):
    """A job, or a point at which ranks wait for each other, wherever its ranks are."""

    job: int  # its number; -1: an exchange of lengths, or the metrics
    jobs: tuple[int, ...]  # whose ranks take part: of the metrics, which are the last item, the first of each
    predecessors: tuple[int, ...]  # items that the list scheduler puts before it
    cost: int  # `Traits.order_cost`
    priority: int  # as `Task.priority`: the smaller goes first
    lengths_of: int = -1  # the `generate` whose lengths are exchanged here; -1: none


class PlayedItem(NamedTuple):
    """A job or an exchange of lengths, in the order of a step."""

    job: int  # its number; -1: an exchange of lengths
    atoms: tuple[int, ...]  # that take part
    exchange_seconds: float  # of an exchange
    waits: tuple[tuple[int, int], ...]  # jobs that a job waits for, and how many turns later they work for its step


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """The part of an assignment's evaluation that depends on its blocks alone."""

    atoms: tuple[tuple[int, int], ...]  # ranks (start, stop)
    jobs: tuple[int, ...]  # numbers of the jobs, in the order in which they start
    job_atoms: tuple[tuple[int, ...], ...]  # by job number
    overhead_seconds: tuple[float, ...]  # by job number, besides the work of the job
    fetch_seconds: float  # reading data, at the start of a step
    played: tuple[PlayedItem, ...]  # in the order in which they start; metrics go without waiting


@dataclass(frozen=True, slots=True)
class StepItems:
    """The items of a step whose jobs run ahead by certain steps, and what each job waits for, as a `PlayedItem`."""

    items: tuple[StepItem, ...]  # in program order
    waits: tuple[tuple[tuple[int, int], ...], ...]  # by job number


JobAtoms = tuple[tuple[int, ...], ...]  # by job number


@dataclass(frozen=True, slots=True)
class Orders:
    """What schedules of one problem have in common; caches."""

    items: dict[tuple[int, ...], StepItems] = field(default_factory=dict)  # by the steps by which each job runs ahead
    # (job atoms, whether the first atom begins with rank 0) -> the items in their order, each with its atoms
    orders: dict[tuple[JobAtoms, bool], tuple[tuple[StepItem, tuple[int, ...]], ...]] = field(default_factory=dict)


def schedule_step(problem: Problem, overheads: Overheads, blocks: Sequence[Block], known: Orders) -> StepSchedule:
    """blocks: by job number; a computation has the block of the call that it is placed with."""
    ends = sorted({e for b in blocks for e in b})
    atoms = [(a, b) for a, b in pairwise(ends) if any(x[0] <= a and b <= x[1] for x in blocks)]
    atoms_of = {b: tuple([i for i, (a, z) in enumerate(atoms) if b[0] <= a and z <= b[1]]) for b in set(blocks)}
    job_atoms = tuple([atoms_of[b] for b in blocks])
    overhead = tuple([overheads.job_seconds(j, b[1] - b[0]) for j, b in zip(problem.jobs, blocks, strict=True)])
    ahead = problem.steps_ahead([frozenset(x) for x in job_atoms]) if problem.graph.lag else (0,) * len(blocks)
    if ahead not in known.items:
        known.items[ahead] = _step_items(problem, ahead)
    items, waits = known.items[ahead].items, known.items[ahead].waits
    key = job_atoms, atoms[0][0] == 0
    if key not in known.orders:
        where = [_item_atoms(item, job_atoms, atoms[0][0] == 0) for item in items]
        known.orders[key] = tuple((items[i], where[i]) for i in list_schedule(
            [Task(x, item.predecessors, item.cost, item.priority) for x, item in zip(where, items, strict=True)]))
    jobs: list[int] = []
    played: list[PlayedItem] = []
    for item, own in known.orders[key]:
        if item.job >= 0:
            jobs.append(item.job)
            played.append(PlayedItem(item.job, own, 0.0, waits[item.job]))
        elif item.lengths_of >= 0:
            ranks = sum([atoms[a][1] - atoms[a][0] for a in own])
            seconds = overheads.length_exchange_seconds(problem.jobs[item.lengths_of], ranks)
            played.append(PlayedItem(-1, own, seconds, ()))
    return StepSchedule(tuple(atoms), tuple(jobs), job_atoms, overhead, overheads.fetch_seconds, tuple(played))


def _item_atoms(item: StepItem, job_atoms: JobAtoms, from_zero: bool) -> tuple[int, ...]:
    if item.job >= 0:
        return job_atoms[item.job]
    if item.lengths_of >= 0:
        return tuple(sorted(set().union(*[job_atoms[o] for o in item.jobs])))
    return tuple(sorted({job_atoms[o][0] for o in item.jobs} | ({0} if from_zero else set())))


def _step_items(problem: Problem, ahead: tuple[int, ...]) -> StepItems:
    """Jobs in program order; after each `generate` the exchange of lengths among all jobs that work on its rows, or,
    where it runs ahead, before everything else among those of its step; at the end the metrics, from the first rank of
    each mesh to rank 0. A job of another step is no predecessor."""
    items: list[StepItem] = []
    position: dict[int, int] = {}  # job number -> index in `items`
    for j in problem.jobs:
        if j.kind == "generate" and ahead[j.number]:
            items.append(StepItem(-1, problem.length_readers[j.number], (), 1, 0, j.number))
    for j in problem.jobs:
        position[j.number] = len(items)
        predecessors = tuple(position[b] for b in problem.predecessors[j.number] if ahead[b] == ahead[j.number])
        items.append(StepItem(j.number, (j.number,), predecessors, ORDER_COST[j.kind], 1))
        if j.kind == "generate" and not ahead[j.number]:
            items.append(StepItem(-1, problem.length_readers[j.number], (position[j.number],), 1, 0, j.number))
    logged = tuple(j.number for j in problem.jobs if j.number in problem.logged_jobs)
    if logged:
        items.append(StepItem(-1, logged, tuple(position[n] for n in logged), 1, 3))
    return StepItems(tuple(items), tuple(tuple((b, ahead[j.number] - ahead[b]) for b in j.depends_on)
                                         for j in problem.jobs))


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
    played = [(n, mine, exchange, waits) if n < 0 else
              (n, mine, seconds[n] + overhead[n] + (reshards[n][0].unpack_seconds if n in reshards else 0.0), waits)
              for n, mine, exchange, waits in s.played]
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
        for n, mine, took, waits in played:
            if n < 0:
                met = max([free[a] for a in mine]) + took
                for a in mine:
                    free[a] = met
                continue
            start = arrived.get(n, 0.0)
            for b, later in waits:
                then = turn + later  # the turn in which the other job worked for this step
                if then >= 0 and turns[then][b] > start:
                    start = turns[then][b]
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
