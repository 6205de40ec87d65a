"""Schedules of pipelines, all ranks at once: passes, waiting, memory and idle time as in the papers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from rldsl.diag import InternalError
from rldsl.sharding import pipeline_schedule
from rldsl.sharding.pipeline_schedule import (
    Exchange,
    Message,
    MicroBatchPass,
    actions,
    max_activations_in_flight,
    max_waiting_messages,
    passes_in_flight,
    rank_passes,
)

SHAPES = [(1, 1, 1), (1, 1, 5), *product((2, 3, 4, 7), (1, 2, 3), (1, 2, 3, 4, 7, 8, 9, 13))]


@pytest.mark.parametrize("pp, chunks, count", SHAPES)
def test_every_pass_once_and_backward_after_forward(pp: int, chunks: int, count: int) -> None:
    for rank in range(pp):
        order = rank_passes(pp, chunks, count, rank)
        assert Counter(order) == Counter(MicroBatchPass(*p) for p in product((False, True), range(chunks), range(count)))
        assert all(order.index(p._replace(backward=False)) < order.index(p) for p in order if p.backward)
        assert tuple(a for a in actions(pp, chunks, count)[rank] if isinstance(a, MicroBatchPass)) == order


def rendezvous(lists: list[list]) -> int:
    """Run the lists of all ranks, where an exchange ends only when everybody named is at theirs of the same messages.
    The moments it takes; -1 when nobody can go on. A message may pass while others of the same exchange wait."""
    at, moments = [0] * len(lists), 0
    open_: list[set[tuple[int, Message]]] = [set() for _ in lists]  # (who is to have it, message as this rank names it)

    def posted(rank: int) -> set[tuple[int, Message]]:
        now = lists[rank][at[rank]]
        return {(m.peer, m) for m in now.sends} | {(rank, m) for m in now.receives}

    for rank, own in enumerate(lists):
        open_[rank] = posted(rank) if own and isinstance(own[0], Exchange) else set()
    while any(i < len(own) for i, own in zip(at, lists)):
        moved = False
        for rank, mine in enumerate(open_):
            for to, m in list(mine):
                other = (to, Message(m.for_pass, rank))
                if other in open_[m.peer]:
                    mine.discard((to, m))
                    open_[m.peer].discard(other)
        for rank, own in enumerate(lists):
            if at[rank] < len(own) and not open_[rank]:
                at[rank] += 1
                moved = True
                if at[rank] < len(own) and isinstance(own[at[rank]], Exchange):
                    open_[rank] = posted(rank)
        moments += 1
        if not moved:
            return -1
    return moments


@pytest.mark.parametrize("pp, chunks, count", SHAPES)
def test_nobody_waits_for_ever(pp: int, chunks: int, count: int) -> None:
    """Even if each exchange ends before the next action begins; and what a pass needs has come by then."""
    lists = [list(own) for own in actions(pp, chunks, count)]
    assert rendezvous(lists) > 0
    for rank, own in enumerate(lists):
        here: set[MicroBatchPass] = set()
        made: MicroBatchPass | None = None
        for action in own:
            if isinstance(action, Exchange):
                assert len(action.sends) <= 1 and made is not None or not action.sends
                for m in action.sends:
                    assert made is not None and pipeline_schedule.next_pass(pp, chunks, rank, made) == (m.peer, m.for_pass)
                here |= {m.for_pass for m in action.receives}
                made = None
                continue
            made, stage = action, action.chunk * pp + rank
            alone = stage == pp * chunks - 1 if action.backward else stage == 0
            assert alone or pp == 1 or action in here
            here.discard(action)
        assert not here


def span(pp: int, chunks: int, count: int, ahead: int, back: int) -> int:
    """Time until all are done, with messages that take none; of passes that are as long as these."""
    lists = [list(rank_passes(pp, chunks, count, rank)) for rank in range(pp)]
    done: dict[tuple[int, bool, int], int] = {}
    clock, last = [0] * pp, pp * chunks - 1
    while any(lists):
        left = sum(map(len, lists))
        for rank, own in enumerate(lists):
            while own:
                back_, chunk, micro = own[0]
                stage = chunk * pp + rank
                needs = (stage, False, micro) if back_ and stage == last else (stage + (1 if back_ else -1), back_, micro)
                if (back_ or stage) and needs not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needs, 0)) + (back if back_ else ahead)
                done[stage, back_, micro] = clock[rank]
                own.pop(0)
        assert sum(map(len, lists)) < left
    return max(clock)


@pytest.mark.parametrize("pp, chunks, count", [s for s in SHAPES if s[2] >= s[0]])
@pytest.mark.parametrize("ahead, back", [(1, 1), (1, 2), (2, 3)])
def test_idle_time_is_that_of_the_paper(pp: int, chunks: int, count: int, ahead: int, back: int) -> None:
    """(pp - 1) passes of a chunk each way, for any number of micro-batches from pp on: 1/chunks of 1F1B's."""
    assert span(pp, chunks, count, ahead, back) == (count * chunks + pp - 1) * (ahead + back)


