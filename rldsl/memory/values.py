"""Bytes of values between calls, bounded by the frames' limits.

In: the tables of a plan. Out: bytes of a buffer `value@spread` on a rank that holds it. Rows are divided longest first
(`sharding/partition.py`), so no dp rank gets more tokens than an even share of rows of maximum length has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rldsl.plan.entries import ENTRIES, HIDDEN, EntrySpace, entry_spaces
from rldsl.plan.expr import Program
from rldsl.plan.image_limits import most_image_tokens
from rldsl.plan.model import Layout, Plan, ReplayBuffer, Spread, Value
from rldsl.plan.operators import OPERATORS
from rldsl.plan.prompt_sources import PromptSource, prompt_sources
from rldsl.plan.spaces import IndexedFrame, indexed_frames, unit_tokens, units_of_minibatch

WIDE = 8  # bytes of a float64, and of an int64
SIZES = {"f32": 4, "i64": 8, "bool": 1}
ROW = 16  # bytes of a row's number and its number of entries


@dataclass(frozen=True, slots=True)
class PassPeaks:
    """Bytes of activations, logits and messages at those moments of a minibatch's passes when most is held."""

    head: int  # the last norm, the head and the loss; on other stages less than of the layers
    layers: int  # the backward pass of the layer that needs most
    first_layer: int  # the backward pass of this rank's first layer, which comes last
    embedding: int  # the gradient of the embedding
    tower: int  # the passes of a vision tower; without images less than of the layers
    between_layers: int  # after the backward pass of the last layer of a chunk
    between_passes: int  # when the backward pass of a micro-batch has gone through all layers
    several: bool  # whether there are several micro-batches

    @property
    def most(self) -> int:
        return max(self.head, self.layers, self.embedding, self.tower)


@dataclass(frozen=True, slots=True)
class Tables:
    """Records of a plan by id."""

    frames: Mapping[str, IndexedFrame]  # by id
    values: Mapping[str, Value]  # by id
    spreads: Mapping[str, Spread]  # by id
    layouts: Mapping[str, Layout]  # by id
    entries: Mapping[str, EntrySpace] = field(default_factory=dict)  # by name
    prompts: Mapping[str, PromptSource] = field(default_factory=dict)  # by frame, as far as it is known
    images: int = 0  # tokens of the images of a prompt, at most; 0: no rows have images
    # A cache, by all that they depend on: what the passes of one call hold, the same at all levels of `zero`, and for
    # micro-batches of the same size on any number of ranks; None: not cached
    passes: dict[Hashable, Any] | None = None

    @staticmethod
    def of(plan: Plan) -> Tables:
        return Tables(indexed_frames(plan), {v.id: v for v in plan.values}, {s.id: s for s in plan.spreads},
                      {x.id: x for x in plan.layouts}, entry_spaces(plan.values), prompt_sources(plan),
                      most_image_tokens(plan.data))


