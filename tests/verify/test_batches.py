"""Messages posted together: both ends agree, and no batch grows with the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches
from tests.world import run_world


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(2, 12), st.data())
def test_pairs_meet_in_bounded_batches(world: int, messages: int, data: st.DataObject) -> None:
    """For any set of pairs: each is in one batch of either end, with the same ones before it by number."""
    every = [(a, b) for a in range(world) for b in range(a)]
    pairs = data.draw(st.sets(st.sampled_from(every))) if every else set()
    peers = {r: {a + b - r for a, b in pairs if r in (a, b)} for r in range(world)}
    number = {}
    for r in range(world):
        found = message_batches(r, peers[r], world, messages)
        assert sorted(p for batch in found for p in batch) == sorted(peers[r])
        assert all(2 * len(batch) <= max(messages, 2) and batch == tuple(sorted(batch)) for batch in found)
        for batch in found:
            for p in batch:
                number[r, p] = (r + p) % world // (messages // 2)
        order = [number[r, batch[0]] for batch in found]
        assert order == sorted(order) and len(order) == len({*order})
    assert all(number[a, b] == number[b, a] for a, b in number)


def test_few_ranks_have_one_batch_and_many_a_bounded_one() -> None:
    assert message_batches(3, range(3), 128) == ((0, 1, 2),)
    found = message_batches(3, [r for r in range(5000) if r != 3], 5000)
    assert max(map(len, found)) == MAX_MESSAGES // 2 and sum(map(len, found)) == 4999


def _everyone(rank: int, world: int) -> None:
    import rldsl.runtime.comm.exchange as exchange

    exchange.message_batches = lambda rank, peers, world, _: message_batches(rank, peers, world, 2)  # type: ignore[assignment]
    asked: list[int] = []
    whole = dist.batch_isend_irecv
    dist.batch_isend_irecv = lambda ops: (asked.append(len(ops)), whole(ops))[1]
    sends = {p: torch.full((3,), float(10 * rank + p)) for p in range(world) if p != rank}
    receives = {p: torch.empty(3) for p in sends if p != rank}
    sends[(rank + 1) % world] = torch.empty(0)  # nothing to say to the next
    del receives[(rank - 1) % world]
    exchange.post(sends, receives, 7).wait()
    assert all(bool((t == 10 * p + rank).all()) for p, t in receives.items())
    assert max(asked) <= 2 and len(asked) > 1


def test_the_runtime_posts_in_batches() -> None:
    run_world(4, _everyone, 4, timeout=60.0)
