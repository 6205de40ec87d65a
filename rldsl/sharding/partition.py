"""Which rows each dp rank works on, and which rows are sent between ranks.

In: spreads, frames, row lengths, seed and step. Out: row numbers. All pure functions of their arguments (integers
only), so that every rank computes the same without communication.
Invariants: every row is on exactly one dp rank of a division, and in exactly one minibatch of an epoch; which minibatch
a row is in depends on seed, step, call, epoch and row alone, never on degrees.
Errors: InternalError for a spread that the verifier refuses (RL0538), or for wrong arguments.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import groupby
from typing import Literal

from rldsl.diag import internal_error
from rldsl.plan.model import Spread
from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding.balance import balance_items, sequence_cost
from rldsl.sharding.siblings import Siblings

MASK = (1 << 64) - 1
PLACE = "the division of rows"  # in internal errors

Rows = tuple[int, ...]  # ascending
Lengths = Mapping[str, Sequence[int]]  # frame -> total tokens of each row


@dataclass(frozen=True, slots=True)
class RowMove:
    """`rows` of a frame go from rank `src` to rank `dst`."""

    src: int  # rank that has them
    dst: int  # rank that gets them
    rows: Rows  # numbers, ascending


# ---------------------------------------------------------------------------------------------------- division


def partition(weights: Sequence[int], parts: int, balance_by: Literal["count", "tokens"]) -> tuple[Rows, ...]:
    """Item numbers of each of `parts` parts. "count": contiguous runs of even length. "tokens": so that the heaviest
    part is as light as possible (`balance.py`). Parts stay empty when there are fewer items."""
    if parts < 1:
        raise internal_error(f"items cannot be divided into {parts} parts", place=PLACE)
    if balance_by == "count":
        return _runs(tuple(range(len(weights))), parts)
    return balance_items(weights, parts, len(weights))


def _runs(items: Rows, count: int) -> tuple[Rows, ...]:
    n = len(items)
    return tuple(items[i * n // count : (i + 1) * n // count] for i in range(count))


def mix(*keys: int) -> int:
    """A 64-bit hash of integers: the finalizer of splitmix64 (Steele, Lea & Flood 2014), chained."""
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


def minibatch_positions(count: int, minibatches: int, epochs: int, shuffle: bool, seed: int, step: int,
                        call: int = 0) -> tuple[tuple[Rows, ...], ...]:
    """[epoch][minibatch] -> positions of units, out of 0..count-1, ascending. Without shuffle, contiguous runs; sizes
    differ by at most one. call: as of a spread."""
    return tuple(
        tuple(tuple(sorted(run)) for run in _runs(
            permutation(count, seed, step, call << 32 | epoch) if shuffle else tuple(range(count)), minibatches))
        for epoch in range(epochs)
    )


# ---------------------------------------------------------------------------------------------------- spreads


def rows_by_dp(spread: Spread, dp: int, frames: Sequence[IndexedFrame], lengths: Lengths, seed: int, step: int,
               siblings: Siblings | None = None) -> tuple[dict[str, Rows], ...]:
    """[dp rank] -> frame -> the rows of each of `frames` that it works on (in a training spread, in any minibatch).

    frames: at least those of the spread. The others, which share their rows or prompts or are concatenated in them, are
    divided accordingly: a dp rank gets the rows that belong to its own. lengths: needed of frames that are balanced by
    tokens, and of those whose lengths say which rows exist; of a frame whose rows are not known yet there are none in
    the result. A spread with granularity "all" has one dp rank with every row. siblings: rows of one prompt, and the
    costs of prompts, of a spread whose ranks compute a prompt once: then they stay together where that makes the dp
    rank with most to compute faster."""
    known = {f.id: f for f in frames}
    if spread.granularity == "all":
        return ({f.id: present_rows(f, lengths) for f in frames},)
    first = _spread_frames(spread, known)[0]
    minibatches = [m for epoch in _units_by_dp(spread, dp, known, lengths, seed, step, siblings) for m in epoch]
    unions = (sorted({unit for m in minibatches for unit in m[dp_rank]}) for dp_rank in range(dp))
    present = [f for f in frames if not f.present_in or f.present_in in lengths]
    return tuple({f.id: _rows_of_units(spread.granularity, first, f, units, lengths) for f in present}
                 for units in unions)


def minibatch_rows_by_dp(spread: Spread, dp: int, frames: Sequence[IndexedFrame], lengths: Lengths, seed: int,
                         step: int, siblings: Siblings | None = None) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][dp rank] -> rows, the same of every frame of the spread. frames, siblings: as for
    `rows_by_dp`."""
    known = {f.id: f for f in frames}
    first, *others = _spread_frames(spread, known)
    if any(f.row_space != first.row_space for f in others):
        raise internal_error(f"the frames of spread {spread.id} do not share rows", place=PLACE)
    return tuple(tuple(tuple(_rows_of_units(spread.granularity, first, first, units, lengths)
                             for units in minibatch)
                       for minibatch in epoch)
                 for epoch in _units_by_dp(spread, dp, known, lengths, seed, step, siblings))


