"""How long a step takes under an assignment, without compiling it: what the simulator finds of the compiled plan.

In: a block for every call, entries with their seconds, moves of parameters. Out: seconds of a steady step. Jobs are
ordered as the compiler orders them (`passes/event_order.py`), then three steps are gone through on *atoms*, the
stretches of ranks that no block divides, and the last one counts, as in `simulate/simulate.py`; so what of a step can
run beside the one before does. All that is waited for stands earlier in the order, so one walk along it is enough; and
the order depends on blocks alone, so no call that takes longer makes a step shorter. """

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

ROUGH = {"": Compute.traits.order_cost} | {e.kind: e.traits.order_cost for e in (Generate, Infer, Train)}
STEPS = 3


@dataclass(frozen=True, slots=True)
class ScheduledItem:
    """Of the order: a job, or when `job` is -1 a moment at which ranks meet. on: atoms. after: the items that come
    before it, for the compiler. tells: the `generate` whose lengths are told then."""

    job: int
    on: tuple[int, ...]
    after: tuple[int, ...]
    cost: int
    rank: int
    tells: int = -1


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """What of an assignment depends on blocks alone. atoms: (start, stop). on: job -> its atoms. small: job -> seconds
    of what it does besides its work. told: `generate` -> seconds of telling its lengths. fetch: seconds of reading
    data, at the top of a step."""

    atoms: tuple[tuple[int, int], ...]
    order: tuple[ScheduledItem, ...]
    on: tuple[tuple[int, ...], ...]
    small: tuple[float, ...]
    told: Mapping[int, float]
    fetch: float

    @property
    def jobs(self) -> tuple[int, ...]:
        """In order."""
        return tuple(i.job for i in self.order if i.job >= 0)


On = tuple[tuple[int, ...], ...]  # job -> its atoms
Orders = dict[tuple[On, bool], tuple[ScheduledItem, ...]]  # known already; whether the first atom begins with rank 0


def schedule_step(problem: Problem, overheads: Overheads, blocks: Sequence[Block], orders: Orders) -> StepSchedule:
    """blocks: of every job; a computation's is that of its lead."""
    ends = sorted({e for b in blocks for e in b})
    atoms = [(a, b) for a, b in pairwise(ends) if any(x.start <= a and b <= x.stop for x in blocks)]
    on = tuple([tuple([i for i, (a, z) in enumerate(atoms) if b.start <= a and z <= b.stop]) for b in blocks])
    small = tuple([overheads.job(j, blocks[j.number].size) for j in problem.jobs])
    key = on, atoms[0][0] == 0
    if key not in orders:
        items = _step_items(problem, *key)
        tasks = [Task(item.on, item.after, item.cost, item.rank) for item in items]
        orders[key] = tuple(items[i] for i in list_schedule(tasks))
    told = {item.tells: overheads.lengths(problem.jobs[item.tells], sum([atoms[a][1] - atoms[a][0] for a in item.on]))
            for item in orders[key] if item.tells >= 0}
    return StepSchedule(tuple(atoms), orders[key], on, small, told, overheads.fetch)


def _step_items(problem: Problem, on: On, from_zero: bool) -> list[ScheduledItem]:
    """Jobs in program order; behind a `generate` the telling of lengths, to all that work on its rows; at the end the
    metrics, from the first rank of each mesh to rank 0."""
    items: list[ScheduledItem] = []
    place: dict[int, int] = {}
    for j in problem.jobs:
        place[j.number] = len(items)
        before = tuple(place[b] for b in problem.before[j.number])
        items.append(ScheduledItem(j.number, on[j.number], before, ROUGH[j.kind], 1))
        if j.kind == "generate":
            there = sorted({a for o in problem.told[j.number] for a in on[o]})
            items.append(ScheduledItem(-1, tuple(there), (place[j.number],), 1, 0, j.number))
    told = [j for j in problem.jobs if j.number in problem.logged]
    firsts = sorted({on[j.number][0] for j in told} | ({0} if from_zero else set()))
    if told:
        items.append(ScheduledItem(-1, tuple(firsts), tuple(place[j.number] for j in told), 1, 3))
    return items


def step_seconds(problem: Problem, s: StepSchedule, seconds: Sequence[float], units: Sequence[int],
         moves: Mapping[int, tuple[ReshardCost, int]], away: Mapping[int, float]) -> float:
    """seconds: of every job. units: ranks of each that wait for each other; 0: all. moves: job whose copy is brought up
    to date at the top of the step -> how, and the train call that it comes from. away: of a job, until what is
    offloaded is there, from the call before on."""
    free = [0.0] * len(s.atoms)
    jobs, on, small = problem.jobs, s.on, s.small
    ends: list[float] = [0.0]
    sizes = [stop - start for start, stop in s.atoms]
    apart = [bool(u) and min([sizes[a] for a in on[n]]) >= u for n, u in enumerate(units)]
    for _ in range(STEPS):
        came: dict[int, float] = {}
        done: dict[int, float] = {}
        for n, (move, home) in moves.items():
            for a in on[home]:
                free[a] += move.before
            came[n] = max(free[a] for a in (*on[home], *on[n])) + move.seconds
        free = [f + s.fetch for f in free]
        for item in s.order:
            n, mine = item.job, item.on
            if n < 0:
                together = max([free[a] for a in mine]) + s.told.get(item.tells, 0.0)
                for a in mine:
                    free[a] = together
                continue
            start, took = 0.0, seconds[n] + small[n]
            for b in jobs[n].after:
                if done[b] > start:
                    start = done[b]
            if n in moves:
                start, took = max(start, came[n]), took + moves[n][0].after
            if n in away:
                start = max(start, max([free[a] for a in mine]) + away[n])
            if apart[n]:
                last = 0.0
                for a in mine:
                    free[a] = max(start, free[a]) + took
                    last = max(last, free[a])
            else:
                last = max(start, max([free[a] for a in mine])) + took
                for a in mine:
                    free[a] = last
            done[n] = last
        ends.append(max(free))
    return ends[-1] - ends[-2]
