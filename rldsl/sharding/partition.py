"""Which rows each data-parallel shard works on, and which rows travel between ranks.

In: spreads, frames, row lengths, seed and step. Out: row numbers. All pure functions of their arguments (integers
only), so that every rank finds the same without a message.
Invariants: every row is in exactly one shard of a division, and in exactly one minibatch of an epoch; what a sample's
minibatch is depends on seed, step, call, epoch and row alone, never on degrees.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from typing import Literal

from rldsl.plan.model import Frame, Spread
from rldsl.sharding.balance import balance_items, sequence_cost

MASK = (1 << 64) - 1

Rows = tuple[int, ...]  # ascending
Lengths = Mapping[str, Sequence[int]]  # frame -> total tokens of each row


@dataclass(frozen=True, slots=True)
class RowMove:
    """`rows` of a frame go from rank `src` to rank `dst`."""

    src: int
    dst: int
    rows: Rows


# ---------------------------------------------------------------------------------------------------- division


def partition(weights: Sequence[int], shards: int, weigh: Literal["count", "tokens", "slot"]) -> tuple[Rows, ...]:
    """Item numbers for each shard. "count": contiguous runs of even length. "tokens": so that the heaviest
    shard is as light as possible (`balance.py`). Shards stay empty when there are fewer items."""
    assert shards > 0
    if weigh == "count":
        return _runs(tuple(range(len(weights))), shards)
    return balance_items(weights, shards, len(weights))


def _runs(items: Rows, shards: int) -> tuple[Rows, ...]:
    n = len(items)
    return tuple(items[i * n // shards : (i + 1) * n // shards] for i in range(shards))


def mix(*keys: int) -> int:
    """A 64-bit hash of integers: the finaliser of splitmix64 (Steele, Lea & Flood 2014), chained."""
    state = 0
    for key in keys:
        state = (state ^ (key & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def key_of(name: str) -> int:
    """A name as a key of random numbers: 64 bits of its hash."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def permutation(n: int, *keys: int) -> tuple[int, ...]:
    """A pseudo-random order of 0..n-1 that depends on `keys` alone."""
    start = mix(*keys)
    return tuple(sorted(range(n), key=lambda i: (mix(start, i), i)))


def minibatch_rows(count: int, minibatches: int, epochs: int, shuffle: bool, seed: int, step: int,
                   call: int = 0) -> tuple[tuple[Rows, ...], ...]:
    """[epoch][minibatch] -> rows. Without shuffle, contiguous runs; sizes differ by at most one. call: as of a
    spread."""
    return tuple(
        tuple(tuple(sorted(run)) for run in _runs(
            permutation(count, seed, step, call << 32 | epoch) if shuffle else tuple(range(count)), minibatches))
        for epoch in range(epochs)
    )


# ---------------------------------------------------------------------------------------------------- spreads


def shard_rows(spread: Spread, dp: int, frames: Sequence[Frame], lengths: Lengths, seed: int, step: int,
               every: Sequence[Frame] = ()) -> tuple[dict[str, Rows], ...]:
    """For each shard, the rows of each of `frames` that it works on (in a training spread, in any minibatch).

    frames: at least those of the spread. Others whose rows or prompts have the same numbers follow: a shard has all
    their rows that belong to its own. every: more frames, to look up what those were selected from. lengths are read
    only where tokens weigh and of frames that tell which rows there are. Unit "all" is one shard with every row."""
    known = {f.id: f for f in (*every, *frames)}
    if spread.granularity == "all":
        return ({f.id: present_rows(f, known, lengths) for f in frames},)
    first = _weighed(spread, known)[0]
    minibatches = [m for epoch in _schedule(spread, dp, known, lengths, seed, step) for m in epoch]
    unions = (sorted({unit for m in minibatches for unit in m[shard]}) for shard in range(dp))
    return tuple({f.id: _follow(spread.granularity, first, f, units, known, lengths) for f in frames}
                 for units in unions)