def present_rows(frame: IndexedFrame, lengths: Lengths) -> Rows:
    """All rows, or those that the lengths of `frame.present_in` say exist."""
    if not frame.present_in:
        return tuple(range(frame.count))
    present = lengths[frame.present_in]
    each = frame.count // len(present)  # completions of each row of selected prompts
    return tuple(r for r in range(frame.count) if present[r // each] > 0)


def _spread_frames(spread: Spread, known: Mapping[str, IndexedFrame]) -> tuple[IndexedFrame, ...]:
    if not spread.frames or any(f not in known for f in spread.frames):
        raise internal_error(f"spread {spread.id} divides the rows of unknown frames {list(spread.frames)}",
                             place=PLACE)
    return tuple(known[f] for f in spread.frames)


def _units_by_dp(spread: Spread, dp: int, known: Mapping[str, IndexedFrame], lengths: Lengths, seed: int, step: int,
                 siblings: Siblings | None) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
    """[epoch][minibatch][dp rank] -> unit ids (numbers of rows or prompts)."""
    frames = _spread_frames(spread, known)
    balance_by = spread.balance_by
    if balance_by == "slot":
        return ((_slots(frames[0], spread.granularity, dp),),)
    weights = _weights(spread, frames, lengths)
    unit_ids, tokens = tuple(weights), _tokens(spread, frames, lengths)

    def divide(units: Rows) -> tuple[Rows, ...]:
        """[dp rank] -> those of some units, ascending, that it works on."""
        costs = [weights[unit] for unit in units]
        parts = _in_leaves(spread.leaves, costs, dp, balance_by) if spread.leaves else partition(costs, dp, balance_by)
        found = tuple(tuple(units[i] for i in part) for part in parts)
        return found if siblings is None or dp == 1 else siblings.together(found, weights)

    # positions among the present units -> unit ids
    return tuple(
        tuple(divide(tuple(unit_ids[p] for p in positions)) for positions in epoch)
        for epoch in _positions(spread, [tokens[unit] for unit in unit_ids] if spread.minibatch_tokens else None,
                                len(unit_ids), seed, step)
    )


def _positions(spread: Spread, tokens: Sequence[int] | None, count: int, seed: int,
               step: int) -> tuple[tuple[Rows, ...], ...]:
    """[epoch][minibatch] -> positions of units, out of 0..count-1, ascending. tokens: of each unit, where minibatches
    have a size in tokens."""
    if tokens is None:
        return minibatch_positions(count, spread.minibatches, spread.epochs, spread.shuffle, seed, step, spread.call)
    whole = minibatch_positions(count, 1, spread.epochs, False, seed, step)
    orders = [permutation(count, seed, step, spread.call << 32 | epoch) if spread.shuffle else whole[epoch][0]
              for epoch in range(spread.epochs)]
    return tuple(minibatches_by_tokens(order, tokens, spread.minibatch_tokens, spread.minibatches) for order in orders)


def minibatches_by_tokens(order: Sequence[int], tokens: Sequence[int], most_tokens: int, count: int
                          ) -> tuple[Rows, ...]:
    """Positions, in this order, in minibatches: each takes positions until the next one would make it more than
    `most_tokens`; one that is longer is alone. tokens: of each position. Up to `count` the others are empty."""
    found: list[list[int]] = []
    filled = 0
    for at in order:
        if not found or filled + tokens[at] > most_tokens:
            found.append([])
            filled = 0
        found[-1].append(at)
        filled += tokens[at]
    if len(found) > count:
        raise internal_error(f"{len(found)} minibatches of {most_tokens} tokens, and room for {count}", place=PLACE)
    return (*(tuple(sorted(positions)) for positions in found), *((),) * (count - len(found)))


def _in_leaves(leaves: int, weights: Sequence[int], dp: int, balance_by: Literal["count", "tokens"]
               ) -> tuple[Rows, ...]:
    """Item numbers of each dp rank: those of its leaves. The heaviest leaves lie as far apart as possible, so that the
    ranks of every degree have about equal work, also where there are fewer items than leaves."""
    if leaves % dp:
        raise internal_error(f"{leaves} leaves cannot be divided over {dp} dp ranks", place=PLACE)
    parts = sorted(partition(weights, leaves, balance_by), key=lambda part: (-sum(weights[i] for i in part), part))
    in_order = [parts[_reversed_bits(at, leaves)] for at in range(leaves)]
    each = leaves // dp
    return tuple(tuple(sorted(i for part in in_order[r * each : (r + 1) * each] for i in part)) for r in range(dp))


def _reversed_bits(number: int, count: int) -> int:
    """The bits of a number below `count`, a power of two, in reverse."""
    bits = count.bit_length() - 1
    return sum((number >> i & 1) << bits - 1 - i for i in range(bits))


def _slots(frame: IndexedFrame, granularity: str, dp: int) -> tuple[Rows, ...]:
    """[dp rank] -> the same units of every iteration, whether they exist or not."""
    units = frame.count // (frame.per_prompt if granularity == "prompt" else 1)
    per_iteration = units // frame.iterations
    return tuple(tuple(i * per_iteration + unit for i in range(frame.iterations) for unit in run)
                 for run in _runs(tuple(range(per_iteration)), dp))


def _weights(spread: Spread, frames: Sequence[IndexedFrame], lengths: Lengths) -> dict[int, int]:
    """Unit id -> weight, of the units that exist, ascending: what its sequences of all frames cost, or 1."""
    per_unit = [f.per_prompt if spread.granularity == "prompt" else 1 for f in frames]
    if any(f.count % per for f, per in zip(frames, per_unit, strict=True)):
        raise internal_error(f"spread {spread.id} splits a prompt", place=PLACE)
    if len({f.count // per for f, per in zip(frames, per_unit, strict=True)}) != 1:
        raise internal_error(f"the frames of spread {spread.id} have different numbers of units", place=PLACE)
    weights: dict[int, int] = {}
    for frame, per in zip(frames, per_unit, strict=True):
        rows = present_rows(frame, lengths)
        if spread.balance_by == "count":
            weights |= {row // per: 1 for row in rows}
            continue
        if len(lengths[frame.id]) != frame.count:
            raise internal_error(f"frame {frame.id} has {frame.count} rows, but {len(lengths[frame.id])} lengths",
                                 place=PLACE)
        for row in rows:
            weights[row // per] = weights.get(row // per, 0) + sequence_cost(lengths[frame.id][row])
    return dict(sorted(weights.items()))


def _tokens(spread: Spread, frames: Sequence[IndexedFrame], lengths: Lengths) -> dict[int, int]:
    """Unit id -> tokens of its sequences of all frames, where minibatches have a size in tokens."""
    tokens: dict[int, int] = defaultdict(int)
    for frame in frames if spread.minibatch_tokens else ():
        each = frame.per_prompt if spread.granularity == "prompt" else 1
        for row in present_rows(frame, lengths):
            tokens[row // each] += lengths[frame.id][row]
    return tokens


def _rows_of_units(granularity: str, divided: IndexedFrame, frame: IndexedFrame, units: Sequence[int],
                   lengths: Lengths) -> Rows:
    """The rows of `frame` for some units (rows or prompts) of `divided`."""
    # Both frames are divided along the finest space that both lie below (selections count as what they were selected
    # from): a row of it has units_per_row units of `divided` and rows_per_row rows of `frame`.
    unit_level = divided.prompt_index if granularity == "prompt" else 0
    part = frame.among(divided)
    if part is not None:
        return _rows_of_part(frame, *part, divided.chain[unit_level].count // divided.chain[-1].count, units, lengths)
    common = next((i for i in range(unit_level, len(divided.chain)) if divided.origins[i] in frame.origins), None)
    if common is None:
        raise internal_error(f"frame {frame.id} shares no rows and no prompts with {divided.id}", place=PLACE)
    units_per_row = divided.chain[unit_level].count // divided.chain[common].count
    rows_per_row = frame.count // divided.chain[common].count
    return _present([r for s in sorted({unit // units_per_row for unit in units})
                     for r in range(s * rows_per_row, (s + 1) * rows_per_row)], frame, lengths)


def _rows_of_part(frame: IndexedFrame, level: int, first: int, units_per_root: int, units: Sequence[int],
                  lengths: Lengths) -> Rows:
    """The rows of a frame that belong to units of a concatenation. level, first: of `IndexedFrame.among`.
    units_per_root: units of each row of the root."""
    count = frame.chain[level].count
    rows_per_root = frame.count // count
    roots = sorted({unit // units_per_root - first for unit in units})
    return _present([r for root in roots if 0 <= root < count
                     for r in range(root * rows_per_root, (root + 1) * rows_per_root)], frame, lengths)


def _present(rows: Sequence[int], frame: IndexedFrame, lengths: Lengths) -> Rows:
    """Those of some rows that exist."""
    if not frame.present_in:
        return tuple(rows)
    present = set(present_rows(frame, lengths))
    return tuple(r for r in rows if r in present)


# ---------------------------------------------------------------------------------------------------- moves


def row_moves(src_rows: Mapping[int, Collection[int]], dst_rows: Mapping[int, Collection[int]],
              devices_per_node: int) -> tuple[RowMove, ...]:
    """The rows that each destination rank lacks, from the nearest holders (own node first), then from the one that
    sends the fewest rows so far. Rows with the same nearest holders come from one of them, so a rank receives from as
    few ranks as possible. Ordered by destination, then source."""
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
            if row not in set_of_row:
                raise internal_error(f"no rank holds row {row}, which rank {dst} needs", place=PLACE)
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
