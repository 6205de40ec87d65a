"""The own sends and receives of one rank, without looking at the others: equal to the whole plan, filtered."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, WHOLE_BELOW, Message, num_buckets, num_rounds, num_steps, rank_rounds
from rldsl.reshard.summary import digest, summary
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding.boxes import volume
from tests.effort import lines
from tests.plan_algebra.models import layout, mesh, model
from tests.realloc.cases import Case, cases, small, wide
from tests.realloc.naive import flows, of_rank


def check_equal(case: Case) -> None:
    p, whole = case.paths(), flows(case)
    assert len(set(whole)) == len(whole)
    for rank in case.ranks():
        assert rank_slices(p, rank) == of_rank(whole, rank), f"{case}, rank {rank}"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gqa", "fused"])
def test_all_small_layouts(kind: str) -> None:
    for case in small(kind):
        check_equal(case)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_any_layouts(case: Case) -> None:
    check_equal(case)


@pytest.mark.parametrize("replicas", [3, 6, 7, 12])
def test_trees(replicas: int) -> None:
    """One holder and many nodes that want everything."""
    am, bm = mesh((0, 2)), mesh((2, 2 + 2 * replicas))
    case = Case(model(), layout(am, tp=2), am, layout(bm, dp=replicas, tp=2), bm, 2)
    assert 1 <= case.paths().groups[0].num_trees < replicas
    check_equal(case)


def test_a_rank_without_a_part_does_nothing() -> None:
    case = small("gqa")[0]
    p = case.paths()
    assert rank_slices(p, 99) == ((), ())
    assert all(r.sends == r.receives == () for r in rank_rounds(p, 99, 3))


def test_the_same_layout_moves_nothing() -> None:
    on = mesh((0, 8))
    at = layout(on, pp=2, dp=2, tp=2)
    p = plan_reshard(model(), at, on, at, on, 4)
    assert all(rank_slices(p, r) == ((), ()) for r in range(8))
    total = summary(p, model())
    assert (total.bytes, total.network_bytes, total.messages, total.busiest_bytes) == (0, 0, 0, 0)


def check_rounds(case: Case, number_of_buckets: int) -> None:
    """Both ends of a message say the same of it, and none is empty."""
    p = case.paths()
    rounds = {rank: rank_rounds(p, rank, number_of_buckets) for rank in case.ranks()}
    assert {len(r) for r in rounds.values()} == {num_rounds(p, number_of_buckets)}
    assert not num_steps(p) or num_rounds(p, number_of_buckets) >= number_of_buckets
    for number in range(num_rounds(p, number_of_buckets)):
        sent = {(a, m.peer): m.boxes for a in rounds for m in rounds[a][number].sends}
        received = {(m.peer, b): m.boxes for b in rounds for m in rounds[b][number].receives}
        assert sent == received
        assert all(sent.values()) and all(a != b for a, b in sent)
        for rank in rounds:
            for side in (rounds[rank][number].sends, rounds[rank][number].receives):
                peers = [m.peer for m in side]
                assert peers == sorted(set(peers)), "one message for each peer"


@given(cases())
@settings(max_examples=40, deadline=None)
def test_messages_have_two_ends(case: Case) -> None:
    for number in (1, 3):
        check_rounds(case, number)


@given(cases(large=True))
@settings(max_examples=40, deadline=None)
def test_no_round_is_larger_than_half_a_bucket(case: Case) -> None:
    """To within short lines, and a row of each box."""
    p = case.paths()
    limit = max(1, p.busiest // 5)
    number = num_buckets(p, 1, limit)
    assert number in (1, 10, 11)
    short = p.busiest // (WHOLE_BELOW * number)
    short = sum(line.size for line in p.classes if line.size <= short)
    row = max(volume(box) // max(stop - start for start, stop in box)
              for line in p.classes for box in [e.box for e in line.segments] if box)
    for rank in case.ranks():
        for ops in rank_rounds(p, rank, number):
            for side in (ops.sends, ops.receives):
                boxes = sum(len(m.boxes) for m in side)
                assert sum(map(Message.size, side)) <= limit / ROUNDS_IN_FLIGHT + short + row * (boxes + 1), case


def test_bytes_are_those_that_are_lacking() -> None:
    on = mesh((0, 4))
    made = wide("gqa")
    p = plan_reshard(made, layout(on, tp=2, dp=2), on, layout(on, dp=4), on, 2)
    received: Counter[int] = Counter()
    for rank in range(4):
        received[rank] = sum(x.stop - x.start for x in rank_slices(p, rank)[1])
    total = summary(p, made)
    assert total.bytes == 2 * sum(received.values()) and total.network_bytes == 0
    assert total.messages == 1 and summary(p, made, bucket=2 * total.busiest_bytes).messages == 1
    assert summary(p, made, bucket=-(-total.busiest_bytes // 7)).messages == 14, "two rounds share a bucket"


def test_the_digest_sees_what_changes() -> None:
    on, other = mesh((0, 8)), mesh((8, 16))
    made = model("fused")
    args = (made, layout(on, pp=2, dp=2, tp=2), on, layout(on, dp=4, tp=2), on, 4)
    seen = {digest(plan_reshard(*args), 1), digest(plan_reshard(*args), 2)}
    assert digest(plan_reshard(*args), 1) in seen
    for changed in (
        (model("gqa"), *args[1:]), (model("fused", 4), *args[1:]), (*args[:3], layout(on, dp=2, tp=4), on, 4),
        (*args[:3], layout(other, dp=4, tp=2), other, 4), (*args[:5], 8), (made, *args[3:5], *args[1:3], 4),
    ):
        seen.add(digest(plan_reshard(*changed), 1))
    assert len(seen) == 8


def test_a_layout_must_fill_its_mesh() -> None:
    on = mesh((0, 4))
    with pytest.raises(InternalError, match="does not fill"):
        plan_reshard(model(), layout(on, tp=2), on, layout(on, tp=4), on, 8)
    with pytest.raises(InternalError, match="is on mesh"):
        plan_reshard(model(), layout(on, tp=4), mesh((0, 5)), layout(on, tp=4), on, 8)


def test_the_work_does_not_grow_with_the_ranks() -> None:
    """Lines that one rank's part executes with 160 times as many ranks, of a model with 70 layers."""
    def cost(ranks: int) -> int:
        on = Mesh("m", ((0, ranks),))
        src, dst = Layout("s", "m", dp=ranks // 32, tp=8, pp=4), Layout("d", "m", dp=ranks // 4, tp=4)
        return lines(lambda: rank_slices(plan_reshard(model("gqa", layers=70), src, on, dst, on, 8), ranks // 2 + 3))

    assert cost(10240) <= 1.5 * cost(64)
