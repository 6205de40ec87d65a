"""Which rows each data-parallel shard works on, and which rows travel between ranks.

In: spreads, frames, row lengths, seed and step. Out: row numbers. All pure functions of their arguments (integers
only), so that every rank finds the same without a message.
Invariants: every row is in exactly one shard of a division, and in exactly one minibatch of an epoch; what a sample's
minibatch is depends on seed, step, epoch and row alone, never on degrees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from rldsl.plan.model import Frame, Spread

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


def partition(weights: Sequence[int], shards: int, weigh: Literal["count", "tokens"]) -> tuple[Rows, ...]:
    """Item numbers for each shard. "count": contiguous runs of even length. "tokens": longest first onto the lightest
    shard, at most 4/3 of the best possible (Graham 1969). Shards stay empty when there are fewer items."""
    assert shards > 0
    if weigh == "count":
        return _runs(tuple(range(len(weights))), shards)
    return _longest_first(weights, shards, len(weights))


def _runs(items: Rows, shards: int) -> tuple[Rows, ...]:
    n = len(items)
    return tuple(items[i * n // shards : (i + 1) * n // shards] for i in range(shards))


def _longest_first(weights: Sequence[int], shards: int, most: int) -> tuple[Rows, ...]:
    """Ties go to the shard with fewer items, then to the first; no shard gets more than `most` items."""
    heap = [(0, 0, shard) for shard in range(shards)]
    chosen: list[list[int]] = [[] for _ in range(shards)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, count, shard = heappop(heap)
        chosen[shard].append(item)
        if count + 1 < most:
            heappush(heap, (load + weights[item], count + 1, shard))
    return tuple(tuple(sorted(items)) for items in chosen)


def mix(*keys: int) -> int:
    """A 64-bit hash of integers: the finaliser of splitmix64 (Steele, Lea & Flood 2014), chained."""
    state = 0
    for key in keys:
        state = (state ^ (key & MASK)) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def permutation(n: int, *keys: int) -> tuple[int, ...]:
    """A pseudo-random order of 0..n-1 that depends on `keys` alone."""
    start = mix(*keys)
    return tuple(sorted(range(n), key=lambda i: (mix(start, i), i)))


def minibatch_rows(count: int, minibatches: int, epochs: int, shuffle: bool, seed: int,
                   step: int) -> tuple[tuple[Rows, ...], ...]:
    """[epoch][minibatch] -> rows. Without shuffle, contiguous runs; sizes differ by at most one."""
    return tuple(
        tuple(tuple(sorted(run)) for run in _runs(
            permutation(count, seed, step, epoch) if shuffle else tuple(range(count)), minibatches))
        for epoch in range(epochs)
    )


# ---------------------------------------------------------------------------------------------------- spreads


def shard_rows(spread: Spread, dp: int, frames: Sequence[Frame], lengths: Lengths, seed: int,
               step: int) -> tuple[dict[str, Rows], ...]:
    """For each shard, the rows of each of `frames` that it works on (in a training spread, in any minibatch).

    frames: at least those of the spread. Others of the same prompt space follow: a shard has all their rows that
    belong to its prompts. lengths are read only where tokens weigh. Unit "all" is one shard with every row."""
    if spread.unit == "all":
        return ({f.id: tuple(range(f.count)) for f in frames},)
    first = _weighed(spread, frames)[0]
    minibatches = [m for epoch in _schedule(spread, dp, frames, lengths, seed, step) for m in epoch]
    unions = (sorted({unit for m in minibatches for unit in m[shard]}) for shard in range(dp))
    return tuple({f.id: _follow(spread.unit, first, f, units) for f in frames} for units in unions)


def train_schedule(spread: Spread, dp: int, frames: Sequence[Frame], lengths: Lengths, seed: int,
                   step: int) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][shard] -> rows, which are those of every frame of the spread."""
    first, *others = _weighed(spread, frames)
    assert all(f.rows == first.rows for f in others), f"the frames of spread {spread.id} do not share rows"
    return tuple(tuple(tuple(_follow(spread.unit, first, first, units) for units in minibatch) for minibatch in epoch)
                 for epoch in _schedule(spread, dp, frames, lengths, seed, step))


def _weighed(spread: Spread, frames: Sequence[Frame]) -> tuple[Frame, ...]:
    known = {f.id: f for f in frames}
    assert spread.frames and all(f in known for f in spread.frames), f"spread {spread.id}: frames {spread.frames}"
    return tuple(known[f] for f in spread.frames)