def train_schedule(spread: Spread, dp: int, frames: Sequence[Frame], lengths: Lengths, seed: int,
                   step: int) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][shard] -> rows, which are those of every frame of the spread. frames: as for `shard_rows`."""
    known = {f.id: f for f in frames}
    first, *others = _weighed(spread, known)
    assert all(f.row_space == first.row_space for f in others), f"the frames of spread {spread.id} do not share rows"
    return tuple(tuple(tuple(_follow(spread.granularity, first, first, units, known, lengths) for units in minibatch)
                       for minibatch in epoch) for epoch in _schedule(spread, dp, known, lengths, seed, step))


def present_rows(frame: Frame, known: Mapping[str, Frame], lengths: Lengths) -> Rows:
    """The rows that the frame has: all, or those that the lengths of `frame.partial` tell."""
    if not frame.present_in:
        return tuple(range(frame.count))
    tells = lengths[frame.present_in]
    each = frame.count // len(tells)  # completions of each row of selected prompts
    return tuple(r for r in range(frame.count) if tells[r // each] > 0)


def source_frame(frame: Frame, known: Mapping[str, Frame]) -> Frame:
    """The frame that a selection, or a selection of a selection, was taken from: rows have the same numbers in both."""
    while frame.selected_from:
        frame = known[frame.selected_from]
    return frame


def prompt_space(frame: Frame, known: Mapping[str, Frame]) -> str:
    """The prompt space in which the prompts of `frame` have the same numbers, selected or not."""
    while frame.selected_from or frame.present_in not in ("", frame.id):
        frame = known[frame.selected_from or frame.present_in]
    return frame.prompt_space


def _weighed(spread: Spread, known: Mapping[str, Frame]) -> tuple[Frame, ...]:
    assert spread.frames and all(f in known for f in spread.frames), f"spread {spread.id}: frames {spread.frames}"
    return tuple(known[f] for f in spread.frames)


def _schedule(spread: Spread, dp: int, known: Mapping[str, Frame], lengths: Lengths, seed: int,
              step: int) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][shard] -> units (rows or prompts)."""
    frames = _weighed(spread, known)
    if spread.balance_by == "slot":
        return ((_slots(frames[0], spread.granularity, dp),),)
    weights = _weights(spread, frames, known, lengths)
    numbers = tuple(weights)
    return tuple(
        tuple(tuple(tuple(numbers[units[i]] for i in items)
                    for items in partition([weights[numbers[u]] for u in units], dp, spread.balance_by))
                     for units in epoch)
        for epoch in minibatch_rows(len(numbers), spread.minibatches, spread.epochs, spread.shuffle, seed, step,
                                    spread.call)
    )


def _slots(frame: Frame, unit: str, dp: int) -> tuple[Rows, ...]:
    """The same units of every turn for a shard, whether they are there or not."""
    units = frame.count // (frame.per_prompt if unit == "prompt" else 1)
    turn = units // frame.iterations
    return tuple(tuple(t * turn + u for t in range(frame.iterations) for u in run)
                 for run in _runs(tuple(range(turn)), dp))


