"""Decode attention over the KV cache in Triton: one query per sequence, its keys divided over many programs.

In: queries, one layer's KV cache, and the position of each query. Out: the attention output.

A program reads one part of one sequence's keys and values once, for all query heads that share them, and stores the
largest score, the sum of weights and the weighted sum of values; a second kernel combines the parts (Flash-Decoding,
Dao et al. 2023). Sums are float32. The division into parts depends on shapes alone, so a captured CUDA graph holds for
all lengths; a part after a sequence's end reads nothing.

Parameters of kernels are annotated with names of `tl` alone: Triton evaluates annotations, too, and refuses others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64  # keys that are read at once
JOINED_AT_ONCE = 32  # parts that are read at once
TARGET_PROGRAMS = 512  # enough to keep a GPU busy


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _part(queries: tl.tensor, keys: tl.tensor, values: tl.tensor, positions: tl.tensor, sums: tl.tensor,
          stats: tl.tensor, first: tl.tensor, scale: tl.tensor, window: tl.tensor, slot: tl.tensor, token: tl.tensor,
          head: tl.tensor, HEADS: tl.constexpr, EACH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
          WIDE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """One part of the keys of sequence s and KV head h.

    slot, token, head: strides of keys and values. EACH query heads of SIZE elements share a KV head; ROWS and WIDE are
    these two rounded up to powers of two, as Triton needs them. PART: keys of a part."""
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
        top = tl.maximum(peak, tl.max(scores, 1))  # finite: every block that is read has a visible key
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _join(sums: tl.tensor, stats: tl.tensor, out: tl.tensor, parts: tl.tensor, HEADS: tl.constexpr,
          EACH: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, MANY: tl.constexpr, AT_ONCE: tl.constexpr
          ) -> None:
    """Combines the parts of one query head of sequence s. At least one of them has a finite largest score: a query sees
    its own position. MANY: parts rounded up to a power of two; AT_ONCE of them are read together."""
    s, head = tl.program_id(0), tl.program_id(1)
    at_size, at_part = tl.arange(0, WIDE), tl.arange(0, MANY)
    first = (s * HEADS + head // EACH) * parts * EACH + head % EACH
    rows = first + at_part * EACH
    peaks = tl.load(stats + 2 * rows, mask=at_part < parts, other=float("-inf"))
    top = tl.max(peaks, 0)
    mass = tl.sum(tl.exp(peaks - top) * tl.load(stats + 2 * rows + 1, mask=at_part < parts, other=0.0), 0)
    total = tl.zeros((WIDE,), tl.float32)
    for start in range(0, parts, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        row, seen = first + part * EACH, part < parts
        weight = tl.exp(tl.load(stats + 2 * row, mask=seen, other=float("-inf")) - top)
        each = tl.load(sums + row[:, None] * SIZE + at_size[None, :], mask=seen[:, None] & (at_size < SIZE)[None, :],
                       other=0.0)
        total += tl.sum(weight[:, None] * each, 0)
    tl.store(out + (s * HEADS * EACH + head) * SIZE + at_size, (total / mass).to(out.dtype.element_ty),
             mask=at_size < SIZE)


def parts(sequences: int, heads: int, width: int) -> tuple[int, int]:
    """(keys of a part, number of parts): enough programs for a GPU, but at least one block of keys in each part."""
    many = max(1, min(TARGET_PROGRAMS // max(1, sequences * heads), triton.cdiv(width, BLOCK)))
    each = max(BLOCK, triton.next_power_of_2(triton.cdiv(width, many)))
    return each, triton.cdiv(width, each)


def split_kv_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor,
                       kv_len: int, scale: float, window: int | None) -> torch.Tensor:
    """q: [S, H, D], of the slots first .. first + S. keys, values: [slots, W, K, D] with H a multiple of K.
    positions: [S], the last key that each query sees, below kv_len <= W. window: how many keys a query sees at most
    (None: all). Returns [S, H, D]."""
    q = q.contiguous()
    (count, heads, size), groups = q.shape, keys.shape[2]
    each = heads // groups
    part, many = parts(count, groups, kv_len)
    sums, stats = (torch.empty(count, groups, many, each, n, dtype=torch.float32, device=q.device) for n in (size, 2))
    out = torch.empty_like(q)
    shape = {"HEADS": groups, "EACH": each, "SIZE": size, "ROWS": max(16, triton.next_power_of_2(each)),
             "WIDE": max(16, triton.next_power_of_2(size))}
    _part[count, groups, many](q, keys, values, positions, sums, stats, first, scale,
                               kv_len if window is None else window, *keys.stride()[:3], **shape, PART=part,
                               BLOCK=BLOCK)
    del shape["ROWS"]
    together = triton.next_power_of_2(many)
    _join[count, heads](sums, stats, out, many, **shape, MANY=together, AT_ONCE=min(together, JOINED_AT_ONCE))
    return out
