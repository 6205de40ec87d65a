"""A plan's programs with torch: the arithmetic of the flow, over all ranks (`minibatch_loss.py` computes losses).

In: a Program, inputs and the rows at hand (a `FrameRows` per frame). Out: its outputs.
Invariant: results do not depend on how rows are divided over ranks: reductions to batch level are exact
(`exact_sums.py`). On CUDA `index_add` adds in no fixed order, so there results under one placement may differ by the
rounding of float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.plan.arrays import ARRAYS
from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Node, Program
from rldsl.plan.operators import OPERATORS, in_family
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.draws import uniform
from rldsl.runtime.interpreter.array_metrics import RowNumbers, array
from rldsl.runtime.interpreter.batch_reductions import all_reduced, gathered, reduces_to_batch
from rldsl.runtime.interpreter.expression_ops import (
    as_number,
    evaluate,
    float_type,
    input_value,
    of_all_elements,
    ordered,
)
from rldsl.runtime.interpreter.ragged_index import FrameRows, RaggedIndex
from rldsl.runtime.interpreter.row_ops import evaluate_rows
from rldsl.runtime.store import offsets_within
from rldsl.sharding.partition import key_of, mix


def run_compute(program: Program, inputs: Mapping[str, Tensor], frame_rows: Mapping[str, FrameRows],
                frames: Mapping[str, IndexedFrame], group: Any, call_py: Callable[[Node], Tensor],
                seed: int = 0, step: int = 0, batch: int = 0,
                entries: Mapping[str, EntrySpace] = MappingProxyType({}),
                row_numbers: RowNumbers | None = None) -> dict[str, Tensor]:
    """The outputs of `program`, each of the level of its node (see `FrameRows` for the shapes); those of `ARRAYS` are
    float64.

    group: the ranks that share the work (None: this one alone). Each row is on exactly one of them, all sequences of a
    prompt on the same. Every rank takes part in every all-reduce, one for each reduction to batch, with or without
    rows. call_py: the result of a user's function for the rows of the node's frame. seed, step: of random numbers;
    steps count from 0. batch: which batch of an evaluation these rows are, for their random numbers. entries: the entry
    spaces of the plan. row_numbers: of the rows of tables, with their tokens.
    Numbers have the widest float type of the inputs (float32 if there is none); batch-level arithmetic runs in
    float64."""
    ragged, dtype = RaggedIndex(frame_rows, frames, entries), float_type(inputs)
    done: list[Tensor] = []
    with torch.no_grad():
        for node in program.nodes:
            inner, args = [program.nodes[a] for a in node.args], [done[a] for a in node.args]
            if node.op == "input":
                value = input_value(node, inputs, ragged, dtype)
            elif node.op == "py":
                value = as_number(call_py(node).to(ragged.device), dtype)
            elif node.op == "uniform":
                value = _drawn(node, ragged, seed, step, batch).to(dtype)
            elif node.op in ARRAYS:
                own = frame_rows[str(node.attr("frame"))].rows if node.attr("frame") else None
                value = array(node, args[0] if args else None, own, group, row_numbers)
            elif node.op == "step":
                value = torch.tensor(float(step + 1), dtype=torch.float64, device=ragged.device)
            elif reduces_to_batch(node) and OPERATORS[node.op].combine == "gather":
                value = of_all_elements(node.op, gathered(args[0].to(torch.float64), group), args[1:])
            elif reduces_to_batch(node):
                value = all_reduced(node.op, args[0], group)
            elif node.attr("within") == "batch":
                value = _ordered(node, args[0], ragged, group).to(dtype)
            elif in_family(node.op, "rows"):
                value = evaluate_rows(node, inner, args, ragged, dtype)
            else:
                value = evaluate(node, inner, args, ragged, dtype)
            done.append(value)
    return {name: done[i] if program.nodes[i].op in ARRAYS else as_number(done[i], dtype)
            for name, i in program.outputs}


def _ordered(node: Node, x: Tensor, ragged: RaggedIndex, group: Any) -> Tensor:
    """An order over the elements of all ranks, in the order of their rows: those of this rank."""
    rows, offsets = _places(node, ragged)
    counts, own = gathered(x.new_tensor([x.numel()], dtype=torch.float64), group), 0 if group is None else \
        dist.get_rank(group)
    table, row, offset = (gathered(t.to(torch.float64), group) for t in (x, rows, offsets))
    by_offset = offset.argsort(stable=True)
    by_place = by_offset[row[by_offset].argsort(stable=True)]
    found = ordered(node.op, table[by_place], torch.zeros_like(by_place))
    start = int(counts[:own].sum())
    return torch.empty_like(found).index_copy(0, by_place, found)[start : start + x.numel()]


def _drawn(node: Node, ragged: RaggedIndex, seed: int, step: int, batch: int) -> Tensor:
    """A random number for each element of a node, independent of those of other calls of `uniform`."""
    frame = ragged.frames[ragged.frame(node.level, node.space)]
    first = batch * (frame.count // frame.per_prompt if node.level == "prompt" else frame.count)
    rows, offsets = _places(node, ragged)
    return uniform(mix(seed, key_of(str(node.attr("call")))) >> 1, step, rows + first, offsets)


def _places(node: Node, ragged: RaggedIndex) -> tuple[Tensor, Tensor]:
    """For each element of a node the number of its row, or prompt, and its number among those of the row."""
    if node.level == "prompt":
        rows = ragged.prompts(node.space)
        return rows, torch.zeros_like(rows)
    if node.level == "entry":
        name, width = ragged.entries[node.space]
        index = ragged.index("entry", node.space, "token")
        lens = ragged.frame_rows[name].lens
        rows = ragged.frame_rows[name].rows[ragged.index("token", name, "seq")[index]]
        return rows, offsets_within(lens)[index] * width + torch.arange(len(index), device=index.device) % width
    frame_rows = ragged.frame_rows[ragged.frame(node.level, node.space)]
    if node.level == "turn":
        counts = ragged.turn_counts(node.space)
        return frame_rows.rows.repeat_interleave(counts), offsets_within(counts)
    if node.level == "token":
        seq_of_token = ragged.index("token", node.space, "seq")
        starts = (ragged.ends(node.space) - frame_rows.lens)[seq_of_token]
        return frame_rows.rows[seq_of_token], torch.arange(seq_of_token.numel(), device=starts.device) - starts
    return frame_rows.rows, torch.zeros_like(frame_rows.rows)


