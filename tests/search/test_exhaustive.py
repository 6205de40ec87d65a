"""On what is small enough to enumerate, the search finds the best there is, and proves it."""

from __future__ import annotations

import random
from math import inf

import pytest

from rldsl.search.branch_and_bound import BranchAndBound, branch_and_bound
from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.problem import Job
from rldsl.simulate import Lengths
from tests.samples import thorough_between
from tests.search.brute import assignments, best
from tests.search.programs import cluster, instance

# (program, model, nodes, devices, GB, entries of each call on each block)
SMALL = [(name, size, nodes, gpus, memory, few) for name, few, shapes in (
    ("ppo", 1, ((1, 2), (2, 1))), ("grpo", 2, ((1, 2), (2, 1))), ("remax", 1, ((1, 2), (3, 1))),
    ("dpo", 3, ((1, 2), (1, 3), (2, 1), (3, 1))), ("ppo lag=1", 1, ((1, 2),)), ("grpo lag=2", 2, ((1, 2), (2, 1))))
    for nodes, gpus in shapes for size in ("0.5B", "1B") for memory in (14, 24, 80)]


def few_entries(i: Evaluator, few: int, seed: int) -> Evaluator:
    """The same with few entries: some of the fastest, some of the leanest, so that memory matters."""
    draw, entries = random.Random(seed), i.table.candidates
    known: dict[tuple[int, int], tuple[Candidate, ...]] = {}

    def some(job: Job, size: int) -> tuple[Candidate, ...]:
        if (job.number, size) not in known:
            every = entries(job, size)
            lean = sorted(every, key=lambda e: (e.resident_bytes + e.active_bytes, e.strategy))
            picked = {*every[: few - few // 2], *lean[: few // 2], *draw.sample(every, min(1, len(every)))}
            known[job.number, size] = tuple(sorted(picked, key=lambda e: (e.seconds, e.strategy))[:few])
        return known[job.number, size]

    i.table.candidates = some  # type: ignore[method-assign]
    return i


def test_there_are_enough() -> None:
    assert len(SMALL) >= 50 and {x[0] for x in SMALL} >= {"ppo", "grpo", "remax", "dpo"}


@pytest.mark.parametrize("name, size, nodes, gpus, memory, few", thorough_between(SMALL))
def test_the_gap_is_nothing(name: str, size: str, nodes: int, gpus: int, memory: int, few: int) -> None:
    draw = random.Random(f"{name}{size}{nodes}{gpus}{memory}")
    lengths = Lengths(0.0, draw.choice((0.0, 128.0, 300.0)))
    machines = cluster(nodes, gpus, memory, network_gb_s=draw.choice((5.0, 50.0)))
    i = few_entries(instance(name, size, machines, lengths, batch=draw.choice((16, 64, 256))), few, 0)
    found, known = branch_and_bound(i, gap=0.0, max_nodes=10**6), best(i, few)
    assert found.complete
    if known == inf:
        assert not found.best
        return
    assert found.best[0].seconds == pytest.approx(known, rel=1e-9)
    assert found.bound == pytest.approx(known, rel=1e-9), "the bound reaches what is found"


@pytest.mark.parametrize("name, few", [("ppo", 1), ("grpo", 2), ("dpo", 3), ("ppo lag=1", 1), ("grpo lag=2", 2)])
def test_no_assignment_is_below_a_bound(name: str, few: int) -> None:
    """Of every part of the space that an assignment lies in."""
    i = few_entries(instance(name, "1B", cluster(1, 2), batch=64), few, 1)
    draw = random.Random(0)
    for a in draw.sample(list(assignments(i, few)), 60):
        judged = i.evaluate(a)
        for k in range(len(a.blocks) + 1):
            placed = dict(enumerate(a.blocks[:k]))
            assert i.bound.step_seconds(placed) <= judged.seconds * (1 + 1e-9)
            assert i.bound.peak_bytes(placed) <= judged.bytes


def test_what_is_looked_at_least_is_still_bounded() -> None:
    i = instance("ppo", "1B", cluster(2, 4))
    short, long = branch_and_bound(i, max_nodes=1), branch_and_bound(i, gap=0.0, max_nodes=3000)
    assert not short.complete
    assert short.bound <= long.best[0].seconds <= short.best[0].seconds
    assert short.bound <= long.bound * (1 + 1e-9)


@pytest.mark.parametrize("name, nodes, gap", [("ppo", 1, 0.5), ("ppo", 2, 0.05), ("grpo", 1, 0.3), ("dpo", 2, 0.3)])
def test_a_search_that_ends_early_has_no_faster_neighbor(name: str, nodes: int, gap: float) -> None:
    """Or the report would list a change of one call that makes the step shorter."""
    i = instance(name, "1B", cluster(nodes, 4), Lengths(0.0, 200.0))
    found = branch_and_bound(i, gap=gap)
    now = found.best[0]
    assert not [j for j in every_neighbor(i, now.assignment) if j.seconds < now.seconds]
    assert found.bound <= now.seconds


def every_neighbor(i: Evaluator, a: Assignment) -> list[Evaluation]:
    """Those that fit, evaluated one by one."""
    found = [i.evaluate(n.assignment) for n in i.free_neighbors(a)]
    return [j for j in found if i.fits(j.bytes)]


@pytest.mark.parametrize("name, nodes, memory", thorough_between([("ppo", 1, 24), ("ppo", 2, 80), ("grpo", 2, 24), ("ppo lag=1", 2, 40)]))
def test_the_fastest_neighbor_is_found_without_planning_all_routes(name: str, nodes: int, memory: int) -> None:
    i = instance(name, "1B", cluster(nodes, 4, memory), Lengths(0.0, 200.0))
    draw, looked = random.Random(1), 0
    starts = [j for j in branch_and_bound(i, max_nodes=30).best if i.fits(j.bytes)]
    for now in draw.sample(starts, min(3, len(starts))):
        neighbors = list(i.free_neighbors(now.assignment))
        assert all(i.min_seconds(n.assignment) <= i.evaluate(n.assignment).seconds * (1 + 1e-9) for n in neighbors)
        every = every_neighbor(i, now.assignment)
        for limit in (inf, now.seconds, now.seconds * 0.9):
            wanted = min((j.seconds for j in every if j.seconds < limit), default=None)
            found = i.fastest_neighbor(neighbors, limit)
            assert (found[1].seconds if found else None) == wanted
            looked += found is not None
            if found is not None:  # and without that one, the next
                rest = [j.seconds for j in every if j.seconds < limit and j.assignment != found[1].assignment]
                second = i.fastest_neighbor(neighbors, limit, {found[1].assignment})
                assert (second[1].seconds if second else None) == min(rest, default=None)
    assert looked


@pytest.mark.parametrize("name", thorough_between(["ppo", "grpo", "remax", "grpo lag=2"]))
def test_a_copy_that_is_called_certain_is_there(name: str) -> None:
    """The bound of memory counts it, so an assignment without it must not exist."""
    i = instance(name, "1B", cluster(1, 4), batch=64)
    search, draw, certain = BranchAndBound(i, 0.0, 0, lambda _: True), random.Random(2), 0
    for a in [draw_assignment(i, draw) for _ in range(150)]:
        resolved = i.resolve_copies(a.blocks, a.candidates)
        reshards = i.reshards_of_copies(a.blocks, resolved)
        for c, e in enumerate(a.candidates):
            trained = search.train_index.get(i.calls[c].model)
            for chosen in ({}, {} if trained is None else {trained: a.candidates[trained]}):
                if search.memory.needs_copy(c, e, a.blocks, chosen):
                    certain += 1
                    own = i.calls[c].model, a.blocks[c], e.strategy.degrees
                    assert any((i.calls[k].model, a.blocks[k], resolved[k].strategy.degrees) == own for k in reshards)
                    assert resolved[c].copy_bytes == e.copy_bytes > 0
                    assert i.evaluate(a).bytes >= e.min_bytes + e.copy_bytes
    assert certain > 100


def draw_assignment(i: Evaluator, draw: random.Random) -> Assignment:
    blocks = [draw.choice(i.tree.all_blocks) for _ in i.calls]
    return Assignment(tuple(blocks), tuple(draw.choice(i.table.candidates(j, b.size))
                                           for j, b in zip(i.calls, blocks, strict=True)))


@pytest.mark.parametrize("memory", thorough_between([20, 28, 36]))
def test_the_gap_is_small_where_memory_is_short(memory: int) -> None:
    """Copies of trained models decide what fits: the bound counts them."""
    found = branch_and_bound(instance("ppo", "7B", cluster(2, 8, memory), Lengths(0.0, 300.0)))
    assert found.best and found.gap <= 0.02


def test_twice_the_same() -> None:
    first, second = (branch_and_bound(instance("grpo", "1B", cluster(2, 4))) for _ in range(2))
    assert first == second


def test_where_nothing_fits_nothing_is_found() -> None:
    found = branch_and_bound(instance("ppo", "7B", cluster(1, 2, 24)))
    assert found.best == () and found.bound == inf
