"""The loss and the metrics of a minibatch, over its micro-batches and over the ranks that hold its rows.

In: the Program of a loss, and the counts of the whole minibatch. Out: of each micro-batch a share of the loss with its
gradient (`MinibatchLoss`); of all of them the metrics.
Invariant: metrics do not depend on how rows are divided over ranks and micro-batches; shares of a loss only by the
rounding of float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Level, Node, Program, nodes_under
from rldsl.plan.operators import OPERATORS
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.interpreter.batch_reductions import (
    extremum,
    is_extreme,
    marked_nan,
    partial_result,
    reduces_to_batch,
    unmarked_nan,
)
from rldsl.runtime.interpreter.exact_sums import SPECIAL, WORDS, as_floats, exact_sum, exact_words
from rldsl.runtime.interpreter.expression_ops import evaluate, float_type, input_value, of_all_elements
from rldsl.runtime.interpreter.ragged_index import FrameRows, RaggedIndex


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
        reductions = [i for i, n in enumerate(nodes) if reduces_to_batch(n)]
        # nodes that reduce to batch level by a sum
        self._summed = [i for i in reductions if OPERATORS[nodes[i].op].combine == "sum"]
        # nodes that reduce to batch level by a maximum or minimum
        self._maxima = [i for i in reductions if is_extreme(nodes[i].op)]
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
        # partial results so far: exact sums of `_summed`, as machine words, then `_maxima` and the values of `_scalars`
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
        locals_ = {i: partial_result(self._program.nodes[i].op, done[self._program.nodes[i].args[0]])
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
        leaves |= {i: extremum(self._program.nodes[i].op, x) if self._size(i) else x.new_zeros(())
                   for i, x in zip(self._maxima, maxima, strict=True)}
        leaves |= dict(zip(self._scalars, scalars, strict=True))
        done = self._batch_level(leaves, [i for _, i in self._program.outputs],
                                 dict(zip(self._gathered, tables, strict=True)))
        return {name: float(done[i]) for name, i in self._program.outputs}

    def _elements(self, inputs: Mapping[str, Tensor], ragged: RaggedIndex) -> dict[int, Tensor]:
        """The values of everything below batch level, and of the batch-level inputs."""
        nodes, dtype = self._program.nodes, float_type(inputs)
        done: dict[int, Tensor] = {}
        for i in sorted(self._per_element_nodes | set(self._scalars)):
            if nodes[i].op == "input":
                done[i] = input_value(nodes[i], inputs, ragged, dtype)
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
        under = nodes_under(nodes, roots, lambda n: n.args[1:] if reduces_to_batch(n) else n.args)
        for i in sorted(under - set(leaves)):
            if tables is not None and i in tables:
                done[i] = of_all_elements(nodes[i].op, tables[i], [done[a] for a in nodes[i].args[1:]])
                continue
            inner, args = [nodes[a] for a in nodes[i].args], [done[a] for a in nodes[i].args]
            done[i] = evaluate(nodes[i], inner, args, ragged, torch.float64)
        return done
