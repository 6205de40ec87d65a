"""Rounds: the messages of one rank, bucket by bucket.

In: the transfer slices of a rank. Out: `Round`s, which all ranks execute in the same order. Bucket b of B carries the
b-th part of every box class, so every round moves about the same number of bytes and every rank is equally busy in
all rounds; a class that is small compared to a bucket travels whole in one of them. Two rounds are in flight at a time:
what arrives in a round is forwarded exactly two rounds later, so two buckets of memory are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rldsl.reshard.box_classes import boxes_between
from rldsl.reshard.broadcast_trees import height
from rldsl.reshard.records import ReshardPlan, TransferSlice
from rldsl.reshard.reshard_cache import ClassSlice, ReshardCache
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding.boxes import Box, volume

BUCKET = 256 << 20  # bytes in flight to or from a rank; more gains little, and two must fit next to the parameters
MIN_ROUND_BYTES = 4 << 20  # in smaller rounds the latency of a message costs more than its bytes
ROUNDS_IN_FLIGHT = 2
BUCKETS_PER_STEP = 16  # per tree step beyond the first: filling and draining a tree then takes a small part of the time
WHOLE_BELOW = 32  # a class smaller than 1/32 of a bucket is not divided


Known = dict[ClassSlice, tuple[tuple[str, Box], ...]]  # its boxes


@dataclass(frozen=True, slots=True)
class Message:
    """One contiguous message to or from `peer`."""

    peer: int  # rank at the other end
    boxes: tuple[tuple[str, Box], ...]  # (parameter, box): the elements of each box, one box after the other

    def size(self) -> int:
        """Number of elements."""
        return sum(volume(box) for _, box in self.boxes)


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank posts together: at most one message to and one from each peer."""

    sends: tuple[Message, ...]  # in the order in which they are posted
    receives: tuple[Message, ...]  # in the order in which they are posted


def rank_rounds(plan: ReshardPlan, rank: int, buckets: int) -> tuple[Round, ...]:
    """All rounds of a rank, including empty ones, so that round i is the same for all ranks."""
    return tuple(selected_rounds(plan, rank, buckets, range(num_rounds(plan, buckets))))


def selected_rounds(plan: ReshardPlan, rank: int, buckets: int, numbers: Iterable[int],
                shared: ReshardCache | None = None) -> Iterator[Round]:
    """The rounds with the given numbers. shared: the cache of this plan, for callers that ask for many ranks."""
    sends, receives = rank_slices(plan, rank, shared)
    short, known = _short(plan, buckets), Known()
    for number in numbers:
        yield Round(*(tuple(_messages(plan, side, number, buckets, short, known)) for side in (sends, receives)))


def num_rounds(plan: ReshardPlan, buckets: int) -> int:
    """The number of rounds."""
    return buckets + ROUNDS_IN_FLIGHT * (num_steps(plan) - 1) if num_steps(plan) else 0


def _messages(plan: ReshardPlan, slices: Sequence[TransferSlice], number: int, buckets: int,
              short: int, known: Known) -> Iterator[Message]:
    """known: the boxes of intervals, which a rank may send to many others."""
    by_peer: dict[int, list[tuple[str, Box]]] = {}
    for peer, key in _in_round(plan, slices, number, buckets, short):
        boxes = known.get(key)
        if boxes is None:
            boxes = known[key] = tuple(boxes_between(plan.classes[key[0]], *key[1:]))
        if boxes:
            by_peer.setdefault(peer, []).extend(boxes)
    return (Message(peer, tuple(by_peer[peer])) for peer in sorted(by_peer))


def _in_round(plan: ReshardPlan, slices: Sequence[TransferSlice], number: int, buckets: int,
              short: int) -> Iterator[tuple[int, ClassSlice]]:
    """(peer, (box class, start, stop)) of what travels in a round."""
    classes = plan.classes
    for step, peer, box_class, start, stop in slices:
        # step j of bucket b is in round b + ROUNDS_IN_FLIGHT * j
        bucket, size = number - ROUNDS_IN_FLIGHT * step, classes[box_class].size
        if not 0 <= bucket < buckets:
            continue
        if size > short:
            first, past = size * bucket // buckets, size * (bucket + 1) // buckets
            start, stop = first + start * (past - first) // size, first + stop * (past - first) // size
        elif bucket != box_class % buckets:
            continue
        if start != stop:
            yield peer, (box_class, start, stop)


@dataclass(frozen=True, slots=True)
class LikeMessages:
    """Messages of a round that are equal but for their peers and for where their boxes lie."""

    count: int  # how many there are
    message: Message  # one of them


def like_messages(plan: ReshardPlan, slices: Sequence[TransferSlice], number: int, buckets: int,
                  alike: Mapping[int, int]) -> Iterator[LikeMessages]:
    """The messages of a round, made once for all that are alike: a rank hears from hundreds of zero shards, which send
    the same rows of different places. alike: of each box class, a number that is equal only for classes whose boxes
    have the same parameters and shapes, in the same order."""
    by_peer: dict[int, list[ClassSlice]] = {}
    for peer, key in _in_round(plan, slices, number, buckets, _short(plan, buckets)):
        by_peer.setdefault(peer, []).append(key)
    counts: dict[tuple[ClassSlice, ...], int] = {}
    first: dict[tuple[ClassSlice, ...], tuple[int, Sequence[ClassSlice]]] = {}
    for peer, intervals in by_peer.items():
        kind = tuple([(alike[box_class], start, stop) for box_class, start, stop in intervals])
        counts[kind] = counts.get(kind, 0) + 1
        first.setdefault(kind, (peer, intervals))
    for kind, (peer, alone) in first.items():
        boxes = tuple(x for i, start, stop in alone for x in boxes_between(plan.classes[i], start, stop))
        if boxes:
            yield LikeMessages(counts[kind], Message(peer, boxes))


def _short(plan: ReshardPlan, buckets: int) -> int:
    """The elements up to which a class is not divided."""
    return plan.busiest // (WHOLE_BELOW * buckets)


def kept_boxes(plan: ReshardPlan, rank: int) -> tuple[tuple[str, Box], ...]:
    """What `rank` holds under both layouts and so keeps. Each box lies inside one piece of either layout."""
    have, want = plan.src.cell(rank), plan.dst.cell(rank)
    both = (c for c in plan.classes if have in c.holders and want in c.needers)
    return tuple(x for c in both for x in boxes_between(c, 0, c.size))


@lru_cache(maxsize=64)
def num_steps(plan: ReshardPlan) -> int:
    """How many steps one bucket takes: into nodes, down the trees, and inside nodes."""
    most = 0
    for group in plan.groups:
        most = max([most, *(copy.step + 1 for copy in group.local_copies)])
        if group.arrivals:
            largest = max(stop - start for start, stop in map(group.tree_nodes, range(group.num_trees)))
            tree_steps = height(largest) + 1
            most = max(most, tree_steps + any(len(x) > 1 for x, parts in group.arrivals.by_device.items() if parts))
    return most


def num_buckets(plan: ReshardPlan, itemsize: int, limit: int = BUCKET) -> int:
    """Into how many buckets the classes are divided, so that no rank has more than `limit` bytes in flight in one
    direction, up to undivided classes and one row of each box. itemsize: bytes per element."""
    amount = plan.busiest * itemsize
    enough = BUCKETS_PER_STEP * ROUNDS_IN_FLIGHT * max(1, num_steps(plan) - 1)
    return max(1, -(-ROUNDS_IN_FLIGHT * amount // limit), min(enough, amount // MIN_ROUND_BYTES))
