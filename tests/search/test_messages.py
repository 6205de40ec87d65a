"""Layouts between which a rank would post more messages at once than there may be (RL0535) do not go together."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings

from rldsl.plan.realloc.paths import paths
from rldsl.plan.realloc.rounds import buckets, count, posted, rank_ops
from rldsl.search import branch, moves
from rldsl.search.greedy import heuristic
from rldsl.search.instance import Instance
from rldsl.search.space import Block, Strategy
from tests.realloc.cases import Case, cases
from tests.search.programs import cluster, instance

ALL = Block(0, 32)


@given(cases(large=True))
@settings(max_examples=25, deadline=None)
def test_no_round_has_more_than_is_said(case: Case) -> None:
    way = paths(case.model, case.src, case.src_mesh, case.dst, case.dst_mesh, case.devices)
    for parts in {1, 4, buckets(way, 4, 4000)} if count(way, 1) else {1}:
        for rank in case.ranks():
            most = max((len(r.sends) + len(r.receives) for r in rank_ops(way, rank, parts)), default=0)
            assert most <= posted(way, rank, parts)


def test_a_rank_hears_from_few_holders() -> None:
    """Of rows over all ranks, each device of a node gets those of its part of the ranks, and what is small with them."""
    i = instance("grpo", "1B", cluster(8, 8))
    model, every = i.problem.models["actor"], Block(0, 64)
    src = Strategy(dp=32, tp=2, zero=3).layout(every.mesh())
    dst = Strategy(dp=64).layout(every.mesh())
    way = paths(model, src, every.mesh(), dst, every.mesh(), 8)
    parts = buckets(way, 2)
    most = max(len(r.sends) + len(r.receives) for rank in (0, 13, 63) for r in rank_ops(way, rank, parts))
    assert most <= moves.messages(way, parts) <= 2 * (64 // 8 + 7 + 2)  # holders, the node, a tree


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Instance:
    """As if there might be 40."""
    monkeypatch.setattr(moves, "MESSAGES", 40)
    return instance("grpo", "1B", cluster(4, 8), batch=64)


def test_such_a_move_is_no_move(few: Instance) -> None:
    rows, whole = Strategy(dp=32, zero=3), Strategy(dp=32)
    assert few.moves("actor", ALL, rows, ALL, Strategy(dp=8, tp=4)).seconds == inf
    assert few.moves("actor", ALL, whole, ALL, Strategy(dp=8, tp=4)).seconds < inf


def test_no_answer_has_one(few: Instance) -> None:
    found = heuristic(few)
    best = branch.search(few, most=50).best
    assert found is not None and found.seconds < inf and best
    for judged in (found, *best):
        a = judged.assignment
        moved = few.copies(a.blocks, few.resolved(a.blocks, a.entries))
        assert judged.seconds < inf and all(m.seconds < inf for m, _ in moved.values())
