"""A plan's programs with torch: flow arithmetic over all ranks (`run_compute`), losses over micro-batches (`LossRun`).

In: a Program, inputs and the rows at hand (`View`s). Out: its outputs, or a loss share with its gradient.
Invariant: results do not depend on how rows are divided over ranks and micro-batches, but for rounding of float64. On
CUDA `index_add` adds in no fixed order, so there two runs under one placement may differ by that rounding too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.expr import Level, Node, Program
from rldsl.plan.model import Frame
from rldsl.plan.operators import OPERATORS
from rldsl.runtime.draws import uniform
from rldsl.runtime.interpreter.expression_ops import Geometry, View, evaluate, of_all_elements
from rldsl.sharding.partition import mix

__all__ = ["Counts", "LossRun", "View", "loss_counts", "run_compute"]


def run_compute(program: Program, inputs: Mapping[str, Tensor], views: Mapping[str, View],
                frames: Mapping[str, Frame], group: Any, call_py: Callable[[Node], Tensor],
                seed: int = 0, step: int = 0) -> dict[str, Tensor]:
    """The outputs of `program`, each of the level of its node (see `View` for the shapes).

    group: the ranks that share the work (None: this one alone). Each row is on exactly one of them, all sequences of a
    prompt on the same. Every rank takes part in every all-reduce, one for each reduction to batch, with or without
    rows. call_py: the result of a user's function for the rows of the node's frame. seed, step: of random numbers.
    Numbers have the widest float type of the inputs (float32 if there is none); batch-level arithmetic runs in
    float64."""
    geometry, dtype = Geometry(views, frames), _float_type(inputs)
    done: list[Tensor] = []
    with torch.no_grad():
        for node in program.nodes:
            inner, args = [program.nodes[a] for a in node.args], [done[a] for a in node.args]
            if node.op == "input":
                value = _entered(node, inputs, geometry, dtype)
            elif node.op == "py":
                value = _number(call_py(node).to(geometry.device), dtype)
            elif node.op == "uniform":
                value = _drawn(node, geometry, seed, step).to(dtype)
            elif _to_batch(node) and OPERATORS[node.op].combine == "gather":
                value = of_all_elements(node.op, _gathered(args[0].to(torch.float64), group), args[1:])
            elif _to_batch(node):
                value = _all_reduced(node.op, args[0], group)
            else:
                value = evaluate(node, inner, args, geometry, dtype)
            done.append(value)
    return {name: _number(done[i], dtype) for name, i in program.outputs}


def _to_batch(node: Node) -> bool:
    return node.attr("to") == "batch"


def _float_type(inputs: Mapping[str, Tensor]) -> torch.dtype:
    found = [x.dtype for x in inputs.values() if x.is_floating_point() and x.dim()]
    found = found or [x.dtype for x in inputs.values() if x.is_floating_point()] or [torch.float32]
    widest = found[0]
    for other in found[1:]:
        widest = torch.promote_types(widest, other)
    return widest


def _number(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.bool else x.to(dtype)


def _entered(node: Node, inputs: Mapping[str, Tensor], geometry: Geometry, dtype: torch.dtype) -> Tensor:
    x = inputs[str(node.attr("name"))]
    if node.level == "batch":
        return _number(x.reshape(()), torch.float64)
    size = geometry.size(node.level, node.space)
    assert x.shape == (size,), f"input {node.attr('name')}: shape {tuple(x.shape)}, {size} {node.level} elements"
    return _number(x, dtype)


# ---------------------------------------------------------------------------------------- reductions to batch


def _local(op: str, x: Tensor) -> Tensor:
    """What `op` needs of the elements at hand: their sum, their number, their maximum, or minus their minimum."""
    wide = x.to(torch.float64)
    match op:
        case "count":
            return wide.new_tensor(float(wide.numel()))
        case "sum" | "mean":
            return wide.sum()
        case "amax" | "amin":
            wide = wide if op == "amax" else -wide
            return wide.max() if wide.numel() else wide.new_tensor(-torch.inf)
    raise internal_error(f"the interpreter cannot reduce with {op} to batch")


def _is_extreme(op: str) -> bool:
    """Whether results of ranks combine by their maximum (a minimum is negated)."""
    return OPERATORS[op].combine in ("max", "min")


def _extremum(op: str, found: Tensor) -> Tensor:
    """The result of amax or amin from the maximum found; 0 when there was no element at all."""
    found = torch.where(found == -torch.inf, 0.0, found)
    return found if op == "amax" else -found


def _all_reduced(op: str, x: Tensor, group: Any) -> Tensor:
    local = torch.stack((_local(op, x), _local("count", x)))
    extreme = _is_extreme(op)
    if group is not None:
        dist.all_reduce(local, op=dist.ReduceOp.MAX if extreme else dist.ReduceOp.SUM, group=group)
    value, count = local
    if extreme:
        return _extremum(op, value)
    return value / count.clamp(min=1) if op == "mean" else value


def _gathered(x: Tensor, group: Any) -> Tensor:
    """The elements of all ranks: each adds its own to a table of zeros."""
    if group is None:
        return x
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
    mine = dist.get_rank(group)
    counts[mine] = x.numel()
    dist.all_reduce(counts, op=dist.ReduceOp.SUM, group=group)
    start = int(counts[:mine].sum())
    table = x.new_zeros(int(counts.sum()))
    table[start : start + x.numel()] = x
    dist.all_reduce(table, op=dist.ReduceOp.SUM, group=group)
    return table


def _drawn(node: Node, geometry: Geometry, seed: int, step: int) -> Tensor:
    """Random numbers of the elements of a node; those of other calls are independent."""
    if node.level == "prompt":
        rows = geometry.prompts(node.space)
        positions = torch.zeros_like(rows)
    else:
        view = geometry.views[geometry.frame(node.level, node.space)]
        rows, positions = view.rows, torch.zeros_like(view.rows)
        if node.level == "token":
            of = geometry.index("token", node.space, "seq")
            starts = geometry.ends(node.space) - view.lens
            rows, positions = rows[of], torch.arange(of.numel(), device=of.device) - starts[of]
    return uniform(mix(seed, int(node.attr("call") or 0)) >> 1, step, rows, positions)


# ----------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, slots=True)
class Counts:
    """The frames of a loss and the number of elements of each (level, space) in the whole minibatch."""

    frames: Mapping[str, Frame]
    sizes: Mapping[tuple[Level, str], int]


def loss_counts(program: Program, frames: Mapping[str, Frame], rows: Sequence[int],
                response_lens: Mapping[str, Sequence[int]]) -> Counts:
    """The global counts of a minibatch. rows: all its rows, on whatever rank, the same of every frame.
    response_lens: frame -> response length of each row of the whole frame. program: for its index sets; only those of
    `frames` may occur."""
    sizes: dict[tuple[Level, str], int] = {}
    for frame in frames.values():
        sizes["token", frame.id] = sum(int(response_lens[frame.id][r]) for r in rows)
        sizes["seq", frame.rows] = len(rows)
        sizes["prompt", frame.prompts] = len({r // frame.per_prompt for r in rows})
    assert all((n.level, n.space) in sizes for n in program.nodes if n.level != "batch"), f"{program.id}: unknown frame"
    return Counts(frames, sizes)


class LossRun:
    """One minibatch of a loss.

    Call it once for each micro-batch; then add up `partials` over the ranks that hold different rows and hand the
    result to `finish`. The vector has two parts: the first `sums` entries add (all-reduce with SUM), the others take
    the maximum (all-reduce with MAX; minima are negated, and batch-level inputs stand there so that ranks without
    rows learn them). A run that is never called has the neutral element of both."""

    def __init__(self, program: Program, counts: Counts):
        self._program, self._counts = program, counts
        nodes = program.nodes
        reductions = [i for i, n in enumerate(nodes) if _to_batch(n)]
        self._adding = [i for i in reductions if OPERATORS[nodes[i].op].combine == "sum"]
        self._extreme = [i for i in reductions if _is_extreme(nodes[i].op)]
        if other := set(reductions) - {*self._adding, *self._extreme}:
            raise internal_error(f"a loss cannot reduce with {', '.join(sorted({nodes[i].op for i in other}))}")
        self._scalars = [i for i, n in enumerate(nodes) if n.op == "input" and n.level == "batch"]
        self._inner = _ancestors(nodes, [a for i in reductions for a in nodes[i].args], through=lambda n: True)
        assert not self._inner & set(reductions), f"{program.id}: a batch-level reduction is used for each element"
        self._vector = torch.tensor([0.0] * self.sums + [-torch.inf] * (len(self._extreme) + len(self._scalars)),
                                    dtype=torch.float64)

    @property
    def sums(self) -> int:
        """How many leading entries of `partials` add; the others take the maximum."""
        return len(self._adding)

    def __call__(self, inputs: Mapping[str, Tensor], views: Mapping[str, View]) -> Tensor:
        """This micro-batch's share of the loss: a float64 scalar whose gradients add up to the loss's over all
        micro-batches of all ranks. A constant term of the loss is left out, so the values add up to the rest."""
        done = self._elements(inputs, Geometry(views, self._counts.frames))
        locals_ = {i: _local(self._program.nodes[i].op, done[self._program.nodes[i].args[0]])
                   for i in (*self._adding, *self._extreme)}
        scalars = {i: done[i] for i in self._scalars}
        self._record(locals_, scalars)
        root = dict(self._program.outputs)["loss"]
        leaves = {i: locals_[i] / self._divisor(i) for i in self._adding}
        zeros = {i: torch.zeros_like(x.detach()) for i, x in leaves.items()}
        share = self._batch_level(leaves | scalars, [root])[root]
        # The loss is affine: f(sums) = linear(sums) + constant. Each micro-batch of each rank would add the constant once
        # more, so it returns f(sums) - f(0). The constant has no gradient; detached, autograd does not walk it.
        return share - self._batch_level(zeros | scalars, [root])[root].detach()

    def partials(self, device: torch.device | None = None) -> Tensor:
        """A copy of what this rank has found so far (float64; see the class), on `device` or where the rows were."""
        return self._vector.clone().to(device or self._vector.device)

    def finish(self, vector: Tensor) -> dict[str, float]:
        """"loss" and every metric of the whole minibatch, from the partials of all ranks."""
        vector = vector.cpu()
        added, found, scalars = vector.split([self.sums, len(self._extreme), len(self._scalars)])
        leaves = {i: x / self._divisor(i) for i, x in zip(self._adding, added)}
        leaves |= {i: _extremum(self._program.nodes[i].op, x) for i, x in zip(self._extreme, found)}
        leaves |= dict(zip(self._scalars, scalars))
        done = self._batch_level(leaves, [i for _, i in self._program.outputs])
        return {name: float(done[i]) for name, i in self._program.outputs}

    def _elements(self, inputs: Mapping[str, Tensor], geometry: Geometry) -> dict[int, Tensor]:
        """The values of everything below batch level, and of the batch-level inputs."""
        nodes, dtype = self._program.nodes, _float_type(inputs)
        done: dict[int, Tensor] = {}
        for i in sorted(self._inner | set(self._scalars)):
            if nodes[i].op == "input":
                done[i] = _entered(nodes[i], inputs, geometry, dtype)
            else:
                inner, args = [nodes[a] for a in nodes[i].args], [done[a] for a in nodes[i].args]
                done[i] = evaluate(nodes[i], inner, args, geometry, dtype)
        return done

    def _record(self, locals_: Mapping[int, Tensor], scalars: Mapping[int, Tensor]) -> None:
        here = [locals_[i].detach() for i in (*self._adding, *self._extreme)]
        here += [scalars[i].detach().to(torch.float64) for i in self._scalars]
        if here:
            found = torch.stack(here)
            known = self._vector.to(found.device)
            found[: self.sums] += known[: self.sums]
            found[self.sums :] = torch.maximum(found[self.sums :], known[self.sums :])
            self._vector = found

    def _divisor(self, reduction: int) -> float:
        node = self._program.nodes[reduction]
        of = self._program.nodes[node.args[0]]
        return float(max(self._counts.sizes[of.level, of.space], 1)) if node.op == "mean" else 1.0

    def _batch_level(self, leaves: Mapping[int, Tensor], roots: Sequence[int]) -> dict[int, Tensor]:
        """The batch-level arithmetic that `roots` need, from the reductions and inputs in `leaves`."""
        nodes, done = self._program.nodes, dict(leaves)
        device = next((x.device for x in leaves.values()), torch.device("cpu"))
        for i in sorted(_ancestors(nodes, roots, through=lambda n: not _to_batch(n)) - set(leaves)):
            inner, args = [nodes[a] for a in nodes[i].args], [done[a] for a in nodes[i].args]
            done[i] = evaluate(nodes[i], inner, args, Geometry({}, {}), torch.float64).to(device)
        return done


def _ancestors(nodes: Sequence[Node], roots: Sequence[int], through: Callable[[Node], bool]) -> set[int]:
    """`roots` and what they are made of, not looking behind nodes that fail `through`."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting.extend(nodes[i].args if through(nodes[i]) else ())
    return found
