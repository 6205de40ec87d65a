"""Rounds: the messages of one rank, bucket by bucket.

In: the lanes of a rank. Out: `Round`s, which every rank of the reallocation goes through in the same order. In bucket b
of B the b-th part of every line travels, so that every round moves about the same number of bytes and every rank is as
busy in one round as in any other; a line that is short beside a bucket travels whole, in one of them. Two rounds are
under way at a time, so what comes in a round may be sent on two rounds later, and never after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rldsl.reshard.broadcast_trees import height
from rldsl.reshard.records import Paths
from rldsl.reshard.shard_classes import boxes
from rldsl.reshard.transfer_slices import Known, Lane, rank_lanes
from rldsl.sharding.boxes import Box, volume

BUCKET = 256 << 20  # bytes on their way to or from a rank: larger ones gain little, two must fit beside the parameters
LEAST = 4 << 20  # bytes; in smaller rounds the start of a message costs more than its bytes
AHEAD = 2  # rounds under way
FULL = 16  # buckets for each step beyond the first, so that the ends of a tree wait for a small part of the time only
SHORT = 32  # lines of less than this part of a bucket are not divided


@dataclass(frozen=True, slots=True)
class Message:
    """One contiguous message to or from `peer`: the elements of each box of a parameter, one after the other."""

    peer: int
    boxes: tuple[tuple[str, Box], ...]

    def size(self) -> int:
        """Number of elements."""
        return sum(volume(box) for _, box in self.boxes)


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank posts together; by peer, at most one message to and one from each."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def rank_ops(p: Paths, rank: int, buckets: int) -> tuple[Round, ...]:
    """All rounds of a rank; empty ones too, so that the i-th rounds of all ranks belong together."""
    return tuple(some_rounds(p, rank, buckets, range(count(p, buckets))))


def some_rounds(p: Paths, rank: int, buckets: int, numbers: Iterable[int],
                known: Known | None = None) -> Iterator[Round]:
    """Those of the given numbers. known: of these paths, from who asks for many ranks."""
    sends, receives = rank_lanes(p, rank, known)
    short = _short(p, buckets)
    for number in numbers:
        yield Round(*(tuple(_messages(p, side, number, buckets, short)) for side in (sends, receives)))


def count(p: Paths, buckets: int) -> int:
    """The number of rounds."""
    return buckets + AHEAD * (steps(p) - 1) if steps(p) else 0


def _messages(p: Paths, lanes: Sequence[Lane], number: int, buckets: int, short: int) -> Iterator[Message]:
    found: dict[int, list[tuple[str, Box]]] = {}
    for lane in lanes:
        if part := tuple(boxes(p.lines[lane.line], *_stretch(p, lane, number, buckets, short))):
            found.setdefault(lane.peer, []).extend(part)
    return (Message(peer, tuple(found[peer])) for peer in sorted(found))


def _stretch(p: Paths, lane: Lane, number: int, buckets: int, short: int) -> tuple[int, int]:
    """What of a lane travels in a round: bucket b takes its step j in round b + AHEAD * j."""
    bucket, size = number - AHEAD * lane.step, p.lines[lane.line].size
    if not 0 <= bucket < buckets:
        return 0, 0
    if size <= short:
        return (lane.start, lane.stop) if bucket == lane.line % buckets else (0, 0)
    first, past = size * bucket // buckets, size * (bucket + 1) // buckets
    return first + lane.start * (past - first) // size, first + lane.stop * (past - first) // size


def _short(p: Paths, buckets: int) -> int:
    """Lines of at most so many elements are not divided."""
    return p.busiest // (SHORT * buckets)


def kept(p: Paths, rank: int) -> tuple[tuple[str, Box], ...]:
    """What `rank` holds under both layouts. Each box lies inside one piece of either."""
    have, want = p.src.cell(rank), p.dst.cell(rank)
    return tuple(x for line in p.lines if have in line.have and want in line.want for x in boxes(line, 0, line.size))


def steps(p: Paths) -> int:
    """Rounds that one bucket takes."""
    most = 1 if any(k.hops for k in p.kinds) else 0
    for kind in p.kinds:
        most = max(most, 1, *(h.step + 1 for h in kind.hops)) if kind.hops else most
        if kind.entering:
            largest = max(stop - start for start, stop in map(kind.tree, range(kind.trees)))
            deep = height(largest)
            most = max(most, deep + 1 + any(len(e.needers) > 1 for e in kind.entering.values()))
    return most


def buckets(p: Paths, itemsize: int, limit: int = BUCKET) -> int:
    """Into how many buckets the lines are divided so that no rank has more than `limit` bytes on their way in one
    direction, to within short lines and a row of each box. itemsize: bytes of an element."""
    amount = p.busiest * itemsize
    return max(1, -(-AHEAD * amount // limit), min(FULL * AHEAD * max(1, steps(p) - 1), amount // LEAST))