def _schedule(spread: Spread, dp: int, frames: Sequence[Frame], lengths: Lengths, seed: int,
              step: int) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][shard] -> units (rows or prompts)."""
    weights = _weights(spread, _weighed(spread, frames), lengths)
    return tuple(
        tuple(tuple(tuple(units[i] for i in items)
                    for items in partition([weights[u] for u in units], dp, spread.weigh)) for units in epoch)
        for epoch in minibatch_rows(len(weights), spread.minibatches, spread.epochs, spread.shuffle, seed, step)
    )


def _weights(spread: Spread, frames: Sequence[Frame], lengths: Lengths) -> list[int]:
    """Weight of each unit: tokens over all frames, or 1."""
    per_unit = [f.per_prompt if spread.unit == "prompt" else 1 for f in frames]
    assert all(f.count % per == 0 for f, per in zip(frames, per_unit)), f"spread {spread.id} cuts a prompt"
    counts = {f.count // per for f, per in zip(frames, per_unit)}
    assert len(counts) == 1, f"the frames of spread {spread.id} have different numbers of units"
    if spread.weigh == "count":
        return [1] * counts.pop()
    weights = [0] * counts.pop()
    for frame, per in zip(frames, per_unit):
        assert len(lengths[frame.id]) == frame.count, f"frame {frame.id}: {len(lengths[frame.id])} lengths"
        for row, length in enumerate(lengths[frame.id]):
            weights[row // per] += length
    return weights


def _follow(unit: str, divided: Frame, frame: Frame, units: Sequence[int]) -> Rows:
    """The rows of `frame` for some units (rows or prompts) of `divided`."""
    if unit == "row" and frame.rows == divided.rows:
        return tuple(units)
    assert frame.prompts == divided.prompts, f"frame {frame.id} shares no prompts with {divided.id}"
    prompts = units if unit == "prompt" else sorted({row // divided.per_prompt for row in units})
    return tuple(r for p in prompts for r in range(p * frame.per_prompt, (p + 1) * frame.per_prompt))


def micro_batches(rows: Sequence[int], lengths: Sequence[int], limit: int, at_least: int) -> tuple[Rows, ...]:
    """`rows` in micro-batches of at most `limit` (0: any number), of about equal token counts, at least `at_least` of
    them while there are that many rows. lengths: tokens, by row number. Rows ascend inside a micro-batch and
    micro-batches by their first row, so their concatenation is in general *not* in the order of `rows`."""
    if not rows:
        return ()
    rows = sorted(rows)
    count = min(len(rows), max(at_least, -(-len(rows) // limit) if limit else 1, 1))
    parts = _longest_first([lengths[r] for r in rows], count, limit or len(rows))
    return tuple(sorted(tuple(rows[i] for i in part) for part in parts))


# ---------------------------------------------------------------------------------------------------- moves


def row_moves(src_rows: Mapping[int, Collection[int]], dst_rows: Mapping[int, Collection[int]],
              devices_per_node: int) -> tuple[RowMove, ...]:
    """The rows that each destination rank lacks, from the nearest holders (own node first), then from the one that
    sends the fewest rows so far. Rows with the same nearest holders come from one of them, so a rank hears from as few
    as possible. Ordered by destination, then source."""
    found: dict[int, list[int]] = {}
    for rank in sorted(src_rows):
        for row in src_rows[rank]:
            found.setdefault(row, []).append(rank)
    holders = {row: tuple(ranks) for row, ranks in found.items()}
    load = dict.fromkeys(src_rows, 0)
    moves: dict[tuple[int, int], list[int]] = {}
    for dst in sorted(dst_rows):
        groups: dict[tuple[int, ...], list[int]] = {}
        near: dict[tuple[int, ...], tuple[int, ...]] = {}
        for row in sorted(set(dst_rows[dst]).difference(src_rows.get(dst, ()))):
            assert row in holders, f"nobody holds row {row}, which rank {dst} lacks"
            every = holders[row]
            if every not in near:
                near[every] = tuple(r for r in every if r // devices_per_node == dst // devices_per_node) or every
            groups.setdefault(near[every], []).append(row)
        for ranks, rows in groups.items():
            src = min(ranks, key=lambda r: (load[r], r))
            load[src] += len(rows)
            moves.setdefault((dst, src), []).extend(rows)
    return tuple(RowMove(src, dst, tuple(sorted(rows))) for (dst, src), rows in sorted(moves.items()))