@pytest.mark.parametrize("pp, chunks, count", SHAPES)
def test_memory_is_that_of_the_paper(pp: int, chunks: int, count: int) -> None:
    """1F1B keeps as many micro-batches as there are stages from here on; interleaved, (chunks - 1) groups and twice the
    distance from the end, in passes of one chunk: 1 + (pp - 1) / (pp * chunks) times as much on the first rank."""
    group = -(-count // max(1, count // pp))
    for rank in range(pp):
        apart = pp - 1 - rank
        most = apart + 1 if chunks == 1 else (chunks - 1) * group + 2 * apart + 1
        assert max_activations_in_flight(passes_in_flight(pp, chunks, count, rank), [1] * chunks) == min(
            most, chunks * count)
    if chunks > 1 and count % pp == 0 and count > pp:
        assert max_activations_in_flight(passes_in_flight(pp, chunks, count, 0), [1] * chunks) / chunks == pytest.approx(
            pp * (1 + (pp - 1) / (pp * chunks)))


@pytest.mark.parametrize("pp, chunks, most",
                         [(2, 1, 1), (3, 1, 2), (8, 1, 2), (2, 2, 3), (4, 2, 4), (8, 2, 5), (8, 4, 5)])
def test_few_messages_wait_however_many_micro_batches(pp: int, chunks: int, most: int) -> None:
    for count in (pp, 2 * pp, 4 * pp, 6 * pp):
        assert max(max_waiting_messages(pp, chunks, count)) <= most


@pytest.mark.parametrize("pp, chunks, count", SHAPES)
def test_the_messages_that_wait_are_those_of_the_actions_played(pp: int, chunks: int, count: int) -> None:
    for own, most in zip(actions(pp, chunks, count), max_waiting_messages(pp, chunks, count), strict=True):
        waiting, found = set[MicroBatchPass](), 0
        for action in own:
            if isinstance(action, Exchange):
                assert not waiting & {m.for_pass for m in action.receives}
                waiting |= {m.for_pass for m in action.receives}
                found = max(found, len(waiting))
            else:
                waiting.discard(action)
        assert found == most


def test_kept_when_the_pass_of_one_chunk_begins() -> None:
    last, first = passes_in_flight(2, 2, 4, 0, 1), passes_in_flight(2, 2, 4, 0, 0)
    assert max_activations_in_flight(last, [10, 1]) >= max_activations_in_flight(first, [10, 0])
    assert max_activations_in_flight(passes_in_flight(2, 2, 4, 0), [10, 0]) == 40
    assert max_activations_in_flight((), [1]) == 0


@pytest.mark.parametrize("pp, chunks, count", SHAPES)
def test_what_is_in_flight_is_that_of_the_passes_played(pp: int, chunks: int, count: int) -> None:
    weights = [3 ** c for c in range(chunks)]
    for rank in range(pp):
        for of in (None, *range(chunks)):
            kept = most = 0
            for p in rank_passes(pp, chunks, count, rank):
                if not p.backward:
                    kept += weights[p.chunk]
                    continue
                most = max(most, kept) if of in (None, p.chunk) else most
                kept -= weights[p.chunk]
            assert max_activations_in_flight(passes_in_flight(pp, chunks, count, rank, of), weights) == most


# ------------------------------------------------------------------------------------------- what would go wrong


def test_a_schedule_that_waits_for_itself_is_found() -> None:
    wrong = [list(rank_passes(2, 2, 4, rank)) for rank in range(2)]
    wrong[1] = wrong[1][:2] + list(rank_passes(2, 2, 4, 1))[2:][::-1]
    with pytest.raises(InternalError, match="deadlocks"):
        list(pipeline_schedule._clock_ticks(wrong, 2))


@pytest.mark.parametrize("pp, chunks, rank", [(1, 2, 0), (2, 0, 0), (2, 1, 2), (2, 1, -1)])
def test_what_is_no_schedule_is_refused(pp: int, chunks: int, rank: int) -> None:
    with pytest.raises(ValueError):
        rank_passes(pp, chunks, 4, rank)


def test_lists_in_two_orders_stop_for_ever() -> None:
    """The check itself sees a circle: two ranks that send first and take later."""
    a, b = MicroBatchPass(False, 0, 0), MicroBatchPass(True, 0, 0)
    first = [Exchange((Message(a, 1),), ()), Exchange((), (Message(b, 1),))]
    second = [Exchange((Message(b, 0),), ()), Exchange((), (Message(a, 0),))]
    assert rendezvous([first, second]) == -1
    assert rendezvous([first, second[::-1]]) > 0


def test_a_message_that_nobody_takes_stops_for_ever() -> None:
    lists = [list(own) for own in actions(2, 2, 4)]
    at = next(i for i, a in enumerate(lists[1]) if isinstance(a, Exchange) and a.receives)
    del lists[1][at]
    assert rendezvous(lists) == -1


def test_a_schedule_prints_a_line_per_rank() -> None:
    assert pipeline_schedule.show_schedule(2, 1, 3) == "rank 0  F0 F1 B0 F2 B1 B2\nrank 1  F0 B0 F1 B1 F2 B2"
    assert pipeline_schedule.show_schedule(2, 2, 2).startswith("rank 0  F0.0 F1.0 F0.1 ")


def test_a_schedule_that_waits_for_itself_shows_where_each_rank_stands() -> None:
    good = [rank_passes(2, 1, 2, rank) for rank in range(2)]
    with pytest.raises(InternalError) as caught:
        list(pipeline_schedule._clock_ticks([good[0], good[1][::-1]], 1))
    assert caught.value.diagnostic.notes == ("rank 0 | F0| F1|>B0| B1|", "rank 1 |>B1| F1| B0| F0|")
    with pytest.raises(ValueError, match="no schedule for rank 2 of 2"):
        rank_passes(2, 1, 2, 2)
