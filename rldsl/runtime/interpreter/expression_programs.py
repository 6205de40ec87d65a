"""A plan's programs with torch: flow arithmetic over all ranks (`run_compute`), losses over micro-batches
(`MinibatchLoss`).

In: a Program, inputs and the rows at hand (a `FrameRows` per frame). Out: its outputs, or a share of the loss with its
gradient.
Invariant: results do not depend on how rows are divided over ranks and micro-batches: flow arithmetic and the metrics
of losses reduce to batch level exactly (`exact_sums.py`), shares of a loss, of which gradients are made, but for
rounding of float64. On CUDA `index_add` adds in no fixed order, so there results under one placement may differ by that
rounding too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.arrays import ARRAYS
from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Level, Node, Program, nodes_under
from rldsl.plan.operators import OPERATORS, in_family
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.draws import uniform
from rldsl.runtime.interpreter.array_metrics import RowNumbers, array
from rldsl.runtime.interpreter.exact_sums import SPECIAL, WORDS, as_floats, exact_sum, exact_words
from rldsl.runtime.interpreter.expression_ops import FrameRows, RaggedIndex, evaluate, of_all_elements, ordered
from rldsl.runtime.interpreter.row_ops import evaluate_rows
from rldsl.runtime.store import offsets_within
from rldsl.sharding.partition import key_of, mix

__all__ = ["Counts", "MinibatchLoss", "FrameRows", "loss_counts", "run_compute"]


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
    ragged, dtype = RaggedIndex(frame_rows, frames, entries), _float_type(inputs)
    done: list[Tensor] = []
    with torch.no_grad():
        for node in program.nodes:
            inner, args = [program.nodes[a] for a in node.args], [done[a] for a in node.args]
            if node.op == "input":
                value = _entered(node, inputs, ragged, dtype)
            elif node.op == "py":
                value = _number(call_py(node).to(ragged.device), dtype)
            elif node.op == "uniform":
                value = _drawn(node, ragged, seed, step, batch).to(dtype)
            elif node.op in ARRAYS:
                own = frame_rows[str(node.attr("frame"))].rows if node.attr("frame") else None
                value = array(node, args[0] if args else None, own, group, row_numbers)
            elif node.op == "step":
                value = torch.tensor(float(step + 1), dtype=torch.float64, device=ragged.device)
            elif _to_batch(node) and OPERATORS[node.op].combine == "gather":
                value = of_all_elements(node.op, _gathered(args[0].to(torch.float64), group), args[1:])
            elif _to_batch(node):
                value = _all_reduced(node.op, args[0], group)
            elif node.attr("within") == "batch":
                value = _ordered(node, args[0], ragged, group).to(dtype)
            elif in_family(node.op, "rows"):
                value = evaluate_rows(node, inner, args, ragged, dtype)
            else:
                value = evaluate(node, inner, args, ragged, dtype)
            done.append(value)
    return {name: done[i] if program.nodes[i].op in ARRAYS else _number(done[i], dtype)
            for name, i in program.outputs}


def _to_batch(node: Node) -> bool:
    return node.attr("to") == "batch"


def _float_type(inputs: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = [x.dtype for x in inputs.values() if x.is_floating_point() and x.dim()]
    dtypes = dtypes or [x.dtype for x in inputs.values() if x.is_floating_point()] or [torch.float32]
    widest = dtypes[0]
    for other in dtypes[1:]:
        widest = torch.promote_types(widest, other)
    return widest


def _number(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.bool else x.to(dtype)


def _entered(node: Node, inputs: Mapping[str, Tensor], ragged: RaggedIndex, dtype: torch.dtype) -> Tensor:
    x = inputs[str(node.attr("name"))]
    if node.level == "batch":
        return _number(x.reshape(()), torch.float64)
    size = ragged.size(node.level, node.space)
    if x.shape != (size,):
        raise internal_error(f"input {node.attr('name')}: shape {tuple(x.shape)}, {size} {node.level} elements", "run")
    return _number(x, dtype)


# ---------------------------------------------------------------------------------------- reductions to batch


def _local(op: str, x: Tensor) -> Tensor:
    """This rank's partial result of `op`: the sum, the number, the maximum, or minus the minimum of its elements."""
    wide = x.to(torch.float64)
    match op:
        case "count":
            return wide.new_full((), float(wide.numel()))
        case "sum" | "mean":
            return wide.sum()
        case "amax" | "amin":
            wide = wide if op == "amax" else -wide
            return wide.max() if wide.numel() else wide.new_full((), -torch.inf)
    raise internal_error(f"the interpreter cannot reduce with {op} to batch")


