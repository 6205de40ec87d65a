"""Ranks of one start find each other, whatever ranks of earlier starts left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from rldsl.runtime.comm.rendezvous import mark_begun, start_prefix, started_before

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)


def meet(store: dist.Store, ranks: dict[int, float], world: int, timeout: timedelta = LONG) -> dict[int, object]:
    """Each rank after so many seconds, in a thread of its own: its prefix, or its error."""
    found: dict[int, object] = {}

    def one(rank: int, after: float) -> None:
        time.sleep(after)
        try:
            found[rank] = start_prefix(store, rank, world, timeout)
        except TimeoutError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=x) for x in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("late", [None, 0, 1, 2])
def test_starts_one_after_the_other_have_prefixes_of_their_own(late: int | None) -> None:
    store = dist.HashStore()
    seen = set()
    for _ in range(3):
        found = meet(store, {rank: 0.1 * (rank == late) for rank in range(3)}, 3)
        assert len(set(found.values())) == 1
        seen |= set(found.values())
    assert len(seen) == 3 and all(isinstance(x, str) for x in seen)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_died_on_its_way_and_came_again(dead: int) -> None:
    """Of a start that never met, words are left; the next start must not take them for its own."""
    store = dist.HashStore()
    assert meet(store, {0: 0, 1: 0, 2: 0}, 3)
    alone = meet(store, {r: 0 for r in range(3) if r != dead}, 3, SHORT)
    assert all(isinstance(x, TimeoutError) for x in alone.values())
    found = meet(store, {dead: 0, **{r: 0.05 for r in range(3) if r != dead}}, 3)
    assert len(set(found.values())) == 1 and isinstance(found[0], str)


def test_one_rank_meets_itself() -> None:
    assert isinstance(start_prefix(dist.HashStore(), 0, 1, LONG), str)


def test_who_never_comes_is_waited_for_no_longer_than_asked() -> None:
    with pytest.raises(TimeoutError, match="2 ranks"):
        start_prefix(dist.HashStore(), 0, 2, SHORT)


def decided(run: dist.Store, start: str, restarted: dict[int, bool]) -> set[bool]:
    """What the ranks of one start find; rank 0 is the last that comes."""
    mine = dist.PrefixStore(start, run)
    found: set[bool] = set()

    def one(rank: int) -> None:
        found.add(started_before(run, mine, rank, len(restarted), restarted[rank]))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in sorted(restarted, reverse=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("restarted", [(False, False, False), (True, False, False), (False, False, True)])
def test_without_a_memory_one_restarted_rank_is_enough(restarted: tuple[bool, ...]) -> None:
    assert decided(dist.HashStore(), "a", dict(enumerate(restarted))) == {any(restarted)}


@pytest.mark.parametrize("restarted", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("began", [False, True])
def test_what_earlier_starts_left_says_more_than_counts(began: bool, restarted: tuple[bool, ...]) -> None:
    """A start that was refused its directory has begun nothing, so that the next one is refused too."""
    run = dist.HashStore()
    assert decided(run, "a", {0: False, 1: False}) == {False}
    if began:
        mark_begun(run)
    assert decided(run, "b", dict(enumerate(restarted))) == {began}
