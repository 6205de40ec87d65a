"""A loss that needs the whole minibatch at once: quantiles, ranks, reductions by prompt, functions of sums.

In: a loss's program, and the outputs of the model for each micro-batch, from a pass without gradient. Out: the loss,
its metrics, and its derivative by each output, with which the passes that follow carry the gradient into the model:
d loss = sum over outputs of (d loss / d output) * d output, for any loss (Gao et al. 2021, arXiv:2101.06983).
Invariant: every dp rank has all elements of the minibatch, in the order of the rows, and computes the same bits from
them in float64, however they are divided over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.expr import Node, Program
from rldsl.plan.operators import OPERATORS, in_family
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.interpreter.batch_reductions import marked_nan, unmarked_nan
from rldsl.runtime.interpreter.expression_ops import evaluate, of_all_elements
from rldsl.runtime.interpreter.minibatch_loss import Counts, positions
from rldsl.runtime.interpreter.ragged_index import FrameRows, RaggedIndex
from rldsl.runtime.interpreter.row_ops import evaluate_rows


class WholeMinibatchLoss:
    """The loss of one minibatch: `add_outputs` of each micro-batch, `evaluate` once on every rank of dp, then
    call it for each micro-batch as a `MinibatchLoss`. Its partial results are combined over ranks like those: all of
    them take the maximum, since the ranks that know a result know the same one."""

    num_summed = 0

    def __init__(self, program: Program, counts: Counts, outputs: Collection[str], booleans: Collection[str],
                 numbers: Mapping[str, Tensor]):
        """outputs: the inputs that have a gradient. booleans: the inputs whose elements are true or false. numbers: the
        inputs of batch level."""
        self._program, self._counts = program, counts
        self._outputs, self._booleans, self._numbers = frozenset(outputs), frozenset(booleans), numbers
        # the inputs with elements
        self._inputs: dict[str, Node] = {str(n.attr("name")): n for n in program.nodes
                                         if n.op == "input" and n.level != "batch"}
        # [input] -> (positions, elements) of each micro-batch on this rank
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self._inputs}
        self._gradients: dict[str, Tensor] = {}  # d loss / d output, of all elements
        self._results: dict[str, float] = {}

    def add_outputs(self, inputs: Mapping[str, Tensor], frame_rows: Mapping[str, FrameRows]) -> None:
        """Keep the inputs of a micro-batch."""
        ragged = RaggedIndex(frame_rows, self._counts.frames, self._counts.entries)
        for name, node in self._inputs.items():
            at, elements = positions(self._counts, node, ragged), inputs[name].detach().to(torch.float64)
            if node.level == "prompt":  # whoever has the first row of a prompt in the minibatch
                at, elements = self._firsts(node, at, elements, ragged)
            self._seen[name].append((at, elements))

    def evaluate(self, group: Any, device: torch.device) -> None:
        """The loss, the metrics and the derivatives. group: the ranks that have the other rows (None: there are
        none)."""
        tables = self._gathered(group, device)
        with torch.enable_grad():
            leaves = {name: x.requires_grad_() for name, x in tables.items() if name in self._outputs}
            done = self._values(tables)
            loss = done[dict(self._program.outputs)["loss"]]
            names = list(leaves)
            grads = torch.autograd.grad(loss, [leaves[n] for n in names], allow_unused=True) if loss.requires_grad \
                else [None] * len(names)
        self._gradients = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        self._results = {name: float(done[i].detach()) for name, i in self._program.outputs}
        self._seen.clear()

    def __call__(self, inputs: Mapping[str, Tensor], frame_rows: Mapping[str, FrameRows]) -> Tensor:
        """This micro-batch's share of the gradient: a float64 scalar with that gradient, and no other meaning."""
        ragged = RaggedIndex(frame_rows, self._counts.frames, self._counts.entries)
        shares = [(inputs[name].to(torch.float64) * gradient[positions(self._counts, self._inputs[name], ragged)]).sum()
                  for name, gradient in self._gradients.items()]
        return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=ragged.device)

    def partials(self, device: torch.device | None = None) -> Tensor:
        """[2 * outputs] float64: each result with a mark of NaN; -inf on ranks that do not have the outputs."""
        found = [self._results.get(name, -torch.inf) for name, _ in self._program.outputs]
        return marked_nan(torch.tensor(found, dtype=torch.float64, device=device)).flatten()

    def finish(self, vector: Tensor) -> dict[str, float]:
        """"loss" and every metric, from the maximum over all ranks."""
        found = unmarked_nan(vector.cpu().view(-1, 2)).tolist()
        return {name: x for (name, _), x in zip(self._program.outputs, found, strict=True)}

    def _firsts(self, node: Node, at: Tensor, elements: Tensor, ragged: RaggedIndex) -> tuple[Tensor, Tensor]:
        """Those of some prompts whose first row in the minibatch is at hand: each prompt once among all ranks."""
        frame = ragged.frame("prompt", node.space)
        rows = torch.tensor(self._counts.rows, device=at.device)
        prompts = rows // self._counts.frames[frame].per_prompt
        first = rows[torch.searchsorted(prompts, prompts.unique())[at]]
        mine = torch.isin(first, ragged.frame_rows[frame].rows)
        return at[mine], elements[mine]

    def _gathered(self, group: Any, device: torch.device) -> dict[str, Tensor]:
        """All inputs of the minibatch: every rank writes its own elements into a table of zeros, which are summed."""
        sizes = [self._counts.sizes[n.level, n.space] for n in self._inputs.values()]
        joined = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        for name, table in zip(self._inputs, joined.split(sizes), strict=True):
            for at, elements in self._seen[name]:
                table[at] = elements
        if group is not None and len(joined):
            all_reduce(joined, dist.ReduceOp.SUM, group)
        tables = {name: table.clone() for name, table in zip(self._inputs, joined.split(sizes), strict=True)}
        numbers = {name: x.reshape(()).to(device=device) for name, x in self._numbers.items()}
        return {name: x != 0 if name in self._booleans else x.to(torch.float64)
                for name, x in (tables | numbers).items()}

    def _rows(self, device: torch.device) -> RaggedIndex:
        """All rows of the minibatch."""
        rows = torch.tensor(self._counts.rows, dtype=torch.int64, device=device)
        found = {}
        for name, frame in self._counts.frames.items():
            total = self._counts.sizes["token", name]
            starts = torch.tensor([*self._counts.starts[name], total], dtype=torch.int64, device=device)
            found[name] = FrameRows(rows, rows // frame.per_prompt, starts.diff(), total)
        return RaggedIndex(found, self._counts.frames, self._counts.entries)

    def _values(self, tables: Mapping[str, Tensor]) -> list[Tensor]:
        """The value of each node."""
        nodes, done = self._program.nodes, list[Tensor]()
        device = next(iter(tables.values())).device
        ragged = self._rows(device)
        for node in nodes:
            inner, args = [nodes[a] for a in node.args], [done[a] for a in node.args]
            if node.op == "input":
                value = tables[str(node.attr("name"))]
            elif node.attr("to") == "batch":
                value = _reduced(node.op, args)
            elif in_family(node.op, "rows"):
                value = evaluate_rows(node, inner, args, ragged, torch.float64)
            else:
                value = evaluate(node, inner, args, ragged, torch.float64)
            done.append(value)
        return done


def _reduced(op: str, args: list[Tensor]) -> Tensor:
    """A reduction to batch over all elements; 0 where there are none."""
    x = args[0].to(torch.float64)
    if OPERATORS[op].combine == "gather":
        return of_all_elements(op, x, args[1:])
    if op == "count" or not x.numel():
        return x.new_full((), float(x.numel()) if op == "count" else 0.0)
    match op:
        case "sum":
            return x.sum()
        case "mean":
            return x.mean()
        case "amax":
            return x.amax()
        case "amin":
            return x.amin()
    raise internal_error(f"the interpreter cannot reduce with {op} to batch")
