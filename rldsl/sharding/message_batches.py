"""Which messages are posted together. A group of point-to-point operations must not grow with the ranks: NCCL cuts a
large one into several launches, at points that differ between ranks, and may then hang (pytorch#174288).

In: a rank and its peers. Out: batches of peers, in the order in which they are posted. Invariants: a pair of ranks is
in the same batch at both ends; a batch has at most `MAX_MESSAGES` operations, one to and one from each of its
peers. So the batches of all ranks increase in one order, and no rank waits forever (a round-robin tournament: in round
s, ranks a and b with (a + b) mod n = s meet; a batch is a run of rounds).
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_MESSAGES = 256


def message_batches(rank: int, peers: Iterable[int], world: int,
                    messages: int = MAX_MESSAGES) -> tuple[tuple[int, ...], ...]:
    """Peers ascend inside a batch. world: number of ranks. messages: at most in a batch; at least 2."""
    batches: dict[int, list[int]] = {}
    for peer in sorted(peers):
        batches.setdefault((rank + peer) % world // (messages // 2), []).append(peer)
    return tuple(tuple(batches[number]) for number in sorted(batches))