def rows(frame: IndexedFrame, spread: Spread, layouts: Mapping[str, Layout],
         frames: Mapping[str, IndexedFrame]) -> int:
    """Rows of a frame on the dp rank of a spread that has most."""
    if spread.granularity == "all" or not spread.layout:
        return frame.count
    divided = frames[spread.frames[0]]
    units = divided.chain[divided.prompt_index if spread.granularity == "prompt" else 0].count
    per_unit = max(1, frame.count // units)
    return min(frame.count, -(-units // layouts[spread.layout].dp) * per_unit)


def width(frame: IndexedFrame) -> int:
    """Tokens of the longest row."""
    return frame.max_prompt_tokens + frame.max_response_tokens


def buffer_bytes(t: Tables, value: str, spread: str) -> int:
    """Bytes of a value under a spread, on a rank of its mesh. Text columns are in host memory and have no bound; states
    of rows are there too, 4 bytes for each row of a file that the compiler does not read."""
    v = t.values[value]
    if v.extent == "table":
        return 0
    if v.extent == "batch":
        return 8 + ROW
    if v.extent == "array":
        return WIDE * v.width + ROW
    if v.extent == "stored":  # in host memory
        return 0
    frame = t.frames[v.frame]
    if v.extent == "lengths":
        return 2 * 8 * frame.count
    if v.dtype == "text" or v.extent in ("columns", "cache"):  # that of a cache depends on its model (`lifetimes.py`)
        return 0
    num_rows = rows(frame, t.spreads[spread], t.layouts, t.frames)
    if v.extent == "prompt":
        return -(-num_rows // frame.per_prompt) * (SIZES[v.dtype] + ROW)
    several = frame.max_response_tokens * v.width
    entries = {"tokens": width(frame), "response": frame.max_response_tokens, "turn": frame.max_turns, "row": 1,
               "row_numbers": 1, ENTRIES: several, HIDDEN: several}[v.extent]
    return num_rows * (entries * SIZES[v.dtype] + ROW)


def buffer_bound(b: ReplayBuffer) -> int:
    """Bytes of a replay buffer in host memory, on each rank that holds it, if it is full of rows of maximum length."""
    longest = b.max_prompt_tokens + b.max_response_tokens
    entries = {"tokens": longest, "response": b.max_response_tokens, "row": 1}
    return b.capacity * (2 * WIDE + sum(entries[f.extent] * SIZES[f.dtype] for f in b.fields))


def loss_gather_bytes(t: Tables, program: Program, spread: Spread) -> int:
    """Bytes on a rank of a train call for medians and quantiles over the batch in the metrics of its loss: of each
    epoch the elements of its own rows with their positions, and all elements of all minibatches, both by minibatch and
    joined for one all-reduce; of the minibatch whose metrics are computed, the elements in order with their order."""
    own, whole = (_gathered_elements(t, program, of)
                  for of in (lambda f: rows(f, spread, t.layouts, t.frames), _all_rows))
    return WIDE * (2 * spread.epochs * (own + whole) + 3 * -(-whole // spread.minibatches))


def first_pass_bytes(t: Tables, program: Program, spread: Spread, frames: Iterable[str]) -> int:
    """Bytes on a rank with a model's last layers for a loss that needs the whole minibatch at once: its inputs, twice
    while they are brought together, and all values with their gradients, in float64. frames: that are trained on."""
    units = {f: t.frames[f].per_prompt if spread.granularity == "prompt" else 1 for f in frames}
    longest = unit_tokens([t.frames[f] for f in frames], spread.granularity == "prompt")
    num_rows = {f: unit * units_of_minibatch(spread, t.frames[f].count // unit, longest) for f, unit in units.items()}
    elements = 0
    for node in program.nodes:
        if node.level in ("token", "entry"):
            frame, width = t.entries[node.space] if node.level == "entry" else (node.space, 1)
            size = num_rows[frame] * t.frames[frame].max_response_tokens * max(width, 1)
        else:
            size = 0 if node.level == "batch" else max(num_rows.values())
        elements += size * (4 if node.op == "input" else 2)
    return WIDE * elements


def flow_gather_bytes(t: Tables, program: Program, spread: Spread) -> int:
    """Bytes on a rank of a computation for medians and quantiles over the batch: the elements of its own rows, and all
    elements, with their order."""
    own, whole = (_gathered_elements(t, program, of)
                  for of in (lambda f: rows(f, spread, t.layouts, t.frames), _all_rows))
    return WIDE * (own + 3 * whole)


def _all_rows(frame: IndexedFrame) -> int:
    return frame.count


def _gathered_elements(t: Tables, program: Program, num_rows: Callable[[IndexedFrame], int]) -> int:
    """How many elements the reductions and orders of the batch that gather them are about, at most. num_rows: of
    a frame."""
    total = 0
    for node in program.nodes:
        gathered = node.op in OPERATORS and OPERATORS[node.op].combine == "gather" and node.attr("to") == "batch"
        if not gathered and node.attr("within") != "batch":
            continue
        of = program.nodes[node.args[0]]
        if of.level == "entry":
            entries = t.entries[of.space]
            tokens = num_rows(t.frames[entries.frame]) * t.frames[entries.frame].max_response_tokens
            total += tokens * entries.width
            continue
        frame = next((f for f in t.frames.values() if of.space == {
            "token": f.id, "turn": f.id, "seq": f.row_space, "prompt": f.prompt_space}.get(of.level)), None)
        if frame is not None:
            each = {"token": frame.max_response_tokens, "turn": frame.max_turns, "seq": 1}.get(of.level)
            total += num_rows(frame) * each if each is not None else -(-num_rows(frame) // frame.per_prompt)
    return total