def _is_extreme(op: str) -> bool:
    """Whether results of ranks combine by their maximum (a minimum is negated)."""
    return OPERATORS[op].combine in ("max", "min")


def _extremum(op: str, maximum: Tensor) -> Tensor:
    """The result of amax or amin from the maximum of all partial results."""
    return maximum if op == "amax" else -maximum


def marked_nan(x: Tensor) -> Tensor:
    """[..., 2]: x with -inf for NaN, and a mark of what was NaN. A maximum over ranks keeps both; of NaN and a number,
    it may be either (gloo compares)."""
    is_nan = x.isnan()
    return torch.stack((x.masked_fill(is_nan, -torch.inf), torch.where(is_nan, 1.0, -torch.inf)), -1)


def unmarked_nan(marked: Tensor) -> Tensor:
    """What `marked_nan` took apart."""
    x, mark = marked.unbind(-1)
    return x.masked_fill(mark > 0, torch.nan)


def _all_reduced(op: str, x: Tensor, group: Any) -> Tensor:
    """The reduction over the elements of all ranks of `group`: exact, so that it does not depend on their division."""
    if _is_extreme(op):
        marked = marked_nan(torch.stack((_local(op, x), _local("count", x))))
        if group is not None:
            all_reduce(marked, dist.ReduceOp.MAX, group)
        value, count = unmarked_nan(marked).unbind()
        return torch.where(count > 0, _extremum(op, value), 0.0)
    if op not in ("count", "sum", "mean"):
        raise internal_error(f"the interpreter cannot reduce with {op} to batch")
    counted = torch.tensor([x.numel()], device=x.device)
    words = counted if op == "count" else torch.cat([exact_words(x), counted])
    if group is not None:
        all_reduce(words, dist.ReduceOp.SUM, group)
    *_, count = words.tolist()
    total = float(count) if op == "count" else exact_sum(words[:-1])
    return torch.tensor(total / max(count, 1) if op == "mean" else total, dtype=torch.float64, device=x.device)


def _ordered(node: Node, x: Tensor, ragged: RaggedIndex, group: Any) -> Tensor:
    """An order over the elements of all ranks, in the order of their rows: those of this rank."""
    rows, offsets = _places(node, ragged)
    counts, own = _gathered(x.new_tensor([x.numel()], dtype=torch.float64), group), 0 if group is None else \
        dist.get_rank(group)
    table, row, offset = (_gathered(t.to(torch.float64), group) for t in (x, rows, offsets))
    by_offset = offset.argsort(stable=True)
    by_place = by_offset[row[by_offset].argsort(stable=True)]
    found = ordered(node.op, table[by_place], torch.zeros_like(by_place))
    start = int(counts[:own].sum())
    return torch.empty_like(found).index_copy(0, by_place, found)[start : start + x.numel()]


def _gathered(x: Tensor, group: Any) -> Tensor:
    """The elements of all ranks, on each of them: every rank writes its own into a table of zeros, which are summed."""
    if group is None:
        return x
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
    index = dist.get_rank(group)
    counts[index] = x.numel()
    all_reduce(counts, dist.ReduceOp.SUM, group)
    start = int(counts[:index].sum())
    table = x.new_zeros(int(counts.sum()))
    table[start : start + x.numel()] = x
    all_reduce(table, dist.ReduceOp.SUM, group)
    return table


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


# ----------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, slots=True)
class Counts:
    """How many elements the sets of a loss have in the whole minibatch."""

    frames: Mapping[str, IndexedFrame]             # by id: those of the loss
    sizes: Mapping[tuple[Level, str], int]  # (level, space) -> number of elements, on all ranks together
    rows: Sequence[int]                     # all rows of the minibatch, ascending
    starts: Mapping[str, Sequence[int]]     # frame -> response tokens of the minibatch before each of `rows`
    entries: Mapping[str, EntrySpace]       # by name: those of the loss