def _weights(spread: Spread, frames: Sequence[Frame], known: Mapping[str, Frame], lengths: Lengths) -> dict[int, int]:
    """The weight of each unit that is there, ascending: what its sequences of all frames cost, or 1."""
    per_unit = [f.per_prompt if spread.granularity == "prompt" else 1 for f in frames]
    assert all(f.count % per == 0 for f, per in zip(frames, per_unit, strict=True)), f"spread {spread.id} cuts a prompt"
    assert len({f.count // per for f, per in zip(frames, per_unit, strict=True)}) == 1, (
        f"the frames of spread {spread.id} have different numbers of units")
    weights: dict[int, int] = {}
    for frame, per in zip(frames, per_unit, strict=True):
        rows = present_rows(frame, known, lengths)
        if spread.balance_by == "count":
            weights |= {row // per: 1 for row in rows}
            continue
        assert len(lengths[frame.id]) == frame.count, f"frame {frame.id}: {len(lengths[frame.id])} lengths"
        for row in rows:
            weights[row // per] = weights.get(row // per, 0) + sequence_cost(lengths[frame.id][row])
    return dict(sorted(weights.items()))


def _follow(unit: str, divided: Frame, frame: Frame, units: Sequence[int], known: Mapping[str, Frame],
            lengths: Lengths) -> Rows:
    """The rows of `frame` for some units (rows or prompts) of `divided`."""
    if unit == "row" and source_frame(frame, known).row_space == source_frame(divided, known).row_space:
        rows: Sequence[int] = units
    else:
        assert prompt_space(frame, known) == prompt_space(divided, known), (
            f"frame {frame.id} shares no prompts with {divided.id}")
        prompts = units if unit == "prompt" else sorted({row // divided.per_prompt for row in units})
        rows = [r for p in prompts for r in range(p * frame.per_prompt, (p + 1) * frame.per_prompt)]
    if not frame.present_in:
        return tuple(rows)
    here = set(present_rows(frame, known, lengths))
    return tuple(r for r in rows if r in here)


def micro_batches(rows: Sequence[int], lengths: Sequence[int], mbs: int, min_count: int,
                  mbt: int = 0) -> tuple[Rows, ...]:
    """`rows` in micro-batches of at most `mbs` rows and `mbt` tokens (0: any number), of about equal token counts,
    at least `min_count` of them while there are that many rows. A row longer than `mbt` is alone. lengths: tokens,
    by row number. Rows ascend inside a micro-batch and micro-batches by their first row, so their concatenation is in
    general *not* in the order of `rows`."""
    if not rows:
        return ()
    rows = sorted(rows)
    sizes = [lengths[r] for r in rows]
    count = max(count_without_token_limit(len(rows), mbs, min_count), _bins(sizes, mbt) if mbt else 1)
    parts = balance_items(sizes, count, mbs or len(rows))
    while mbt and any(len(part) > 1 and sum(sizes[i] for i in part) > mbt for part in parts):
        count += 1
        parts = balance_items(sizes, count, mbs or len(rows))
    return tuple(sorted(tuple(rows[i] for i in part) for part in parts))


def num_micro_batches(rows: Sequence[int], lengths: Sequence[int], mbs: int, min_count: int, mbt: int = 0) -> int:
    """Into how many micro-batches `micro_batches` divides them."""
    if mbt:
        return len(micro_batches(rows, lengths, mbs, min_count, mbt))
    return count_without_token_limit(len(rows), mbs, min_count)


def _bins(sizes: Sequence[int], budget: int) -> int:
    """How many bins of `budget` the longest first fill, each going to the first with room (Johnson 1973: at most 11/9
    of the fewest possible, and one)."""
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = next((i for i, left in enumerate(room) if left >= size), None)
        if at is None:
            room.append(budget - size)
        else:
            room[at] -= size
    return len(room)


def count_without_token_limit(rows: int, mbs: int, min_count: int) -> int:
    """Into how many micro-batches `micro_batches` divides so many rows where tokens have no bound."""
    return min(rows, max(min_count, -(-rows // mbs) if mbs else 1, 1))


# ---------------------------------------------------------------------------------------------------- moves


def row_moves(src_rows: Mapping[int, Collection[int]], dst_rows: Mapping[int, Collection[int]],
              devices_per_node: int) -> tuple[RowMove, ...]:
    """The rows that each destination rank lacks, from the nearest holders (own node first), then from the one that
    sends the fewest rows so far. Rows with the same nearest holders come from one of them, so a rank hears from as few
    as possible. Ordered by destination, then source."""
    holders_of_row: dict[int, list[int]] = {}
    for rank in sorted(src_rows):
        for row in src_rows[rank]:
            holders_of_row.setdefault(row, []).append(rank)
    # sets of holders by number: there are few, and each may have all ranks
    set_ids: dict[tuple[int, ...], int] = {}
    set_of_row = {row: set_ids.setdefault(tuple(ranks), len(set_ids)) for row, ranks in holders_of_row.items()}
    holder_sets = list(set_ids)
    by_node = [{node: tuple(ranks) for node, ranks in groupby(holders, lambda r: r // devices_per_node)}
               for holders in holder_sets]  # holders ascend
    nearest_set: dict[tuple[int, int], int] = {}  # (set of holders, node of the destination) -> those of them to ask
    heap_of_set: dict[int, list[tuple[int, int]]] = {}
    rows_sent = dict.fromkeys(src_rows, 0)
    moves: dict[tuple[int, int], list[int]] = {}
    for dst in sorted(dst_rows):
        node = dst // devices_per_node
        rows_by_set: dict[int, list[int]] = defaultdict(list)
        for row in sorted(set(dst_rows[dst]).difference(src_rows.get(dst, ()))):
            assert row in set_of_row, f"no rank holds row {row}, which rank {dst} needs"
            key = set_of_row[row], node
            if key not in nearest_set:
                ranks = by_node[key[0]].get(node)
                nearest_set[key] = set_ids.setdefault(ranks, len(set_ids)) if ranks else key[0]
                if nearest_set[key] not in heap_of_set:
                    heap_of_set[nearest_set[key]] = sorted((rows_sent[r], r) for r in ranks or holder_sets[key[0]])
            rows_by_set[nearest_set[key]].append(row)
        for set_id, rows in rows_by_set.items():
            src = _least_loaded(heap_of_set[set_id], rows_sent)
            rows_sent[src] += len(rows)
            moves.setdefault((dst, src), []).extend(rows)
    return tuple(RowMove(src, dst, tuple(sorted(rows))) for (dst, src), rows in sorted(moves.items()))


def _least_loaded(heap: list[tuple[int, int]], load: Mapping[int, int]) -> int:
    """The rank with the smallest load, the first of equals."""
    # A lazy heap: entries may be out of date, but loads only grow, so update the top until it is right.
    while True:
        noted, rank = heap[0]
        if load[rank] == noted:
            return rank
        heapreplace(heap, (load[rank], rank))
