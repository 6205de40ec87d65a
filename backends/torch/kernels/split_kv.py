"""Decode attention over the slab, for CUDA: one query for each sequence, whose keys are divided over many programs.

In: queries, the slab of a layer, where each query stands. Out: its result. A program reads a part of one sequence's
keys and values once, for all heads of queries that share them, and keeps the largest score, the sum of weights and the
weighed values; a second kernel joins the parts (Dao et al. 2023, Flash-Decoding). Sums are float32. Which parts there
are follows from shapes alone, so a captured graph holds for all lengths; a part behind a sequence's end reads nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64  # keys at once
WANTED = 512  # programs that keep a GPU busy


@triton.jit
def _part(queries, keys, values, positions, sums, stats, first, scale, window, slot, token, head,
          HEADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
          PART: tl.constexpr, BLOCK: tl.constexpr):
    """One part of the keys of sequence s and head h. slot, token, head: strides of keys and values. EACH heads of
    queries of SIZE numbers, as ROWS and WIDE, which are powers of two."""
    s, h, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_row, at_size, at_key = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    rows, sizes = at_row < EACH, at_size < SIZE
    place = tl.load(positions + s).to(tl.int32)
    low = tl.maximum(place - window + 1, p * PART)
    end = tl.minimum(place + 1, (p + 1) * PART)
    row = (s * HEADS + h) * EACH + at_row
    q = tl.load(queries + row[:, None] * SIZE + at_size[None, :], mask=rows[:, None] & sizes[None, :], other=0.0)
    base = (first + s).to(tl.int64) * slot + h * head
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(low // BLOCK * BLOCK, end, BLOCK):
        key = start + at_key
        seen = (key >= low) & (key < end)
        where = base + key.to(tl.int64)[:, None] * token + at_size[None, :]
        k = tl.load(keys + where, mask=seen[:, None] & sizes[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))  # finite: a block that is read has a key that is seen
        weights = tl.exp(scores - top[:, None])
        kept = tl.exp(peak - top)
        v = tl.load(values + where, mask=seen[:, None] & sizes[None, :], other=0.0)
        mass = mass * kept + tl.sum(weights, 1)
        total = total * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = top
    out = ((s * HEADS + h) * tl.num_programs(2) + p) * EACH + at_row
    tl.store(sums + out[:, None] * SIZE + at_size[None, :], total, mask=rows[:, None] & sizes[None, :])
    tl.store(stats + 2 * out, peak, mask=rows)
    tl.store(stats + 2 * out + 1, mass, mask=rows)


@triton.jit
def _join(sums, stats, out, parts, HEADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
          WIDE: tl.constexpr):
    """The parts of sequence s and head h, of which the first that a query sees has a finite largest score."""
    s, h = tl.program_id(0), tl.program_id(1)
    at_row, at_size = tl.arange(0, ROWS), tl.arange(0, WIDE)
    rows, sizes = at_row < EACH, at_size < SIZE
    here = (s * HEADS + h) * parts
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for p in range(parts):
        top = tl.maximum(top, tl.load(stats + 2 * ((here + p) * EACH + at_row), mask=rows, other=0.0))
    mass = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for p in range(parts):
        row = (here + p) * EACH + at_row
        weight = tl.exp(tl.load(stats + 2 * row, mask=rows, other=0.0) - top)
        mass += weight * tl.load(stats + 2 * row + 1, mask=rows, other=1.0)
        part = tl.load(sums + row[:, None] * SIZE + at_size[None, :], mask=rows[:, None] & sizes[None, :], other=0.0)
        total += weight[:, None] * part
    row = (s * HEADS + h) * EACH + at_row
    found = total / mass[:, None]
    tl.store(out + row[:, None] * SIZE + at_size[None, :], found.to(out.dtype.element_ty),
             mask=rows[:, None] & sizes[None, :])


def parts(sequences: int, heads: int, width: int) -> tuple[int, int]:
    """(keys of a part, parts): enough programs for a GPU, but no part without a whole block."""
    many = max(1, min(WANTED // max(1, sequences * heads), triton.cdiv(width, BLOCK)))
    each = max(BLOCK, triton.next_power_of_2(triton.cdiv(width, many)))
    return each, triton.cdiv(width, each)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor, width: int,
           scale: float, window: int | None) -> torch.Tensor:
    """q [S, H, D] of the slots from `first` on; keys, values [slots, W, K, D]; positions [S]: the last key that each
    sees, below width <= W. window: how many it sees; None: all. Returns [S, H, D]."""
    q = q.contiguous()
    (count, heads, size), groups = q.shape, keys.shape[2]
    each = heads // groups
    part, many = parts(count, groups, width)
    sums, stats = (torch.empty(count, groups, many, each, n, dtype=torch.float32, device=q.device) for n in (size, 2))
    out = torch.empty_like(q)
    shape = dict(HEADS=groups, EACH=each, SIZE=size, ROWS=max(16, triton.next_power_of_2(each)),
                 WIDE=max(16, triton.next_power_of_2(size)))
    _part[count, groups, many](q, keys, values, positions, sums, stats, first, scale,
                               width if window is None else window, *keys.stride()[:3], **shape, PART=part, BLOCK=BLOCK)
    _join[count, groups](sums, stats, out, many, **shape)
    return out