def loss_counts(program: Program, frames: Mapping[str, IndexedFrame], rows: Sequence[int],
                response_lens: Mapping[str, Sequence[int]],
                entries: Mapping[str, EntrySpace] = MappingProxyType({})) -> Counts:
    """The global counts of a minibatch. rows: all its rows, on whatever rank, the same of every frame.
    response_lens: frame -> response length of each row of the whole frame. program: all its index sets must be those
    of `frames`. entries: the entry spaces of the plan."""
    rows = sorted(rows)
    sizes: dict[tuple[Level, str], int] = {}
    starts: dict[str, Sequence[int]] = {}
    for frame in frames.values():
        ends = list(accumulate((int(response_lens[frame.id][r]) for r in rows), initial=0))
        starts[frame.id], sizes["token", frame.id] = ends[:-1], ends[-1]
        sizes["seq", frame.row_space] = len(rows)
        sizes |= {("entry", name): ends[-1] * e.width for name, e in entries.items() if e.frame == frame.id}
        sizes["prompt", frame.prompt_space] = len({r // frame.per_prompt for r in rows})
        # prompts that are sequences of another frame
        sizes.setdefault(("seq", frame.prompt_space), sizes["prompt", frame.prompt_space])
    if unknown := {n.space for n in program.nodes if n.level != "batch" and (n.level, n.space) not in sizes}:
        raise internal_error(f"{program.id}: unknown frame of {', '.join(sorted(unknown))}", "run")
    return Counts(frames, sizes, rows, starts, entries)


def positions(counts: Counts, node: Node, ragged: RaggedIndex) -> Tensor:
    """Where the elements of `node` at hand, a prompt, seq, token or entry value, are among those of the whole
    minibatch, in the order of the rows."""
    if node.level == "entry":
        frame, width = counts.entries[node.space]
        tokens = positions(counts, Node("input", level="token", space=frame), ragged)
        return (tokens[:, None] * width + torch.arange(width, device=tokens.device)).flatten()
    frame = ragged.frame(node.level, node.space)
    rows = ragged.frame_rows[frame]
    if node.level == "prompt":
        whole = torch.tensor(counts.rows, device=rows.rows.device) // counts.frames[frame].per_prompt
        return torch.searchsorted(whole.unique(), ragged.prompts(node.space))
    row = torch.searchsorted(torch.tensor(counts.rows, device=rows.rows.device), rows.rows)
    if node.level == "seq":
        return row
    # token j of the rows at hand is token j - (the first of its row at hand) of its row
    shift = torch.tensor(counts.starts[frame], device=row.device)[row] - (ragged.ends(frame) - rows.lens)
    return torch.arange(rows.total, device=row.device) + shift[ragged.index("token", frame, "seq")]


class MinibatchLoss:
    """The loss and the metrics of one minibatch, computed micro-batch by micro-batch.

    Call it once for each micro-batch; then combine `partials` over the ranks that hold different rows and hand the
    result to `finish`. The vector has two parts: the first `num_summed` entries add (all-reduce with SUM), the words of
    exact sums first, and the others take the maximum (all-reduce with MAX; minima are negated, and batch-level inputs
    are among them so that ranks without rows learn them; each with a mark of NaN). Without a micro-batch, the vector is
    the neutral element of both.

    A median or quantile of a metric needs all elements of the minibatch. Each has a table among the entries that add,
    with one float64 per element in the order of the rows: a rank fills in its own, and the others are 0."""

    def __init__(self, program: Program, counts: Counts):
        self._program, self._counts = program, counts
        nodes = program.nodes
        reductions = [i for i, n in enumerate(nodes) if _to_batch(n)]
        # nodes that reduce to batch level by a sum
        self._summed = [i for i in reductions if OPERATORS[nodes[i].op].combine == "sum"]
        # nodes that reduce to batch level by a maximum or minimum
        self._maxima = [i for i in reductions if _is_extreme(nodes[i].op)]
        # nodes that reduce to batch level all elements at once
        self._gathered = [i for i in reductions if OPERATORS[nodes[i].op].combine == "gather"]
        if other := set(reductions) - {*self._summed, *self._maxima, *self._gathered}:
            raise internal_error(f"a loss cannot reduce with {', '.join(sorted({nodes[i].op for i in other}))}")
        # inputs of batch level
        self._scalars = [i for i, n in enumerate(nodes) if n.op == "input" and n.level == "batch"]
        # everything below batch level: what the reductions are computed from
        self._per_element_nodes = nodes_under(nodes, [nodes[i].args[0] for i in reductions])
        if self._per_element_nodes & set(reductions):
            raise internal_error(f"{program.id}: a batch-level reduction is used for each element", "run")
        # Squares that only sums over the minibatch read, as in the variance of a metric, are exact in float64: the
        # variance is the small difference of two such sums.
        self._exact_squares = self._metric_squares()
        # partial results so far: the words of `_summed`, then those of `_maxima` and the values of `_scalars`
        self._words = torch.zeros(len(self._summed), WORDS + SPECIAL, dtype=torch.int64)
        self._partials = torch.full((len(self._maxima) + len(self._scalars),), -torch.inf, dtype=torch.float64)
        # (positions, elements) of each micro-batch so far, for each of `_gathered`
        self._elements_of: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in self._gathered}

    @property
    def num_summed(self) -> int:
        """How many leading entries of `partials` add; the others take the maximum."""
        return self.num_words + sum(map(self._size, self._gathered))

    @property
    def num_words(self) -> int:
        """How many of them are words of exact sums."""
        return self._words.numel()

    def __call__(self, inputs: Mapping[str, Tensor], frame_rows: Mapping[str, FrameRows]) -> Tensor:
        """This micro-batch's share of the loss: a float64 scalar whose gradients add up to the loss's over all
        micro-batches of all ranks. A constant term of the loss is left out, so the values add up to the rest."""
        ragged = RaggedIndex(frame_rows, self._counts.frames, self._counts.entries)
        done = self._elements(inputs, ragged)
        locals_ = {i: _local(self._program.nodes[i].op, done[self._program.nodes[i].args[0]])
                   for i in (*self._summed, *self._maxima)}
        scalars = {i: done[i] for i in self._scalars}
        self._record(done, locals_, scalars)
        for i, elements in self._elements_of.items():
            of = self._program.nodes[i].args[0]
            at = positions(self._counts, self._program.nodes[of], ragged)
            elements.append((at, done[of].detach().to(torch.float64)))
        root = dict(self._program.outputs)["loss"]
        leaves = {i: locals_[i] / self._divisor(i) for i in self._summed}
        zeros = {i: torch.zeros_like(x.detach()) for i, x in leaves.items()}
        # The loss is affine in its sums: sum of c_i * reduction_i + constant. Each micro-batch on each rank would add
        # the constant once more, so subtract the loss with all sums 0. Detached: a constant has no gradient.
        share = self._batch_level(leaves | scalars, [root])[root]
        return share - self._batch_level(zeros | scalars, [root])[root].detach()

    def partials(self, device: torch.device | None = None) -> Tensor:
        """[num_summed + others] float64, a copy: this rank's partial results so far (see the class), on `device` or
        where the rows were."""
        device = device or self._partials.device
        tables = [torch.zeros(self._size(i), dtype=torch.float64, device=device) for i in self._gathered]
        for table, i in zip(tables, self._gathered, strict=True):
            for positions, elements in self._elements_of[i]:
                table[positions.to(device)] = elements.to(device)
        words = [as_floats(x).to(device) for x in self._words.cpu()]  # the device is waited for once
        return torch.cat([*words, *tables, marked_nan(self._partials.to(device)).flatten()])

    def finish(self, vector: Tensor) -> dict[str, float]:
        """"loss" and every metric of the whole minibatch, from the partials of all ranks."""
        sizes = [self.num_words, *map(self._size, self._gathered), 2 * len(self._partials)]
        words, *tables, marked = vector.cpu().split(sizes)
        sums = words.new_tensor([exact_sum(x) for x in words.view(self._words.shape)])
        maxima, scalars = unmarked_nan(marked.view(-1, 2)).tensor_split([len(self._maxima)])
        leaves = {i: x / self._divisor(i) for i, x in zip(self._summed, sums, strict=True)}
        leaves |= {i: _extremum(self._program.nodes[i].op, x) if self._size(i) else x.new_zeros(())
                   for i, x in zip(self._maxima, maxima, strict=True)}
        leaves |= dict(zip(self._scalars, scalars, strict=True))
        done = self._batch_level(leaves, [i for _, i in self._program.outputs],
                                 dict(zip(self._gathered, tables, strict=True)))
        return {name: float(done[i]) for name, i in self._program.outputs}

    def _elements(self, inputs: Mapping[str, Tensor], ragged: RaggedIndex) -> dict[int, Tensor]:
        """The values of everything below batch level, and of the batch-level inputs."""
        nodes, dtype = self._program.nodes, _float_type(inputs)
        done: dict[int, Tensor] = {}
        for i in sorted(self._per_element_nodes | set(self._scalars)):
            if nodes[i].op == "input":
                done[i] = _entered(nodes[i], inputs, ragged, dtype)
            elif i in self._exact_squares:
                done[i] = done[nodes[i].args[0]].detach().to(torch.float64).square()
            else:
                inner, args = [nodes[a] for a in nodes[i].args], [done[a] for a in nodes[i].args]
                done[i] = evaluate(nodes[i], inner, args, ragged, dtype)
        return done

    def _metric_squares(self) -> set[int]:
        """The nodes x * x that sums to batch level read and nothing else, the loss included."""
        nodes = self._program.nodes
        in_loss = nodes_under(nodes, [dict(self._program.outputs)["loss"]])
        read_elsewhere = {a for i, n in enumerate(nodes) if i not in self._summed for a in n.args}
        return {i for i in self._per_element_nodes - in_loss - read_elsewhere
                if nodes[i].op == "mul" and len(set(nodes[i].args)) == 1}

    def _record(self, done: Mapping[int, Tensor], locals_: Mapping[int, Tensor], scalars: Mapping[int, Tensor]) -> None:
        """Combine the partial results of a micro-batch with those of the micro-batches before."""
        for at, i in enumerate(self._summed):
            node = self._program.nodes[i]
            terms = locals_[i][None] if node.op == "count" else done[node.args[0]]
            words = exact_words(terms.detach())
            if self._words.device != words.device:  # of the first rows; zeros are written there, not copied
                self._words = torch.zeros_like(self._words, device=words.device)
            self._words[at] += words
        new = [locals_[i].detach() for i in self._maxima]
        new += [scalars[i].detach().to(torch.float64) for i in self._scalars]
        if new:
            if self._partials.device != new[0].device:
                self._partials = torch.full_like(self._partials, -torch.inf, device=new[0].device)
            self._partials = torch.maximum(torch.stack(new), self._partials)

    def _size(self, reduction: int) -> int:
        """The global number of elements that a reduction to batch level reduces."""
        reduced = self._program.nodes[self._program.nodes[reduction].args[0]]
        return self._counts.sizes[reduced.level, reduced.space]

    def _divisor(self, reduction: int) -> float:
        """The global number of elements for a mean, else 1."""
        return float(max(self._size(reduction), 1)) if self._program.nodes[reduction].op == "mean" else 1.0

    def _batch_level(self, leaves: Mapping[int, Tensor], roots: Sequence[int],
                     tables: Mapping[int, Tensor] | None = None) -> dict[int, Tensor]:
        """The batch-level arithmetic that `roots` need, from the reductions and inputs in `leaves`. tables: all
        elements of each reduction that needs them at once."""
        nodes, done = self._program.nodes, dict(leaves)
        ragged = RaggedIndex({}, {}, without_rows=next((x.device for x in leaves.values()), torch.device("cpu")))
        for i in sorted(nodes_under(nodes, roots, lambda n: n.args[1:] if _to_batch(n) else n.args) - set(leaves)):
            if tables is not None and i in tables:
                done[i] = of_all_elements(nodes[i].op, tables[i], [done[a] for a in nodes[i].args[1:]])
                continue
            inner, args = [nodes[a] for a in nodes[i].args], [done[a] for a in nodes[i].args]
            done[i] = evaluate(nodes[i], inner, args, ragged, torch.float64)
        return done
