"""Bytes of values between calls, bounded by the frames' limits.

In: the tables of a plan. Out: bytes of a buffer `value@spread` on a rank that holds it. Rows are divided longest first
(`sharding/partition.py`), so no dp rank gets more tokens than an even share of rows of maximum length has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rldsl.plan.model import Layout, Plan, Spread, Value
from rldsl.plan.spaces import IndexedFrame, indexed_frames

SIZES = {"f32": 4, "i64": 8, "bool": 1}
ROW = 16  # bytes of a row's number and its number of entries


@dataclass(frozen=True, slots=True)
class Tables:
    """Records of a plan by id."""

    frames: Mapping[str, IndexedFrame]
    values: Mapping[str, Value]
    spreads: Mapping[str, Spread]
    layouts: Mapping[str, Layout]

    @staticmethod
    def of(plan: Plan) -> Tables:
        return Tables(indexed_frames(plan), {v.id: v for v in plan.values}, {s.id: s for s in plan.spreads},
                      {x.id: x for x in plan.layouts})


def rows(frame: IndexedFrame, spread: Spread, layouts: Mapping[str, Layout]) -> int:
    """Rows of a frame on the dp rank of a spread that has most."""
    if spread.granularity == "all" or not spread.layout:
        return frame.count
    dp = layouts[spread.layout].dp
    if spread.granularity == "prompt":
        return -(-frame.count // frame.per_prompt // dp) * frame.per_prompt
    return -(-frame.count // dp)


def width(frame: IndexedFrame) -> int:
    """Tokens of the longest row."""
    return frame.max_prompt_tokens + frame.max_response_tokens


def buffer_bytes(t: Tables, value: str, spread: str) -> int:
    """Bytes of a value under a spread, on a rank of its mesh. Text columns are in host memory and have no bound."""
    v = t.values[value]
    if v.extent == "batch":
        return 8 + ROW
    frame = t.frames[v.frame]
    if v.extent == "lengths":
        return 2 * 8 * frame.count
    if v.dtype == "text" or v.extent == "columns":
        return 0
    num_rows = rows(frame, t.spreads[spread], t.layouts)
    if v.extent == "prompt":
        return -(-num_rows // frame.per_prompt) * (SIZES[v.dtype] + ROW)
    entries = {"tokens": width(frame), "response": frame.max_response_tokens, "row": 1}[v.extent]
    return num_rows * (entries * SIZES[v.dtype] + ROW)
