"""Bounds that count what moves between a training and the calls that use its model: never above any assignment."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from rldsl.search.branch_and_bound import BranchAndBound, branch_and_bound
from rldsl.search.evaluator import Assignment, Evaluator
from rldsl.search.lower_bound import MAX_CHAINS, LowerBound, Moving
from rldsl.search.space import Block
from rldsl.simulate import Lengths
from tests.samples import thorough_between
from tests.search.programs import PROGRAMS, cluster, instance

SLOW = dict(network_gb_s=1.0)  # reshards decide


def draw(i: Evaluator, r: random.Random) -> Assignment:
    blocks = [r.choice(i.tree.all_blocks) for _ in i.calls]
    candidates = []
    for c, (j, b) in enumerate(zip(i.calls, blocks, strict=True)):
        first = i.problem.train_index.get(j.model, c) if j.kind == "train" else c
        blocks[c] = b = blocks[first]
        same = [e for e in i.table.candidates(j, b.size)
                if first == c or e.strategy.degrees == candidates[first].strategy.degrees]
        candidates.append(r.choice(same))
    return Assignment(tuple(blocks), tuple(candidates))


@pytest.mark.parametrize("name, nodes, gpus", thorough_between([("ppo", 2, 2), ("grpo", 3, 2), ("remax", 2, 2), ("ppo lag=1", 2, 2),
                                               ("grpo lag=2", 2, 4)]))
def test_no_assignment_is_below_the_bound_of_its_chosen_candidates(name: str, nodes: int, gpus: int) -> None:
    i = instance(name, "1B", cluster(nodes, gpus, 80, **SLOW), Lengths(0.0, 200.0), batch=64)
    search, r, moving = BranchAndBound(i, 0.0, 0, lambda _: True), random.Random(name), 0
    search.count_reshards()
    for a in [draw(i, r) for _ in range(180)]:
        blocks, every = tuple(a.blocks[c] for c in search.order), dict(enumerate(a.blocks))
        bounds = [i.bound.step_seconds(every), i.bound.step_seconds(every, moving=Moving())]
        assert bounds[0] <= bounds[1]
        for k in range(len(search.order) + 1):
            chosen = tuple(a.candidates[c] for c in search.order[:k])
            remaining = search.memory.remaining_bytes(a.blocks, search.chosen_by_call(chosen))
            bounds.append(search.relaxed_seconds(blocks, chosen, remaining))
            if search.plan_reshards(blocks, chosen):  # what is planned replaces a bound, and is one, too
                bounds.append(search.relaxed_seconds(blocks, chosen, remaining))
                moving += bounds[-1] > bounds[-2]
        judged = i.evaluate(a)
        assert max(bounds) <= judged.seconds * (1 + 1e-9) or not i.fits(judged.bytes)
    assert moving, "planned routes raise the bound"


@pytest.mark.parametrize("speed, longer", [(0.1, True), (0.5, False), (1.0, False)])
def test_calls_on_all_ranks_run_while_parameters_move(speed: float, longer: bool) -> None:
    """A critic's copy is on its way while generation and the actor's training use all ranks: their seconds are not
    added to those of what moves. longer: whether it takes longer than they do."""
    i = instance("ppo", "1B", cluster(2, 2, 80, network_gb_s=speed), Lengths(0.0, 200.0), batch=64)
    blocks = [i.tree.root] * len(i.calls)
    critic = {j.kind: c for c, j in enumerate(i.calls) if j.model == "critic"}
    blocks[critic["infer"]], blocks[critic["train"]] = Block(0, 1), Block(2, 4)
    a = Assignment(tuple(blocks), tuple(i.table.candidates(j, b.size)[0] for j, b in zip(i.calls, blocks, strict=True)))
    cost, train = i.reshards_of_copies(a.blocks, a.candidates)[critic["infer"]]
    both = sum(a.candidates[c].seconds for c in critic.values()) + cost.transfer_seconds + cost.unpack_seconds
    every, chosen = dict(enumerate(blocks)), dict(enumerate(a.candidates))
    plain, least, found = (i.bound.step_seconds(every, moving=moving) for moving in (
        None, Moving(chosen), Moving(chosen, {(critic["infer"], train): both})))
    assert plain <= least <= found <= i.evaluate(a).seconds and (found > plain) == longer


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_no_pair_takes_less_than_its_bound(name: str) -> None:
    i = instance(name, "1B", cluster(2, 4, 80, **SLOW), batch=64)
    (gen,) = [c for c, j in enumerate(i.calls) if j.kind == "generate"]
    train, more = i.problem.train_index["actor"], 0
    r = random.Random(3)
    for _ in range(60):
        src, dst = r.choice(i.tree.all_blocks), r.choice(i.tree.all_blocks)
        t, e = r.choice(i.table.candidates(i.calls[train], src.size)), r.choice(i.table.candidates(i.calls[gen],
                                                                                                 dst.size))
        alone = i.bound.call_seconds(train, src.size) + i.bound.call_seconds(gen, dst.size)
        every = i.reshard_bounds.pair_seconds(train, src, gen, dst)
        this = i.reshard_bounds.pair_seconds(train, src, gen, dst, e)
        both = i.reshard_bounds.seconds(train, src, t, gen, dst, e)
        cost = i.reshard_costs.cost("actor", src, t.strategy, dst, e.strategy)
        own = src == dst and t.strategy.degrees == e.strategy.degrees
        moved = 0.0 if own else cost.transfer_seconds + cost.unpack_seconds
        assert alone <= every <= this <= both <= (t.seconds + e.seconds + moved) * (1 + 1e-9)
        more += every > alone
    assert more, "a bound that is never above the two fastest candidates says nothing"


@pytest.mark.parametrize("name, memory", thorough_between([("ppo", 24), ("ppo", 36), ("grpo", 24)]))
def test_what_has_no_room_for_its_copy_fits_nowhere(name: str, memory: int) -> None:
    i = instance(name, "7B", cluster(2, 8, memory), Lengths(0.0, 300.0))
    r, dropped = random.Random(5), 0
    for c, job in enumerate(i.calls):
        for size in i.tree.sizes:
            kept = i.table.candidates(job, size)
            for e in (e for e in i.table.fitting_alone(job, size) if e not in kept):
                dropped += 1
                train = i.problem.train_index[job.model]
                for block in [b for b in i.tree.all_blocks if b.size == size][:2]:
                    for home in (block, r.choice(i.tree.all_blocks)):
                        for t in i.table.candidates(i.calls[train], home.size)[:20]:
                            blocks, candidates = [i.tree.root] * len(i.calls), [t] * len(i.calls)
                            blocks[c], blocks[train], candidates[c] = block, home, e
                            own = block == home and e.strategy.degrees == t.strategy.degrees
                            resolved = i.resolve_copies([block, home], [e, t]) if len(i.calls) == 2 else None
                            assert not own and resolved is None
                            assert not i.fits(e.min_bytes + e.copy_bytes)
                            assert i.reshard_costs.cost(job.model, home, t.strategy, block, e.strategy).has_copy
    assert dropped


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_with_enough_memory_nothing_is_left_out(name: str) -> None:
    i = instance(name, "1B", cluster(2, 4, 80))
    assert all(i.table.candidates(j, n) == i.table.fitting_alone(j, n) for j in i.calls for n in i.tree.sizes)


# ------------------------------------------------------------------------------------- a search that continues


def test_a_search_goes_on_to_the_bound_that_is_wanted() -> None:
    i = instance("ppo", "1B", cluster(2, 2, 24), Lengths(0.0, 200.0), batch=64)
    search = BranchAndBound(i, 0.3, 10**6, lambda _: True)
    first = search.run()
    wanted = first.best[0].seconds / 1.01
    assert first.bound < wanted, "nothing to go on for"
    second = search.prove(wanted)
    assert second.complete and second.num_nodes > first.num_nodes
    assert second.bound >= min(wanted, second.best[0].seconds) * (1 - 1e-12)
    assert second.best[0].seconds <= first.best[0].seconds


def test_to_the_end_it_finds_what_a_search_without_a_gap_finds() -> None:
    i = instance("grpo", "1B", cluster(1, 2, 24), Lengths(0.0, 200.0), batch=64)
    search = BranchAndBound(i, 0.5, 10**6, lambda _: True)
    search.run()
    found, known = search.prove(float("inf")), branch_and_bound(i, gap=0.0, max_nodes=10**6)
    assert (found.best[0].seconds, found.bound) == pytest.approx((known.best[0].seconds, known.bound))


def test_a_search_that_has_no_nodes_left_does_not_go_on() -> None:
    i = instance("ppo", "1B", cluster(2, 2, 24), Lengths(0.0, 200.0), batch=64)
    search = BranchAndBound(i, 0.0, 3, lambda _: True)
    first = search.run()
    second = search.prove(first.best[0].seconds)
    assert not second.complete and second.num_nodes == first.num_nodes == 3
    assert second.bound <= second.best[0].seconds


def slow_network(name: str) -> Evaluator:
    """Without offload, which makes assignments that differ by less than rounding."""
    return instance(name, "1B", cluster(2, 2, 24, **SLOW), Lengths(0.0, 200.0), batch=64,
                    text=PROGRAMS[name] + "place * offload=false\n")


@pytest.mark.parametrize("name", thorough_between(["ppo", "ppo lag=1", "grpo"]))
def test_bounds_that_count_reshards_find_and_prove_the_same(name: str) -> None:
    """The search without a gap: to its end with one kind of bounds, and with the other after 10 search nodes."""
    plain = BranchAndBound(slow_network(name), 0.0, 10**6, lambda _: True, reshards_after=10**6)
    known = plain.run()
    search = BranchAndBound(slow_network(name), 0.0, 10**6, lambda _: True, reshards_after=10)
    found = search.run()
    assert search.counts_reshards and not plain.counts_reshards and known.complete and found.complete
    assert (found.best[0].seconds, found.bound) == pytest.approx((known.best[0].seconds, known.bound))


def test_what_was_proved_before_the_bounds_count_reshards_stays_proved() -> None:
    proved: list[float] = []
    search = BranchAndBound(slow_network("ppo"), 0.0, 40, lambda now: not proved.append(now.bound), reshards_after=20)
    result = search.run()
    assert search.counts_reshards and search.proved_bound > 0 and result.num_nodes == 40
    assert [*proved, result.bound] == sorted([*proved, result.bound])


def test_a_search_that_ends_early_never_counts_reshards() -> None:
    i = instance("ppo", "1B", cluster(2, 2, 24), Lengths(0.0, 200.0), batch=64)
    search = BranchAndBound(i, 0.3, 10**6, lambda _: True)
    assert search.run().complete and not search.counts_reshards


def test_a_dive_gives_waiting_blocks_an_assignment_and_leaves_those_that_cannot_win() -> None:
    i = instance("ppo", "1B", cluster(2, 2), Lengths(0.0, 200.0), batch=64)
    search = BranchAndBound(i, 0.0, 0, lambda _: True)
    root = (i.tree.root,) * len(search.order)
    search.promising = [(0.0, 1, root)]
    search.dive()
    assert search.best and search.assigned == {root} and not search.promising
    search.promising = [(0.0, 2, root)]
    found = list(search.best)
    search.dive()  # these blocks have one
    assert search.best == found and not search.promising
    half = (i.tree.children(i.tree.root)[0],) * len(search.order)
    search.promising = [(found[0].seconds, 3, half)]
    search.dive()  # no faster than the best
    assert search.assigned == {root} and not search.promising


# --------------------------------------------------------------------------------------- alternatives in a row


def diamonds(count: int, lag: int = 0) -> LowerBound:
    """A generation, `count` times two calls of which each may follow either one before it, and a training."""
    jobs = [SimpleNamespace(number=0, model="actor", kind="generate", depends_on=())]
    for k in range(count):
        before = (0,) if not k else (2 * k - 1, 2 * k)
        jobs += [SimpleNamespace(number=2 * k + 1 + x, model=f"m{k}{x}", kind="infer", depends_on=before)
                 for x in (0, 1)]
    last = 2 * count + 1
    jobs.append(SimpleNamespace(number=last, model="actor", kind="train", depends_on=(last - 2, last - 1)))
    problem: Any = SimpleNamespace(jobs=jobs, calls=jobs, call_index={j.number: j.number for j in jobs},
                                   first_train={"actor": last}, train_index={"actor": last}, may_run_ahead={0},
                                   graph=SimpleNamespace(lag=lag),
                                   models={j.model: SimpleNamespace(path=j.model) for j in jobs})
    nothing: Any = None
    bound = LowerBound(problem, nothing, nothing)
    bound.__dict__["min_seconds"] = tuple(1.0 + (j.number % 2) for j in jobs)
    return bound


def test_alternatives_in_a_row_are_not_all_listed() -> None:
    bound = diamonds(60)  # 2**60 chains
    cycles = [x for x in bound.version_cycles if x.first == 0]
    assert 0 < len(cycles) <= MAX_CHAINS
    longest = max(sum(bound.min_seconds[c] for c in x.calls) for x in cycles)
    assert longest == 1.0 + 60 * 2.0 + 2.0, "the longest is among them"


@pytest.mark.parametrize("count", [1, 3, 6])
def test_few_alternatives_are_all_listed(count: int) -> None:
    cycles = [x for x in diamonds(count).version_cycles if x.first == 0]
    assert len({x.calls for x in cycles}) == len(cycles) == 2**count


def test_a_chain_through_what_runs_ahead_may_take_more_steps() -> None:
    assert {(x.first == 0, x.steps) for x in diamonds(2, lag=3).version_cycles} == {(True, 4), (False, 1)}
